"""The best shapes are rehearsed: their ranks take a step on tensors without content (hpcrl/rehearsal).

Invariants: at most `TRIES` times as many shapes are tried as are asked for; what a rehearsal refuses is refused here,
and one that does not end in its time says so and decides nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.fit.rows import FitRow, ordered
from hpcrl.fit.search import FitTarget
from hpcrl.memory.engine import engine_terms
from hpcrl.memory.nccl import nccl_bytes
from hpcrl.memory.report import ASLEEP, TRAINS
from hpcrl.memory.training import CUDA, GIB
from hpcrl.rehearsal.findings import RehearsalFault, findings, of_cache, of_engine, unshown
from hpcrl.rehearsal.phases import RESUME
from hpcrl.rehearsal.ranks import distinct
from hpcrl.rehearsal.reports import RankReport
from hpcrl.rehearsal.runner import asking_engine, run_ranks
from hpcrl.report.progress import say

BEST = 3  #: shapes that are rehearsed where nothing else is said
TRIES = 2
PACKAGES = ("torch", "megatron")


def rehearsals(wanted: int | None) -> int:
    """How many shapes to rehearse: as many as were asked for, or else some where that can be done.

    Raises:
        UsageError: if it was asked for and cannot be done here.
    """
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if wanted and lacking:
        raise UsageError(
            f"--rehearse {wanted}: {', '.join(lacking)} not installed here", "install them, or give --rehearse 0"
        )
    if wanted is None and lacking:
        say(f"note: no shape is rehearsed: {', '.join(lacking)} not installed here")
    return (0 if lacking else BEST) if wanted is None else wanted


def rehearse_best(rows: Sequence[FitRow], count: int, target: FitTarget) -> list[FitRow]:
    """The rows in their order, the first `count` of those that hold rehearsed."""
    found, tries = ordered(rows), TRIES * count
    while tries and (waiting := [row for row in found[:count] if not (row.rehearsed or row.refused or row.note)]):
        say(f"rehearsing {waiting[0].found.nodes} nodes, {waiting[0].found.shape.layout}")
        tries -= 1
        made = rehearsed(waiting[0], target)
        found = ordered(made if row is waiting[0] else row for row in found)
    return found


def rehearsed(row: FitRow, target: FitTarget) -> FitRow:
    """The row with what its rehearsal has found."""
    options, family, config = row.found.options, target.family, target.config
    try:
        with asking_engine(options) if options.num_engines else contextlib.nullcontext() as answer:
            reports = run_ranks(options, distinct(options, family, config), len(os.sched_getaffinity(0)))
            asked = answer() if answer else None
    except HpcrlError as error:
        return replace(row, note=f"not rehearsed: {error.what}")
    faults = findings(options, family, config, reports, target.memory)
    if asked:
        cache = engine_terms(options, family, config, target.memory * GIB)
        faults += of_engine(asked) + of_cache(options, cache, asked)
    if faults:
        return replace(row, rehearsed=True, refused=_words(faults[0]))
    if limits := unshown(reports):
        return replace(row, note=f"not rehearsed in full: {limits[0].removeprefix('warn: ')}")
    memory, phase = peak(row, reports)
    return replace(row, rehearsed=True, memory=memory, phase=phase)


def _words(fault: RehearsalFault) -> str:
    return f"{fault.what}; {fault.hint}" if fault.hint else fault.what


def peak(row: FitRow, reports: Sequence[RankReport]) -> tuple[float, str]:
    """(GiB, phase) of the fullest GPU: the trainer's as counted, with the allowances; on shared GPUs the engines' turns
    as estimated."""
    options = row.found.options
    sizes = [(size, name) for report in reports for name, size in report.peaks.items() if name != RESUME]
    size, phase = max(sizes, default=(0, row.phase))
    size += CUDA + nccl_bytes(options)
    if not options.takes_turns:
        return size / GIB, phase
    size += ASLEEP
    if row.phase != TRAINS and row.memory * GIB > size:
        return row.memory, row.phase
    return size / GIB, phase
