"""What functions want of slime and vime: answered, or Python's own ImportError."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from hpcrl.config.foreign_imports import MODULES, OURS, answer_foreign_imports


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory, where no module of theirs is kept from one test to the next."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    answer_foreign_imports()
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("slime", "vime")}
    for name in before:
        del sys.modules[name]
    return tmp_path


def test_every_name_of_the_table_is_there() -> None:
    for names in MODULES.values():
        for place in names.values():
            module, _, name = place.partition(":")
            assert hasattr(importlib.import_module(f"{OURS}.{module}"), name), place


def test_their_modules_are_answered_for(here: Path) -> None:
    """slime's and vime's alike, one object for both; what there is not is the import's own error."""
    slime = importlib.import_module("slime.utils.types")
    assert slime.Sample is importlib.import_module("vime.utils.types").Sample
    inner = importlib.import_module("slime.rollout.rm_hub")
    assert importlib.import_module("slime.rollout").rm_hub is inner
    with pytest.raises(ImportError, match="ParamInfo"):
        exec("from slime.utils.types import ParamInfo")
    with pytest.raises(ModuleNotFoundError, match="slime.backends"):
        importlib.import_module("slime.backends")


def test_an_installed_slime_has_the_rest(here: Path) -> None:
    """The table's names are hpcrl's even then; other modules are slime's own, and are not missed."""
    (here / "slime/utils").mkdir(parents=True)
    for name in ("slime/__init__.py", "slime/utils/__init__.py", "slime/utils/types.py"):
        (here / name).write_text("WHOSE = 'theirs'\n")
    (here / "slime/utils/own.py").write_text("WHOSE = 'theirs'\n")
    (here / "f.py").write_text(
        "from slime.utils.own import WHOSE\nfrom slime.utils import own\nfrom slime.utils.types import Sample, WHOSE\n"
    )
    importlib.invalidate_caches()
    assert importlib.import_module("slime.utils.own").WHOSE == "theirs"
    assert not hasattr(importlib.import_module("slime.utils.types"), "WHOSE")
    with pytest.raises(ImportError, match="WHOSE"):
        importlib.import_module("f")


def test_the_page_lists_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/customise.md").read_text().partition("## Functions written for slime")[2]
    for module, names in MODULES.items():
        parents = module.rpartition(".")
        assert f"`{module}`" in page or f"`.{parents[2]}`" in page, module
        assert all(f"`{name}`" in page for name in names), module


def test_a_package_of_the_user_s_keeps_its_names(here: Path) -> None:
    """What is called vime, and is the user's own, has what its `__init__` says."""
    (here / "vime").mkdir()
    (here / "vime/__init__.py").write_text("from .score import brief\n")
    (here / "vime/score.py").write_text("def brief(options, sample):\n    return 1.0\n")
    (here / "my_rm.py").write_text("from vime import brief\n")
    importlib.invalidate_caches()
    assert importlib.import_module("my_rm").brief(None, None) == 1.0
    assert importlib.import_module("vime.utils.types").Sample is importlib.import_module("slime.utils.types").Sample


def test_a_slime_that_only_a_finder_knows(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable installation has no directory in sys.path: its modules are found as any import finds them."""
    away = here / "elsewhere"
    (away / "slime/utils").mkdir(parents=True)
    for name in ("slime/__init__.py", "slime/utils/__init__.py"):
        (away / name).write_text("")
    (away / "slime/utils/mask_utils.py").write_text("MASKS = 3\n")

    class Editable:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            return PathFinder.find_spec(name, [str(away)]) if name == "slime" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    assert importlib.import_module("slime.utils.mask_utils").MASKS == 3
