"""The trained model: Megatron's GPTModel under its DDP wrapper, with optimizer and learning-rate schedule.

    policy = build(options, ranks)
    hf_weights.load_hf(policy, directory)     # or save_load.load_checkpoint: a newly built model holds no weights yet
    logits = policy.chunks[-1](ids, positions, None, packed_seq_params=packed)   # [1, t, vocabulary / TP], last stage

A rank holds one chunk of consecutive layers, or with virtual pipeline stages several: chunk i of every pipeline rank
comes before chunk i + 1 of any.

Invariants: all of the architecture comes from config.json of --hf-checkpoint; a model that the user's function builds
(--custom-model-provider-path) has the same parameters, or loading it names those that are missing; the schedule counts
optimizer steps: `scheduler.step(1)` after each.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from hpcrl.config.custom_functions import guarded, short
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own, option_text
from hpcrl.config.rules.schedules import check_schedules, run_steps, schedule_steps, warmup_steps
from hpcrl.errors import HpcrlError, UsageError, raise_together
from hpcrl.models.divisions import undivided
from hpcrl.models.family import Config, Family, Rule, check_spec, find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.lora.matrices import AdaptedMatrix, adapted, adapter_tensors
from hpcrl.models.lora.settings import LoraSettings, lora_settings
from hpcrl.models.routing import find_routing, replay_flag
from hpcrl.models.shared.mtp import check_heads
from hpcrl.trainer.lora.attach import BaseIdentity, attach
from hpcrl.trainer.lora.layer import with_partial_gradients
from hpcrl.trainer.megatron import mtp
from hpcrl.trainer.megatron.fusions import NOTHING, Fusions
from hpcrl.trainer.megatron.output_head import give_values
from hpcrl.trainer.megatron.packed_attention import block_spec
from hpcrl.trainer.megatron.settings import Settings, config_class, construct, refusals, resolve_settings
from hpcrl.trainer.parallel_state import Ranks

PROVIDER = "custom_model_provider_path"
#: the weights, the adapters next to them, these with the scale in B, and the weights with them added in
Part = Literal["model", "adapter", "sent", "merged"]
ADAPTERS = ("adapter", "sent")
HEAD = ("output_layer.",)  #: of a critic, which is trained whatever else is


@dataclass(frozen=True)
class Policy:
    """The model that is trained, with its optimizer and schedule.

    Attributes:
        chunks: DDP around (for bf16) Float16Module around GPTModel, one for each virtual stage.
        config: their TransformerConfig.
        hf_config: config.json.
        optimizer, scheduler: Megatron's; the schedule counts optimizer steps.
        value_head: it is a critic, whose output layer gives one number for each row.
        fusions: what its layers fuse.
        heads: layers behind the last one that predict further tokens; they are trained where trains_heads says so.
        lora: what its adapters are like; None: it has none, and all its weights are trained.
        part: what of it is read, written or sent.
        base: with adapters, which weights they are trained over.
    """

    chunks: tuple[DistributedDataParallel, ...]
    config: TransformerConfig
    family: Family
    hf_config: Config
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    ranks: Ranks
    value_head: bool = False
    fusions: Fusions = NOTHING
    heads: int = 0
    trains_heads: bool = False
    lora: LoraSettings | None = None
    part: Part = "model"
    base: BaseIdentity = field(default_factory=BaseIdentity)

    def with_part(self, part: Part) -> Policy:
        """The same, to be read, written or sent of that part."""
        return replace(self, part=part)

    @property
    def of_adapters(self) -> bool:
        """Whether the part is the adapters."""
        return self.part in ADAPTERS

    @property
    def trained(self) -> Policy:
        """What changes in training: the adapters where there are any."""
        return self if self.lora is None else self.with_part("adapter")

    @cached_property
    def matrices(self) -> list[AdaptedMatrix]:
        """The layers with an adapter."""
        return adapted(self.family.tensors(self.hf_config), self.lora) if self.lora else []

    def tensors(self) -> list[tuple[str, Rule]]:
        """(Megatron name, rule) of every parameter of the whole model, or of its adapters."""
        if self.of_adapters:
            return list(adapter_tensors(self.matrices))
        return self.family.tensors(self.hf_config, self.heads)

    @property
    def modules(self) -> tuple[GPTModel, ...]:
        """The GPTModel inside the wrappers of each chunk."""
        return tuple(inner(chunk) for chunk in self.chunks)

    @property
    def model(self) -> DistributedDataParallel:
        """The only chunk.

        Raises:
            ValueError: where there are virtual stages.
        """
        (chunk,) = self.chunks
        return chunk

    @property
    def module(self) -> GPTModel:
        """The GPTModel of the only chunk.

        Raises:
            ValueError: where there are virtual stages.
        """
        return inner(self.model)

    @property
    def vocab_size(self) -> int:
        """Real tokens; rows of the output layer past it are padding and must be kept out of every softmax."""
        return self.hf_config["vocab_size"]


class NoOptimizer:
    """The optimizer of a model that is not trained."""

    def reload_model_params(self) -> None:
        """No copies to refresh."""


def build(options: Options, ranks: Ranks, *, trainable: bool = True, value_head: bool = False) -> Policy:
    """The model of --hf-checkpoint's config.json, without weights, on this rank's device; collective.

    The config says calculate_per_token_loss: a loss function returns (sum, count, report) of its micro-batch, Megatron
    sums gradients over micro-batches, DP and CP and divides them by the sum of all counts, whatever is counted.

    Args:
        trainable: with gradient buffers, optimizer and schedule; without, it only holds weights (for conversion).
        value_head: a critic; its head is 0 until weights are loaded, and no other part of it has anything to do with
            the vocabulary's size.

    Raises:
        UsageError: if the layout does not divide the model or a Megatron setting does not fit.
        DataError: for a bad config.json.
    """
    if options.hf_checkpoint is None:
        raise UsageError("--hf-checkpoint is not given", "name a Hugging Face model directory")
    hf_config = read_config(options.hf_checkpoint)
    family = find_family(hf_config, options.hf_checkpoint)
    check_spec(options.spec, hf_config)
    if replay_flag(options):
        find_routing(options, hf_config)
    check_heads(options, family, hf_config)
    fields = family.transformer(hf_config)
    gpt = family.gpt(hf_config)
    if value_head:  # with its embedding it shares nothing
        gpt = gpt | {"share_embeddings_and_output_weights": False}
    sizes = {name: hf_config.get(name) for name in ("vocab_size", "max_position_embeddings")}
    raise_together([*undivided(options, fields, None)])
    settings = resolve_settings(options, fields, {**gpt, **family.facts, **sizes})
    lora = lora_settings(options) if trainable else None
    if not trainable or lora:
        settings.transformer["perform_initialization"] = (
            False  # every weight comes from a file, and no gradient is taken
        )
    config = construct(config_class(settings.transformer), settings.transformer)
    stages = config.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(stages)  # some of Megatron asks here, some the config
    no_optimizer, heads = cast(Any, NoOptimizer()), options.mtp_num_layers or 0
    held = Policy((), config, family, hf_config, no_optimizer, cast(Any, None), ranks, value_head, heads=heads)
    modules = [_module(options, held, gpt, stage) for stage in (range(stages) if stages else [None])]
    for module in modules:
        if value_head:
            give_values(module, ranks.device)
        if trainable:
            settings.fusions.apply(module)
        if lora:
            attach(module, family, hf_config, lora, ranks, HEAD if value_head else ())
    if options.bf16:
        modules = [Float16Module(config, module) for module in modules]
    if not trainable:
        return replace(held, chunks=tuple(modules))
    return _trained(replace(held, fusions=settings.fusions, lora=lora), modules, settings, options)


def _module(options: Options, policy: Policy, gpt: dict[str, Any], stage: int | None) -> Any:
    """The GPTModel of one chunk of a policy: of virtual stage `stage`, or all of this rank's layers (None).

    Raises:
        HpcrlError: names a user's function that returns something else.
    """
    config, family, ranks = policy.config, policy.family, policy.ranks
    last = config.virtual_pipeline_model_parallel_size
    ends = {
        "pre_process": ranks.first_stage and stage in (None, 0),
        "post_process": ranks.last_stage and stage in (None, (last or 0) - 1),
    }

    def build() -> GPTModel:
        layers = block_spec(config, family.adapt, stage, apart=bool(options.lora_rank))
        made = GPTModel(
            config,
            layers,
            vocab_size=padded_vocab_size(policy.vocab_size, ranks.tp_size),
            max_sequence_length=policy.hf_config.get("max_position_embeddings", 2**20),
            parallel_output=True,
            vp_stage=stage,
            **ends,
            **gpt,
        )
        if options.mtp_num_layers:
            before_norm = family.heads_before_norm
            mtp.attach(made, layers, options.mtp_num_layers, options.enable_mtp_training, before_norm)
        return made

    if (path := options.custom_model_provider_path) is None:
        return build().to(ranks.device)
    shown = f"{option_text(PROVIDER)} {path}"
    made = guarded(load_own(PROVIDER, path), shown)(options, config, build, **ends, vp_stage=stage)
    if not isinstance(made, GPTModel):
        raise HpcrlError(
            f"{shown} returned {short(made)}, a GPTModel is expected", "return build(), changed as you like"
        )
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


def _trained(policy: Policy, modules: list[Any], settings: Settings, options: Options) -> Policy:
    """The policy with DDP, optimizer, schedule, and the hooks by which Megatron's schedules find them."""
    config = policy.config
    ddp = construct(DistributedDataParallelConfig, settings.ddp)
    # as Megatron-LM: buckets only for the first chunk, whose gradients come last
    with refusals("these settings for its DistributedDataParallel"):
        chunks = [
            DistributedDataParallel(config, ddp, module, disable_bucketing=i > 0) for i, module in enumerate(modules)
        ]
    optimizer = make_optimizer(chunks, settings.optimizer, options.enable_mtp_training)
    config.finalize_model_grads_func = (
        with_partial_gradients(finalize_model_grads) if options.lora_rank else finalize_model_grads
    )
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    made = {"optimizer": optimizer, "scheduler": make_scheduler(optimizer, options)}
    return replace(policy, chunks=tuple(chunks), trains_heads=options.enable_mtp_training, **made)


