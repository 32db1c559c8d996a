"""The estimate as lines for a person, and a warning where a GPU cannot hold it, with what to change.

Invariant: the warning names the term that weighs most of those that a flag can lessen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpcrl.config.options import Options
from hpcrl.memory.engine import EngineTerms, engine_terms
from hpcrl.memory.training import GIB, Terms, fullest_rank, tokens_per_gpu
from hpcrl.models.family import Config, Family

GPU = 80.0  #: GiB of a GPU where nothing else is said
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def memory_lines(options: Options, family: Family, config: Config, gpu: float = GPU) -> Iterator[str]:
    """Memory of trainer and engine per GPU of `gpu` GiB, and per host; warnings last."""
    trainer = fullest_rank(options, family, config)
    engine = engine_terms(options, family, config, gpu * GIB) if options.num_engines else None
    yield f"memory, GiB (estimated; docs/memory.md), of {gpu:g} a GPU"
    of = f" of stage {trainer.stage}" if options.pipeline_model_parallel_size > 1 else ""
    yield f"  trainer rank{of}: {_sum(trainer.gpu)}"
    if engine:
        yield f"  GPU of an engine: {_sum(engine.gpu)}"
        yield f"    its KV cache holds {engine.cached_tokens:,} tokens, {engine.at_once} samples of full length at once"
    if any(trainer.host.values()):
        ranks = options.actor_num_gpus_per_node
        yield f"  host, for {ranks} ranks: {_sum({name: ranks * value for name, value in trainer.host.items()})}"
    yield from warnings(options, trainer, engine, gpu)


def _sum(terms: Mapping[str, float]) -> str:
    parts = " + ".join(f"{name} {value / GIB:.1f}" for name, value in terms.items() if abs(value) >= 0.05 * GIB)
    return f"{sum(terms.values()) / GIB:.1f} = {parts}" if parts else f"{sum(terms.values()) / GIB:.1f}"


def warnings(options: Options, trainer: Terms, engine: EngineTerms | None, gpu: float) -> Iterator[str]:
    """What cannot fit, and what to change."""
    if engine and engine.gpu["KV cache"] <= 0:
        yield "warn: the model's weights do not fit into the engine's share; raise --rollout-num-gpus-per-engine"
    elif engine and engine.at_once < 1:
        yield (
            "warn: an engine's KV cache does not hold one sample of full length; raise --rollout-num-gpus-per-engine or "
            "--vllm-gpu-memory-utilization"
        )
    shared = engine.total if engine and options.colocate else 0.0
    total = trainer.total + shared
    if total <= gpu * GIB:
        return
    if shared and trainer.total <= gpu * GIB - engine.total + engine.gpu["KV cache"]:  # type: ignore[union-attr]
        room = (gpu * GIB - trainer.total) / (gpu * GIB)
        yield (
            f"warn: trainer and engine on one GPU take {total / GIB:.0f} of {gpu:g} GiB, and both stay in memory; lower "
            f"--vllm-gpu-memory-utilization to {max(room, 0):.2f} or less"
        )
        return
    term = heaviest(trainer)
    who = "trainer and engine on one GPU take" if shared else "a trainer rank takes"
    yield f"warn: {who} {total / GIB:.0f} of {gpu:g} GiB; {term} weigh most: {advice(options, term)}"


def heaviest(trainer: Terms) -> str:
    """The term that weighs most of those that a flag can lessen."""
    return max((name for name in trainer.gpu if name != "libraries"), key=lambda name: trainer.gpu[name])


def advice(options: Options, term: str) -> str:
    """Which flag lessens a term."""
    if term in ("weights", "gradients"):
        experts = " or --expert-model-parallel-size" if options.expert_model_parallel_size > 1 else ""
        return f"raise --tensor-model-parallel-size, --pipeline-model-parallel-size{experts}"
    if term == "optimizer":
        return "give --optimizer-cpu-offload with --use-precision-aware-optimizer, or more data-parallel ranks"
    if term == "logits":
        return "give --log-probs-chunk-size 1024"
    if term == "weight update":
        return "lower --update-weight-buffer-size"
    if options.megatron.get("recompute_granularity") != "full":
        return f"give {RECOMPUTE}"
    longest = tokens_per_gpu(options)
    if options.max_tokens_per_gpu and longest > options.max_tokens_per_gpu:
        return f"a sample of full length alone is {longest} tokens a GPU: raise --context-parallel-size"
    return "lower --max-tokens-per-gpu, or raise --context-parallel-size"
