"""Functions of hpcrl that remember their results: each is known to the tests, and forgets what a test may change."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import hpcrl
from hpcrl.sandbox.kinds import _bounds
from tests.support.caches import FORGOTTEN, KEPT
from tests.support.sources import nodes

ROOT = Path(hpcrl.__file__).parents[1]
CACHES = ("cache", "lru_cache")


def cached_functions() -> set[str]:
    """`module.function` of all that have a cache, by their source."""
    found = set()
    for path in sorted((ROOT / "hpcrl").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in nodes(path):
            for mark in getattr(node, "decorator_list", ()):
                called = mark.func if isinstance(mark, ast.Call) else mark
                if (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in CACHES:
                    found.add(f"{module}.{node.name}")  # type: ignore[attr-defined]
    return found


def test_every_cache_is_in_a_table() -> None:
    """tests/support/caches.py says of each whether it looks at what a test may change."""
    listed = [f"{module}.{name}" for table in (FORGOTTEN, KEPT) for module, names in table.items() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == cached_functions()


@pytest.mark.parametrize("module", FORGOTTEN)
def test_they_can_be_forgotten(module: str) -> None:
    """The functions are where the table says, and nothing has taken their place."""
    for name in FORGOTTEN[module]:
        assert getattr(importlib.import_module(module), name).cache_info().currsize == 0


@pytest.mark.parametrize("time", ["first", "second"])
def test_each_test_begins_anew(time: str) -> None:
    """The same test twice, in whatever order."""
    assert _bounds.cache_info().currsize == 0
    assert not _bounds("/bin/true")
    assert _bounds.cache_info().currsize == 1
