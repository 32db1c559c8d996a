"""The report of a run: its numbers, curves, timeline, costs and samples, filled into page.html.j2.

Invariants: it only reads; whatever a prompt, a response, an error or a name holds is shown as text, and control
characters and those that turn the direction of text as visible signs; the size of the page does not grow with the
length of the run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from hpcrl.report.closing_line import held_out, remarks
from hpcrl.report.curves import PANELS, Panel, series
from hpcrl.report.metrics import read_metrics
from hpcrl.report.run_files import Run, StageFiles
from hpcrl.report.run_status import Status
from hpcrl.report.sample_records import Look, held_out_sets, read_looks, steps_of
from hpcrl.report.sample_view import after_steps, as_text, choose, head_lines, visible
from hpcrl.report.status_text import fault_rows, speed_rows
from hpcrl.report.svg import FILL, Bar, chart, clock, timeline
from hpcrl.report.timeline.accounting import Spent, rows
from hpcrl.report.timeline.reading import Track
from hpcrl.report.timeline.run_spending import Recorded, spending
from hpcrl.report.timeline.spans import DOES, EVALUATE, GENERATE, PAUSED, START, STEP, order
from hpcrl.report.timeline.startup import cells, headline, startup
from hpcrl.run.attempt_log import Fault
from hpcrl.untrusted_files import read_given, read_regular

#: tracks in a picture; steps in the closer one; samples of each kind
MOST_TRACKS = 40
STEPS = 4
SAMPLES = 3
LONGEST = 20_000  #: characters of a prompt or a response that are shown


def page(run: Run, status: Status, recorded: Recorded, recipe: str | None = None) -> str:
    """The HTML of a run.

    Args:
        recipe: its text.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(read_given(Path(__file__).with_name("page.html.j2")))
    spent = spending(run, recorded)
    shown = views(recorded, [fault for stage in run.stages for fault in stage.faults])
    start = startup(recorded)
    hidden = max(0, len({track.name for track in recorded.tracks}) - MOST_TRACKS)
    return template.render(
        title=visible(run.root.name),
        subtitle=f"{status.phase}, as of {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
        message=visible(status.message),
        facts=list(facts(run, status, spent)),
        stages=[{"name": visible(stage.name), "charts": charts(stage)} for stage in run.stages],
        views=shown,
        fills=list(FILL.items()),
        more=f" {hidden} more tracks are in the run's trace: hpcrl trace" if hidden else "",
        bill=rows(spent),
        bill_note=bill_note(spent),
        start=start and {"head": headline(start), "cells": cells(start)},
        samples=list(samples(run)),
        recipe=None if recipe is None else visible(recipe),
    )


# ---- numbers and curves


def facts(run: Run, status: Status, spent: Sequence[Spent]) -> Iterator[tuple[str, str]]:
    """What is said of the run in a line each."""
    yield "directory", visible(status.run)
    if status.stage:
        yield "stage", visible(status.stage)
    yield from ((name or "the last", visible(text)) for name, text in fault_rows(status.faults))
    if status.attempt is not None and status.total != 0:
        yield "steps", f"{status.step} of {'?' if status.total is None else status.total}, attempt {status.attempt}"
    for stage in run.stages:
        of = f" of {visible(stage.name)}" if stage.name else ""
        for name, points in held_out(stage.root).items():
            values = [f"{value:.3f}" for _, value in ([points[0], points[-1]] if len(points) > 1 else points)]
            yield f"held-out accuracy{of}", f"{visible(name)} {' -> '.join(values)}"
        for remark in remarks(stage.root):
            yield f"note{of}", visible(remark)
    if status.reward is not None:
        yield "reward", f"{status.reward:.4g}"
    yield from ((name, visible(text)) for name, text in speed_rows(status))
    if spent:
        held = sum(one.end - one.begin for one in spent) / 1e6
        yield "allocated", f"{clock(held)}, {float(sum(one.total for one in spent)):.4g} node-hours"


def charts(stage: StageFiles) -> list[Any]:
    """A picture of every panel that the stage has numbers for."""
    found = list(read_metrics(stage.root / "metrics.jsonl"))
    shown = ((panel, series(found, panel.metrics)) for panel in panels(found))
    drawn = [chart(visible(panel.title), curves, panel.axis) for panel, curves in shown if curves]
    if tokens := tokens_by_version(found):
        drawn.append(
            chart("tokens by the policy version that sampled them", {"": (list(tokens), list(tokens.values()))}, "zero")
        )
    return drawn


