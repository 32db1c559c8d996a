"""Which functions are called with slime's samples."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.custom_functions import load_object
from hpcrl.rollout.slime_names.speakers import speaks_slime

THEIRS = "from slime.utils.types import Sample\n"
CAUGHT = "try:\n    from slime.utils.types import Sample\nexcept ImportError:\n    Sample = None\n"
FUNCTION = "def f(args, sample):\n    return 1.0\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a module of the user's, or an installed one."""
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "lib/site-packages"
    installed.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, text: str, where: str = "") -> None:
        (tmp_path / where / f"{name}.py").write_text(text)

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("spk_"):
            del sys.modules[name]


def speaks(path: str) -> bool:
    return speaks_slime(load_object(path, "--x"), path)


def test_its_own_module_decides(write: Any) -> None:
    """Whatever a module that it uses imports; an import that it can do without is none."""
    write("spk_helper", THEIRS + "def norm(x):\n    return x\n")
    write("spk_native", "import hpcrl.sample\nimport spk_helper\n" + FUNCTION)
    write("spk_caught", CAUGHT + FUNCTION)
    write("spk_theirs", "import hpcrl.sample\n" + THEIRS + FUNCTION)
    write("spk_inner", "def f(args, sample):\n    from vime.utils.types import Sample\n")
    assert [speaks(f"spk_{name}.f") for name in ("native", "caught", "theirs", "inner")] == [False, False, True, True]


def test_modules_that_it_uses_decide_otherwise(write: Any) -> None:
    """The user's alone: not those that are installed."""
    write("spk_helper", THEIRS + "def norm(x):\n    return x\n")
    write("spk_lib", THEIRS + "def norm(x):\n    return x\n", "lib/site-packages")
    write("spk_optional", CAUGHT + "def norm(x):\n    return x\n")
    for name in ("helper", "lib", "optional"):
        write(f"spk_uses_{name}", f"from spk_{name} import norm\n" + FUNCTION)
    assert [speaks(f"spk_uses_{name}.f") for name in ("helper", "lib", "optional")] == [True, False, False]


def test_installed_and_wrapped_functions(write: Any) -> None:
    write("spk_installed", THEIRS + FUNCTION, "lib/site-packages")
    write("spk_partial", "import functools\nimport spk_installed\nf = functools.partial(spk_installed.f, x=1)\n")
    assert speaks("spk_installed.f") and speaks("spk_partial.f")
    inner = load_object("spk_installed.f", "--x")

    def wrapper(*given: Any) -> Any:
        return inner(*given)

    assert not speaks_slime(wrapper) and speaks_slime(functools.update_wrapper(wrapper, inner))


def test_the_log_says_it_once(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write("spk_said", THEIRS + FUNCTION)
    for _ in range(2):
        speaks("spk_said.f")
    assert capsys.readouterr().err.count("spk_said imports slime") == 1
