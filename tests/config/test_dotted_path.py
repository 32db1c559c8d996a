"""Own functions by dotted path: what is found, and what is said of what is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.custom_functions import (
    BUILT_INS,
    guarded,
    is_async,
    load_class,
    load_function,
    named,
    ours,
    settled,
    takes,
)
from hpcrl.config.recipe import Recipe, Stage, resolve_stages
from hpcrl.errors import CodeError, HpcrlError, UsageError
from tests.support.options import GRPO, PLACES

HERE = "tests.config.test_dotted_path"


def two(a: int, b: int) -> int:
    return a + b


def two_and_more(a: int, b: int, *, c: int = 0, **more: Any) -> int:
    return a + b + c


class Adder:
    async def __call__(self, a: int, b: int) -> int:
        return a + b


class Source:
    def __init__(self, options: Any) -> None:
        self.options = options

    def take(self, count: int) -> list[int]:
        return list(range(count))


def make_source(options: Any) -> Source:
    return Source(options)


NUMBER = 3


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, text: (tmp_path / f"{name}.py").write_text(text) and None


def test_functions_objects_and_classes_are_found() -> None:
    assert load_function(f"{HERE}.two", "--x", ("a", "b"))(1, 2) == 3
    assert load_function(f"{HERE}.two_and_more", "--x", ("a", "b"), ("c", "d"))(1, 2, c=3, d=4) == 6
    adder = load_function(f"{HERE}.Adder", "--x", ("a", "b"))
    assert is_async(adder) and not is_async(two) and asyncio.run(settled(adder(1, 2))) == 3
    assert load_function("math.hypot", "--x", ("a", "b"))(3, 4) == 5, "written in C"
    for name in ("Source", "make_source"):
        assert load_class(f"{HERE}.{name}", "--x", ("options",), {"take": ("count",)})(7).options == 7


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("two", "--x two is not a module.function"),
        (
            "no_such_module.f",
            "imported: No module named 'no_such_module'; modules are looked",
        ),
        (f"{HERE}.absent", f"--x {HERE}.absent: {HERE} has no absent;"),
        (f"{HERE}.NUMBER", "not a function but 3"),
        (f"{HERE}.make_source", "too many positional arguments"),
        ("slime.rollout.rm_hub.math", "not have; write your"),
    ],
)
def test_what_cannot_be_used_is_named(path: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_function(ours(path, "--x"), "--x", ("a", "b"))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "importing broken raises ZeroDivisionError"),
        ("import sys; sys.exit(3)", "importing broken raises SystemExit: 3 (broken.py:1"),
        ("def f(:", "importing broken raises SyntaxError"),
        ("import nothing_of_this_name", "importing broken raises ModuleNotFoundError"),
        ("None.x", "importing broken raises AttributeError"),
    ],
)
def test_a_module_that_breaks_is_named(module: Callable[[str, str], None], text: str, words: str) -> None:
    module("broken", text)
    with pytest.raises(UsageError) as caught:
        load_function("broken.f", "--x")
    assert words in str(caught.value)


def test_a_class_lacks_a_method() -> None:
    with pytest.raises(UsageError, match=r"no plain method give; declare.*give\(self, group\)"):
        load_class(f"{HERE}.Source", "--x", ("options",), {"give": ("group",)})
    with pytest.raises(UsageError, match=r"Source.take takes \(self, count\)"):
        load_class(f"{HERE}.Source", "--x", ("options",), {"take": ("count", "more")})


def test_what_it_takes() -> None:
    assert takes(two, "b") and not takes(two, "c") and takes(two_and_more, "anything")


def test_exception_is_named_with_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """An exception of a custom function is named, and its traceback printed."""

    def bad(number: int) -> float:
        return 1 / number

    with pytest.raises(
        CodeError, match=r"^--x my.f raised ZeroDivisionError: division by.*\(test_dotted_path.py:\d+ in bad\)"
    ):
        guarded(bad, "--x my.f")(0)
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(HpcrlError, match="--x my.f raised SystemExit: 3"), named("--x my.f"):
        raise SystemExit(3)
    for passing in (
        ConnectionResetError(),
        TimeoutError(),
        RuntimeError("CUDA error"),
        json.JSONDecodeError("no", "", 0),
    ):
        with pytest.raises(HpcrlError) as caught, named("--x my.f"):
            raise passing
        assert type(caught.value) is HpcrlError, "it may be over at the next attempt"
    with pytest.raises(UsageError, match="^as it is$"), named("--x my.f"):
        raise UsageError("as it is")
    with pytest.raises(asyncio.CancelledError), named("--x my.f"):
        raise asyncio.CancelledError


# ---- slime's and vime's


def test_their_built_ins_are_ours() -> None:
    assert ours("my.own", "--x") == "my.own"
    for theirs, here in BUILT_INS.items():
        assert ours(f"slime.{theirs}", "--x") == ours(f"vime.{theirs}", "--x") == here
        if "." in here:
            load_function(here, "--x")
    with pytest.raises(UsageError, match="did you mean slime.backends.megatron_utils.loss.icepop_function"):
        ours("slime.backends.megatron_utils.loss.icepop_functions", "--x")


def test_a_recipe_may_name_them() -> None:
    values = GRPO | {"use_tis": True, "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function"}
    (options,) = resolve_stages(Recipe("r", Path("/r.toml"), values, (), (Stage("", {}),)), {}, PLACES)
    assert options.custom_tis_function_path == "icepop"
