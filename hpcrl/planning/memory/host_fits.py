"""What a host holds for the trainer ranks on it, and for the engines that share their GPUs; whether that fits, and the
cheapest change that makes it fit.

Invariant: a change is named only if with it the host has room, and the GPU too; of those the first in `CHANGES`, which
are in the order of what they cost a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcrl.config.options import Options
from hpcrl.models.family import Config, Family
from hpcrl.planning.formulas.engine_memory import EngineTerms, engine_terms
from hpcrl.planning.formulas.training_memory import GIB, MemoryTerms, fullest_rank
from hpcrl.planning.memory.fits import Change, Misfit, misfit, with_megatron

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
    taken = _taken(options, family, config, gpu)
    total = sum(taken.values())
    if total <= host * GIB:
        return None
    most = max(taken, key=lambda name: taken[name])
    ranks = options.actor_num_gpus_per_node
    what = f"{ranks} trainer ranks take {total / GIB:.0f} of {host:g} GiB of a host; {most} weighs most"
    for change in CHANGES:
        for flags, changed in change(options):
            fits = sum(_taken(changed, family, config, gpu).values()) <= host * GIB
            if fits and misfit(changed, family, config, gpu) is None:
                return Misfit(what, flags, True)
    return Misfit(what, "", True)


def _taken(options: Options, family: Family, config: Config, gpu: float) -> dict[str, float]:
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
    for share in (0.75, 0.5, 0.25):
        if share < now:
            yield f"--optimizer-offload-fraction {share}", with_megatron(options, optimizer_offload_fraction=share)


CHANGES: tuple[Callable[[Options], Iterator[Change]], ...] = (_at_once, _no_copies, _less_offloaded)
