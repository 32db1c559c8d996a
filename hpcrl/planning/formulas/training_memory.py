"""Bytes that a trainer rank takes, term by term: a pure function of config.json, the layout and the settings.

Formulas and their sources: docs/sizing.md; tests/planning/memory/test_device_bytes.py counts the same on a device that
knows shapes alone.

Invariant: of all pipeline stages, the one that takes most is reported; a term is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.models.family import Config, Family, tied
from hpcrl.models.lora import peft
from hpcrl.models.lora.serving import served_as
from hpcrl.planning.formulas.activations import activation_bytes, logits_bytes, weight_bytes
from hpcrl.planning.formulas.nccl_memory import gpu_transfer, nccl_bytes
from hpcrl.planning.formulas.parameters import Count, Layout, halved_on_stage, largest_adapted, on_stage, sizes_on_stage

GIB = 1024**3
#: bytes of a CUDA context and the libraries' workspaces: not computed, an allowance
CUDA = 2 * GIB
#: elements coded in FP8 at once, as `hpcrl.models.files.fp8` has it, which a login node need not be able to import
BAND = 1 << 22
#: bytes that the digest of an adapter's base makes of a number: its bits in int64, and their square
DIGEST = 16.0
#: what is an allowance, and not computed from the model
ALLOWANCES = ("CUDA", "NCCL")
#: what is there in every phase
STATE = ("weights", "gradients", "optimizer", "update buffers", *ALLOWANCES)
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class MemoryTerms:
    """Bytes on the GPU of one rank, by what takes them, and on the host for it.

    Attributes:
        away: of its weights and optimizer on the host, while they are not on the GPU.
        adapter: of the weights, what an adapter has.
    """

    gpu: Mapping[str, float]
    host: Mapping[str, float]
    stage: int
    away: float
    adapter: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Bytes on the GPU in each phase of a step: what stays, and the phase's own."""
        stays = sum(self.gpu[name] for name in STATE)
        own = {
            "start": self.gpu["start"] - self.gpu["update buffers"],  # which come with the first update
            "log-probs": max(self.gpu["one layer"], self.gpu["logits"]),
            "forward and backward": self.gpu["activations"] + max(self.gpu["one layer"], self.gpu["logits"]),
            "optimizer step": self.gpu["step"],
            "weight update": self.gpu["weight update"],
            "save": self.gpu["save"],
        }
        return {name: stays + value for name, value in own.items()}

    @property
    def resumed(self) -> float:
        """While a checkpoint is loaded into Transformer Engine's Adam."""
        more = max(0.0, self.gpu["loaded states"] - self.gpu["start"])
        return self.phases["start"] + more

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
    layout = Layout.from_options(options, family.transformer(config)["num_layers"])
    return max(
        (rank_on(options, family, config, layout, stage) for stage in range(layout.pp)), key=lambda terms: terms.total
    )


def most_resumed(options: Options, family: Family, config: Config) -> float:
    """Bytes of a rank whose run resumes, on the stage where that is most: another one, perhaps, than the fullest."""
    layout = Layout.from_options(options, family.transformer(config)["num_layers"])
    return max(rank_on(options, family, config, layout, stage).resumed for stage in range(layout.pp))


