"""What hpcrl imports from vLLM and Megatron-core is there, with the signatures for which it was written."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools.foreign_names import FILE, INSTALLED, PACKAGES, Sources, changed, installed, lines, main, table

pytestmark = pytest.mark.lint


def written() -> dict[str, str]:
    return dict(line.split(" ", 1) for line in FILE.read_text().splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_there(package: str) -> None:
    """Of the release that the file was written for with the same signatures; of another one at all."""
    if not (found := installed(package)):
        pytest.skip(f"{package} is not installed")
    now = table(INSTALLED, {package})
    assert [name for name, what in now.items() if what == "gone"] == []
    if f"# {package} {found}" in FILE.read_text().splitlines():
        before = {name: what for name, what in written().items() if name.partition(".")[0] == package}
        assert changed(before, now) == [] and before.keys() == now.keys(), "python -m tools.foreign_names --write"
        assert all(line in FILE.read_text().splitlines() for line in lines(INSTALLED) if line.startswith(package))


def test_another_release_is_read_from_its_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is gone and one with another signature are named; imports are followed to where a name is made."""
    wheel = tmp_path / "vllm-99.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("vllm/__init__.py", "")
        file.writestr("vllm/utils/__init__.py", "")
        file.writestr("vllm/utils/nccl.py", "from vllm.there import unpinned_nccl_env\n")
        file.writestr("vllm/there.py", "if True:\n    def unpinned_nccl_env(how, *, more=1): ...\n")
    with zipfile.ZipFile(wheel) as file:
        found = table(Sources(file), {"vllm"})
    assert found["vllm.utils.nccl:unpinned_nccl_env"] == "(how, *, more=)"
    if installed("vllm"):
        assert main(["--against", str(wheel)]) == 1
        said = capsys.readouterr().out
        assert "vllm.utils.nccl:unpinned_nccl_env: (how, *, more=); was ()" in said and ": gone; was " in said
