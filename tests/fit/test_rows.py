"""The order of rows, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcrl.fit.rows import FitRow, make_rows, ordered, worthwhile
from hpcrl.fit.search import NearMiss
from hpcrl.fit.shapes import own_shape
from hpcrl.fit.table import close_lines
from tests.fit.models import recipe, search


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[FitRow]:
    looking = search(recipe(tmp_path_factory.mktemp("model")))
    found = worthwhile(looking.shapes(3).fitting, own_shape(looking.base))
    assert own_shape(looking.base) in [one.shape for one in found]
    return make_rows(found, looking._target)


def test_the_first_to_end_comes_first(rows: list[FitRow]) -> None:
    """Start and length together, ties by node-hours; a shape that waits long comes after a slower one that does not;
    what was refused comes last."""
    assert [row.step for row in ordered(rows)] == sorted(row.step for row in rows)
    fast, *slow = ordered(rows)
    late = replace(fast, start=1e6)
    early = [replace(row, start=0.0) for row in slow]
    assert ordered([late, *early])[-1] is late
    assert ordered([replace(late, start=0.0, refused="no"), *early])[-1].refused == "no"
    unknown = [late, *slow]
    assert ordered(unknown)[0] is late, "with a start that is not known, none counts"
    dear = replace(fast, found=replace(fast.found, request=slow[0].found.request))
    assert {row.found.nodes for row in ordered([dear, fast])[:1]} == {min(dear.found.nodes, fast.found.nodes)}


def test_what_another_beats_is_not_shown(rows: list[FitRow]) -> None:
    """No row is slower than another with as few nodes and node-hours."""
    own = rows[0].found.shape
    found = worthwhile([row.found for row in rows], own)
    slower = replace(found[0], speed=replace(found[0].speed, trainer=replace(found[0].speed.trainer, seconds=9e9)))
    assert slower not in worthwhile([*found, replace(slower, shape=replace(own, each=own.each + 1))], own)[-1:]


def test_node_hours_and_end(rows: list[FitRow]) -> None:
    """Rollouts times their length times nodes; without a number of rollouts neither is known."""
    row = replace(rows[0], start=100.0)
    assert row.end == pytest.approx(100.0 + 100 * row.step)
    assert row.node_hours == pytest.approx(100 * row.step * row.found.nodes / 3600)
    open_ended = replace(row, rollouts=None)
    assert open_ended.end is None and open_ended.node_hours is None and ordered([open_ended]) == [open_ended]


def test_shapes_that_lack_little(rows: list[FitRow]) -> None:
    """Each reason once, the least first, a few of them; what lacks much, or cannot be, is not worth a line."""
    shape = rows[0].found.shape
    lacks = [(0.05, "b"), (0.01, "a"), (0.05, "b"), (0.5, "much"), (float("inf"), "never"), (0.06, "c"), (0.07, "d")]
    found = list(close_lines([NearMiss(shape, over, why) for over, why in lacks]))
    assert [line[-1] for line in found] == ["a", "b", "c"]