def tokens_by_version(found: Sequence[dict[str, Any]]) -> dict[float, float]:
    """How many tokens were trained on that each policy version had sampled; {} where all are the trainer's own.

    A record has them by age, counted from the version before its step: a step raises the version by as much as from one
    record to the next.
    """
    steps = [row for row in found if isinstance(row.get("policy_version"), int | float)]
    sums: dict[float, float] = {}
    for number, row in enumerate(steps):
        near = steps[number - 1] if number else steps[min(1, len(steps) - 1)]
        before = row["policy_version"] - (abs(row["policy_version"] - near["policy_version"]) or 1)
        for name, count in row.items():
            age = name.removeprefix("staleness/tokens/")
            if (
                age != name and age.isdigit() and isinstance(count, int | float)
            ):  # of what is older it is not known by how much
                sums[before - int(age)] = sums.get(before - int(age), 0.0) + count
    return dict(sorted(sums.items()))


def bill_note(spent: Sequence[Spent]) -> str:
    """What the bill is of."""
    if not spent:
        return ""
    kept = [attempt for one in spent for attempt in one.attempts]
    lost = sum(attempt.lost is not None for attempt in kept)
    words = f"{len(spent)} starts of the run, {len(kept)} attempts"
    return (
        f"{words}, of which {lost} lost work: what came after the last checkpoint."
        if lost
        else f"{words}; nothing was lost."
    )


# ---- the timeline


def views(recorded: Recorded, faults: Sequence[Fault] = ()) -> list[dict[str, Any]]:
    """The whole run, with a row of its own for what faults have cost, and some of its last steps closer."""
    if not recorded.tracks:
        return []
    tracks = bars(recorded.tracks)
    if faults:
        marks = [Bar(at := int(1e6 * f.time), at + int(1e6 * (f.seconds or 0.0)) + 1, "lost") for f in faults]
        tracks.insert(0, ("faults", marks))
    begin = min(track.begin for track in recorded.tracks)
    end = max(track.end for track in recorded.tracks)
    found = [{"title": f"The whole run: {clock((end - begin) / 1e6)}", "picture": timeline(tracks, begin, end)}]
    for tracks_of in reversed(list(recorded.stages.values())):
        last = max((track.attempt or 0 for track in tracks_of), default=0)
        drivers = [track for track in tracks_of if track.name == "trainer-0" and track.attempt == last]
        steps = [span for track in drivers for span in track.named(STEP)][-STEPS:]
        if steps:
            first, to = steps[0].begin, steps[-1].end
            title = f"The last {len(steps)} steps: {clock((to - first) / 1e6)}" if len(steps) > 1 else "The last step"
            found.append({"title": title, "picture": timeline(bars(tracks_of), first, to)})
            break
    return found


def bars(tracks: Sequence[Track]) -> list[tuple[str, list[Bar]]]:
    """What each track did, the first MOST_TRACKS of them."""
    found: dict[str, list[Bar]] = {track.name: [] for track in tracks if track.role in DOES}
    for track in tracks:
        for span in track.spans:
            if span.name == GENERATE:
                found.setdefault(f"engine-{span.more.get('engine')}", []).append(
                    Bar(span.begin, span.end, "generating")
                )
            elif span.name in (kinds := DOES.get(track.role, {}) | {START: "starting"}) and track.role in DOES:
                found[track.name].append(Bar(span.begin, span.end, kinds[span.name]))
            if span.name == PAUSED:
                for name in [name for name in found if name.startswith("engine-")]:
                    found[name].append(Bar(span.begin, span.end, "updating"))
            elif span.name == EVALUATE and track.role == "trainer":
                found[track.name].append(Bar(span.begin, span.end, "waiting"))
    return [(name, found[name]) for name in sorted(found, key=order)[:MOST_TRACKS]]


# ---- samples


def samples(run: Run) -> Iterator[dict[str, Any]]:
    """The best, the worst and some of the last step that there are samples of, and the worst of each last
    evaluation."""
    for stage in reversed(run.stages):
        numbers = steps_of(stage.root)
        if not numbers:
            continue
        step = numbers[-1]
        for which, title in (("best", "the greatest reward"), ("worst", "the least reward"), ("first", "the first")):
            found = choose(read_looks(stage.root, step), which, SAMPLES)
            yield {"title": f"Step {step}: {title}", "samples": [_sample(look) for look in found]}
        for name in held_out_sets(stage.root):
            if after := steps_of(stage.root, name):
                found = choose(read_looks(stage.root, after[-1], name), "worst", SAMPLES)
                title = f"Evaluation {visible(name)} {after_steps(after[-1])}: the least reward"
                yield {"title": title, "samples": [_sample(look) for look in found]}
        return


