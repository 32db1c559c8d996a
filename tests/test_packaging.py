"""pyproject.toml and the pinned lists of `make env` say the same."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.lint
REPO = Path(__file__).parent.parent
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: extra -> the lists that install it
LISTS = {
    "": ["cpu"],
    "report": ["cpu"],
    "roles": ["cpu"],
    "cpu": ["cpu"],
    "test": ["test"],
    "docs": ["test"],
    "bench": ["bench"],
}


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


def test_transformer_engine_adds_to_the_gpu_lock() -> None:
    """One version of its parts, that for CUDA 13, and no other version of what is locked already."""
    added = locked("gpu-te")
    ours = {name: version for name, version in added if name.startswith("transformer-engine")}
    assert ours.keys() == {f"transformer-engine{part}" for part in ("", "-cu13", "-torch")}
    assert len(set(ours.values())) == 1 and all(added.values())
    assert not {name for name, _ in added} & {name for name, _ in locked("gpu")}


def test_no_two_locked_packages_own_a_file() -> None:
    """Which of the two is there would depend on the order of installation.

    Of what is installed here by the files themselves. Of the lock for GPUs, whose wheels take gigabytes, by the one pair
    that is known: cuda-python before 13 holds 33 files of cuda-bindings 13.5, and a later one none.
    """
    owners: dict[str, str] = {}
    for package in distributions():
        name = package.name
        for path, *_ in csv.reader((package.read_text("RECORD") or "").splitlines()):
            if ".dist-info/" not in path:
                assert owners.setdefault(path, name) == name, path
    versions = dict(locked("gpu").keys())
    assert "cuda-bindings" in versions and int(versions["cuda-python"].partition(".")[0]) >= 13


@pytest.mark.parametrize(("suits", "chosen"), [(True, "/usr/bin/python3"), (False, "python3")])
def test_ci_uses_the_distributions_python(suits: bool, chosen: str, tmp_path: Path) -> None:
    """The script is run with a `make` that prints its arguments and fails."""
    own = tmp_path / "own-python"
    own.write_text(f'#!/bin/sh\nif [ "$1" = -c ] && ! {str(suits).lower()}; then exit 1; fi\nexec python3 "$@"\n')
    (tmp_path / "make").write_text('#!/bin/sh\necho "asked for: $*"\nexit 7\n')
    script = (REPO / ".ci" / "run").read_text().replace("/usr/bin/python3", str(own))
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(script)
    for file in (own, tmp_path / "make"):
        file.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7, done.stderr
    assert f"asked for: packages PYTHON={str(own) if suits else chosen}\n" in done.stdout
    assert "Python of the environment: /" in done.stdout


def test_an_environment_of_another_python_is_refused(tmp_path: Path) -> None:
    """Made anew over another one's, it would be a mixture whose modules do not load; without PYTHON= it keeps its
    own."""
    other = tmp_path / "venv" / "bin" / "python"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\necho /elsewhere 3.11.99\n")
    other.chmod(0o755)
    words = ["make", "--dry-run", "env", f"HPCRL_VENV={tmp_path / 'venv'}"]
    # make tells a make that it starts, such as the one that runs these tests, what it was given
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHON" and not name.startswith("MAKE")
    }
    done = subprocess.run(words, env=environment, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "-m venv" not in done.stdout, done.stderr
    done = subprocess.run(
        [*words, "PYTHON=python3"], env=environment, cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "3.11.99" in done.stderr and "HPCRL_VENV" in done.stderr
