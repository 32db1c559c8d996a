"""From options and a model's config to Megatron's three config dataclasses, and to the cut of the pipeline.

`options.megatron` holds fields of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig under their own
names; each goes to every dataclass that has it.  The dataclasses are asked for names and types: no list is kept here.

With v virtual stages each pipeline rank holds v chunks of layers, and at one time may send to and receive from both
neighbours.  Megatron's batched exchange tells messages apart by the peer alone: between two ranks, and over gloo, it
delivers the activation of one chunk as that of another, without an error.

Invariants: a field that no dataclass has, that contradicts the model's config.json, that has its own option, that
hpcrl must fix, or that this machine cannot honour, is a UsageError before anything is built; no field is dropped;
virtual stages always exchange by single, overlapped messages over gloo and between two ranks, and over gloo no buffer
is freed that may not have been sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from hpcrl.config.options import Options
from hpcrl.config.passthrough import as_flag
from hpcrl.config.setting_names import gather_table
from hpcrl.errors import UsageError
from hpcrl.models.model_args import check_model_args
from hpcrl.models.routing import replay_flag
from hpcrl.trainer.megatron import capabilities
from hpcrl.trainer.megatron.capabilities import Machine
from hpcrl.trainer.megatron.fusions import Fusions, check_replay, choose_fusions

CLASSES = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
ACTIVATIONS: dict[str, Callable] = {"silu": F.silu, "gelu": F.gelu}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Keyword arguments of the three dataclasses, and what is fused."""

    transformer: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]
    fusions: Fusions


def resolve_settings(
    options: Options, model: Mapping[str, Any], gpt: Mapping[str, Any], machine: Machine | None = None
) -> Settings:
    """All settings: the model's (checked against the user's), hpcrl's defaults under the user's, the options' own.

    Args:
        model: TransformerConfig fields from config.json.
        gpt: GPTModel's arguments from it (vocab_size among them).
        machine: on which the model will be trained (None: this one).
    """
    machine = machine or Machine.here()
    # once more: a machine without Megatron took names and values as they were
    settled = gather_table("megatron", options.megatron, "[megatron]")
    defaults = _dataclass_defaults()
    given = {name: _coerced(value, defaults[name]) for name, value in check_model_args(settled, model, gpt).items()}
    capabilities.check_capabilities(given, machine)
    if flag := replay_flag(options):
        check_replay(given, flag)
    fusions = choose_fusions(given, model, machine, flag or "", options.log_probs_chunk_size > 0)
    fixed = {**_fixed(options), **pipeline_fields(options, {**model, **given}, machine.cuda)}
    for name in given.keys() & fixed.keys():
        if given[name] != fixed[name]:
            raise UsageError(f"{as_flag(name, given[name])} cannot be: hpcrl needs {fixed[name]}")
    merged = {**_defaults(machine, given), **model, **given, **fusions.settings, **fixed}
    merged["activation_func"] = ACTIVATIONS[merged["activation_func"]]
    classes = (config_class(merged), *CLASSES[1:])
    names = ({field.name for field in dataclasses.fields(cls) if field.init} for cls in classes)
    return Settings(*({k: v for k, v in merged.items() if k in own} for own in names), fusions)


