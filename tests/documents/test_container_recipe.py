"""tools/container: both files copy what is there and install the same, where the pages say that the interpreter is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint
REPO = Path(__file__).parents[2]
FOLDER = REPO / "tools/container"
RECIPE, DOCKER, INSTALL = ((FOLDER / name).read_text() for name in ("hpcrl.def", "Dockerfile", "install.sh"))


def section(name: str) -> list[str]:
    return RECIPE.partition(f"\n%{name}\n")[2].partition("\n%")[0].split("\n")


def test_all_that_the_image_is_built_from_is_here() -> None:
    """The package with what its links lead to, and the lists of requirements that the commands read."""
    copied = dict(line.split() for line in section("files") if line.strip())
    assert all((REPO / name).exists() for name in copied), copied
    linked = {link.resolve().name for link in (REPO / "hpcrl/utils/shipped").iterdir() if link.is_symlink()}
    assert linked | {"hpcrl", "pyproject.toml", "README.md", "requirements"} <= copied.keys()
    assert dict(re.findall(r"^COPY (\S+) (\S+)$", DOCKER, re.M)) == copied
    for name in re.findall(r"-r (\S+)", INSTALL):
        assert (REPO / name).is_file(), name


def test_both_recipes_take_the_same_arguments() -> None:
    """And hand the same one to the script that installs."""
    arguments = dict(line.strip().split("=") for line in section("arguments") if line.strip())
    assert arguments.pop("AGENT") == "docker"
    assert dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKER, re.M)) == arguments
    for text, extra in ((RECIPE, "{{ EXTRA }}"), (DOCKER, "${EXTRA}")):
        assert f'sh /opt/source/install.sh "{extra}"\n' in text


@pytest.mark.parametrize("extra", ["", "cuda"])
def test_another_variant_is_refused(extra: str) -> None:
    command = ["sh", FOLDER / "install.sh", extra]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 2 and done.stderr == f"install.sh: EXTRA is '{extra}': give gpu or cpu\n"


def test_the_pages_name_the_images_interpreter() -> None:
    assert "python3 -m venv /opt/hpcrl" in INSTALL
    for page in ("docs/slurm.md", "sites/apptainer.toml", "tools/container/hpcrl.def"):
        assert "/opt/hpcrl/bin/python" in (REPO / page).read_text(), page
