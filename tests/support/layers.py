"""The layers of the suite: every test gets one of the marks core, full, soak and lint.

    make test        core: no root, no Debian packages, no Slurm
    make test-all    core and full
    make soak        soak
    make lint        lint

A test that starts nothing is core; one with the mark process, vllm or cluster is full; tests/layers.toml lists the
exceptions, and a mark of a layer on the test itself decides before all of this.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

LAYERS = ("lint", "soak", "core", "full")
STARTS = ("process", "vllm", "cluster")  #: marks of tests that start processes
TESTS = Path(__file__).parent.parent
#: seconds that a test may take with its fixtures, by what it starts; a soak test is a campaign
SECONDS = {"fast": 60, "process": 300, "quick_start": 900, "cluster": 600, "soak": 4 * 3600}
collected: set[str] = set()  #: the node ids of this session's tests below tests/, selected or not


@functools.cache
def table() -> dict[str, str]:
    """Entry of tests/layers.toml -> its layer."""
    read = tomllib.loads((TESTS / "layers.toml").read_text())
    entries = [(entry, layer) for layer, found in read.items() for entry in found]
    assert len(entries) == len(dict(entries)), "tests/layers.toml names a test twice"
    return dict(entries)


def entry_of(name: str) -> str:
    """The longest entry of the table that fits a node id below tests/; "" if none does."""
    parts = re.findall(r"^[^/:\[]+|/[^/:\[]+|::[^\[]+|\[.*", name)
    names = ["".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((found for found in names if found in table()), "")


def layer_of(name: str, marks: set[str]) -> str:
    """The layer of a test.

    Args:
        name: its node id below tests/.
        marks: the names of its marks.
    """
    if own := next((layer for layer in LAYERS if layer in marks), ""):
        return own
    return table().get(entry_of(name), "full" if marks & set(STARTS) else "core")


def seconds_of(marks: set[str], fixtures: Collection[str]) -> int:
    """The limit of a test with these marks and fixtures."""
    if "soak" in marks:
        return SECONDS["soak"]
    if "quick_start" in fixtures:
        return SECONDS["quick_start"]
    return SECONDS["cluster" if "cluster" in marks else "process" if marks & set(STARTS) else "fast"]


def assign(items: Iterable[pytest.Item]) -> None:
    """Give every test the mark of its layer, a time limit, and the worker group in which its fixtures are shared."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        name = item.nodeid.removeprefix("tests/")
        collected.add(name)
        layer = layer_of(name, marks)
        item.add_marker(layer)
        if "timeout" not in marks:
            item.add_marker(pytest.mark.timeout(seconds_of(marks | {layer}, getattr(item, "fixturenames", ()))))
        if "xdist_group" not in marks:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one worker: those of a file, and all that need the same expensive fixture.

    There are two clusters, since tests on one wait more than they compute: one is for whole runs by each launcher.
    """
    if any(item.iter_markers("cluster")):
        return "cluster of launchers" if "whole_runs/test_under" in item.nodeid else "cluster"
    fixtures = getattr(item, "fixturenames", ())
    return next((name for name in ("quick_start", "nursery") if name in fixtures), item.nodeid.partition("::")[0])


def dearest_first(items: list[pytest.Item]) -> None:
    """The cluster, then whole runs, engines, other processes and the rest, files with many tests first: no worker is
    left with the longest at the end."""

    def rank(item: pytest.Item) -> int:
        marks = {mark.name for mark in item.iter_markers()}
        if "cluster" in marks or "whole_runs" in item.nodeid:
            return 0 if "cluster" in marks else 1
        return 2 if "vllm" in marks else 3 if marks & {"process", "full"} else 4

    def group(item: pytest.Item) -> str:
        return next(item.iter_markers("xdist_group")).args[0]

    dear, tests = dict[str, int](), Counter(map(group, items))
    for item in items:
        dear[group(item)] = min(dear.get(group(item), 4), rank(item))
    sizes = {name: -count if dear[name] == 4 else 0 for name, count in tests.items()}
    items.sort(key=lambda item: (dear[group(item)], sizes[group(item)]))


def none_selected(path: Path, expression: str, marks: set[str]) -> bool:
    """Whether no test of a file can be selected, as far as the marks of the whole file say: it is not imported then."""
    if expression != "core":
        return False
    name = str(path.relative_to(TESTS))
    listed = any(
        found.startswith(name) or name.startswith(f"{found}/") for found, layer in table().items() if layer == "core"
    )
    return bool(marks & {*STARTS, "soak", "lint"}) and not listed and "mark.core" not in path.read_text()


def too_many_skipped(expression: str, skipped: int) -> str:
    """The error if CI skipped more tests than are recorded, else "".

    Args:
        expression: of `-m`, a key of [skipped] in tests/baseline.toml; without a key no test may be skipped.
    """
    if "HPCRL_REQUIRE" not in os.environ:
        return ""
    most = tomllib.loads((TESTS / "baseline.toml").read_text()).get("skipped", {}).get(expression, 0)
    if skipped <= most:
        return ""
    return f"{skipped} tests were skipped, tests/baseline.toml allows {most} for -m '{expression}'"
