"""pyproject.toml and the pinned lists of `make env` say the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parent.parent
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: extra -> the lists that install it
LISTS = {"": ["cpu"], "report": ["cpu"], "roles": ["cpu"], "cpu": ["cpu"], "test": ["test"], "bench": ["bench"]}


def pins(name: str) -> dict[str, str]:
    """Package -> version of requirements/NAME.txt for this Python; every line must be an exact pin."""
    lines = [
        line.partition("#")[0].strip() for line in (REPO / "requirements" / f"{name}.txt").read_text().splitlines()
    ]
    found = {}
    for requirement in (Requirement(line) for line in lines if line):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        [pin] = requirement.specifier
        assert pin.operator == "==", f"{requirement} in {name}.txt is no exact pin"
        assert canonicalize_name(requirement.name) not in found, f"{requirement.name} is twice in {name}.txt"
        found[canonicalize_name(requirement.name)] = pin.version
    return found


@pytest.mark.parametrize("extra", LISTS)
def test_pins_fit_declarations(extra: str) -> None:
    """What is declared is pinned to a version that fits."""
    pinned = {name: version for file in LISTS[extra] for name, version in pins(file).items()}
    for requirement in map(Requirement, EXTRAS[extra] if extra else PROJECT["dependencies"]):
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= set(EXTRAS)
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None and requirement.specifier.contains(version), f"{requirement}: pinned is {version}"


def test_the_lists_do_not_contradict_each_other() -> None:
    seen: dict[str, str] = {}
    for file in ("cpu", "cpu-nodeps", "test", "bench"):
        for name, version in pins(file).items():
            assert seen.setdefault(name, version) == version, f"{name} in {file}.txt"


def locked(name: str) -> dict[tuple[str, str], int]:
    """(package, version) -> how many files of it are allowed, of requirements/NAME.lock; markers aside."""
    found: dict[tuple[str, str], int] = {}
    at = ("", "")
    for line in (REPO / "requirements" / f"{name}.lock").read_text().splitlines():
        if match := re.match(r"([\w.-]+)==([\w.+]+)( ;.*)? \\$", line):
            at = (canonicalize_name(match[1]), match[2])
            found[at] = 0
        elif re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?", line):
            found[at] += 1
        else:
            assert line.lstrip().startswith("#"), f"{name}.lock: {line}"
    return found


def test_every_pin_has_hashes() -> None:
    """`make env` installs from the locks alone: a pin that changes without `make lock` would not take effect."""
    wanted = {pin for name in ("cpu", "cpu-nodeps", "test") for pin in pins(name).items()}
    both = {pin for pin in locked("cpu") if pin[0] != "megatron-core"} | {pin for pin in wanted if "megatron" in pin[0]}
    torch = {pin for pin in wanted if pin[0] == "torch"}
    assert both == wanted - torch and all(locked("cpu").values())
    assert set(locked("torch-cpu")) == set(locked("torch-cuda")) == torch
    assert wanted & {pin for pin in locked("cpu") if "megatron" in pin[0]}


def test_the_gpu_lock_fits_the_extras() -> None:
    """What `hpcrl[gpu,mpi,parquet]` asks for is in it, with hashes, in versions that are allowed."""
    versions = {name: version for (name, version), count in locked("gpu").items() if count}
    asked = [line for extra in ("gpu", "roles", "report", "mpi", "parquet") for line in EXTRAS[extra]]
    for requirement in map(Requirement, [*asked, *PROJECT["dependencies"]]):
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def interpreter(path: Path, minor: int, *, venv: bool = True) -> None:
    """A stand-in for a Python 3.`minor`, with or without the modules that make an environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    asked = f"import sys; sys.modules |= dict(ensurepip=sys, venv=sys); sys.version_info = (3, {minor}, 9); exec(sys.argv[1])"
    told = f'exec {sys.executable} -c "{asked}" "$2"' if venv else "exit 1"
    path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then {told}; fi\nexit 0\n')
    path.chmod(0o755)


def plain(tmp_path: Path) -> dict[str, str]:
    """An environment without what a make tells a make that it starts, such as the one that runs these tests."""
    left = {name: value for name, value in os.environ.items() if name != "PYTHON" and not name.startswith("MAKE")}
    return left | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYENV_ROOT": str(tmp_path / "pyenv")}


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"python3.12": True, "pyenv/versions/3.12.7/bin/python3.12": True}, "python3.12"),
        ({"python3.12": False, "pyenv/versions/3.12.7/bin/python3.12": True}, "pyenv/versions/3.12.7/bin/python3.12"),
        ({"python3.12": False, "python3": True}, "python3"),
    ],
)
def test_the_newer_python_is_taken(there: dict[str, bool], chosen: str, tmp_path: Path) -> None:
    """Python 3.12 where there is one that can make an environment, from PATH or of pyenv's; else python3."""
    if Path("/usr/bin/python3.12").exists() and chosen != "python3.12":
        pytest.skip("the distribution's own is taken first")
    for name, venv in there.items():
        interpreter(tmp_path / name, 12 if "12" in name else 11, venv=venv)
    words = ["make", "--dry-run", "env", f"HPCRL_VENV={tmp_path / 'venv'}"]
    done = subprocess.run(words, env=plain(tmp_path), cwd=REPO, capture_output=True, text=True, timeout=60)
    wanted = tmp_path / chosen if "/" in chosen else chosen
    assert f"\n{wanted} -m venv {tmp_path / 'venv'}\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("minor", "gone", "said"),
    [
        (12, 0, "asked for: fast-311 PYTHON311=/opt/python3.11"),
        (12, 4300, "71 of CI's 90 minutes"),
        (12, -1, "no Python 3.11"),
        (11, 0, "of Python 3.11 itself"),
    ],
)
def test_ci_runs_both_pythons(minor: int, gone: int, said: str, tmp_path: Path) -> None:
    """The script is run with a `make` that only says what it is asked for, and knows an older Python or none."""
    older = "exit 0" if gone < 0 else "echo /opt/python3.11; exit 0"
    words = f'case "$*" in *older) {older};; esac; echo "asked for: $*"'
    (tmp_path / "make").write_text(f"#!/bin/sh\n{words}\n")
    (tmp_path / "make").chmod(0o755)
    (tmp_path / "df").write_text("#!/bin/sh\necho Avail\necho 90000000\n")
    (tmp_path / "df").chmod(0o755)
    interpreter(tmp_path / ".venv" / "bin" / "python", minor)
    (tmp_path / ".ci").mkdir()
    told = f"make test\nSECONDS={max(gone, 0)}\n"
    script = (REPO / ".ci" / "run").read_text().replace("make test < /dev/null\n", told)
    (tmp_path / ".ci" / "run").write_text(script)
    done = subprocess.run(
        ["bash", tmp_path / ".ci" / "run"], env=plain(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("asked for: test\n") and said in done.stdout


def test_an_environment_of_another_python_is_refused(tmp_path: Path) -> None:
    """Made anew over another one's, it would be a mixture whose modules do not load; without PYTHON= it keeps its
    own."""
    other = tmp_path / "venv" / "bin" / "python"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\necho /elsewhere 3.11.99\n")
    other.chmod(0o755)
    words = ["make", "--dry-run", "env", f"HPCRL_VENV={tmp_path / 'venv'}"]
    done = subprocess.run(words, env=plain(tmp_path), cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "-m venv" not in done.stdout, done.stderr
    words.append("PYTHON=python3")
    done = subprocess.run(words, env=plain(tmp_path), cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "3.11.99" in done.stderr and "HPCRL_VENV" in done.stderr
