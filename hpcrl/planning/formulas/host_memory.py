"""Bytes of host memory that a trainer rank takes, in addition to its GPU's: a pure function of config.json, the layout
and the settings.

Formulas and their sources: docs/sizing.md.  What a save and a load take is what `trainer/checkpoint/` does; tests count
it (tests/trainer/checkpoint/test_optimizer_shards.py).

Invariant: a term is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.planning.formulas.activations import weight_bytes
from hpcrl.planning.formulas.parameters import Count, Layout

#: a block of pinned memory up to this size is rounded to the next power of two (`run/gpu_environment.py`)
ROUNDED = 64 * 2**20
FP32 = 4
STATES = 3 * FP32  #: of a parameter in a checkpoint: its full precision and Adam's two moments
#: tensors of a checkpoint on the host at one time: two files, of each the one that is written and the next
AT_ONCE = 4
UPDATED = 4 * FP32  #: of a parameter that is updated on the host: full precision, gradient and two moments
RELOADED = FP32  #: of it while a checkpoint is loaded: full precision once more, and no gradient yet


def host_bytes(options: Options, models: Sequence[Count], layout: Layout, sizes: Sequence[int]) -> dict[str, float]:
    """By what takes them.

    Args:
        models: the policy's parameters, and a critic's if there is one.
        sizes: elements of each parameter of the rank.
    """
    count = models[0]
    over_base = bool(options.lora_rank)  # the base is the reference, and an old actor is an adapter
    sets = (needs(options).reference + 2 * options.keep_old_actor) * (not over_base)
    there = sum(own(options, model, layout) for model in models) * offloaded(options)
    return {
        "optimizer": there * UPDATED,
        "reference and old actors": sets * sum(pinned(size * weight_bytes(options)) for size in sizes),
        "save or load": checkpoint_bytes(options, count, layout, max(sizes)),
        "async save": background_bytes(options, count, layout) if options.async_save else 0.0,
        "copies in memory": copies_bytes(options, models, layout),
    }


def pinned(size: float) -> float:
    """Bytes that torch takes for a block of pinned memory."""
    return float(size if size > ROUNDED else 1 << math.ceil(math.log2(max(1.0, size))))


def own(options: Options, count: Count, layout: Layout) -> float:
    """Parameters of a rank that it is the one to update."""
    if not options.megatron.get("use_distributed_optimizer", True):
        return float(count.trained)
    return count.dense / layout.copies + count.expert / layout.expert_copies


def offloaded(options: Options) -> float:
    """The share of them that is updated on the host."""
    told = options.megatron
    return float(told.get("optimizer_offload_fraction", 1.0)) if told.get("optimizer_cpu_offload") else 0.0


def converted(options: Options) -> bool:
    """Whether the optimizer's states are made fp32 for a checkpoint: Transformer Engine's Adam keeps them otherwise."""
    return bool(options.megatron.get("use_precision_aware_optimizer")) and not offloaded(options)


def checkpoint_bytes(options: Options, count: Count, layout: Layout, largest: int) -> float:
    """Whichever of save and load takes more.

    What is on the GPU comes tensor by tensor, what is on the host anyway is written from where it is.
    """
    mine = own(options, count, layout)
    made = STATES * mine if converted(options) else 0.0
    return AT_ONCE * FP32 * largest + made + RELOADED * mine * offloaded(options)


def copies_bytes(options: Options, models: Sequence[Count], layout: Layout) -> float:
    """What copies between checkpoints take at most: of the last and of the next one files of this rank's part and of
    its partner's, and what the process that writes keeps."""
    if not options.non_persistent_save_interval:
        return 0.0
    sets = bool(needs(options).reference and options.ref_update_interval) + 2 * options.keep_old_actor
    part = sum(background_bytes(options, model, layout) for model in models)
    part += sets * written(options, models[0]) * weight_bytes(options) / layout.copies
    places = 2 if options.actor_num_nodes > 1 else 1
    return (2 * places + 1) * part


def background_bytes(options: Options, count: Count, layout: Layout) -> float:
    """What a background save keeps of the state at its beginning: all that the rank writes, weights in fp32 among the
    optimizer's states also where the model has them so."""
    return written(options, count) * weight_bytes(options) / layout.copies + STATES * own(options, count, layout)


def written(options: Options, count: Count) -> int:
    """Parameters of a rank's part of the model that a checkpoint holds: of a run with an adapter, the adapter's."""
    return count.trained if options.lora_rank else count.all