def make_optimizer(chunks: list[Any], values: dict[str, Any], heads: bool = False) -> MegatronOptimizer:
    """AdamW over the chunks' DDP buffers; norms and biases without weight decay (Megatron-LM's rule).

    Args:
        heads: layers that predict further tokens are among them, as groups of their own.
    """
    config = construct(OptimizerConfig, values)
    groups = get_standard_config_overrides(config) | (mtp.GROUPS if heads else {})
    with refusals("these settings for the optimizer"):
        made = get_megatron_optimizer(config, chunks, groups)
    if config.optimizer_cpu_offload:
        gc.collect()  # Megatron makes one for the whole parameters first, whose copies only Python's collector finds
    return made


def take_step(optimizer: MegatronOptimizer, norm: float, heads: float | None = None) -> bool:
    """Clip the gradients, whose norm over all ranks is `norm`, to --clip-grad and step; False if the optimizer refuses.

    For gradients after `prepare_grads()`: what Megatron's own `step()` does, without preparing and measuring them
    again.

    Args:
        heads: norm of the layers that predict further tokens, by which these alone are clipped; `norm` is of all
            others then.
    """
    if heads is None:
        _clip(optimizer, norm)
    else:
        for of_heads, own in ((False, norm), (True, heads)):
            with mtp.only(optimizer, of_heads):
                _clip(optimizer, own)
    return optimizer.step_with_ready_grads()


