"""The trained model: Megatron's GPTModel under its DDP wrapper, with optimizer and schedule.

    policy = build(options, ranks)
    load_hf(policy, directory)          # or checkpoint.load: a built model holds no weights yet
    logits = policy.chunks[-1](ids, positions, None, packed_seq_params=packed)   # [1, t, vocabulary / TP] on the last stage

A rank holds one chunk of consecutive layers, or with virtual pipeline stages several: chunk i of every pipeline rank
comes before chunk i + 1 of any.

Invariant: all of the architecture comes from config.json of --hf-checkpoint; a model that an own function makes
(--custom-model-provider-path) has the same parameters, or loading it says which it has not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from hpcrl.config.dotted_path import guarded, short
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own, spelled
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.model_files.config_json import read_config
from hpcrl.models.family import Config, Family, check_spec, find_family
from hpcrl.models.routing import find_routing, replay_flag
from hpcrl.trainer.megatron.hf_weights import export, load_hf
from hpcrl.trainer.megatron.optimizer import make_optimizer, make_scheduler
from hpcrl.trainer.megatron.packed_attention import block_spec
from hpcrl.trainer.megatron.settings import Settings, construct, refusals, resolve_settings
from hpcrl.trainer.megatron.value_head import give_values
from hpcrl.trainer.parallel.parallel_state import Ranks, check_layout

__all__ = ["Policy", "build", "export", "load_hf"]
PROVIDER = "custom_model_provider_path"


@dataclass(frozen=True)
class Policy:
    """chunks: DDP around (for bf16) Float16Module around GPTModel, one for each virtual stage; config: their
    TransformerConfig.

    hf_config: config.json.  optimizer and scheduler: Megatron's; the schedule counts optimizer steps.  value_head: it
    is a critic, whose output layer gives one number for each row.
    """

    chunks: tuple[DistributedDataParallel, ...]
    config: TransformerConfig
    family: Family
    hf_config: Config
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    ranks: Ranks
    value_head: bool = False

    @property
    def modules(self) -> tuple[GPTModel, ...]:
        """The GPTModel inside the wrappers of each chunk."""
        return tuple(inner(chunk) for chunk in self.chunks)

    @property
    def model(self) -> DistributedDataParallel:
        """The only chunk; ValueError where there are virtual stages."""
        (chunk,) = self.chunks
        return chunk

    @property
    def module(self) -> GPTModel:
        """The GPTModel of the only chunk; ValueError where there are virtual stages."""
        return inner(self.model)

    @property
    def vocab_size(self) -> int:
        """Real tokens; rows of the output layer past it are padding and must be kept out of every softmax."""
        return self.hf_config["vocab_size"]


class NoOptimizer:
    """Stands where a model that is not trained has no optimizer."""

    def reload_model_params(self) -> None:
        """No copies to refresh."""


def build(options: Options, ranks: Ranks, *, trainable: bool = True, value_head: bool = False) -> Policy:
    """The model of --hf-checkpoint's config.json, without weights, on this rank's device; collective.

    trainable: with gradient buffers, optimizer and schedule; without, it only holds weights (for conversion).
    value_head: a critic; its head is 0 until weights are loaded, and no other part of it has anything to do with the
    vocabulary's size.

    The config says calculate_per_token_loss: a loss function returns (sum, count, report) of its micro-batch, Megatron
    sums gradients over micro-batches, DP and CP and divides them by the sum of all counts, whatever is counted.
    UsageError if the layout does not divide the model or a Megatron setting does not fit; DataError for a bad
    config.json.
    """
    if options.hf_checkpoint is None:
        raise UsageError("--hf-checkpoint is not given", "name a Hugging Face model directory")
    hf_config = read_config(options.hf_checkpoint)
    family = find_family(hf_config, options.hf_checkpoint)
    check_spec(options.spec, hf_config)
    if replay_flag(options):
        find_routing(options, hf_config)
    fields, gpt = family.transformer(hf_config), family.gpt(hf_config)
    if value_head:  # with its embedding it shares nothing
        gpt = gpt | {"share_embeddings_and_output_weights": False}
    sizes = {name: hf_config.get(name) for name in ("vocab_size", "max_position_embeddings")}
    settings = resolve_settings(options, fields, {**gpt, **family.facts, **sizes})
    check_layout(options, settings.transformer)
    if not trainable:
        settings.transformer["perform_initialization"] = (
            False  # every weight comes from a file, and no gradient is taken
        )
    config = construct(TransformerConfig, settings.transformer)
    stages = config.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(stages)  # some of Megatron asks here, some the config
    module = partial(_module, options, config, family, hf_config, gpt, ranks)
    modules = [module(stage) for stage in (range(stages) if stages else [None])]
    if value_head:
        for module in modules:
            give_values(module, ranks.device)
    if options.bf16:
        modules = [Float16Module(config, module) for module in modules]
    if not trainable:
        return Policy(
            tuple(modules), config, family, hf_config, cast(Any, NoOptimizer()), cast(Any, None), ranks, value_head
        )
    return replace(_wrap(modules, config, family, hf_config, settings, options, ranks), value_head=value_head)


def _module(
    options: Options,
    config: TransformerConfig,
    family: Family,
    hf_config: Config,
    gpt: dict[str, Any],
    ranks: Ranks,
    stage: int | None,
) -> Any:
    """The GPTModel of one chunk: of virtual stage `stage`, or all of this rank's layers (None).  HpcrlError names an
    own function that makes something else."""
    last = config.virtual_pipeline_model_parallel_size
    ends = {
        "pre_process": ranks.first_stage and stage in (None, 0),
        "post_process": ranks.last_stage and stage in (None, (last or 0) - 1),
    }

    def build() -> GPTModel:
        return GPTModel(
            config,
            block_spec(config, family.adapt, stage),
            vocab_size=padded_vocab_size(hf_config["vocab_size"], ranks.tp_size),
            max_sequence_length=hf_config.get("max_position_embeddings", 2**20),
            parallel_output=True,
            vp_stage=stage,
            **ends,
            **gpt,
        )

    if (path := options.custom_model_provider_path) is None:
        return build().to(ranks.device)
    shown = f"{spelled(PROVIDER)} {path}"
    made = guarded(load_own(PROVIDER, path), shown)(options, config, build, **ends, vp_stage=stage)
    if not isinstance(made, GPTModel):
        raise HpcrlError(f"{shown} returned {short(made)}, a GPTModel is wanted", "return build(), changed as you like")
    return made.to(ranks.device)


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding: the next multiple of TP, and no more (padding rows would take part in a careless
    softmax)."""
    return -(-vocab_size // tp_size) * tp_size


def inner(chunk: Any) -> GPTModel:
    """The GPTModel inside a chunk's wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def _wrap(
    modules: list[Any],
    config: TransformerConfig,
    family: Family,
    hf_config: Config,
    settings: Settings,
    options: Options,
    ranks: Ranks,
) -> Policy:
    """DDP, optimizer, schedule, and the hooks by which Megatron's schedules find them."""
    ddp = construct(DistributedDataParallelConfig, settings.ddp)
    # as Megatron-LM: buckets only for the first chunk, whose gradients come last
    with refusals("its DistributedDataParallel"):
        chunks = [
            DistributedDataParallel(config, ddp, module, disable_bucketing=i > 0) for i, module in enumerate(modules)
        ]
    optimizer = make_optimizer(chunks, settings.optimizer)
    scheduler = make_scheduler(optimizer, options)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    return Policy(tuple(chunks), config, family, hf_config, optimizer, scheduler, ranks)
