"""Settings of Megatron-core and vLLM that pass through hpcrl under their own names.

The installed packages' dataclasses say which there are; here are only the few flags whose spelling does not follow
from the field, and the settings that are hpcrl's to decide.  Invariant: a setting that hpcrl decides is refused with
the reason, never overwritten in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from hpcrl.config import megatron_flags
from hpcrl.config.dataclass_fields import Setting, locate, read_fields
from hpcrl.config.options import Options
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError

Table = Literal["megatron", "vllm"]
UNCHECKED = Kind(
    "any", bare=True
)  #: the package is not installed here: the package checks it when it reads the setting

#: (module, class), read in this order; a missing one is skipped (vLLM's frontend has moved between releases)
CLASSES: dict[Table, tuple[tuple[str, str], ...]] = {
    "megatron": (
        ("megatron.core.model_parallel_config", "ModelParallelConfig"),
        ("megatron.core.transformer.transformer_config", "TransformerConfig"),
        ("megatron.core.transformer.transformer_config", "MLATransformerConfig"),
        ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
        ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
    ),
    "vllm": (
        ("vllm.engine.arg_utils", "EngineArgs"),
        ("vllm.engine.arg_utils", "AsyncEngineArgs"),
        ("vllm.entrypoints.launchers.cli_args", "BaseFrontendArgs"),
        ("vllm.entrypoints.launchers.cli_args", "FrontendArgs"),
        ("vllm.entrypoints.openai.cli_args", "BaseFrontendArgs"),
        ("vllm.entrypoints.openai.cli_args", "FrontendArgs"),
    ),
}

#: what a user may say of the model in addition to TransformerConfig: arguments of Megatron's GPTModel, compared with
#: config.json
MODEL_ARGUMENTS: dict[str, Kind] = {
    "group_query_attention": Kind("bool"),
    "max_position_embeddings": Kind("int"),
    "position_embedding_type": Kind("str"),
    "post_mlp_layernorm": Kind("bool"),
    "post_self_attn_layernorm": Kind("bool"),
    "rope_scaling": Kind("bool"),
    "rope_scaling_factor": Kind("float"),
    "rotary_base": Kind("float"),
    "rotary_percent": Kind("float"),
    "seq_length": Kind("int"),
    "share_embeddings_and_output_weights": Kind("bool"),
    "vocab_size": Kind("int"),
}

#: Megatron's flags that do not follow from a field's name -> (field, the value they stand for; None: the flag's own
#: value)
IRREGULAR: dict[str, tuple[str, Any]] = {
    **megatron_flags.IRREGULAR,
    "accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_fp32", True),
    "ddp-average-in-collective": ("average_in_collective", True),
    "ddp-bucket-size": ("bucket_size", None),
    "ddp-reduce-scatter-with-fp32-accumulation": ("reduce_scatter_with_fp32_accumulation", True),
    "decoder-first-pipeline-num-layers": ("num_layers_in_first_pipeline_stage", None),
    "decoder-last-pipeline-num-layers": ("num_layers_in_last_pipeline_stage", None),
    "no-bias-gelu-fusion": ("bias_activation_fusion", False),
    "no-bias-swiglu-fusion": ("bias_activation_fusion", False),
    "no-check-for-nan-in-loss-and-grad": ("check_for_nan_in_grad", False),
    "no-overlap-p2p-communication": ("overlap_p2p_comm", False),
    "no-rope-fusion": ("apply_rope_fusion", False),
    "num-experts": ("num_moe_experts", None),
    "rotary-scaling-factor": ("rope_scaling_factor", None),
    "swiglu": ("gated_linear_unit", True),
    "untie-embeddings-and-output-weights": ("share_embeddings_and_output_weights", False),
    "use-rope-scaling": ("rope_scaling", True),
    "use-rotary-position-embeddings": ("position_embedding_type", "rope"),
}

_MODEL = "it is read from the model's config.json (--hf-checkpoint)"
_ONE_ENGINE = (
    "an engine's GPUs are divided by tensor and data parallelism: use --rollout-num-gpus-per-engine, "
    "--vllm-data-parallel-size, and --rollout-num-gpus for more engines"
)

#: Megatron's flags that describe the model and have no counterpart to compare with
_OF_MODEL = """
make_vocab_size_divisible_by padded_vocab_size squared_relu
"""

#: vLLM's ways to split an engine over processes
_SPLIT = """
tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size data_parallel_rank
data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend data_parallel_supervisor_port
"""

#: settings that are hpcrl's to decide -> why, or what to use instead
OWNED: dict[Table, dict[str, str]] = {
    "megatron": megatron_flags.REFUSED
    | dict.fromkeys(_OF_MODEL.split(), _MODEL)
    | {
        "autocast_dtype": "use --bf16 or --no-bf16",
        "enable_autocast": "use --bf16 or --no-bf16",
        "fp16": "training is in bf16 or fp32: use --bf16 or --no-bf16",
        "hierarchical_context_parallel_sizes": "use --context-parallel-size",
        "hybrid_context_parallel": "use --context-parallel-size",
        "params_dtype": "use --bf16 or --no-bf16",
        "perform_initialization": "weights come from --hf-checkpoint or --load",
        "pipeline_dtype": "use --bf16 or --no-bf16",
        "variable_seq_lengths": "samples are packed, so lengths always vary",
        "batch_p2p_sync": "torch's batched messages wait for the stream by themselves",
    },
    "vllm": {
        "api_key": "every route of an engine asks for the key of the run",
        "config": "write vLLM's settings in the recipe's table [vllm]",
        "distributed_executor_backend": "it is chosen by --rollout-num-gpus-per-engine",
        "dtype": "use --bf16 or --no-bf16",
        "enable_scale_out": "token ids go in and out through it",
        "grpc_port": "an engine listens on one port",
        "headless": "every engine serves requests",
        "generation_config": "sampling is set by the --rollout-* options alone",
        "host": "the plan names the host",
        "logprobs_mode": "log-probs are those of the sampling temperature, as the trainer computes them",
        "master_addr": "the plan names the hosts",
        "master_port": "ports are chosen at start and published",
        "max_model_len": "use --rollout-max-context-len",
        "middleware": "it holds the guard of the run's key",
        "model": "use --hf-checkpoint",
        "nnodes": "the plan names the hosts",
        "node_rank": "the plan names the hosts",
        "port": "ports are chosen at start and published",
        "seed": "use --seed",
        "served_model_name": "the rollout process asks for it by name",
        "ssl_certfile": "the trainer and the rollout process speak plain HTTP",
        "ssl_keyfile": "the trainer and the rollout process speak plain HTTP",
        "tokenizer": "use --hf-checkpoint",
        "uds": "an engine listens on one port",
        "weight_transfer_config": "use --weight-transfer",
        "worker_cls": "the weights are received in vLLM's own worker",
        "worker_extension_cls": "it receives the weights",
    }
    | dict.fromkeys(_SPLIT.split(), _ONE_ENGINE),
}


@dataclass(frozen=True)
class Target:
    """Where a flag or key leads: a table ("" is hpcrl's own options), a field there, and the kind of its value.

    Attributes:
        fixed: the value that the flag itself stands for, as `--no-x` does; None where the value follows the flag.
    """

    table: Literal["", "megatron", "vllm"]
    field: str
    kind: Kind
    fixed: Any = None


@cache
def settings(table: Table) -> dict[str, Setting] | None:
    """Every setting of the table, the first class that has it winning; None if the package is not installed."""
    if not locate(table):
        return None
    found: dict[str, Setting] = {}
    for module, cls in CLASSES[table]:
        found |= {name: setting for name, setting in (read_fields(module, cls) or {}).items() if name not in found}
    if table == "megatron":
        help = "compared with the model's config.json"
        found |= {name: Setting(name, kind, "", help, "GPTModel") for name, kind in MODEL_ARGUMENTS.items()}
    return found or None


def dashed(name: str) -> str:
    """A field's name as a flag spells it."""
    return name.replace("_", "-")


def flag(name: str) -> str:
    """An option as an error names it."""
    return f"--{dashed(name)}"


@cache
def spellings(table: Table) -> dict[str, Target]:
    """Every flag of a table, without the leading dashes -> where it leads.  Empty if the package is not installed.

    Megatron's fields that are options of hpcrl's own are left out.
    """
    found: dict[str, Target] = {}
    for setting in (settings(table) or {}).values():
        if table == "vllm" or setting.name not in Options.model_fields:
            found |= _flags(table, setting)
    if table == "megatron" and found:
        found |= {
            flag: _irregular(flag, found.get(dashed(field)))
            for flag, (field, _) in IRREGULAR.items()
            if dashed(field) in found
        }
    return found


@cache
def _preferred() -> dict[tuple[str, bool | None], str]:
    """(Megatron's field, the value of a switch or None) -> the flag of Megatron-LM's that says it, where just one other
    does."""
    found: dict[tuple[str, bool | None], list[str]] = {}
    for flag, target in spellings("megatron").items():
        regular = dashed(target.field)
        if flag not in (regular, f"no-{regular}", f"disable-{regular}") and (
            target.fixed is None or isinstance(target.fixed, bool)
        ):
            found.setdefault((target.field, target.fixed), []).append(flag)
    return {said: flags[0] for said, flags in found.items() if len(flags) == 1}


def as_flag(field: str, value: Any) -> str:
    """A setting of Megatron's as a command line has it: --swiglu, --no-rope-fusion, --norm-epsilon 1e-06.

    Args:
        value: also a member of an enumeration, shown by its name.
    """
    if isinstance(value, bool):
        return f"--{_preferred().get((field, value)) or ('' if value else 'no-') + dashed(field)}"
    return f"--{_preferred().get((field, None)) or dashed(field)} {getattr(value, 'name', value)}"


def _irregular(flag: str, regular: Target | None) -> Target:
    """Where an irregular flag leads, given where the regular one of its field does (None: the package is not
    installed)."""
    field, value = IRREGULAR[flag]
    if value is None:
        return Target("megatron", field, regular.kind if regular else UNCHECKED)
    return Target("megatron", field, Kind("bool"), value)


def _flags(table: Table, setting: Setting) -> dict[str, Target]:
    """The flags of a setting: --x, or --vllm-x for one of vLLM's.

    --no-x turns a switch off. Megatron's switches that are on by default also have --disable-x. Other
    names that a setting declares are flags too."""
    name, prefix = dashed(setting.name), "vllm-" if table == "vllm" else ""
    flags: dict[str, bool | None] = dict.fromkeys((name, *setting.spellings))
    if setting.kind.base == "bool" and not setting.kind.many:
        flags = {name: True, f"no-{name}": False} | dict.fromkeys(setting.spellings, not setting.on_by_default)
        flags |= {f"disable-{name}": False} if table == "megatron" and setting.on_by_default else {}
    return {f"{prefix}{flag}": Target(table, setting.name, setting.kind, value) for flag, value in flags.items()}


def refuse_owned(table: Table, flag: str, shown: str) -> None:
    """Raise UsageError if `flag` (with vLLM's prefix, if it has one) is hpcrl's to decide; `shown` is how the user
    wrote it.
    """
    target = spellings(table).get(flag)
    plain = flag.removeprefix("vllm-") if table == "vllm" else flag
    for name in (target.field if target else "", plain.replace("-", "_"), plain.removeprefix("no-").replace("-", "_")):
        if reason := OWNED[table].get(name):
            raise UsageError(f"{shown} cannot be set: {reason}", "leave it out" if "use -" not in reason else "")


def find_setting(table: Table, flag: str, shown: str) -> Target | None:
    """Where a flag (without leading dashes) leads in a table; None if the installed package knows no such setting.

    Raises:
        UsageError: if it is hpcrl's to decide, or holds something that cannot be written.
    """
    refuse_owned(table, flag, shown)
    if settings(table) is None:
        if table == "megatron" and flag in IRREGULAR:
            return _irregular(flag, None)
        name = flag.removeprefix("vllm-")
        off = table == "vllm" and name.startswith("no-")
        return Target(
            table, name.removeprefix("no-" if off else "").replace("-", "_"), UNCHECKED, False if off else None
        )
    target = spellings(table).get(flag)
    if target and target.kind.base == "none":
        raise UsageError(f"{shown} cannot be set: it is not a value that can be written", "leave it out")
    return target
