"""A stand-in for Transformer Engine 2.20, which has no build for CPUs: the modules of it that Megatron-core asks for.

    transformer_engine.install()        # before anything imports Megatron, which then builds its layers from it

Layers, optimizer and kernels have the real ones' parameters, with their names and marks, and take only arguments that
the real ones take; what they give has the real shapes and dtypes, on any device, and so do the collectives that they
call.  Numbers are those of the plain formula, or none: this is for the device that knows none
(planning/rehearsal/device.py).  Where a real one waits for the device or demands a tensor on it, so does the stand-in.
What Megatron finds here is what that release still has: no `_SplitAlongDim`, no `get_workspace`, no `float8_tensor`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from hpcrl.planning.fake_libraries import te_kernels as kernels
from hpcrl.planning.fake_libraries import te_layers as layers
from hpcrl.planning.fake_libraries import te_router as fused_router

VERSION = "2.20.2"
LAYERS = ("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention")


class FusedAdam(torch.optim.Optimizer):
    """Adam in few launches, for parameters on the device alone."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        assert not (amsgrad or capturable), "not stood in for"
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.kept = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        assert not (master_weights and store_param_remainders), "not stood in for"
        if master_weights:
            self.kept["master_param"] = master_weight_dtype
        self.plain = not master_weights

    def initialize_state(self, parameter: torch.Tensor, *_: Any) -> None:
        self.state[parameter] = {name: torch.zeros_like(parameter, dtype=kind) for name, kind in self.kept.items()}

    def state_dict(self) -> dict[str, Any]:
        """With states of fewer bits in fp32."""
        found = super().state_dict()
        mine = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in enumerate(mine):
            if number in found["state"]:
                names = self.state[parameter]
                found["state"][number] = {name: self.get_unscaled_state(parameter, name) for name in names}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into new states of their own types, where torch's takes the types of the parameters."""
        super().load_state_dict(state_dict)
        mine = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in enumerate(mine):
            if number in state_dict["state"]:
                self.initialize_state(parameter)
                for name, value in state_dict["state"][number].items():
                    self.set_scaled_state(parameter, name, value.float())

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[parameter][name].float()

    def set_scaled_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self.state[parameter][name].copy_(value)

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if getattr(parameter, "decoupled_grad", parameter.grad) is None:
                    continue
                assert parameter.is_cuda, "FusedAdam is for the device"
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                if not self.plain:
                    continue
                state = self.state[parameter]
                state["exp_avg"].lerp_(parameter.grad.float(), 1 - first)
                state["exp_avg_sq"].lerp_(parameter.grad.float().square(), 1 - second)
                parameter.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


class _RandomStates:
    """CudaRNGStatesTracker, of which Megatron makes a subclass."""


class _Fp8State:
    """FP8GlobalStateManager: FP8 is off."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False


def _types(*names: str) -> dict[str, Any]:
    """Classes that Megatron names, and makes no instance of here."""
    return {name: type(name, (), {}) for name in names}


def _rotate(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """apply_rotary_pos_emb"""
    assert tensor_format == "thd" and fused and cu_seqlens is not None and freqs.dtype == torch.float32
    return kernels.Rope.apply(t)


#: module -> what is in it
MODULES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "common": {},
    "common.recipe": _types(
        "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "Format"
    ),
    "pytorch": {name: getattr(layers, name) for name in LAYERS}
    | {"RMSNorm": layers.EngineRMSNorm}
    | _types("LayerNorm", "Fp8Padding", "Fp8Unpadding"),
    "pytorch.ops": _types("Sequential", "FusibleOperation"),
    "pytorch.fp8": {"FP8GlobalStateManager": _Fp8State, "fp8_autocast": nullcontext, "fp8_model_init": nullcontext},
    "pytorch.distributed": {
        "CudaRNGStatesTracker": _RandomStates,
        "activation_recompute_forward": lambda **_: nullcontext(),
        "checkpoint": None,
    },
    "pytorch.tensor": _types("QuantizedTensor"),
    "pytorch.module": {},
    "pytorch.module.base": _types("TransformerEngineBaseModule") | {"get_dummy_wgrad": kernels.dummy_wgrad},
    "pytorch.optimizers": {
        "FusedAdam": FusedAdam,
        "FusedSGD": torch.optim.SGD,
        "multi_tensor_applier": kernels.multi_tensor_applier,
        "multi_tensor_l2norm": kernels.multi_tensor_l2norm,
        "multi_tensor_scale": kernels.multi_tensor_scale,
        "multi_tensor_scale_tensor": kernels.multi_tensor_scale_tensor,
    },
    "pytorch.attention": {},
    "pytorch.attention.rope": {"apply_rotary_pos_emb": _rotate},
    "pytorch.permutation": {
        each.__name__: each
        for each in (
            kernels.moe_permute,
            kernels.moe_permute_with_probs,
            kernels.moe_unpermute,
            kernels.moe_sort_chunks_by_index,
            kernels.moe_sort_chunks_by_index_with_probs,
        )
    },
    "pytorch.router": {name: getattr(fused_router, name) for name in fused_router.NAMES},
}


def install() -> None:
    """Be `transformer_engine` in this process."""
    for path, contents in MODULES.items():
        name = ".".join(["transformer_engine", *([path] if path else [])])
        module = ModuleType(name, "A stand-in of the tests.")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
