"""What is wrong with a run by the reports of its ranks, and the table of what it takes.

Invariants: what a rank refuses comes first, alone, since nothing else is known of the run then; memory is held against
the card with the allowances of `hpcrl plan` on top; a phase that only a resumed run has is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcrl.config.options import Options
from hpcrl.models.family import Config, Family
from hpcrl.planning.formulas.nccl_memory import nccl_bytes
from hpcrl.planning.formulas.training_memory import CUDA, GIB
from hpcrl.planning.memory.fits import cheapest
from hpcrl.planning.rehearsal.collectives import PHASES, RESUME, differing, totals, unlike_messages
from hpcrl.planning.rehearsal.ranks import boundaries, like, same_rows, stages
from hpcrl.planning.rehearsal.reports import RankReport

SHOWN = 12  #: rows of the table of collectives


@dataclass(frozen=True)
class RehearsalFault:
    """Something wrong: what, and what to do ("" if nothing is known)."""

    what: str
    hint: str = ""


def findings(
    options: Options, family: Family, config: Config, reports: Sequence[RankReport], gpu: float
) -> list[RehearsalFault]:
    """What would end the run on GPUs of `gpu` GiB."""
    if failed := [report for report in reports if report.error and not report.unshown]:
        return _refused(failed)
    reports = [report for report in reports if not report.error]
    found = []
    calls = {report.rank: report.calls for report in reports}
    between = boundaries(options, like(options, family, config))
    if differs := differing(calls, stages(options), same_rows(options)) or unlike_messages(calls, between):
        found.append(RehearsalFault(differs, "the run would wait there until its distributed timeout"))
    allowed = CUDA + nccl_bytes(options)
    for report, phase, size in _fullest(reports):
        if size + allowed > gpu * GIB:
            change = cheapest(options, family, config, gpu)
            what = (
                f"does not fit: rank {report.rank} of stage {report.stage} takes {size / GIB:.1f} GiB in {phase} and "
                f"{allowed / GIB:.1f} for CUDA and NCCL, a GPU has {gpu:g}"
            )
            found.append(RehearsalFault(what, f"give {change}" if change else "give the trainer more GPUs"))
            break
    return found


def verdict(options: Options, reports: Sequence[RankReport], gpu: float) -> str:
    """The last line of a rehearsal in which nothing was wrong."""
    ((report, _, size), *_) = _fullest(reports)
    return (
        f"fits: {(size + CUDA + nccl_bytes(options)) / GIB:.1f} of {gpu:g} GiB on the fullest GPU (rank {report.rank})"
    )


def unshown(reports: Sequence[RankReport]) -> list[str]:
    """A warning of what the rehearsal is no judge of, once for all ranks that met it."""
    found = _refused([report for report in reports if report.error and report.unshown])
    return [f"warn: {fault.what}{f'; {fault.hint}' if fault.hint else ''}" for fault in found]


def _refused(failed: Sequence[RankReport]) -> list[RehearsalFault]:
    """Each refusal once, with the ranks that met it."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for report in failed:
        ranks.setdefault((report.error, report.hint), []).append(report.rank)
    return [RehearsalFault(f"rank {', '.join(map(str, where))}: {what}", hint) for (what, hint), where in ranks.items()]


def _fullest(reports: Sequence[RankReport]) -> list[tuple[RankReport, str, int]]:
    """(report, phase, bytes) of every rank, the most bytes first, without phases that only a resumed run has."""
    found = []
    for report in reports:
        peaks = {name: size for name, size in report.peaks.items() if name != RESUME}
        if peaks:
            phase = max(peaks, key=lambda name: peaks[name])
            found.append((report, phase, peaks[phase]))
    return sorted(found, key=lambda row: -row[2])


# ---- the table


def lines(options: Options, reports: Sequence[RankReport], gpu: float) -> Iterator[str]:
    """Memory by rank and phase, then collectives by group, of the ranks that took their step."""
    whole = [report for report in reports if not report.error]
    if not whole:
        return
    allowed = CUDA + nccl_bytes(options)
    names = [name for name in PHASES if any(name in report.peaks for report in whole)]
    yield f"most memory at once, GiB of {gpu:g} a GPU ({allowed / GIB:.1f} more for CUDA and NCCL, an allowance)"
    yield "  rank  stage" + "".join(f"  {name:>20}" for name in names) + "   host"
    for report in whole:
        sizes = "".join(f"  {report.peaks.get(name, 0) / GIB:20.2f}" for name in names)
        yield f"  {report.rank:4}  {report.stage:5}{sizes}  {report.host / GIB:5.1f}"
    for report in whole:
        over = report.peaks.get(RESUME, 0) + allowed - gpu * GIB
        if over > 0:
            yield f"warn: rank {report.rank}: a run that resumes takes {over / GIB:.1f} GiB more than a GPU has"
            break
    yield ""
    first = whole[0]
    yield f"collectives of rank {first.rank} in these phases"
    yield "  group      operation                     often            bytes"
    for group, what, often, size in totals(first.calls)[:SHOWN]:
        yield f"  {group[:24]:9}  {what:28}  {often:6}  {size:15,}"
    yield f"model: {first.parts}"
