"""When rows would start: what the scheduler says of each, and what is refused by it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.recipe import load_recipe
from hpcrl.findings import Finding
from hpcrl.fit import starts
from hpcrl.fit.rows import FitRow, make_rows
from hpcrl.fit.starts import with_starts
from hpcrl.fit.table import notes, table
from hpcrl.launch.site import load_site
from hpcrl.run.queued_job import ExpectedStart
from tests.fit.models import recipe, search

SITE = {"trainer.gpus_per_node": 8, "trainer.partition": "main"}


def scheduler(says: dict[int, ExpectedStart], most: int = 99, silent: bool = False) -> Any:
    """One that has an answer for each number of nodes, and a partition of so many."""

    def nodes(request: Any) -> int:
        return sum(component.nodes for component in request.components)

    return SimpleNamespace(
        title="Queue",
        submit_command="sh",
        test_command="sh",
        responds=lambda: [Finding("fail" if silent else "ok", "", "no controller")],
        fits=lambda request, _: [Finding("fail" if nodes(request) > most else "ok", "", "too many nodes")],
        expected_starts=lambda submissions: [says[nodes(one.request)] for one in submissions],
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[FitRow], Any]:
    path = recipe(tmp_path_factory.mktemp("model"))
    looking = search(path)
    return path, make_rows(looking.shapes(2).fitting, looking._target), looking._target


def asked(rows: tuple[Path, list[FitRow], Any], answers: Any, monkeypatch: pytest.MonkeyPatch) -> list[FitRow]:
    monkeypatch.setattr(starts, "load_scheduler", lambda _: answers)
    return with_starts(rows[1], load_recipe(rows[0]), {}, load_site(None, SITE))


def test_a_shape_that_waits_comes_later(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is that of the expected end, and the table shows start and end."""
    says = {1: ExpectedStart(1000.0, "now"), 2: ExpectedStart(1e6, "later")}
    found = asked(rows, scheduler(says), monkeypatch)
    assert {row.found.nodes for row in found} == {1, 2}
    assert [row.found.nodes for row in found] == sorted(row.found.nodes for row in found)
    assert all(row.end == pytest.approx(row.start + row.seconds) for row in found)
    shown = table(found, rows[2], 1000.0)
    assert " now " in shown and "in 11 d 13 h" in shown


def test_what_the_site_refuses(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many nodes, and what the scheduler would take at no time, come last with the reason; a start that is not known
    is told, and nothing is said of a queue that does not answer."""
    says = {1: ExpectedStart(told="invalid account", refused=True), 2: ExpectedStart(5.0, "later")}
    found = asked(rows, scheduler(says, most=1), monkeypatch)
    assert all(row.refused for row in found)
    assert {row.refused for row in found if row.found.nodes == 2} == {"too many nodes"}
    told = " ".join(notes(found, found[0].found.speed))
    assert "invalid account" in told and "too many nodes" in told
    found = asked(rows, scheduler(says | {1: ExpectedStart(told="drained")}), monkeypatch)
    assert not any(row.refused for row in found) and "drained" in " ".join(notes(found, found[0].found.speed))
    found = asked(rows, scheduler(says, silent=True), monkeypatch)
    assert {row.told for row in found} == {"no controller"} and not any(row.start for row in found)