def _clip(optimizer: MegatronOptimizer, norm: float) -> None:
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(leaf, "is_stub_optimizer", False) or leaf.config.clip_grad <= 0:
            continue
        if parameters := leaf.get_parameters():
            decoupled = leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, leaf.config.clip_grad, norm, decoupled)


def make_scheduler(optimizer: MegatronOptimizer, options: Options) -> OptimizerParamScheduler:
    """Linear warm-up, then constant or down to --min-lr, over --lr-decay-iters; weight decay constant or growing over
    the whole run, as in Megatron-LM.

    Options that `check_options` has let pass.
    """
    grows = options.weight_decay_incr_style != "constant"
    with refusals("these settings for the learning-rate schedule"):
        return OptimizerParamScheduler(
            optimizer,
            init_lr=options.lr_warmup_init,
            max_lr=options.lr,
            min_lr=options.min_lr if options.lr_decay_style != "constant" else 0.0,
            lr_decay_style=options.lr_decay_style,
            start_wd=options.start_weight_decay if grows else options.weight_decay,
            end_wd=options.end_weight_decay if grows else options.weight_decay,
            wd_incr_style=options.weight_decay_incr_style,
            use_checkpoint_opt_param_scheduler=True,
            wsd_decay_steps=options.lr_wsd_decay_iters,
            lr_wsd_decay_style=options.lr_wsd_decay_style,
            **_lengths(options),
        )


def _lengths(options: Options) -> dict[str, Any]:
    """The scheduler's numbers of steps; of a run whose length is not known yet those that pass until `know_length`."""
    steps = schedule_steps(options) or max(options.lr_warmup_iters + 1, options.lr_wsd_decay_iters or 0)
    return {
        "lr_warmup_steps": warmup_steps(options, steps),
        "lr_decay_steps": steps,
        "wd_incr_steps": run_steps(options) or steps,
    }


def know_length(scheduler: OptimizerParamScheduler, options: Options, rollouts: int) -> None:
    """Give the schedule of a run with --num-epoch its length: so many rollouts, as the prompts turned out to fill.

    A resumed run has it from its checkpoint.

    Raises:
        UsageError: if the parts of the schedule do not fit into it.
    """
    if options.num_rollout is not None or scheduler.num_steps:
        return
    known = options.model_copy(update={"num_rollout": rollouts})
    check_schedules(known)
    scheduler.load_state_dict(scheduler.state_dict() | _lengths(known))
    scheduler.step(0)  # the rates of the first step
