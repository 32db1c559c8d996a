"""What settings of Megatron's and vLLM's must say together: pure functions of the settings that the user gave.

The packages would refuse most of it themselves, but on the nodes, when the job has begun.

Invariant: needs neither package; what only one kind of machine can do is looked at where the machine is
(`trainer/megatron/capabilities.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NoReturn

from hpcrl.config.megatron_flags import NEVER
from hpcrl.config.options import Options
from hpcrl.config.passthrough import as_flag, settings
from hpcrl.errors import UsageError

_OVERLAPS = """
tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag
tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
tp_comm_split_rs
"""
#: a setting -> (what it modifies, that setting's value) without which nothing reads it
WITHOUT: dict[str, tuple[str, Any]] = {
    "optimizer_offload_fraction": ("optimizer_cpu_offload", True),
    "overlap_cpu_optimizer_d2h_h2d": ("optimizer_cpu_offload", True),
    "use_torch_optimizer_for_cpu_offload": ("optimizer_cpu_offload", True),
    "pin_cpu_grads": ("optimizer_cpu_offload", True),
    "pin_cpu_params": ("optimizer_cpu_offload", True),
    **dict.fromkeys(_OVERLAPS.split(), ("tp_comm_overlap", True)),
    "recompute_method": ("recompute_granularity", "full"),
    "recompute_num_layers": ("recompute_granularity", "full"),
    "distribute_saved_activations": ("recompute_granularity", "full"),
    "recompute_modules": ("recompute_granularity", "selective"),
}
#: values of --cp-comm-type
CONTEXT_WAYS = ("p2p", "all_gather", "a2a")
#: a setting of a pipeline, which without one has no effect
_OF_PIPELINES = "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout"
#: a setting of vLLM's -> the least value that makes sense
_LEAST = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 1, "swap_space": 0, "cpu_offload_gb": 0}


def check_passed_through(o: Options) -> None:
    """Raise UsageError for the first setting of Megatron's that contradicts another."""
    check_megatron({name: getattr(value, "name", value) for name, value in o.megatron.items()})
    if o.pipeline_model_parallel_size == 1:
        for name in _OF_PIPELINES.split():
            if (value := o.megatron.get(name)) is not None:
                _refuse(name, value, "there is no pipeline: --pipeline-model-parallel-size is 1")


def check_megatron(given: Mapping[str, Any]) -> None:
    """Raise UsageError for the first of these settings, by field, that contradicts another or has no effect with it."""
    for name, (master, wanted) in WITHOUT.items():
        if given.get(name) not in (None, False) and given.get(master) != wanted:
            raise UsageError(
                f"{as_flag(name, given[name])} has no effect without {as_flag(master, wanted)}", "leave it out"
            )
    for rule in (_without_place, _context, _recomputation, _dispatcher, _optimizer, _dropout):
        rule(given)


def _without_place(given: Mapping[str, Any]) -> None:
    known = settings("megatron") or {}
    for name, why in NEVER.items():
        value = given.get(name)
        if value not in (None, False) and not (name in known and value == _default(known[name].default)):
            _refuse(name, value, why)


def _default(source: str) -> object:
    """A default as the package's source has it; one that is computed equals no value."""
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return object()


def _context(given: Mapping[str, Any]) -> None:
    """How the parts of a sequence meet in attention: one way for all layers, or a list of one for each."""
    value = given.get("cp_comm_type")
    for kind in value if isinstance(value, list) else [value]:
        if kind == "a2a+p2p":
            _refuse("cp_comm_type", kind, "ranks make no groups of groups for context parallelism")
        if kind is not None and kind not in CONTEXT_WAYS:
            raise UsageError(f"--cp-comm-type {kind}: expected one of {', '.join(CONTEXT_WAYS)}")


def _recomputation(given: Mapping[str, Any]) -> None:
    if given.get("recompute_granularity") != "full":
        return
    for name, proposed in (("recompute_method", "uniform"), ("recompute_num_layers", 1)):
        if given.get(name) is None:
            raise UsageError(
                f"--recompute-granularity full without {as_flag(name, proposed).split()[0]}",
                f"give {as_flag(name, proposed)}",
            )
    if given["recompute_num_layers"] < 1:
        raise UsageError(f"--recompute-num-layers {given['recompute_num_layers']}: expected a whole number >= 1")


def _dispatcher(given: Mapping[str, Any]) -> None:
    kind = given.get("moe_token_dispatcher_type", "alltoall")
    if kind == "flex":
        return
    for name in ("moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_deepep_num_sms"):
        if given.get(name) not in (None, False):
            other = f"--moe-token-dispatcher-type {kind}"
            raise UsageError(f"{as_flag(name, given[name])} with {other}", "give --moe-token-dispatcher-type flex")


def _optimizer(given: Mapping[str, Any]) -> None:
    kind = given.get("optimizer", "adam")
    distributed = given.get("use_distributed_optimizer", True)
    if kind not in ("adam", "sgd"):
        _refuse("optimizer", kind, "hpcrl builds adam or sgd")
    if kind == "sgd" and distributed:
        _refuse(
            "optimizer", "sgd", "Megatron's distributed optimizer is Adam's; give --no-use-distributed-optimizer too"
        )
    if given.get("use_precision_aware_optimizer") and not distributed:
        _refuse(
            "use_precision_aware_optimizer",
            True,
            "it is a distributed optimizer's; leave out --no-use-distributed-optimizer",
        )
    if given.get("store_param_remainders"):
        _refuse("store_param_remainders", True, "a checkpoint that fits any layout has full precision")
    if given.get("optimizer_cpu_offload") and not given.get("use_precision_aware_optimizer"):
        what = (
            "--optimizer-cpu-offload without --use-precision-aware-optimizer: Megatron could not load its checkpoints"
        )
        raise UsageError(what, "give both")
    if given.get("optimizer_cpu_offload") and given.get("decoupled_weight_decay") is False:
        _refuse("optimizer_cpu_offload", True, "it is AdamW's: leave --no-decoupled-weight-decay out")


def _dropout(given: Mapping[str, Any]) -> None:
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= given.get(name, 0.0) < 1:
            raise UsageError(f"{as_flag(name, given[name])}: expected a number >= 0 and < 1")


def _refuse(name: str, value: Any, why: str) -> NoReturn:
    raise UsageError(f"{as_flag(name, value)} cannot be set: {why}", "leave it out")


# ---- vLLM's


def check_engine_settings(o: Options) -> None:
    """Raise UsageError for the first setting of vLLM's that is out of range or contradicts another."""
    share = o.vllm.get("gpu_memory_utilization")
    if share is not None and not 0 < share <= 1:
        raise UsageError(f"--vllm-gpu-memory-utilization {share:g}: expected a number > 0 and <= 1")
    if o.vllm.get("enforce_eager") and o.vllm.get("cudagraph_capture_sizes"):
        raise UsageError(
            "--vllm-cudagraph-capture-sizes has no effect with --vllm-enforce-eager, which captures nothing",
            "leave one of them out",
        )
    for name, least in _LEAST.items():
        value = o.vllm.get(name)
        if isinstance(value, (int, float)) and value < least:
            raise UsageError(f"--vllm-{name.replace('_', '-')} {value}: expected a number >= {least}")
    for token in o.rollout_stop_token_ids:
        if token < 0:
            raise UsageError(f"--rollout-stop-token-ids {token}: a token id is a number >= 0")
