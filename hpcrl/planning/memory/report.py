"""The estimate as lines to read, phase by phase, with shared GPUs (--colocate) turn by turn, and a warning or an error
where a GPU cannot hold it, with what to change.

Invariants: what does not fit whatever the allowances are is an error; a turn holds what `hpcrl.weights.colocation`
allows to be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.groups import planned
from hpcrl.models.family import Config, Family
from hpcrl.planning.formulas.engine_memory import EngineTerms, engine_terms, share, utilization
from hpcrl.planning.formulas.parameters import adapter_parameters
from hpcrl.planning.formulas.training_memory import GIB, STATE, MemoryTerms, fullest_rank, most_resumed
from hpcrl.planning.memory.fits import Change, Misfit, misfit, with_megatron

GPU = 80.0  #: GiB of a GPU where nothing else is said


def memory_lines(
    options: Options, family: Family, config: Config, gpu: float = GPU, host: float | None = None
) -> Iterator[str]:
    """Memory of trainer and engine per GPU of `gpu` GiB, and per host; warnings last.

    Args:
        host: GiB of a host, if that is known: then `refuse_misfit` says that it is too little.
    """
    trainer = fullest_rank(options, family, config)
    engine = engine_terms(options, family, config, gpu * GIB) if options.num_engines else None
    yield f"memory, GiB (estimated; docs/sizing.md), of {gpu:g} a GPU"
    of = f" of stage {trainer.stage}" if options.pipeline_model_parallel_size > 1 else ""
    yield f"  trainer rank{of}: {trainer.total / GIB:.1f} in {trainer.fullest}"
    yield f"    always: {_sum({name: trainer.gpu[name] for name in STATE})}"
    if options.lora_rank:
        mine = {"weights": trainer.adapter, **{name: trainer.gpu[name] for name in ("gradients", "optimizer")}}
        number = adapter_parameters(options, family, config) / 1e6
        yield f"    of it the adapter: {_sum(mine)}; {number:,.0f} million parameters on all ranks"
    yield f"    for a time: {_list_terms({name: size for name, size in trainer.gpu.items() if name not in STATE})}"
    yield f"    by phase: {_list_terms(trainer.phases)}"
    if engine:
        yield f"  GPU of an engine: {_sum(engine.gpu)}"
        if (mine := share(options, family, config, gpu * GIB)) < (own := utilization(options)):
            yield (
                f"    it is started with --vllm-gpu-memory-utilization {mine:.2f}, not vLLM's own {own:g}, "
                "so that a weight update also fits"
            )
        yield f"    its KV cache holds {engine.cached_tokens:,} tokens, {engine.at_once} full-length samples together"
    if engine and options.takes_turns:
        yield f"  of both on one GPU while {_list_terms(turns(options, trainer, engine))}"
    taken = on_host(options, trainer, engine)
    yield f"  host, for {options.actor_num_gpus_per_node} ranks: {_sum(taken)}"
    if host is None and (lacks := host_misfit(options, family, config, gpu, HOST)):
        yield f"warn: {lacks.what}: {advice(lacks, 'hosts')}, or give --host-memory if hosts have more"
    found = misfit(options, family, config, gpu)
    if found and not found.certain:
        yield f"warn: {found.what}; without allowances for CUDA and NCCL it fits: {advice(found)}"
    yield from warnings(options, trainer, engine, gpu)
    if (resumed := most_resumed(options, family, config)) > gpu * GIB and options.bf16:
        yield (
            f"warn: a run that resumes takes {resumed / GIB:.0f} of {gpu:g} GiB while Transformer Engine's "
            "Adam is loaded (docs/sizing.md)"
        )


def refuse_misfit(options: Options, family: Family, config: Config, gpu: float, host: float | None = None) -> None:
    """Raise UsageError if a trainer rank cannot fit `gpu` GiB, whatever the allowances are, or all of a host's `host`
    GiB."""
    found = misfit(options, family, config, gpu)
    if found and found.certain:
        raise UsageError(f"does not fit: {found.what} (docs/sizing.md)", advice(found))
    if host is not None and (found := host_misfit(options, family, config, gpu, host)):
        raise UsageError(f"does not fit: {found.what} (docs/sizing.md)", advice(found, "hosts"))


def verdict(options: Options, family: Family, config: Config, gpu: float, lines: list[str]) -> str:
    """The last line of a plan: whether everything fits, and how full the fullest GPU is.

    Args:
        lines: of `memory_lines`; the first warning is taken out, since this line repeats it.

    Returns:
        "" where `refuse_misfit` has the last word.
    """
    trainer = fullest_rank(options, family, config)
    rank = f"rank {planned(options)['pp'][0][trainer.stage]}"
    if not options.bf16:
        return f"{trainer.total / GIB:.1f} GiB in the fullest process ({rank}); in fp32 it is on a CPU"
    if (found := misfit(options, family, config, gpu)) and found.certain:
        return ""
    if warned := next((line for line in lines if line.startswith("warn: ")), ""):
        lines.remove(warned)
        return warned.replace("warn:", "does not fit:", 1)
    sizes = {} if options.debug_rollout_only else {rank: trainer.total}
    if options.num_engines:
        engine = engine_terms(options, family, config, gpu * GIB)
        sizes["engine 0"] = engine.total
        if options.takes_turns:
            sizes = {f"{rank} and an engine": max(turns(options, trainer, engine).values())}
    fullest = max(sizes, key=lambda name: sizes[name])
    return f"fits: {sizes[fullest] / GIB:.1f} of {gpu:g} GiB on the fullest GPU ({fullest})"


def advice(found: Misfit, of: str = "GPUs") -> str:
    """What makes it fit."""
    return f"give {found.change}" if found.change else f"no flag makes it fit: give the trainer more {of}"


def _sum(terms: Mapping[str, float]) -> str:
    parts = " + ".join(f"{name} {value / GIB:.1f}" for name, value in terms.items() if abs(value) >= 0.05 * GIB)
    return f"{sum(terms.values()) / GIB:.1f} = {parts}" if parts else f"{sum(terms.values()) / GIB:.1f}"


def _list_terms(terms: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {value / GIB:.1f}" for name, value in terms.items())


def warnings(options: Options, trainer: MemoryTerms, engine: EngineTerms | None, gpu: float) -> Iterator[str]:
    """What cannot fit, and what to change."""
    if engine and engine.gpu["KV cache"] <= 0:
        yield "warn: the model's weights do not fit into the engine's share; raise --rollout-num-gpus-per-engine"
    elif engine and engine.at_once < 1:
        yield (
            "warn: an engine's KV cache does not hold one sample of full length; raise --rollout-num-gpus-per-engine "
            "or --vllm-gpu-memory-utilization"
        )
    if engine and not options.takes_turns:
        yield from _warn_of_update(options, engine, gpu)
    elif engine and trainer.total <= gpu * GIB:
        yield from _warn_of_sharing(options, turns(options, trainer, engine), engine, gpu)


def _warn_of_update(options: Options, engine: EngineTerms, gpu: float) -> Iterator[str]:
    """A weight update that does not fit next to the engine's share."""
    update = engine.gpu["weight update"]
    mine = engine.total - engine.gpu["weight update"]
    if engine.gpu["KV cache"] <= 0 or mine + update <= gpu * GIB:
        return
    room = (gpu * GIB - update) / (gpu * GIB)
    yield (
        f"warn: a weight update takes {update / GIB:.1f} GiB of an engine's GPU outside its share of {mine / GIB:.0f} "
        f"of {gpu:g}; lower --vllm-gpu-memory-utilization to {int(100 * room) / 100:.2f} or less"
    )