def _embedding_copy(options: Options, config: Config, layout: Layout, stage: int) -> float:
    """What layers that predict further tokens need of an embedding that another stage has."""
    last = 0 < stage == layout.pp - 1
    rows = -(-config["vocab_size"] // layout.tp) if options.trained_heads and last and not tied(config) else 0
    return rows * config["hidden_size"] * weight_bytes(options)


def rank_on(options: Options, family: Family, config: Config, layout: Layout, stage: int) -> MemoryTerms:
    """The terms of a rank on one pipeline stage."""
    count = on_stage(family, config, layout, stage, options.megatron)
    fields = family.transformer(config)
    models = [count]
    if needs(options).critic:  # a model in addition to the policy, without layers that predict further tokens
        critic = on_stage(family, config, replace(layout, heads=0), stage, options.megatron)
        models.append(critic if layout.lora is None else replace(critic, fixed=0))  # over the same weights
    kept, passing = activation_bytes(options, family, config, layout, stage)
    sizes = list(sizes_on_stage(family, config, layout, stage, options.megatron))
    stepped = max(sizes) if layout.lora is None else count.trained
    halved = halved_on_stage(family, config, layout, stage, options.megatron)
    if layout.lora is not None and not (options.load or options.ref_load):
        halved = 0  # a Hugging Face directory is read tensor by tensor, and checkpoints hold no weights
    gpu = {
        "weights": sum(model.all for model in models) * weight_bytes(options)
        + _embedding_copy(options, config, layout, stage),
        "gradients": sum(model.trained for model in models) * gradient_bytes(options),
        "optimizer": sum(optimizer_bytes(options, model, layout) for model in models),
        "activations": kept,
        "one layer": passing,
        "logits": (1 + options.trained_heads) * logits_bytes(options, config, layout) * (stage == layout.pp - 1),
        "update buffers": kept_buffers(options),
        "weight update": update_bytes(options, config, fields),
        "save": save_bytes(options, count, layout),
        "start": start_bytes(options, count, layout, halved),
        "loaded states": renewed_bytes(options, count, layout),
        # what torch's Adam makes of the largest parameter as it takes a step, a copy where that is on the host;
        # Transformer Engine's makes nothing
        "step": (0.0 if converted(options) else 4.0 if offloaded(options) else 8.0) * min(stepped, max(sizes)),
        "CUDA": float(CUDA),
        "NCCL": nccl_bytes(options),
    }
    away = gpu["weights"] + gpu["optimizer"]
    adapter = 0.0
    if layout.lora is not None:
        if served_as(options, family, config) == "merged":
            largest = largest_adapted(family, config, layout, stage, options.megatron)
            gpu["weight update"] = merging_bytes(options, largest, gpu["weight update"])
        gpu["start"] = max(gpu["start"], DIGEST * min(peft.BAND, max(sizes)))  # a band of the largest tensor
        if len(models) > 1:  # a critic has weights of its own until it takes the policy's
            gpu["start"] += count.fixed * weight_bytes(options)
        base = [size * weight_bytes(options) for size in sizes]  # each a block; what is trained lies in large ones
        away += sum(pinned(size) - size for size in base)
        adapter = float(sum(model.trained for model in models) * weight_bytes(options))
    return MemoryTerms(gpu, host_bytes(options, models, layout, sizes), stage, away, adapter)


# ---- what the model's size decides


def gradient_bytes(options: Options) -> int:
    """Bytes of one element of Megatron's gradient buffers: fp32 unless --grad-reduce-in-bf16."""
    return 4 if options.megatron.get("grad_reduce_in_fp32", True) else weight_bytes(options)


def optimizer_bytes(options: Options, count: Count, layout: Layout) -> float:
    """On the GPU: full-precision weights and Adam's two moments of what a rank updates there."""
    told = options.megatron
    careful = told.get("use_precision_aware_optimizer", False)
    moments = (
        0 if told.get("optimizer") == "sgd" else sum(_moment(told, name, careful) for name in ("exp_avg", "exp_avg_sq"))
    )
    master = 4 if options.bf16 else 0  # in fp32 the weights themselves
    mine = own(options, count, layout)
    share = offloaded(options)
    if share:  # the two halves keep their states alike, the one here too
        return mine * ((1 - share) * STATES + (0 if careful else share * FP32))
    return mine * (master + moments)


def start_bytes(options: Options, count: Count, layout: Layout, halved: int) -> float:
    """More than weights, gradients and optimizer, while a model is made and a checkpoint is loaded, at most.

    Megatron copies the weights into its own buffers before there is an optimizer, a virtual stage at a time; and puts
    what a checkpoint holds in two tensors together, all of it before it is copied to where it belongs.
    """
    copied = 0.0
    if options.megatron.get("use_distributed_optimizer", True):
        copied = count.trained * weight_bytes(options) / layout.virtual_stages
    return max(copied - optimizer_bytes(options, count, layout), float(halved * weight_bytes(options)))


def renewed_bytes(options: Options, count: Count, layout: Layout) -> float:
    """New states, in fp32, that Transformer Engine's Adam makes of those that are loaded; of the weights in full
    precision only with --use-precision-aware-optimizer, else they are Megatron's own."""
    if offloaded(options):
        return 0.0
    return own(options, count, layout) * (STATES if converted(options) else STATES - FP32)


def save_bytes(options: Options, count: Count, layout: Layout) -> float:
    """Of moments in fewer bits Transformer Engine's Adam makes fp32 ones, all at once, before one is copied."""
    told = options.megatron
    few = [name for name in ("exp_avg", "exp_avg_sq") if _moment(told, name, True) < FP32]
    if not converted(options) or not few:
        return 0.0
    return FP32 * len(few) * own(options, count, layout)


def _moment(told: Mapping[str, Any], name: str, careful: bool) -> int:
    return _BYTES.get(str(told.get(f"{name}_dtype", "fp32")), 4) if careful else 4


def update_bytes(options: Options, config: Config, fields: Mapping[str, Any]) -> float:
    """In addition to the buffers that are there all the time.

    In pieces, what a band of a tensor is coded in where engines serve FP8. Any other update has the largest tensor
    whole in addition to its parts; vllm's also two messages under way, and what the next is made of.
    """
    transfer = gpu_transfer(options)
    if transfer in ("nccl", "ipc"):
        return 16.0 * BAND if config.get("quantization_config") else 0.0
    largest = fields["hidden_size"] * max(config["vocab_size"], 2 * fields["ffn_hidden_size"])
    messages = 3.0 * options.update_weight_buffer_size if transfer == "vllm" else 0.0
    return 2.0 * largest * weight_bytes(options) + messages


def merging_bytes(options: Options, largest: int, sent: float) -> float:
    """What an update takes that brings weights with the adapter added in: the matrix, the product and their sum in
    fp32; or the matrix that was made last, and what sending it takes.

    Args:
        largest: elements of the largest matrix with an adapter.
        sent: bytes.
    """
    item = weight_bytes(options)
    made = 3 * FP32 if item < FP32 else 2 * FP32  # fp32 weights are added to as they are
    return max(float(made * largest), item * largest + sent)


def kept_buffers(options: Options) -> float:
    """What a rank sends pieces from, which it keeps from one update to the next (`weights/pieces/piece_sender.py`)."""
    return float(options.update_weight_buffer_size) if gpu_transfer(options) in ("nccl", "ipc") else 0.0


# ---- memory of the host
#
# Bytes of host memory that a trainer rank takes, in addition to its GPU's: a pure function of config.json, the layout
# and the settings.
#
# Formulas and their sources: docs/sizing.md. What a save and a load take is what `trainer/checkpoint/` does; tests
# count it (tests/trainer/checkpoint/test_optimizer_shards.py).
#
# Invariant: a term is never negative.

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
