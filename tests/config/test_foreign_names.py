"""What functions want of slime and vime: answered, or told before anything runs."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from hpcrl.config.foreign_imports import OURS, answer_foreign_imports
from hpcrl.config.foreign_names import MODULES, has, wanted_in_vain
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import foreign_functions, foreign_misses


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
    assert [wanted.name for wanted in wanted_in_vain("f.g")] == ["slime.utils.types.WHOSE"]


MODULE = """
import slime.utils.types
from slime.utils import misc, wandb_utils
from slime.rollout.rm_hub import async_rm, secret_rm
from .helper import other
try:
    from slime.utils.mask_utils import masks
except ImportError:
    masks = None
try:
    import slime.ray.rollout
except ImportError as error:
    raise ImportError("needs Ray") from error

with contextlib.suppress(ImportError):
    from slime.utils.eval_config import config
if TYPE_CHECKING:
    from slime.ray.placement import groups
elif __name__ == "__main__":
    from slime.utils.arguments import parse_args
else:
    import slime.utils.ppo_utils
if __name__ != "__main__":
    import slime.utils.seqlen

def rollout():
    import slime.utils.data

async def generate(args, sample, sampling_params):
    if args.x:
        from slime.utils.flops_utils import count
"""


def test_what_is_wanted_in_vain_is_told(here: Path) -> None:
    """Of the module, of those that it imports, and of the function itself; what it catches, what another function
    imports, and what runs for type checkers or in a program alone, is not counted.  Nothing of it runs."""
    (here / "pack").mkdir()
    (here / "pack/__init__.py").write_text("import slime.utils.timer\nraise SystemExit('this runs')\n")
    (here / "pack/mine.py").write_text(MODULE)
    (here / "pack/helper.py").write_text("from vime.agent.trajectory import Trajectory\nother = 1\n")
    found = {wanted.name: wanted.line for wanted in wanted_in_vain("pack.mine.generate")}
    assert found == {
        "slime.utils.wandb_utils": 3,
        "slime.rollout.rm_hub.secret_rm": 4,
        "slime.utils.flops_utils": 31,
        "slime.utils.ppo_utils": 22,
        "slime.utils.seqlen": 24,
        "vime.agent.trajectory": 1,
        "slime.ray.rollout": 11,
        "slime.utils.timer": 1,
    }


def test_functions_are_refused_before_engines(here: Path) -> None:
    (here / "mine.py").write_text("from slime.utils.ppo_utils import kl\nasync def f(args, sample, params): ...\n")
    [error] = foreign_functions(Options(custom_generate_function_path="mine.f"))
    assert "slime.utils.ppo_utils (mine.py:1)" in error.what and "docs/customise.md" in str(error.hint)
    (here / "mine.py").write_text("from slime.utils.types import Sample\nasync def f(args, sample, params): ...\n")
    assert foreign_functions(Options(custom_generate_function_path="mine.f")) == []


def test_functions_elsewhere_are_read_too(here: Path) -> None:
    """In the directories that a script puts into PYTHONPATH, or its own."""
    (here / "there").mkdir()
    (here / "there/mine.py").write_text("import slime.utils.ppo_utils\ndef f(args, sample): ...\n")
    assert foreign_misses("mine.f") == ("", "")
    assert "slime.utils.ppo_utils" in foreign_misses("mine.f", [str(here / "there")])[0]
    path = {"PYTHONPATH": f"/nowhere:{here / 'there'}"}
    [error] = foreign_functions(Options(custom_rm_path="mine.f", train_env_vars=path))
    assert "--custom-rm-path mine.f" in error.what


def test_whole_rollouts_of_slimes_are_refused(here: Path) -> None:
    """They ask slime's data source and router by themselves; a reward may import the same, a rollout function types."""
    (here / "mine.py").write_text(
        "from slime.rollout.sglang_rollout import GenerateState\ndef f(args, rollout_id, source, *, evaluation): ...\n"
    )
    [error] = foreign_functions(Options(rollout_function_path="mine.f"))
    assert "slime.rollout.sglang_rollout" in error.what and "(mine.py:1)" in error.what
    assert "A whole rollout" in str(error.hint)
    assert foreign_functions(Options(custom_rm_path="mine.f")) == []
    (here / "mine.py").write_text("from slime.rollout.base_types import RolloutFnTrainOutput\ndef f(): ...\n")
    assert foreign_functions(Options(rollout_function_path="mine.f", eval_function_path="mine.f")) == []


def test_packages_and_names_of_the_table() -> None:
    assert has("slime") and has("vime.utils") and has("slime.utils", "types") and has("slime.utils.types", "Sample")
    assert not has("slime.utils.types", "Simple") and not has("slime.agent") and not has("slime", "agent")


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
    assert not wanted_in_vain("my_rm.brief")
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
