"""tools/container/hpcrl.def: what it copies is there, and its interpreter is the one that the pages name."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.lint
REPO = Path(__file__).parents[2]
RECIPE = (REPO / "tools/container/hpcrl.def").read_text()


def section(name: str) -> list[str]:
    return RECIPE.partition(f"\n%{name}\n")[2].partition("\n%")[0].split("\n")


def test_all_that_the_image_is_built_from_is_here() -> None:
    """The package with what its links lead to, and the lists of requirements that the commands read."""
    copied = {line.split()[0] for line in section("files") if line.strip()}
    assert all((REPO / name).exists() for name in copied), copied
    linked = {link.resolve().name for link in (REPO / "hpcrl/utils/shipped").iterdir() if link.is_symlink()}
    assert linked | {"hpcrl", "pyproject.toml", "README.md", "requirements"} <= copied
    for word in " ".join(section("post")).split():
        if word.startswith("requirements/"):
            assert (REPO / word).is_file(), word


def test_the_pages_name_the_images_interpreter() -> None:
    assert "python3 -m venv /opt/hpcrl" in RECIPE
    for page in ("docs/slurm.md", "sites/apptainer.toml", "tools/container/hpcrl.def"):
        assert "/opt/hpcrl/bin/python" in (REPO / page).read_text(), page
