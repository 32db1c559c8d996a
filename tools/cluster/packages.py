"""The Debian packages of the test cluster: which are missing, and their installation.

Invariant: installing starts no daemon, and a machine that lacks something gets one line that says what and the hint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).with_name("packages.txt")
#: program -> package; some lie in directories that are not on an ordinary user's PATH
PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "slurmdbd": "slurmdbd",
    "munged": "munge",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.mpich": "mpich",
    "sshd": "openssh-server",
    "ip": "iproute2",
    "shellcheck": "shellcheck",
}
#: program -> the tests that are skipped without it
OPTIONAL = {
    "bwrap": "sandboxes of the kind bwrap",
    "chromium": "pages",
    "fish": "shell completion",
    "zsh": "shell completion",
}
#: of these, packages that have another name than the program
NAMES = {"bwrap": "bubblewrap"}
POLICY = Path("/usr/sbin/policy-rc.d")


def missing() -> list[str]:
    """Packages whose programs are not here."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin"
    return sorted({package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None})


def reason() -> str | None:
    """Why no cluster can be started here, with the hint; None if one can."""
    if lacking := missing():
        return f"missing: {', '.join(lacking)}; hint: apt-get install --no-install-recommends {' '.join(lacking)}"
    trial = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"])]
    trial += ["--net", "--mount", "--pid", "--fork", "--mount-proc", "ip", "link", "add", "br0", "type", "bridge"]
    result = subprocess.run(
        trial, capture_output=True, text=True, timeout=30, env=os.environ | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    if result.returncode:
        said = result.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return (
            f"this machine allows no network namespaces to {'root' if os.geteuid() == 0 else 'an ordinary user'}: "
            f"{said[0]}"
        )
    return None


def main(*, install: bool) -> int:
    """Say what is missing or install it.  0 if nothing is missing at the end or nothing could be done about it."""
    lacking = missing()
    more = [program for program in OPTIONAL if shutil.which(program) is None]
    if install and more and os.geteuid() == 0 and shutil.which("apt-get"):
        what = ", ".join(f"{program} ({OPTIONAL[program]})" for program in more)
        print(f"installing what some tests are skipped without: {what}", flush=True)
        install_packages(*(NAMES.get(program, program) for program in more))
    if not lacking:
        return 0
    if not install or os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"the test cluster needs: apt-get install --no-install-recommends {' '.join(lacking)}")
        return 0 if install else 1
    print(f"installing Debian packages for the test cluster: {' '.join(wanted())}", flush=True)
    return 0 if install_packages(*wanted()) else 1


def wanted() -> list[str]:
    """The Debian packages of the cluster."""
    return [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]


def install_packages(*names: str) -> bool:
    """Whether apt-get installed them, as root; what it says of a failure is shown.  No daemon is started."""
    with _no_daemons():
        return _apt("update") and _apt("install", "--yes", "--no-install-recommends", *names)


@contextlib.contextmanager
def _no_daemons() -> Iterator[None]:
    """While it lasts, Debian's install scripts may start no service."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _apt(*words: str) -> bool:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    result = subprocess.run(
        ["apt-get", "-q", *words], capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
    )
    if result.returncode:
        print("\n".join((result.stdout + result.stderr).splitlines()[-15:]), file=sys.stderr)
    return result.returncode == 0
