"""A Status as words: cells of a table of many runs, a page of one, a line for a log, and all of it as plain text.

Terminals are drawn on elsewhere (terminal.py).  Invariant: pure; no control character of what a run has written is
left.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from hpcrl.report.run_status import Status, span
from hpcrl.run.attempt_log import Fault
from hpcrl.run.engine_files import EngineView, EngineViews
from hpcrl.run.job_files import OVER, WORKING
from hpcrl.utils.plain_text import strip_control

HEAD = ("RUN", "STATE", "STAGE", "STEP", "REWARD", "TOK/S", "STALE", "LAST STEP", "NEEDS", "JOB", "")


def on_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can be drawn on."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def shorten_path(path: str) -> str:
    """A path relative to the current directory if it is below, with ~ for the home directory elsewhere."""
    for base, mark in ((os.getcwd(), ""), (os.path.expanduser("~"), "~/")):
        if path.startswith(base.rstrip("/") + "/"):
            return mark + path[len(base.rstrip("/")) + 1 :]
    return path


def cells(found: Sequence[Status]) -> dict[str, list[str]]:
    """Columns by their heads, a cell for each run; those are left out that no run has anything in."""
    columns = dict(zip(HEAD, map(list, zip(*map(_row, found), strict=True)), strict=True)) if found else {}
    return {head: column for head, column in columns.items() if head in HEAD[:2] or not {"", "-"}.issuperset(column)}


def table(found: Sequence[Status]) -> str:
    """One line a run, as given, however long; for files and pipes."""
    return aligned([[head, *column] for head, column in cells(found).items()])


def aligned(columns: Sequence[Sequence[str]]) -> str:
    """Columns of cells as lines."""
    widths = [max(map(len, column)) for column in columns]
    rows = zip(
        *([cell.ljust(width) for cell in column] for column, width in zip(columns, widths, strict=True)), strict=True
    )
    return "\n".join("  ".join(row).rstrip() for row in rows)


def _row(s: Status) -> tuple[str, ...]:
    step = step_of(s) or "-"
    needs = "-" if s.needs is None else span(s.needs) + (" !" if s.fits is False else "")
    last = "-" if s.last_step is None else span(s.last_step)
    row = (
        shorten_path(s.run),
        s.phase,
        s.stage or "-",
        step,
        _number(s.reward, ".3f"),
        _number(s.tokens_per_sec, ".0f"),
        _number(s.staleness, ".0f"),
        last,
        needs,
        s.job_id or "-",
        s.message or ("asked to stop" if s.stop_asked else ""),
    )
    return tuple(map(strip_control, row))


def step_of(s: Status) -> str:
    """`12/100`; "" before an attempt, and for an evaluation alone, which has none."""
    return f"{s.step}/{'?' if s.total is None else s.total}" if s.attempt is not None and s.total != 0 else ""


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def page(s: Status) -> str:
    """All that is known of one run: its path and phase, then what is said of it by name."""
    rows: list[tuple[str, str]] = []
    if s.message:
        rows.append(("error" if s.phase in ("failed", "lost") else "", s.message))
    if s.log:
        rows.append(("log", shorten_path(s.log)))
    if s.job_id or s.host:
        rows.append(("job", _job(s)))
    if s.awaits:
        rows.append(("starting", s.awaits))
    if s.stage or s.attempt is not None:
        rows += _work(s)
    if s.engines:
        rows.append(("engines", engine_line(s.engines)))
    rows += fault_rows(s.faults, s.message)
    if s.left is not None or s.needs is not None:
        rows.append(("time", _time(s)))
    if s.stop_asked:
        rows.append(("", "saving and ending"))
    rows += [("note", note) for note in s.notes]
    if s.next:
        rows.append(("next", s.next.replace(s.run, shorten_path(s.run))))
    lines = [f"{shorten_path(s.run)}: {s.phase}", *(f"  {name:10}  {text}" for name, text in rows)]
    return "\n".join(map(strip_control, lines))


def _job(s: Status) -> str:
    parts = [f"Slurm job {s.job_id}" if s.queued and s.job_id else s.scheduler]
    if s.job_state:
        parts.append(s.job_state.lower())
    if s.host:
        parts.append(f"launcher on {s.host}")
    if s.restarts:
        parts.append(f"restarted {s.restarts} time{'s' if s.restarts > 1 else ''}")
    return ", ".join(parts)


def _work(s: Status) -> list[tuple[str, str]]:
    rows = []
    if s.stage:
        place = f" ({s.stages.index(s.stage) + 1} of {len(s.stages)})" if s.stage in s.stages else ""
        rows.append(("stage", s.stage + place))
    attempt = f", attempt {s.attempt}" if s.attempt else ""
    if s.total != 0:  # an evaluation alone has no steps
        rows.append(("step", f"{s.step} of {'?' if s.total is None else s.total}{attempt}"))
    if s.reward is not None:
        rows.append(("reward", f"{s.reward:.3f}"))
    elif s.loss is not None:
        rows.append(("loss", f"{s.loss:.3f}"))
    if s.accuracy:
        means = ", ".join(f"{name} {value:.3f}" for name, value in s.accuracy.items())
        rows.append((s.measure, means if s.total == 0 else f"{means} after {s.accuracy_after} steps"))
    rows += [("note", text) for text in s.numbers_notes]
    rows += speed_rows(s)
    if s.sandboxes:
        rows.append(("sandboxes", s.sandboxes))
    if s.staleness is not None:
        rows.append(("staleness", f"{s.staleness:.0f}"))
    if s.last_step is not None:
        each = "" if s.step_time is None else f"; a step takes {span(s.step_time)}"
        rows.append(("last step", f"{span(s.last_step)} ago{each}"))
    return rows


def speed_rows(s: Status) -> list[tuple[str, str]]:
    """Tokens a second by role, and what of the GPU's rated speed training has reached, in the last step."""
    rows = []
    if s.tokens_per_sec is not None:
        trained = "" if s.trained_per_sec is None else f" sampled, {s.trained_per_sec:.0f} trained"
        each = "" if s.step_per_gpu is None else f"; {s.step_per_gpu:.0f} a GPU over the whole step"
        rows.append(("tokens/s", f"{s.tokens_per_sec:.0f}{trained}{each}"))
    if s.mfu is not None:
        rows.append(("MFU", f"{100 * s.mfu:.1f} %" + (f" ({s.rated})" if s.rated else "")))
    return rows


