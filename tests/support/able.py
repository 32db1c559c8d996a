"""What this machine and this user can do: asked once, and only when a test needs it.

    pytestmark = [pytest.mark.process, needs("namespaces")]     # a file, a test, or one case of it
    require("zsh")                                              # in a test or a fixture

A test that needs what is not there is skipped, with the product's own reason where the product would give one.  With
`HPCRL_REQUIRE=namespaces,root` in the environment it fails instead, with that reason.

Invariant: nothing is started when a test file is imported; each question is put at most once in a process.
"""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

PYTHON = "/usr/bin/python3"  #: the system's, which is in every box
STRANGER = "hpcrl-stranger"  #: the second account
REQUIRED = "HPCRL_REQUIRE"  #: of the environment: a comma-separated list of what must be there
SECONDS = 60.0

#: a program -> how to get it; each is one that tests need and hpcrl does not
PROGRAMS = {
    "bash": "apt-get install bash",
    "bwrap": "apt-get install bubblewrap",
    "cc": "apt-get install gcc",
    "chromium": "apt-get install chromium",
    "fish": "apt-get install fish",
    "git": "apt-get install git",
    "shellcheck": "apt-get install shellcheck",
    "squeue": "apt-get install slurm-client",
    "zsh": "apt-get install zsh",
}


def needs(*names: str) -> pytest.MarkDecorator:
    """The mark of a test that is skipped where something of `PROBES` is not there."""
    if unknown := set(names) - PROBES.keys():
        raise ValueError(f"tests/support/able.py has no probe {', '.join(sorted(unknown))}")
    return pytest.mark.needs(*names)


def require(*names: str) -> None:
    """Go on if all of it is there; otherwise skip this test, or fail it where HPCRL_REQUIRE names it."""
    for name in names:
        if why := lacking(name):
            if name in _required():
                pytest.fail(f"{REQUIRED} has {name}, which is not here: {why}", pytrace=False)
            pytest.skip(why)


@functools.cache
def lacking(name: str) -> str:
    """Why something of `PROBES` is not there, "" if it is."""
    return PROBES[name]()


def _required() -> set[str]:
    return set(filter(None, os.environ.get(REQUIRED, "").replace(" ", "").split(",")))


def _namespaces() -> str:
    """What the product says of a box."""
    if sys.platform != "linux":
        return "Linux confines"
    from hpcrl.sandbox.run import refusal_of

    return error.what if (error := refusal_of("unshare")) else ""


def _root() -> str:
    return "" if os.geteuid() == 0 else "root alone can give files to other users and run programs as them"


def _mounts() -> str:
    """Whether this user can mount a file system where it is, which root in a container may not."""
    if os.geteuid() != 0:
        return "root alone can mount a file system"
    with tempfile.TemporaryDirectory() as place:
        done = _run("mount", "-t", "tmpfs", "-o", "size=1m", "none", place)
        if done.returncode == 0:
            _run("umount", "-l", place)
        return f"root cannot mount a file system here: {done.stderr.strip()}" if done.returncode else ""


def _account() -> str:
    """Makes the account if it is not there."""
    if os.geteuid() != 0:
        return "a second account can be made by root alone"
    if why := _python():
        return f"a second account runs {PYTHON}: {why}"
    if shutil.which("useradd") is None:
        return "a second account needs useradd"
    if find_account() is None:
        made = _run("useradd", "--system", "--no-create-home", "-d", "/nonexistent", "-s", "/bin/false", STRANGER)
        if find_account() is None:  # another test process may have made it meanwhile
            return f"no second account could be made: {made.stderr.strip()}"
    return ""


def find_account() -> pwd.struct_passwd | None:
    """The second account, None if it is not there."""
    try:
        return pwd.getpwnam(STRANGER)
    except KeyError:
        return None


def _account_namespaces() -> str:
    """Root may make namespaces in many a place where users may not."""
    from hpcrl.sandbox.box_line import NO_NAMESPACES

    if why := lacking("namespaces") or lacking("account"):
        return why
    found = find_account()
    assert found is not None
    words = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=SECONDS, user=found.pw_uid, group=found.pw_gid, extra_groups=[]
    )
    return done.stderr.strip() + NO_NAMESPACES if done.returncode else ""


def _cluster() -> str:
    from tools.cluster import packages

    return f"no test cluster here: {why}" if (why := packages.reason()) else ""


def _apptainer() -> str:
    from tools.cluster import roots

    suite = roots.SUITES[-1]
    if (roots.path(suite) / "usr/bin/apptainer").exists():
        return ""
    return f"there is no apptainer: `python -m tools.cluster root {suite}` unpacks a release that has it"


def find_mpirun() -> str | None:
    """The mpirun that belongs to what mpi4py loads: the environment's, else the first in PATH."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return shutil.which("mpirun", path=beside)


def _mpirun() -> str:
    return "" if find_mpirun() else "mpirun is not here; load or install Open MPI"


def _python() -> str:
    return "" if Path(PYTHON).exists() else f"there is no {PYTHON}: apt-get install python3"


def _checkout() -> str:
    """Whether git reads this repository: it does not where there is none, or one of another user's."""
    if why := lacking("git"):
        return why
    done = _run("git", "-C", str(Path(__file__).parent), "rev-parse", "--show-toplevel")
    return f"git finds no repository here: {done.stderr.strip().splitlines()[0]}" if done.returncode else ""


def _program(name: str) -> str:
    return "" if shutil.which(name) else f"{name} is not installed: {PROGRAMS[name]}"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)


#: what a test may need -> says why it is not there, or ""
PROBES: dict[str, Callable[[], str]] = {
    "account": _account,
    "account_namespaces": _account_namespaces,
    "apptainer": _apptainer,
    "checkout": _checkout,
    "cluster": _cluster,
    "mounts": _mounts,
    "mpirun": _mpirun,
    "namespaces": _namespaces,
    "python": _python,
    "root": _root,
    **{name: functools.partial(_program, name) for name in PROGRAMS},
}


# ---- pytest's hooks, which tests/conftest.py imports


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark, and refuse unknown names in HPCRL_REQUIRE."""
    config.addinivalue_line("markers", "needs(*names): skipped where the machine lacks it (tests/support/able.py)")
    if unknown := _required() - PROBES.keys():
        raise pytest.UsageError(f"{REQUIRED}: {', '.join(sorted(unknown))}: give some of {', '.join(sorted(PROBES))}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test before any of its fixtures is made."""
    for mark in item.iter_markers("needs"):
        require(*mark.args)
