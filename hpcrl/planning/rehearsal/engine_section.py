"""The engine section of a rehearsal: what vLLM chose on H100s (engine_choices.py), memory by `hpcrl plan`, and faults.

Invariant: what would end a run is a fault; what is slow, or depends on the machine that is asked, is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.options import Options
from hpcrl.planning.formulas.engine_memory import WORKING, EngineTerms
from hpcrl.planning.formulas.training_memory import GIB
from hpcrl.planning.rehearsal.problems import RehearsalFault
from hpcrl.planning.rehearsal.reports import EngineChoices, EngineReport
from hpcrl.run.gpu_environment import NVCC


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
    return f"engine: vLLM takes its settings: {sizes}{weights}, {report.longest:,} tokens at most"


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
    rows = terms.gpu.get("experts' workspace", 0)
    if report.choices and rows > WORKING:
        what += f"; experts' workspace takes {rows / GIB:.1f} GiB of a GPU at {report.choices.batched:,} tokens a pass"
        return [RehearsalFault(what, f"lower --vllm-max-num-batched-tokens, or {LARGER_CACHE}")]
    return [RehearsalFault(what, LARGER_CACHE)]


def _too_small(options: Options, terms: EngineTerms, report: EngineReport) -> bool:
    return terms.cached_tokens // options.engine_data_parallel_size < report.longest


def as_chosen(options: Options, report: EngineReport) -> Options:
    """The options with the tokens of one pass that vLLM takes, which decide the memory of the experts' kernels."""
    if report.choices is None:
        return options
    return options.model_copy(update={"vllm": options.vllm | {"max_num_batched_tokens": report.choices.batched}})


def choice_lines(options: Options, terms: EngineTerms, report: EngineReport) -> Iterator[str]:
    """What vLLM chose, and a warning for each choice that is slow."""
    if report.unshown:
        yield f"warn: engine: what vLLM chooses on GPUs is not rehearsed: {report.unshown}"
    if report.choices is None:
        return
    found = report.choices
    experts = f"; experts {found.experts}" if found.experts else ""
    exchange = f"; all-to-all {found.exchange}" if found.exchange else ""
    yield f"engine: vLLM chooses on H100s: attention {found.attention}{experts}{exchange}"
    sizes = f", {len(found.captured)} sizes up to {max(found.captured)}" if found.captured else ""
    most = f"at most {found.batched:,} tokens and {found.sequences:,} sequences a pass"
    yield f"engine: CUDA graphs {found.graphs}{sizes}; {most}"
    yield f"engine: weights {found.weights / GIB:.1f} GiB a GPU, cache {found.token_bytes / 1024:.0f} KiB a token"
    if found.experts:
        rows = terms.gpu["experts' workspace"]
        inside = f", {rows / GIB:.1f} with gathered rows and what kernels take inside (estimated)" if rows else ""
        yield f"engine: experts' workspace {found.workspace / GIB:.2f} GiB by vLLM's shapes{inside}"
    yield "engine: not shown without a GPU: kernels of all-reduce, memory of CUDA graphs and of NCCL"
    yield from (f"warn: engine: {what}" for what in _slow(options, found))


def _slow(options: Options, found: EngineChoices) -> Iterator[str]:
    if found.graphs == "NONE" and not options.vllm.get("enforce_eager"):
        other = "give --vllm-all2all-backend deepep_low_latency" if "HT" in found.exchange else "see vLLM's log"
        yield f"it decodes without CUDA graphs; {other}"
    if found.no_nvcc:
        yield (
            f"FP8 blocks need nvcc {NVCC[0]}.{NVCC[1]} or newer at run time; the engine's environment here has none: "
            "load the site's CUDA module, set CUDA_HOME, or pip install nvidia-cuda-nvcc"
        )
    if found.no_flashinfer:
        tools = " and ".join(found.no_flashinfer)
        yield f"FlashInfer is off: the engine's environment here lacks {tools}; install that, or flashinfer-cubin"


def of_choices(report: EngineReport) -> list[RehearsalFault]:
    """An empty start whose first passes leave most experts without a row."""
    found = report.choices
    if found is None or not 0 < 2 * found.reached <= found.all_experts:
        return []
    what = f"engine: while its weights are empty, tokens go to {found.reached} of {found.all_experts} experts"
    return [RehearsalFault(f"{what}, and vLLM may hang", "give --vllm-load-format auto")]