def _warn_of_sharing(options: Options, taken: Mapping[str, float], engine: EngineTerms, gpu: float) -> Iterator[str]:
    """The turn that one GPU cannot hold, and what to change."""
    turn = max(taken, key=lambda name: taken[name])
    over = taken[turn] - gpu * GIB
    if over <= 0:
        return
    what = f"warn: while {turn}, trainer and engine on one GPU take {taken[turn] / GIB:.0f} of {gpu:g} GiB"
    stays = [
        flag for flag, kept in (("train", not options.offloads_train), ("rollout", not options.sleep_level)) if kept
    ]
    if stays:
        yield f"{what}; leave out {' and '.join(f'--no-offload-{flag}' for flag in stays)}"
    elif turn == SAMPLES and over < engine.gpu["KV cache"]:
        room = (gpu * GIB - (taken[turn] - engine.total) - engine.gpu["weight update"]) / (gpu * GIB)
        yield f"{what}; lower --vllm-gpu-memory-utilization to {int(100 * room) / 100:.2f} or less"
    else:
        yield f"{what}; raise --tensor-model-parallel-size or --rollout-num-gpus-per-engine"


#: what a sleeping vLLM keeps on a GPU: not computed, an allowance for its CUDA context, NCCL and graphs
ASLEEP = 2 * GIB
TRAINS = "the trainer trains"
SAMPLES = "the engines sample"
UPDATES = "weights are updated"
OWN = ("weights", "gradients", "optimizer")  #: what --offload-train takes off the GPU