def fault_rows(faults: Sequence[Fault], said: str = "") -> list[tuple[str, str]]:
    """The cost of faults so far, and the last fault, without what the lines above say."""
    if not faults:
        return []
    over = [fault for fault in faults if fault.seconds is not None]
    steps = sum(fault.repeated or 0 for fault in over)
    seconds = span(sum(fault.seconds or 0.0 for fault in over))
    cost = f"{steps} step{'' if steps == 1 else 's'} repeated, {seconds} until it trained again"
    cost = cost if over else "it has not trained again"
    last = faults[-1]
    return [
        ("faults", f"{len(faults)}: {cost}"),
        (
            "",
            f"attempt {last.attempt}, at step {last.step}: {last.place}"
            + ("" if last.why in said else f": {last.why}"),
        ),
        *[("left out", f.left_out) for f in faults if f.left_out],
    ]


def _time(s: Status) -> str:
    """What it needs against what is left."""
    which = f"stage {s.stage}" if len(s.stages) > 1 else "it"
    later = len(s.stages) - s.stages.index(s.stage) - 1 if s.stage in s.stages else 0
    needs = "" if s.needs is None else f"{which} needs about {span(s.needs)}"
    if needs and s.step == s.total:
        needs = f"{which} has done its steps, and evaluates or saves"
    needs += f" (not counting {later} later stage{'s' if later > 1 else ''})" if needs and later else ""
    if s.left is None:
        return needs
    left = f"{span(s.left)} to the time limit"
    if s.fits is False:
        fate = "saved and requeued" if s.queued else "ended"
        return f"{needs}, {left}: it will not finish before, and will be {fate}"
    return f"{needs}, {left}" if needs else left


def line(s: Status) -> str:
    """A line that changes when something has happened."""
    parts = [s.phase]
    if s.stage:
        parts.append(s.stage)
    if steps := step_of(s):
        parts.append(steps)
    if s.phase in WORKING:
        if s.reward is not None:
            parts.append(f"reward {s.reward:.3f}")
        if s.tokens_per_sec is not None:
            parts.append(f"{s.tokens_per_sec:.0f} tok/s")
        if s.mfu is not None:
            parts.append(f"MFU {100 * s.mfu:.0f} %")
    parts += [f"{name} {s.measure} {value:.3f}" for name, value in s.accuracy.items()]
    if s.phase in OVER:
        parts += s.numbers_notes
    if s.message and (s.phase in OVER or s.phase in ("pending", "lost", "requeued")):
        parts.append(f"({s.message})")
    return strip_control("  ".join(parts))


# ---- the engines of a run

OLD = 30.0  #: seconds after which what was said of engines is no longer news
ENGINE_HEAD = ("ENGINE", "STATE", "HOST", "VERSION", "REQUESTS", "RESTARTS", "")


def engine_table(views: EngineViews, now: float) -> str:
    """One line an engine.

    Args:
        now: unix time.
    """
    columns = [[head] for head in ENGINE_HEAD]
    for view in views.engines:
        version = "-" if view.version is None else view.version
        row = (view.index, view.state, view.host, version, view.requests, view.restarts, view.why)
        for column, value in zip(columns, row, strict=True):
            column.append(str(value))
    table = aligned(columns)
    return table if now - views.time <= OLD else f"{table}\n(as of {span(now - views.time)} ago)"


def engine_line(engines: Sequence[EngineView]) -> str:
    """3 serving, 1 ended; 2 restarts.  Nothing for none."""
    counts = Counter(view.state for view in engines)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    restarts = sum(view.restarts for view in engines)
    return states + (f"; {restarts} restart{'s' if restarts > 1 else ''}" if restarts else "")
