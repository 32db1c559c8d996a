"""Bytes that a trainer rank takes, term by term: a pure function of config.json, the layout and the settings.

Formulas and their sources: docs/memory.md.  For a checkpoint, what is counted is what Megatron allocates for the
optimizer's state as `trainer/checkpoint/save_load.py` asks for it: gathered over gloo, on the host.

Invariant: of all pipeline stages, the one that takes most is reported; a term is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.memory.activations import activation_bytes, logits_bytes, weight_bytes
from hpcrl.memory.nccl import nccl_bytes, pieces_from_gpu
from hpcrl.memory.parameters import Count, Layout, on_stage, sizes_on_stage
from hpcrl.models.family import Config, Family

GIB = 1024**3
#: bytes of a CUDA context and the libraries' workspaces: not computed, an allowance
CUDA = 2 * GIB
#: a block of pinned memory up to this size is rounded to the next power of two (`run/gpu_environment.py`)
ROUNDED = 64 * 2**20
#: what is an allowance, and not computed from the model
ALLOWANCES = ("CUDA", "NCCL")
#: what is there in every phase
STATE = ("weights", "gradients", "optimizer", "update buffers", *ALLOWANCES)
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class MemoryTerms:
    """Bytes on the GPU of one rank, by what takes them, and on the host for it."""

    gpu: Mapping[str, float]
    host: Mapping[str, float]
    stage: int

    @property
    def phases(self) -> dict[str, float]:
        """Bytes on the GPU in each phase of a step: what stays, and the phase's own."""
        stays = sum(self.gpu[name] for name in STATE)
        own = {
            "log-probs": max(self.gpu["one layer"], self.gpu["logits"]),
            "forward and backward": self.gpu["activations"] + max(self.gpu["one layer"], self.gpu["logits"]),
            "optimizer step": self.gpu["step"],
            "weight update": self.gpu["weight update"],
            "save": self.gpu["checkpoint"],
        }
        return {name: stays + value for name, value in own.items()}

    @property
    def total(self) -> float:
        """Of the phase that takes most."""
        return max(self.phases.values())

    @property
    def fullest(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def allowed(self) -> float:
        """What of it is an allowance."""
        return sum(self.gpu[name] for name in ALLOWANCES)


def fullest_rank(options: Options, family: Family, config: Config) -> MemoryTerms:
    """The terms of a rank on the pipeline stage that takes most."""
    layout = Layout.of(options, family.transformer(config)["num_layers"])
    return max(
        (rank_on(options, family, config, layout, stage) for stage in range(layout.pp)), key=lambda terms: terms.total
    )


def rank_on(options: Options, family: Family, config: Config, layout: Layout, stage: int) -> MemoryTerms:
    """The terms of a rank on one pipeline stage."""
    count = on_stage(family, config, layout, stage, options.megatron)
    fields = family.transformer(config)
    on_gpu, on_host = optimizer_bytes(options, count, layout)
    saved_here, saved_there = checkpoint_bytes(options, count, layout)
    kept, passing = activation_bytes(options, family, config, layout, stage)
    sizes = list(sizes_on_stage(family, config, layout, stage, options.megatron))
    critic = 2 if needs(options).critic else 1  # a model of the same size in addition to the policy
    gpu = {
        "weights": critic * count.all * weight_bytes(options),
        "gradients": critic * count.all * gradient_bytes(options),
        "optimizer": critic * on_gpu,
        "activations": kept,
        "one layer": passing,
        "logits": logits_bytes(options, config, layout) if stage == layout.pp - 1 else 0.0,
        "update buffers": kept_buffers(options),
        "weight update": update_bytes(options, config, fields),
        "checkpoint": saved_here,
        "step": step_bytes(options, max(sizes)),
        "CUDA": float(CUDA),
        "NCCL": nccl_bytes(options),
    }
    sets = needs(options).reference + 2 * options.keep_old_actor
    host = {
        "optimizer": critic * on_host,
        "reference and old actors": sets * sum(pinned(size * weight_bytes(options)) for size in sizes),
        "checkpoint": saved_there,
        "async save": count.all * weight_bytes(options) / layout.copies + on_gpu if options.async_save else 0.0,
    }
    return MemoryTerms(gpu, host, stage)


def pinned(size: float) -> float:
    """Bytes that torch takes for a block of pinned memory."""
    return float(size if size > ROUNDED else 1 << math.ceil(math.log2(max(1.0, size))))


# ---- what the model's size decides


def gradient_bytes(options: Options) -> int:
    """Bytes of one element of Megatron's gradient buffers: fp32 unless --grad-reduce-in-bf16."""
    return 4 if options.megatron.get("grad_reduce_in_fp32", True) else weight_bytes(options)


def optimizer_bytes(options: Options, count: Count, layout: Layout) -> tuple[float, float]:
    """(on the GPU, on the host): full-precision weights and Adam's two moments of what a rank updates."""
    told = options.megatron
    spread = told.get("use_distributed_optimizer", True)
    own = count.dense / layout.copies + count.expert / layout.expert_copies if spread else float(count.all)
    careful = told.get("use_precision_aware_optimizer", False)
    moments = (
        0 if told.get("optimizer") == "sgd" else sum(_moment(told, name, careful) for name in ("exp_avg", "exp_avg_sq"))
    )
    master = 4 if options.bf16 else 0  # in fp32 the weights themselves
    if options.bf16 and careful:  # bf16 weights and the 16 bits that they lack
        master = 2 if told.get("store_param_remainders", True) else 4
    if not told.get("optimizer_cpu_offload"):
        return own * (master + moments), 0.0
    share = told.get("optimizer_offload_fraction", 1.0)
    here = own * ((1 - share) * (master + moments) + (0 if careful else share * master))
    return here, own * share * (4 + 4 + 8)  # there in fp32: weights, gradients, moments


def step_bytes(options: Options, largest: int) -> float:
    """What torch's Adam makes of the largest parameter as it takes a step; of one that takes it on the host, a copy on
    its way."""
    told = options.megatron
    there = told.get("optimizer_cpu_offload") and told.get("optimizer_offload_fraction", 1.0) == 1
    return (4.0 if there else 8.0) * largest


def _moment(told: Mapping[str, Any], name: str, careful: bool) -> int:
    return _BYTES.get(str(told.get(f"{name}_dtype", "fp32")), 4) if careful else 4


def update_bytes(options: Options, config: Config, fields: Mapping[str, Any]) -> float:
    """A bucket, unless it is there all the time, and the largest tensor whole in addition to its parts."""
    hidden = fields["hidden_size"]
    largest = hidden * max(config["vocab_size"], 2 * fields["ffn_hidden_size"])
    bucket = options.update_weight_buffer_size - kept_buffers(options)
    return bucket + 2.0 * largest * weight_bytes(options)


def kept_buffers(options: Options) -> float:
    """What a rank sends pieces from, which it keeps from one update to the next (`weights/pieces/piece_sender.py`)."""
    return float(options.update_weight_buffer_size) if pieces_from_gpu(options) else 0.0


SAVED = 12  #: bytes of a parameter: its fp32 copy and Adam's two moments, in fp32 whatever they are kept in
TWICE = 8  #: of the one that is being gathered: as it comes from the ranks, and put together


def checkpoint_bytes(options: Options, count: Count, layout: Layout) -> tuple[float, float]:
    """(on the GPU, on the host a rank, averaged over those of the host that takes most), whichever of save and load
    takes more.

    A save gathers the state of all data-parallel ranks on the first; a load makes room for all of it on each.
    """
    ranks = options.actor_num_gpus_per_node
    stages = max(1, ranks * layout.pp // options.world_size)  # of the pipeline, on one host
    dense = count.dense * min(ranks, layout.tp * stages)  # on the ranks of a host that are the first to hold them
    expert = count.expert * min(ranks, layout.etp * layout.ep * stages)
    own = ranks * (count.dense / layout.copies + count.expert / layout.expert_copies)
    save = SAVED * (dense + expert + own) + TWICE * max(dense, expert)
    return 0.0, max(save, SAVED * ranks * count.all) / ranks