def _sample(look: Look) -> dict[str, Any]:
    head = " ".join("".join(word.text for word in line) for line in head_lines(look.record, look.trained, ""))
    fields = [("prompt", as_text(look.record.prompt))]
    if look.record.label is not None:
        fields.append(("label", as_text(look.record.label)))
    fields.append(("response", look.record.response))
    return {"head": head, "fields": [(name, _short(visible(text))) for name, text in fields]}


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text) - LONGEST} characters more)"


def recipe_text(root: Path) -> str | None:
    """The recipe's own text, or None."""
    try:
        return read_regular(root / "recipe.toml").decode(errors="replace")
    except OSError:
        return None


# ---- panels

MOST = 40  #: panels of the user's own metrics
#: what the page shows in addition to the panels of curves.png
MORE = (
    Panel("groups whose rewards are all equal", {"": "rollout/zero_std"}, "share"),
    Panel("idle share", {"trainer": "perf/wait_time_ratio", "engines": "perf/engine_idle_ratio"}, "share"),
    Panel("staleness, policy versions", {"mean": "staleness/mean", "max": "staleness/max"}, "zero"),
    Panel("share of tokens by age, policy versions", {"*": "staleness/share/*"}, "share"),
    Panel(
        "tokens per second and GPU",
        {
            "sampled": "perf/tokens_per_sec_per_gpu",
            "trained": "perf/train_tokens_per_sec_per_gpu",
            "whole step": "perf/step_tokens_per_sec_per_gpu",
        },
        "log",
    ),
    Panel("MFU of training", {"": "perf/mfu"}, "share"),
    Panel("requests in flight", {"mean": "perf/requests_in_flight", "max": "perf/requests_in_flight_max"}, "zero"),
    Panel(
        "seconds of a weight update",
        {"all": "perf/update_weights_time", "engines pause": "perf/update_weights_pause_time"},
        "zero",
    ),
    Panel("responses cut off", {"": "rollout/truncated_ratio"}, "share"),
)

#: metrics that hpcrl itself logs, those of a held-out set without eval/NAME/ before them
_OURS = re.compile(
    r"rollout_id|time|policy_version|(?:data|perf|train|staleness)/.*|rollout/(?:reward|raw_reward|reward_errors|reward_timeouts|"
    r"truncated_ratio|zero_std|opd_teacher_errors|opd_reverse_kl|requests_limit|(?:ref_|teacher_)?log_probs|values|advantages|returns|"
    r"response_len/.*|reward/.*|groups_.*|dynamic_filter/.*)"
)
_OURS_HELD_OUT = re.compile(
    r"accuracy|ci_low|ci_high|n|dropped|response_len|reward_errors|reward_timeouts|truncated_ratio|policy_version.*|majority@\d+|"
    r"pass@\d+|reward/.*"
)


def panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    """Every panel that these records may have numbers for, in the order of the page."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    failed = [name for name in names if re.fullmatch(r"(?:rollout|eval/.+)/reward_(?:errors|timeouts)", name)]
    failing = {name.removesuffix("s"): name for name in failed if any(row.get(name) for row in rows)}
    found = [*PANELS, Panel("parts of the reward", {"*": "rollout/reward/*"}), *_of_sets(names), *MORE]
    if failing:
        found.append(
            Panel(
                "failed gradings", {name.replace("/reward_", " "): metric for name, metric in failing.items()}, "zero"
            )
        )
    return found + [Panel(name, {"": name}) for name in own_metrics(names)[:MOST]]


def own_metrics(names: Sequence[str]) -> list[str]:
    """The metrics among these that hpcrl does not log by itself: of the user's own functions."""
    return [name for name in names if not _is_ours(name)]


def _is_ours(name: str) -> bool:
    if name.startswith("eval/") and name.count("/") > 1:
        return _OURS_HELD_OUT.fullmatch(name.split("/", 2)[2]) is not None
    return _OURS.fullmatch(name) is not None


def _of_sets(names: Sequence[str]) -> list[Panel]:
    """Of each held-out set the parts of its reward, and pass@k with the majority's accuracy."""
    found = []
    for name_of_set in dict.fromkeys(name.split("/")[1] for name in names if name.startswith("eval/")):
        found.append(Panel(f"{name_of_set}: parts of the reward", {"*": f"eval/{name_of_set}/reward/*"}))
        rates = [name for name in names if re.fullmatch(rf"eval/{re.escape(name_of_set)}/(?:pass|majority)@\d+", name)]
        found.append(
            Panel(f"{name_of_set}: pass@k, majority@n", {name.rpartition("/")[2]: name for name in rates}, "share")
        )
    return found
