"""Settings of Megatron-core that this machine cannot honour, or that nothing here would read.

Megatron notices some of them when the model is built, some at the first step, and some never: the run would continue
without what was asked for.  Invariant: a setting that passes `check_capabilities` has its effect.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hpcrl.config.megatron_flags import INFERENCE, NEEDS, PARTS, VALUE_NEEDS
from hpcrl.config.passthrough import as_flag
from hpcrl.config.rules.passed_through import check_megatron
from hpcrl.errors import UsageError


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


def check_capabilities(given: Mapping[str, Any], machine: Machine) -> None:
    """Raise UsageError for the first of the user's settings that cannot have its effect on `machine`.

    Args:
        given: the user's settings that config.json does not decide, by field, in the types of their fields.
    """
    for name, value in given.items():
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


# ---- kernels

ROPE = "rotary embedding"  #: of packed sequences, which rotates the two halves of a head
INTERLEAVED = "interleaved rotary embedding"  #: of packed sequences, which can rotate neighbouring columns too
PERMUTE = "permutation of tokens"  #: to and from experts
ROUTER = "choice of experts"
GRADIENTS = "weight gradients"  #: Apex's, which Megatron's own linear layers call

#: what Megatron's TransformerConfig asks for with moe_permute_fusion
#: (transformer/transformer_config.py of 0.16.1 and 0.19.2: "Please install TE >= 2.1.0")
_PERMUTE = """
fused_permute fused_permute_with_probs fused_sort_chunks_by_index fused_sort_chunks_by_index_with_probs fused_unpermute
"""


def find_kernels() -> frozenset[str]:
    """Those that are here; imports Megatron-core, and with it Transformer Engine where it is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Transformer Engine and Apex are not installed": that is the answer
        from megatron.core.extensions import transformer_engine
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.tensor_parallel import layers
        from megatron.core.transformer.moe import moe_utils
    rotate = getattr(transformer_engine, "apply_rotary_pos_emb", None)  # from where Megatron's wrapper has it
    found = rope_kernels(getattr(rope_utils, "fused_apply_rotary_pos_emb_thd", None), rotate)
    if all(getattr(moe_utils, name, None) is not None for name in _PERMUTE.split()):
        found |= {PERMUTE}
    # transformer/moe/moe_utils.py: None before Transformer Engine 2.7
    if getattr(moe_utils, "fused_topk_with_score_function", None) is not None:
        found |= {ROUTER}
    # tensor_parallel/layers.py: whether it could import fused_weight_gradient_mlp_cuda, without which its
    # ColumnParallelLinear, the output layer among them, raises
    if getattr(layers, "_grad_accum_fusion_available", False):
        found |= {GRADIENTS}
    return frozenset(found)


def rope_kernels(wrapper: Callable[..., Any] | None, kernel: Callable[..., Any] | None) -> set[str]:
    """What the rotary embedding of packed sequences can do.

    Args:
        wrapper: Megatron's `fused_apply_rotary_pos_emb_thd`; that of 0.16.1 has no `interleaved`, and leaves unread
            that a model's columns are, that of 0.19.2 takes it.
        kernel: Transformer Engine's `apply_rotary_pos_emb`, which the wrapper calls; it takes `interleaved` since 2.3.
    """
    if wrapper is None:
        return set()
    return {ROPE, INTERLEAVED} if _takes(wrapper, "interleaved") and _takes(kernel, "interleaved") else {ROPE}


def _takes(function: Callable[..., Any] | None, name: str) -> bool:
    return function is not None and name in inspect.signature(function).parameters
