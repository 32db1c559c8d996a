"""What is wrong with a run by the reports of its ranks, and the table of what it takes.

Invariants: what a rank refuses comes first, alone, since nothing else is known of the run then; memory is held against
the card with the allowances of `hpcrl plan` on top; a phase that only a resumed run has is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcrl.config.options import Options
from hpcrl.models.family import Config, Family
from hpcrl.planning.formulas.engine_memory import WORKING, EngineTerms
from hpcrl.planning.formulas.nccl_memory import nccl_bytes
from hpcrl.planning.formulas.training_memory import CUDA, GIB
from hpcrl.planning.memory.fits import cheapest
from hpcrl.planning.rehearsal.collectives import PHASES, RESUME, differing, totals, unlike_messages
from hpcrl.planning.rehearsal.ranks import boundaries, like, same_rows, stages
from hpcrl.planning.rehearsal.reports import EngineReport, RankReport

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


def of_engine(report: EngineReport) -> list[RehearsalFault]:
    """What vLLM refuses."""
    return [RehearsalFault(f"engine: {report.error}", report.hint)] if report.error else []


LARGER_CACHE = "raise --rollout-num-gpus-per-engine or --vllm-gpu-memory-utilization, or give --rollout-max-context-len"


def engine_line(report: EngineReport) -> str:
    """What vLLM makes of an engine's settings."""
    if report.absent:
        return f"engine: not rehearsed, vLLM cannot be asked here: {report.absent}"
    if report.error:
        return "engine: refused"
    sizes = f"TP {report.tensor}, PP {report.pipeline}, DP {report.data}"
    weights = f", {report.quantization} weights" if report.quantization else ""
    left = f"; left to the GPUs' machine: {', '.join(report.left_out)}" if report.left_out else ""
    return f"engine: vLLM takes its settings: {sizes}{weights}, {report.longest:,} tokens at most{left}"


def cache_line(options: Options, terms: EngineTerms, report: EngineReport) -> str:
    """How much an engine caches, by the figures of `hpcrl plan`; with a warning where vLLM would refuse that. The
    memory for vLLM's work is left out."""
    size = terms.gpu["KV cache"] / GIB
    line = f"engine: KV cache {size:.1f} GiB a GPU, {terms.cached_tokens:,} tokens (estimated as in hpcrl plan)"
    if size <= 0:
        line = f"engine: no memory is left for its KV cache, {-size:.1f} GiB are missing (estimated as in hpcrl plan)"
    if _too_small(options, terms, report) and not of_cache(options, terms, report):
        line += f"\nwarn: a request may have {report.longest:,} tokens: vLLM may refuse to start; {LARGER_CACHE}"
    return line


def of_cache(options: Options, terms: EngineTerms, report: EngineReport) -> list[RehearsalFault]:
    """What vLLM would refuse on the GPU: a cache that does not hold one request of the longest, whatever is allowed for
    its work."""
    size = terms.gpu["KV cache"]
    if report.absent or report.error or not _too_small(options, terms, report):
        return []
    if size + WORKING > 0 and (
        size <= 0 or (1 + WORKING / size) * terms.cached_tokens >= report.longest * options.engine_data_parallel_size
    ):
        return []
    held = max(terms.cached_tokens, 0) // options.engine_data_parallel_size
    what = f"engine: its KV cache holds {held:,} tokens, and a request may have {report.longest:,}"
    return [RehearsalFault(what, LARGER_CACHE)]


def _too_small(options: Options, terms: EngineTerms, report: EngineReport) -> bool:
    return terms.cached_tokens // options.engine_data_parallel_size < report.longest


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
