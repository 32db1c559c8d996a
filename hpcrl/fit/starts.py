"""When the scheduler would start each shape: asked of the site's scheduler where it can be asked from here.

Invariant: nothing is submitted; a shape that the site cannot hold is refused, and what is not known stays open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.fit.rows import FitRow, ordered
from hpcrl.launch.scheduler import Scheduler, Submission, can_submit, load_scheduler
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.submission import preview


def with_starts(rows: Sequence[FitRow], recipe: Recipe, flags: Mapping[str, Any], site: SiteProfile) -> list[FitRow]:
    """The rows in their order, with what the scheduler says of each."""
    scheduler = load_scheduler(site.scheduler)
    if not (can_submit(scheduler) and scheduler.test_command):
        return ordered(rows)
    if silent := [finding for finding in scheduler.responds() if finding.level == "fail"]:
        return ordered(replace(row, told=silent[0].what) for row in rows)
    found, asked = list(rows), dict[int, Submission]()
    held: dict[str, str] = {}
    for number, row in enumerate(rows):
        try:
            shown = preview(recipe, site.options(recipe, {**flags, **row.found.settings}), site)
        except UsageError as error:
            found[number] = replace(row, refused=error.what)
            continue
        key = str(shown.request)
        held[key] = held[key] if key in held else _unfit(scheduler, shown)
        if held[key]:
            found[number] = replace(row, refused=held[key])
        else:
            asked[number] = shown
    for number, start in zip(asked, scheduler.expected_starts(list(asked.values())), strict=True):
        refused = f"{scheduler.title} refuses it: {start.told}" if start.refused else ""
        found[number] = replace(found[number], start=start.start, told=start.told, refused=refused)
    return ordered(found)


def _unfit(scheduler: Scheduler, shown: Submission) -> str:
    """Why the site cannot hold a request, "" if it can."""
    wrong = [finding for finding in scheduler.fits(shown.request, shown.site) if finding.level == "fail"]
    return wrong[0].what if wrong else ""
