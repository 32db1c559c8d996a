"""The layers of Transformer Engine's stand-in (transformer_engine.py): parameters with the real ones' names, shapes and
marks, arguments that the real ones take, and what they refuse or wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hpcrl.planning.fake_libraries import te_kernels as kernels


class _Module(torch.nn.Module):
    """What all layers share: the state that FP8 would have, and parameters that are set up under a tracker of random
    numbers."""

    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def get_extra_state(self) -> torch.Tensor:
        """Nothing without FP8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Nothing to set."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing without FP8."""

    def _parameter(
        self,
        name: str,
        shape: Sequence[int],
        init: Callable[[torch.Tensor], Any] | None,
        tracker: Callable[[], Any] | None,
        tracker_name: str | None = None,
        **place: Any,
    ) -> torch.nn.Parameter:
        made = torch.nn.Parameter(torch.empty(*shape, **place))
        forked = [tracker_name] if tracker_name else []
        with tracker().fork(*forked) if tracker and init else nullcontext():
            (init or torch.nn.init.ones_)(made.data)
        self.register_parameter(name, made)
        return made


def _first(zero_centered: bool) -> Callable[[torch.Tensor], Any]:
    """What a norm's weight begins with: 0 where it scales by 1 + weight, else 1."""
    return torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_


def _cut(parameter: torch.nn.Parameter, dim: int) -> None:
    """Mark it as split over tensor-parallel ranks."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    parameter.partition_stride = 1


class _Matrices(_Module):
    """One matrix or several of the same shape, each with a bias or none."""

    def __init__(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.tp_size = tp_size
        self.tp_group = tp_group
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.parallel_mode = parallel_mode
        self.use_bias = bias
        self.return_bias = return_bias
        self.ub_name = ub_name
        self.save_original_input = save_original_input
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        shape = self.out_features, self.in_features
        init = init_method or torch.nn.init.xavier_uniform_
        place = {"dtype": params_dtype, "device": device}
        for each in names:
            weight = self._parameter(each, shape, init, get_rng_state_tracker, rng_tracker_name, **place)
            if parallel_mode:
                _cut(weight, 0 if parallel_mode == "column" else 1)
            if bias:
                made = self._parameter(each.replace("weight", "bias"), shape[:1], torch.nn.init.zeros_, None, **place)
                if parallel_mode == "row":
                    made.sequence_parallel = sequence_parallel
                elif parallel_mode:
                    _cut(made, 0)


class Linear(_Matrices):
    """x @ weight^T, whose rows or columns may be split over ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parameters_split: Any = None,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        symmetric_ar_type: str | None = None,
        **matrix: Any,
    ) -> None:
        super().__init__(["weight"], in_features, out_features, **matrix)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        out = kernels.Gemm.apply(inp, self.weight, kernels.Split.of_layer(self))
        if not self.use_bias:
            return out
        return (out, self.bias) if self.return_bias else out + self.bias


class LayerNormLinear(Linear):
    """A norm, then x @ weight^T."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **linear: Any,
    ) -> None:
        assert normalization == "RMSNorm" and not return_layernorm_output
        super().__init__(in_features, out_features, **linear)
        self.eps = eps
        self.normalization = normalization
        place = {"dtype": self.weight.dtype, "device": self.weight.device}
        self.zero_centered_gamma = zero_centered_gamma
        norm = self._parameter("layer_norm_weight", [in_features], _first(zero_centered_gamma), None, **place)
        norm.sequence_parallel = self.sequence_parallel

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        return super().forward(kernels.Norm.apply(inp, self.layer_norm_weight), is_first_microbatch)


class GroupedLinear(_Matrices):
    """A matrix for each of the chunks of rows."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        **matrix: Any,
    ) -> None:
        super().__init__([f"weight{number}" for number in range(num_gemms)], in_features, out_features, **matrix)
        assert not (self.use_bias or single_grouped_weight), "not stood in for"
        self.num_gemms = num_gemms

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        assert len(m_splits) == self.num_gemms and all(isinstance(rows, int) for rows in m_splits)
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        alone = kernels.Split(None, None, False, self.fuse_wgrad_accumulation)
        return torch.cat(
            [kernels.Gemm.apply(rows, weight, alone) for rows, weight in zip(inp.split(m_splits), weights, strict=True)]
        )


class EngineRMSNorm(_Module):
    """x / its root mean square, times a weight, or 1 + weight."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,  # its older name
        device: Any = None,
    ) -> None:
        super().__init__()
        self.zero_centered_gamma = zero_centered_gamma
        size = normalized_shape or hidden_size or 0
        weight = self._parameter("weight", [size], _first(zero_centered_gamma), None, dtype=params_dtype, device=device)
        weight.sequence_parallel = bool(sequence_parallel)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return kernels.Norm.apply(inp, self.weight)


class DotProductAttention(_Module):
    """Causal attention of packed sequences."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        self.qkv_format = qkv_format
        self.heads = num_attention_heads // tp_size
        self.groups = (num_gqa_groups or num_attention_heads) // tp_size

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor:
        assert qkv_format == "thd" and attn_mask_type == "padding_causal", "sequences are always packed"
        assert query_layer.size(1) == self.heads and key_layer.size(1) == value_layer.size(1) == self.groups
        assert cu_seqlens_q is not None and cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.is_cuda
        if cu_seqlens_q_padded is not None and pad_between_seqs is None:  # whether there is padding between sequences
            torch.equal(cu_seqlens_q_padded, cu_seqlens_q)
        if max_seqlen_q is None or max_seqlen_kv is None:
            int(cu_seqlens_q.diff().max().item())
        return kernels.Attention.apply(query_layer, key_layer, value_layer).flatten(1)