def turns(options: Options, trainer: MemoryTerms, engine: EngineTerms) -> dict[str, float]:
    """Bytes on one GPU while ..., by turn."""
    state = sum(trainer.gpu[name] for name in OWN)
    kept = trainer.allowed + trainer.gpu["update buffers"]
    stays = kept + (0.0 if options.offloads_train else state)
    exports = kept + trainer.gpu["weight update"]
    exports += trainer.gpu["weights"] if options.offloads_train else state
    asleep = ASLEEP if options.sleep_level else engine.total
    loads = ASLEEP + engine.gpu["weights"] + engine.gpu["weight update"] if options.sleep_level else engine.total
    return {TRAINS: trainer.total + asleep, SAMPLES: engine.total + stays, UPDATES: exports + loads}


# ---- memory of the hosts
#
# What a host holds for the trainer ranks on it, and for the engines that share their GPUs; whether that fits, and the
# cheapest change that makes it fit.
#
# Invariant: a change is named only if with it the host has room, and the GPU too; of those the first in `CHANGES`,
# which are in the order of what they cost a step.


HOST = 2000.0  #: GiB of a host where nothing else is said: a node with eight GPUs and 2 TiB


def on_host(options: Options, trainer: MemoryTerms, engine: EngineTerms | None) -> dict[str, float]:
    """Bytes of host memory for all trainer ranks of a host, and for the engines that share their GPUs."""
    each = dict(trainer.host)
    if engine and options.takes_turns:
        each["put away"] = put_away(options, trainer, engine)
    return {name: options.actor_num_gpus_per_node * value for name, value in each.items()}


def put_away(options: Options, trainer: MemoryTerms, engine: EngineTerms) -> float:
    """Bytes of host memory for one GPU's trainer and engine while they are not on it."""
    away = trainer.away if options.offloads_train else 0.0
    return away + (engine.gpu["weights"] if options.sleep_level == 1 else 0.0)


def host_misfit(options: Options, family: Family, config: Config, gpu: float, host: float) -> Misfit | None:
    """Why what a host holds does not fit its `host` GiB, and what to change where a GPU has `gpu` GiB; None if it
    fits."""
    taken = taken_on_host(options, family, config, gpu)
    total = sum(taken.values())
    if total <= host * GIB:
        return None
    most = max(taken, key=lambda name: taken[name])
    ranks = options.actor_num_gpus_per_node
    what = f"{ranks} trainer ranks take {total / GIB:.0f} of {host:g} GiB of a host; {most} weighs most"
    for change in CHANGES:
        for flags, changed in change(options):
            fits = sum(taken_on_host(changed, family, config, gpu).values()) <= host * GIB
            if fits and misfit(changed, family, config, gpu) is None:
                return Misfit(what, flags, True)
    return Misfit(what, "", True)


def taken_on_host(options: Options, family: Family, config: Config, gpu: float = GPU) -> dict[str, float]:
    """The terms of `on_host`, in bytes, where a GPU has `gpu` GiB."""
    engine = engine_terms(options, family, config, gpu * GIB) if options.num_engines else None
    return on_host(options, fullest_rank(options, family, config), engine)


# ---- changes


def _at_once(options: Options) -> Iterator[Change]:
    if options.async_save:
        yield "--no-async-save", options.model_copy(update={"async_save": False})


def _no_copies(options: Options) -> Iterator[Change]:
    if options.non_persistent_save_interval:
        yield "--non-persistent-save-interval 0", options.model_copy(update={"non_persistent_save_interval": 0})


def _less_offloaded(options: Options) -> Iterator[Change]:
    if not options.megatron.get("optimizer_cpu_offload"):
        return
    now = options.megatron.get("optimizer_offload_fraction", 1.0)
    for part in (0.75, 0.5, 0.25):
        if part < now:
            yield f"--optimizer-offload-fraction {part}", with_megatron(options, optimizer_offload_fraction=part)


CHANGES: tuple[Callable[[Options], Iterator[Change]], ...] = (_at_once, _no_copies, _less_offloaded)
