"""The shapes as a table to read, and what is assumed in it.

Invariant: what is estimated is called so, and a row says whether its ranks were rehearsed or are only planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.fit.rows import FitRow
from hpcrl.fit.search import FitTarget, NearMiss
from hpcrl.plain_text import strip_control
from hpcrl.report.run_status import span
from hpcrl.report.status_text import aligned
from hpcrl.speed.estimate import READ, Estimate

HEADS = ("#", "nodes", "trainer", "engines", "layout", "memory", "trainer tok/s", "engine tok/s", "a rollout")
ENDS = ("node-hours", "start", "end", "known by")


def table(rows: Sequence[FitRow], target: FitTarget, now: float) -> str:
    """A line of each row, numbered from 1."""
    cells = [_cells(number, row, target, now) for number, row in enumerate(rows, 1)]
    return aligned([[head, *column] for head, column in zip((*HEADS, *ENDS), zip(*cells, strict=True), strict=True)])


def _cells(number: int, row: FitRow, target: FitTarget, now: float) -> tuple[str, ...]:
    shape, speed, options = row.found.shape, row.found.speed, row.found.options
    engines = f"{options.num_engines} x {shape.engine}" if options.num_engines else "-"
    rates = [f"{role.rate:,.0f}" if role else "-" for role in (speed.trainer, speed.engines)]
    return (
        str(number),
        str(row.found.nodes),
        f"{shape.ranks}{' shared' if shape.shared else ''}",
        engines,
        str(shape.layout),
        f"{row.memory:.0f} of {target.memory:g}",
        *rates,
        span(row.step),
        "-" if row.node_hours is None else f"{row.node_hours:,.0f}",
        _moment(row.start, now),
        _moment(row.end, now),
        "refused" if row.refused else "rehearsed" if row.rehearsed else "planned",
    )


def _moment(when: float | None, now: float) -> str:
    """A time from now on; a start that is past by the time that it is shown is now."""
    if when is None:
        return "-"
    return "now" if when - now < 1 else f"in {span(when - now)}"


def notes(rows: Sequence[FitRow], speed: Estimate) -> Iterator[str]:
    """What the figures assume, and what was said of rows."""
    how = "the slower of trainer and engines decides" if speed.ahead else "trainer and engines one after the other"
    yield f"tokens/s, times and node-hours are rough estimates, of {speed.card}: {how} (docs/memory.md#speed)."
    yield (
        f"They assume responses of {speed.response} tokens in the mean (--mean-response-length), prompts of "
        f"{speed.prompt}, {speed.reached:.0%} of the"
    )
    yield (
        f"rated operations and {READ:.0%} of the bandwidth, whatever TP, CP and EP are; rewards, saves, evaluation and "
        "requeues come on top."
    )
    if not rows[0].found.options.bf16:
        yield "Rates are those of BF16; the recipe computes in fp32, which is slower."
    for number, row in enumerate(rows, 1):
        if row.refused:
            yield f"{number}: {strip_control(row.refused)}"
        elif row.told and row.start is None:
            yield f"{number}: start not known: {strip_control(row.told)}"
        if row.note:
            yield f"{number}: {strip_control(row.note)}"


CLOSE = 0.1  #: a shape that lacks less than this share of a card's memory is worth a word
FEW = 3  #: of those


def close_lines(missed: Sequence[NearMiss]) -> Iterator[str]:
    """Shapes that would hold the run but for little."""
    close = sorted((miss for miss in missed if miss.over < CLOSE), key=lambda miss: miss.over)
    for miss in list({miss.why: miss for miss in reversed(close)}.values())[::-1][:FEW]:
        yield f"left out: {_where(miss)}: {miss.why}"


def _where(miss: NearMiss) -> str:
    shape = miss.shape
    where = f"{shape.trainers} trainer node{'s' if shape.trainers > 1 else ''} of {shape.each} GPUs, {shape.layout}"
    return where + (", shared with the engines" if shape.shared else "")


def nearest_lines(miss: NearMiss, hint: str, most: int) -> tuple[str, str]:
    """(what, hint) of the error where no shape holds the run."""
    what = (
        f"no shape of up to {most} node{'s' if most > 1 else ''} holds this run; nearest ({_where(miss)}): {miss.why}"
    )
    return what, hint or miss.hint or "raise --max-nodes"
