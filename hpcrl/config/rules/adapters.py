"""What the options of an adapter must say together: pure functions of the options.

Invariant: what would change weights under an adapter, or leave part of what is trained out of it, ends here.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.options import AdapterOptions, Options
from hpcrl.config.passthrough import as_flag, dashed
from hpcrl.errors import UsageError, failures, raise_together

_BASE = "the weights under an adapter stay as they are"
#: settings of Megatron's that do not go with adapters, and why
_MEGATRON = {
    "moe_shared_expert_overlap": "shared experts would be computed past their adapters",
    "moe_router_bias_update_rate": _BASE,
    "fp8_param": "adapters are next to weights in bf16 or fp32",
    "fp8_param_gather": "adapters are next to weights in bf16 or fp32",
}


def check_adapters(o: Options) -> None:
    """Raise UsageError for all that cannot be with --lora-rank."""
    if o.lora_rank:
        raise_together(failures([_trained_too, _megatron, _names, _engines], o))


def _trained_too(o: Options) -> None:
    for name in ("enable_mtp_training", "critic_load"):
        if getattr(o, name):
            raise UsageError(f"--{dashed(name)} and --lora-rank exclude each other: {_BASE}", "leave one of them out")


def _megatron(o: Options) -> None:
    for name, why in _MEGATRON.items():
        if value := o.megatron.get(name):
            raise UsageError(
                f"{as_flag(name, value)} and --lora-rank exclude each other: {why}", "leave one of them out"
            )


def _names(o: Options) -> None:
    if not o.target_modules:
        raise UsageError("--target-modules names nothing", "leave it out: all-linear is the default")


def _engines(o: Options) -> None:
    for name in o.vllm:
        if "lora" in name:
            raise UsageError(f"--vllm-{dashed(name)}: engines are started for the adapter of the run", "leave it out")


def inert_in_adapters(o: Options) -> Iterator[tuple[str, str]]:
    """(option, why) of what has no effect."""
    if not o.lora_rank:
        yield from ((name, "--lora-rank is not given") for name in AdapterOptions.model_fields if name != "lora_rank")
