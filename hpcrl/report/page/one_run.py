"""The report of a run: its numbers, curves, timeline, costs and samples, filled into run.html.j2.

Invariants: it only reads; whatever a prompt, a response, an error or a name holds is shown as text, and control
characters and those that turn the direction of text as visible signs; the size of the page does not grow with the
length of the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hpcrl.report.closing_line import held_out, remarks
from hpcrl.report.curves import Curves
from hpcrl.report.metrics import measure, read_metrics
from hpcrl.report.page.charts import chart
from hpcrl.report.page.how_it_ran import how_it_ran
from hpcrl.report.page.panels import drawn_and_flat, render
from hpcrl.report.page.timeline_picture import KINDS, Bar, clock, timeline
from hpcrl.report.run_files import Run, StageFiles
from hpcrl.report.run_status import Status
from hpcrl.report.sample_records import Look, held_out_sets, read_looks, steps_of
from hpcrl.report.sample_view import after_steps, choose, head_lines, texts, visible
from hpcrl.report.status_text import fault_rows, speed_rows
from hpcrl.report.timeline.node_hours import NodeHours, node_hours
from hpcrl.report.timeline.reading import Recorded, Track
from hpcrl.report.timeline.spans import DOES, EVALUATE, GENERATE, PAUSED, START, STEP, order
from hpcrl.run.attempt_log import Fault
from hpcrl.run.started_runs import COPY
from hpcrl.utils.untrusted_files import read_regular

#: tracks in a picture; steps in the closer one; samples of each kind
MOST_TRACKS = 40
STEPS = 4
SAMPLES = 3
EARLIER = 8  #: steps before the last that samples are shown of
LONGEST = 20_000  #: characters of a prompt or a response that are shown


def page(run: Run, status: Status, recorded: Recorded) -> str:
    """The HTML of a run."""
    recipe = None
    with contextlib.suppress(OSError):
        recipe = visible(read_regular(run.root / COPY).decode(errors="replace"))
    spent = node_hours(run, recorded)
    shown = views(recorded, [fault for stage in run.stages for fault in stage.faults])
    hidden = max(0, len({track.name for track in recorded.tracks}) - MOST_TRACKS)
    return render(
        "run.html.j2",
        title=visible(run.root.name),
        subtitle=f"{status.phase}, as of {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
        message=visible(status.message),
        facts=list(facts(run, status, spent)),
        stages=[charts(part) for part in run.stages],
        views=shown,
        kinds=KINDS,
        more=f" {hidden} more tracks are in the run's trace: hpcrl report --trace" if hidden else "",
        hours=spent.rows(),
        hours_note=hours_note(spent),
        samples=list(samples(run)),
        ran=how_it_ran(run),
        recipe=recipe,
    )


# ---- numbers and curves


def facts(run: Run, status: Status, spent: NodeHours) -> Iterator[tuple[str, str]]:
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
            what = measure(read_metrics(stage.root / "metrics.jsonl"))
            yield f"held-out {what}{of}", f"{visible(name)} {' -> '.join(values)}"
        for remark in remarks(stage.root):
            yield f"note{of}", visible(remark)
    if status.reward is not None:
        yield "reward", f"{status.reward:.4g}"
    yield from ((name, visible(text)) for name, text in speed_rows(status))
    if status.sandboxes:
        yield "sandboxes", visible(status.sandboxes)
    if spent.starts:
        yield "allocated", f"{clock(spent.seconds)}, {spent.total:.4g} node-hours"


def charts(stage: StageFiles) -> dict[str, Any]:
    """The pictures of a stage's numbers, and what stays the same."""
    found = list(read_metrics(stage.root / "metrics.jsonl"))
    shown, flat = drawn_and_flat(found)
    drawn = [chart(visible(panel.title), clean(curves), panel.axis) for panel, curves in shown]
    return {
        "name": visible(stage.name),
        "charts": drawn,
        "flat": [(visible(title), visible(text)) for title, text in flat],
    }


def clean(curves: Curves) -> Curves:
    """The curves under labels that a page may show."""
    return {visible(label): points for label, points in curves.items()}


def hours_note(spent: NodeHours) -> str:
    """What the node-hours are of."""
    if not spent.starts:
        return ""
    words = f"{spent.starts} starts of the run, {spent.attempts} attempts"
    if not spent.lost:
        return f"{words}; nothing was lost."
    return f"{words}, of which {spent.lost} lost work: what came after the last checkpoint."


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
    """Of the last stage that has any: the best, the worst and others of its last step, the worst of each last
    evaluation, and folded up the best and the worst of steps before."""
    for stage in reversed(run.stages):
        numbers = steps_of(stage.root)
        if not numbers:
            continue
        yield from _of_step(stage, numbers[-1])
        for name in held_out_sets(stage.root):
            if after := steps_of(stage.root, name):
                found = choose(read_looks(stage.root, after[-1], name), "worst", SAMPLES)
                yield _part(f"Evaluation {visible(name)} {after_steps(after[-1])}: the least reward", found)
        for step in spread(numbers[:-1], EARLIER):
            looks = list(read_looks(stage.root, step))
            found = [*choose(looks, "best", 1), *choose(looks, "worst", 1)]
            yield _part(f"Step {step}: the greatest and the least reward", found, folded=True)
        return


def _of_step(stage: StageFiles, step: int) -> Iterator[dict[str, Any]]:
    looks = list(read_looks(stage.root, step))
    known: set[int] = set()
    for which, title in (("best", "the greatest reward"), ("worst", "the least reward"), ("first", "others")):
        left = [look for look in looks if look.at not in known]
        if found := choose(left, which, SAMPLES):
            known |= {look.at for look in found}
            yield _part(f"Step {step}: {title}", found)


def spread(numbers: Sequence[int], count: int) -> list[int]:
    """`count` of them, from the first to the last."""
    if len(numbers) <= count:
        return list(numbers)
    return [numbers[round(i * (len(numbers) - 1) / (count - 1))] for i in range(count)]


def _part(title: str, found: Sequence[Look], folded: bool = False) -> dict[str, Any]:
    return {"title": title, "folded": folded, "samples": [as_fields(look) for look in found]}


def as_fields(look: Look) -> dict[str, Any]:
    """A sample as the page shows it: its numbers, and its texts by name."""
    words = [word.text.strip(" ,;") for line in head_lines(look.record, look.trained, "") for word in line]
    fields = texts(look.record, transcript=bool(look.record.transcript))
    return {
        "head": [word for word in words if word],
        "fields": [(name, _short(visible(text))) for name, text in fields],
    }


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text) - LONGEST} characters more)"