def config_class(fields: Mapping[str, Any]) -> type[TransformerConfig]:
    """Of a model's configuration: with multi-head latent attention a subclass that has its sizes."""
    return MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Around building `what`: what Megatron's own checks refuse is a UsageError, not a traceback."""
    try:
        yield
    except (AssertionError, ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise UsageError(f"Megatron refuses {what}: {' '.join(str(error).split())}") from error


def construct(cls: type, values: Mapping[str, Any]) -> Any:
    """cls(**values); what its own checks refuse is a UsageError."""
    with refusals(f"these settings of its {cls.__name__}"):
        return cls(**values)


# ---- what hpcrl sets


def _defaults(machine: Machine, given: Mapping[str, Any]) -> dict[str, Any]:
    """Ours where the user says nothing: slime's where it sets them, else what runs."""
    return {
        "attention_softmax_in_fp32": True,
        "bias_activation_fusion": machine.cuda,
        "bias_dropout_fusion": machine.cuda,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "init_method_std": 0.02,
        "use_cpu_initialization": False,
        "cuda_graph_scope": [],  # the default is deprecated, and says so on every rank
        "grad_reduce_in_fp32": True,  # Megatron-LM turns it on for bf16
        # it ends one rank with a traceback; step/train_batch.py checks the norm on all, and names the step
        "check_for_nan_in_grad": False,
        "use_distributed_optimizer": True,
        "optimizer": "adam",
        "decoupled_weight_decay": True,
        "optimizer_offload_fraction": 1.0,  # as Megatron-LM: --optimizer-cpu-offload moves all of it
        "store_param_remainders": False,  # a checkpoint that fits any layout has full precision
        "transformer_impl": "transformer_engine" if machine.engine else "local",
        # one GEMM for all experts of a layer, where they are Transformer Engine's; else one after another
        "moe_grouped_gemm": machine.engine and given.get("transformer_impl") != "local",
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


def _fixed(options: Options) -> dict[str, Any]:
    """What the options say, and what packed sequences and our loss need."""
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    tp = options.tensor_model_parallel_size
    return {
        "tensor_model_parallel_size": tp,
        "context_parallel_size": options.context_parallel_size,
        "expert_model_parallel_size": options.expert_model_parallel_size,
        "expert_tensor_parallel_size": options.expert_tensor_size,
        # these count or weigh every row that goes through the router, those of padding too
        "moe_router_bias_update_rate": 0.0,
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "sequence_parallel": options.sequence_parallel and tp > 1,  # as Megatron-LM: nothing to split for TP 1
        "bf16": options.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "hidden_dropout": 0.0,  # with dropout a token's log-prob would not be a fact of the weights
        "attention_dropout": 0.0,
        "deterministic_mode": options.deterministic_mode,
        # gradients are summed over DP and CP, then divided by the counts the loss returns
        "calculate_per_token_loss": True,
        # the weights come from a file, but only initialization marks them as split over TP, and without the mark the
        # gradient norm leaves out the parts of all TP ranks but the first
        "perform_initialization": True,
        "lr": options.lr,
        "min_lr": options.min_lr,
        "weight_decay": options.weight_decay,
        "adam_beta1": options.adam_beta1,
        "adam_beta2": options.adam_beta2,
        "adam_eps": options.adam_eps,
        "clip_grad": options.clip_grad,
    }


# ---- what the user gives


def _coerced(value: Any, default: Any) -> Any:
    """A dtype or a member of an enumeration by its name in a flag or TOML, where the field's default is one."""
    if isinstance(value, str) and isinstance(default, torch.dtype):
        return DTYPES[value]
    return type(default)[value] if isinstance(value, str) and isinstance(default, enum.Enum) else value


def _dataclass_defaults() -> dict[str, Any]:
    """The default of every field of the three dataclasses; the first that has it counts."""
    found: dict[str, Any] = {}
    for cls in reversed(CLASSES):
        for field in dataclasses.fields(cls):
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            found[field.name] = None if made is dataclasses.MISSING else made
    return found


STAGES = "--num-virtual-stages-per-pipeline-rank"
OVERLAP = "--overlap-p2p-comm"


def pipeline_fields(options: Options, fields: Mapping[str, Any], cuda: bool) -> dict[str, Any]:
    """TransformerConfig's fields on pipeline stages.

    Args:
        fields: of the model and the user's own; read are num_layers, the uneven stages, the layout and
            overlap_p2p_comm.
        cuda: whether messages go by NCCL, else by gloo.

    Raises:
        UsageError: if the user's way to exchange activations would be wrong.
    """
    size = options.pipeline_model_parallel_size
    stages = _stages(options, fields)
    overlap = fields.get("overlap_p2p_comm")
    if stages is None:
        if overlap:
            raise UsageError(
                f"{OVERLAP} overlaps the messages of virtual pipeline stages", f"give {STAGES}, or leave it out"
            )
        if fields.get("microbatch_group_size_per_vp_stage"):
            raise UsageError(
                f"--microbatch-group-size-per-virtual-pipeline-stage has no effect without {STAGES}", "leave it out"
            )
        overlap = False
    else:
        overlap = True if overlap is None else overlap
        if not overlap and (size == 2 or not cuda):
            where = "between two pipeline ranks" if size == 2 else "over gloo"
            raise UsageError(
                f"--no-overlap-p2p-communication with virtual pipeline stages: {where} Megatron's batched messages "
                "reach the wrong stage",
                "leave it out",
            )
    return {
        "pipeline_model_parallel_size": size,
        "virtual_pipeline_model_parallel_size": stages,
        "overlap_p2p_comm": overlap,
        "batch_p2p_comm": not overlap,
        # Megatron would hold the host until the GPU is idle after each message, for versions of torch whose batched
        # messages did not wait for the stream; with virtual stages it still does so once for the shapes of each
        "batch_p2p_sync": False,
        "variable_seq_lengths": size > 1,  # packed micro-batches differ in length
        # As Megatron-LM: an activation that was sent is not needed any more.  But the messages of virtual stages may
        # still be under way then: a CUDA stream keeps the order, gloo would send what has taken the activation's place.
        "deallocate_pipeline_outputs": size > 1 and (stages is None or cuda),
    }


def _stages(options: Options, fields: Mapping[str, Any]) -> int | None:
    """Virtual stages of one pipeline rank; None for one."""
    size = options.pipeline_model_parallel_size
    layers = fields["num_layers"]
    # the embedding, or the output layer, may take the place of a layer
    layers += sum(bool(fields.get(f"account_for_{what}_in_pipeline_split")) for what in ("embedding", "loss"))
    per_stage = options.num_layers_per_virtual_pipeline_stage
    stages = options.num_virtual_stages_per_pipeline_rank
    if layout := fields.get("pipeline_model_parallel_layout"):
        if per_stage or stages or any(fields.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")):
            raise UsageError("--pipeline-model-parallel-layout says which layer is where", "leave the other cuts out")
        with refusals(f"--pipeline-model-parallel-layout {layout}"):
            stages = PipelineParallelLayerLayout(layout, size).virtual_pipeline_model_parallel_size
    elif per_stage:
        stages = layers // (size * per_stage)
    return stages if stages and stages > 1 else None
