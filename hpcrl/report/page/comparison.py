"""Several runs on one page: what differs between them, their curves laid over each other, what they cost, and what they
answered to the same prompts.

Invariants: as of one run's page; a run has the same colour throughout; stages are compared with those of the same name,
a recipe without stages with the last one of the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from markupsafe import Markup

from hpcrl.report.curves import Curves, Panel, series
from hpcrl.report.metrics import HELD_OUT_MEAN, WINDOW, number, read_metrics, step_rows
from hpcrl.report.page.charts import chart, hue, legend
from hpcrl.report.page.how_it_ran import options_of, shown
from hpcrl.report.page.one_run import as_fields
from hpcrl.report.page.panels import is_flat, panels, render
from hpcrl.report.page.timeline_picture import clock
from hpcrl.report.run_files import Run, StageFiles
from hpcrl.report.run_status import Status
from hpcrl.report.sample_records import Look, held_out_sets, read_looks, steps_of
from hpcrl.report.sample_view import after_steps, as_text, visible
from hpcrl.report.timeline.node_hours import NodeHours

MOST = 32  #: runs
PROMPTS = 8  #: of each held-out set, side by side
#: options that differ between any two runs, and say nothing
OWN = frozenset({"run_dir", "name"})
NOTHING = ""


@dataclass
class Compared:
    """One of the runs.

    Attributes:
        name: what the page calls it, unlike that of the others.
        last: the last stage of all runs.
    """

    name: str
    run: Run
    status: Status
    spent: NodeHours
    last: str = ""

    def stage(self, name: str) -> StageFiles | None:
        """Its stage of that name; of a recipe without stages the only one, which stands for the last of the others."""
        wanted = (name, "") if name == self.last else (name,)
        return next((stage for stage in self.run.stages if stage.name in wanted), None)

    @cached_property
    def records(self) -> dict[str, list[dict[str, Any]]]:
        """What each stage has logged."""
        return {stage.name: list(read_metrics(stage.root / "metrics.jsonl")) for stage in self.run.stages}

    def logged(self, name: str) -> list[dict[str, Any]]:
        """What its stage of that name has logged."""
        stage = self.stage(name)
        return [] if stage is None else self.records[stage.name]


def names_of(runs: Sequence[Run]) -> list[str]:
    """What to call each: the last part of its path, and as many before as tell them apart."""
    parts = [run.root.resolve().parts for run in runs]
    count = 1
    while len({part[-count:] for part in parts}) < len(parts):
        count += 1
    return [visible("/".join(part[-count:])) for part in parts]


def comparison(runs: Sequence[Compared]) -> str:
    """The HTML of several runs."""
    stages = stage_names(runs)
    runs = [replace(one, last=stages[-1]) for one in runs] if stages else runs
    return render(
        "comparison.html.j2",
        title=f"{len(runs)} runs",
        subtitle=f"as of {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
        legend=legend([one.name for one in runs]),
        hues=[hue(at) for at in range(len(runs))],
        names=[one.name for one in runs],
        facts=list(facts(runs, stages[-1] if stages else "")),
        stages=[of_stage(runs, name) for name in stages],
        hours=list(hours_by_phase(runs)),
        samples=list(side_by_side(runs, stages[-1] if stages else "")),
    )


def stage_names(runs: Sequence[Compared]) -> list[str]:
    """Every stage, in the order of the run that has most of them; of runs with one stage each, that one."""
    longest = max(runs, key=lambda one: len(one.run.stages))
    return [stage.name for stage in longest.run.stages]


# ---- numbers


def facts(runs: Sequence[Compared], stage: str) -> Iterator[tuple[str, list[str]]]:
    """(what, of each run), of its last stage."""
    yield "state", [one.status.phase for one in runs]
    yield "steps", [NOTHING if one.status.step is None else str(one.status.step) for one in runs]
    rewards = [_mean(step_rows(one.logged(stage))[-WINDOW:], "rollout/reward") for one in runs]
    yield f"reward, last {WINDOW} steps", rewards
    keys = dict.fromkeys(key for one in runs for row in one.logged(stage) for key in row)
    for name in (match[1] for key in keys if (match := HELD_OUT_MEAN.fullmatch(key))):
        yield f"{visible(name)}, first", [_accuracy(one.logged(stage), name, 0) for one in runs]
        yield f"{visible(name)}, last", [_accuracy(one.logged(stage), name, -1) for one in runs]
    yield "seconds per step", [_mean(step_rows(one.logged(stage))[-WINDOW:], "perf/step_time") for one in runs]
    yield "allocated", [clock(one.spent.seconds) if one.spent.starts else NOTHING for one in runs]
    yield "directory", [visible(str(one.run.root)) for one in runs]


def _accuracy(rows: Sequence[dict[str, Any]], name: str, which: int) -> str:
    """0.42 (0.38 to 0.46), an evaluation's accuracy with its interval."""
    found = [row for row in rows if number(row.get(f"eval/{name}/accuracy"))]
    if not found:
        return NOTHING
    value, low, high = (found[which].get(f"eval/{name}/{what}") for what in ("accuracy", "ci_low", "ci_high"))
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def _mean(rows: Sequence[dict[str, Any]], metric: str) -> str:
    found = [row[metric] for row in rows if number(row.get(metric))]
    return f"{sum(found) / len(found):.4g}" if found else NOTHING


