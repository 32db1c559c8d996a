"""From options and a model's config to Megatron's three config dataclasses.

`options.megatron` holds fields of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig under their own
names; each goes to every dataclass that has it.  The dataclasses are asked for names and types: no list is kept here.

Invariant: a field that nobody has, that contradicts the model's config.json, that has an option of its own, that hpcrl
must fix, or that this machine cannot do, is a UsageError before anything is built; none is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from hpcrl.config.options import Options
from hpcrl.config.passthrough import as_flag
from hpcrl.config.setting_names import gather_table
from hpcrl.errors import UsageError
from hpcrl.models.model_args import check_model_args
from hpcrl.models.routing import replay_flag
from hpcrl.trainer.megatron import capabilities
from hpcrl.trainer.megatron.capabilities import Machine
from hpcrl.trainer.megatron.pipeline import pipeline_fields

CLASSES = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
ACTIVATIONS: dict[str, Callable] = {"silu": F.silu, "gelu": F.gelu}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Keyword arguments of the three dataclasses."""

    transformer: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]


def resolve_settings(
    options: Options, model: Mapping[str, Any], gpt: Mapping[str, Any], machine: Machine | None = None
) -> Settings:
    """All settings: the model's (checked against the user's), hpcrl's defaults under the user's, the options' own.

    model: TransformerConfig fields from config.json; gpt: GPTModel's arguments from it (vocab_size among them);
    machine: on which the model will be trained (None: this one).
    """
    machine = machine or Machine.here()
    settled = gather_table(
        "megatron", options.megatron, "[megatron]"
    )  # names that a machine without Megatron took as they were
    given = {name: _coerced(name, value) for name, value in check_model_args(settled, model, gpt).items()}
    capabilities.check_capabilities(given, _dataclass_defaults(), machine)
    if flag := replay_flag(options):
        capabilities.check_replay(given, flag)
    fused = capabilities.rope_fusion(given, model, machine)
    fixed = {**_fixed(options), **pipeline_fields(options, {**model, **given}, machine.cuda)}
    for name in given.keys() & fixed.keys():
        if given[name] != fixed[name]:
            raise UsageError(f"{as_flag(name, given[name])} cannot be: hpcrl needs {fixed[name]}")
    merged = {**_defaults(machine, given), "apply_rope_fusion": fused, **model, **given, **fixed}
    merged["activation_func"] = ACTIVATIONS[merged["activation_func"]]
    return Settings(*({k: v for k, v in merged.items() if k in _fields(cls)} for cls in CLASSES))


def construct(cls: type, values: Mapping[str, Any]) -> Any:
    """cls(**values); what its own checks refuse is a UsageError."""
    try:
        return cls(**values)
    except (AssertionError, ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"Megatron's {cls.__name__} refuses these settings: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Around building `what`: what Megatron's own checks refuse is a UsageError, not a traceback."""
    try:
        yield
    except (AssertionError, ValueError, NotImplementedError, ImportError) as error:
        raise UsageError(f"Megatron refuses these settings for {what}: {' '.join(str(error).split())}") from error


# ---- what hpcrl sets


def _defaults(machine: Machine, given: Mapping[str, Any]) -> dict[str, Any]:
    """Ours where the user says nothing: slime's where it sets them, else what runs."""
    return {
        "attention_softmax_in_fp32": True,
        "bias_activation_fusion": machine.cuda,
        "bias_dropout_fusion": machine.cuda,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
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


def _coerced(name: str, value: Any) -> Any:
    """A value from a flag or TOML in the type that the dataclass declares.  UsageError if it is none of that type."""
    hint = next(_fields(cls)[name] for cls in CLASSES if name in _fields(cls))
    choices = _members(hint)
    if isinstance(value, str):
        if torch.dtype in choices and value in DTYPES:
            return DTYPES[value]
        for choice in choices:
            if isinstance(choice, type) and issubclass(choice, enum.Enum) and value in choice.__members__:
                return choice[value]
    try:
        adapter = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise UsageError(f"{as_flag(name, value)}: {error.errors()[0]['msg']}") from None


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a union names, or the type itself."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(m for part in typing.get_args(hint) for m in _members(part)) if union else (hint,)


def _dataclass_defaults() -> dict[str, Any]:
    """The default of every field of the three dataclasses; the first that has it counts."""
    found: dict[str, Any] = {}
    for cls in reversed(CLASSES):
        for field in dataclasses.fields(cls):
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            found[field.name] = None if made is dataclasses.MISSING else made
    return found


_HINTS: dict[type, dict[str, Any]] = {}


def _fields(cls: type) -> dict[str, Any]:
    """Names and types of a dataclass's fields."""
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls)
        _HINTS[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
    return _HINTS[cls]
