"""Settings of Megatron-core that this machine cannot honour, or that nothing here would read.

Megatron notices some of them when the model is built, some at the first step, and some never: the run would continue
without what was asked for.  Invariant: a setting that passes `check_capabilities` has its effect.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hpcrl.config.megatron_flags import INFERENCE, NEEDS, PARTS, VALUE_NEEDS
from hpcrl.config.passthrough import as_flag
from hpcrl.config.rules.passed_through import check_megatron
from hpcrl.errors import UsageError
from hpcrl.trainer.megatron.kernels import find_kernels


@dataclass(frozen=True)
class Machine:
    """What settings ask of a machine: CUDA, packages of PARTS, and the kernels that these have (kernels.py)."""

    cuda: bool
    packages: frozenset[str]
    kernels: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        known = {package for packages in PARTS.values() for package in packages}
        cuda = torch.cuda.is_available()
        packages = frozenset(name for name in known if importlib.util.find_spec(name))
        return cls(cuda, packages, find_kernels() if cuda else frozenset())

    def has(self, part: str) -> bool:
        """Whether there is CUDA, and the part ("": CUDA alone)."""
        return self.cuda and (not part or not self.packages.isdisjoint(PARTS[part]))

    @property
    def engine(self) -> bool:
        """Whether layers are built from Transformer Engine: where there is CUDA and it is installed."""
        return self.has("Transformer Engine")


#: what makes another model than config.json says, in addition to what `hpcrl.models.model_args` compares with it
ARCHITECTURE = {
    "apply_residual_connection_post_layernorm",
    "is_hybrid_model",
    "linear_attention_freq",
    "mrope_section",
    "window_attn_skip_freq",
}


def check_capabilities(given: Mapping[str, Any], defaults: Mapping[str, Any], machine: Machine) -> None:
    """Raise UsageError for the first of the user's settings that cannot have its effect on `machine`.

    Args:
        given: the user's settings that config.json does not decide, by field, in the types of their fields.
        defaults: the default of every field.
    """
    for name, value in given.items():
        if name in ARCHITECTURE and value != defaults[name]:
            raise UsageError(f"{as_flag(name, value)}: the model's config.json does not say so", "leave the flag out")
        if value and name in NEEDS:
            _need(machine, name, value, NEEDS[name])
        plain = getattr(value, "name", value)  # of an enum
        if isinstance(plain, (str, bool)) and (part := VALUE_NEEDS.get((name, plain))):
            _need(machine, name, value, part)
    check_megatron({name: getattr(value, "name", value) for name, value in given.items()})
    _combinations(given, machine)


def _combinations(given: Mapping[str, Any], machine: Machine) -> None:
    if getattr(given.get("attention_backend"), "name", "") == "local":
        _refuse("attention_backend", "local", "Megatron's own attention takes no packed sequences")
    if given.get("transformer_impl") == "inference_optimized":
        _refuse("transformer_impl", "inference_optimized", INFERENCE)
    if given.get("transformer_impl") == "local" and given.get("moe_grouped_gemm"):
        _refuse("moe_grouped_gemm", True, "it is Transformer Engine's, which --transformer-impl local leaves out")
    if "layernorm" in (given.get("recompute_modules") or ()):
        _need(machine, "recompute_modules", "layernorm", "Transformer Engine")


def _need(machine: Machine, name: str, value: Any, part: str) -> None:
    if not machine.cuda:
        also = f" and {part}" if part else ""
        raise UsageError(f"{as_flag(name, value)} cannot be done without CUDA{also}", "leave it out on a CPU")
    if not machine.has(part):
        raise UsageError(
            f"{as_flag(name, value)} needs {part}, which is not installed here", "install it, or leave the flag out"
        )


def _refuse(name: str, value: Any, why: str) -> NoReturn:
    raise UsageError(f"{as_flag(name, value)} cannot be set: {why}", "leave it out")