# ---- a stage


def of_stage(runs: Sequence[Compared], name: str) -> dict[str, Any]:
    """Options that differ, and curves."""
    drawn, flat = curves_of(runs, name)
    return {
        "name": visible(name),
        "options": list(options(runs, name)),
        "charts": drawn,
        "flat": flat,
    }


def options(runs: Sequence[Compared], name: str) -> Iterator[tuple[str, list[str]]]:
    """(option, of each run) where they are not all alike; a run's own directory is {run}."""
    found = []
    for one in runs:
        stage = one.stage(name)
        text = {key: shown(value) for key, value in (options_of(stage) if stage else {}).items()}
        found.append({key: value.replace(str(one.run.root), "{run}") for key, value in text.items()})
    for key in sorted({key for values in found for key in values} - OWN):
        each = [values.get(key, NOTHING) for values in found]
        if len(set(each)) > 1:
            yield visible(key), [visible(value) for value in each]


def curves_of(runs: Sequence[Compared], name: str) -> tuple[list[Markup], list[tuple[str, list[str]]]]:
    """(a picture of each metric of the panels, with a curve a run; of those that stay flat the value of each run)."""
    logged = [one.logged(name) for one in runs]
    drawn: list[Markup] = []
    flat: list[tuple[str, list[str]]] = []
    for panel in panels([row for rows in logged for row in rows]):
        found = [series(rows, panel.metrics) for rows in logged]
        for label in dict.fromkeys(label for curves in found for label in curves):
            title = visible(f"{panel.title}: {label}" if label else panel.title)
            of_runs = {one.name: curves.get(label, ([], [])) for one, curves in zip(runs, found, strict=True)}
            if _all_flat(panel, of_runs):
                flat.append((title, [f"{y[-1]:.4g}" if y else NOTHING for _, y in of_runs.values()]))
            else:
                drawn.append(chart(title, of_runs, panel.axis, keys=False))
    return drawn, flat


def _all_flat(panel: Panel, curves: Curves) -> bool:
    there = [points for points in curves.values() if points[0]]
    ends = [y[-1] for _, y in there]
    return is_flat(panel, there) and max(ends) - min(ends) <= panel.noise


# ---- costs


def hours_by_phase(runs: Sequence[Compared]) -> Iterator[tuple[str, list[str]]]:
    """(phase, node-hours and share of each run)."""
    found = [{name: f"{hours} ({share})" for name, hours, share in one.spent.rows()} for one in runs]
    for name in dict.fromkeys(name for rows in found for name in rows):
        yield name, [rows.get(name, NOTHING) for rows in found]


# ---- samples


def side_by_side(runs: Sequence[Compared], name: str) -> Iterator[dict[str, Any]]:
    """Of each held-out set that several runs have, what each answered last to the same prompts; those first about which
    their rewards differ most."""
    stages = [one.stage(name) for one in runs]
    sets = dict.fromkeys(held for stage in stages if stage for held in held_out_sets(stage.root))
    for held in sets:
        last = [max(steps_of(stage.root, held), default=None) if stage else None for stage in stages]
        read = [_by_prompt(stage, step, held) for stage, step in zip(stages, last, strict=True)]
        common = set.intersection(*(set(looks) for looks in read if looks)) if any(read) else set()
        if sum(bool(looks) for looks in read) < 2 or not common:
            continue
        rewards = {key: [looks[key].record.reward for looks in read if looks] for key in common}
        order = sorted(common, key=lambda key: (min(rewards[key]) - max(rewards[key]), key))
        when = [NOTHING if step is None else after_steps(step) for step in last]
        yield {
            "title": visible(held),
            "when": when,
            "prompts": [_answers(key[0], [looks.get(key) for looks in read]) for key in order[:PROMPTS]],
        }


def _by_prompt(stage: StageFiles | None, step: int | None, held: str) -> dict[tuple[str, int], Look]:
    """(prompt, number of the response) -> sample."""
    if stage is None or step is None:
        return {}
    return {(as_text(look.record.prompt), look.record.index): look for look in read_looks(stage.root, step, held)}


def _answers(prompt: str, looks: Sequence[Look | None]) -> dict[str, Any]:
    fields = [None if look is None else as_fields(look) for look in looks]
    rewards = " / ".join(NOTHING if look is None else f"{look.record.reward:.4g}" for look in looks)
    first = next(one for one in fields if one is not None)
    texts = dict(first["fields"])
    return {
        "head": visible(prompt)[:120],
        "rewards": rewards,
        "prompt": texts["prompt"],
        "label": texts.get("label"),
        "answers": [None if one is None else (one["head"], dict(one["fields"])["response"]) for one in fields],
    }
