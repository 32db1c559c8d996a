"""A stand-in for DeepEP 1.2, which has no build for CPUs: what Megatron-core's flex dispatcher of tokens calls.

Shapes and dtypes are the real ones' where every rank sends equally many tokens to every other; numbers there are none.
Each `dispatch` waits for the device once, as the real one does to learn how many rows come.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from hpcrl.planning.rehearsal.device_properties import balanced

#: group sizes for which the real one knows how to be configured
SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)


class EventHandle:
    """On the current stream."""


@dataclass
class EventOverlap:
    """An event that a stream can wait for."""

    event: EventHandle | None = None

    def current_stream_wait(self) -> None:
        """No wait of the host."""


class Config:
    """How kernels are run."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks if num_ranks > 8 else 0


@dataclass(frozen=True)
class Handle:
    """What the way back needs to know: rows that were sent, and that came."""

    sent: int
    came: int


class Buffer:
    """Tokens to the ranks of their experts, and back."""

    num_sms = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 12,
    ) -> None:
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in SIZES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """(tokens to each rank, to each node, to each expert, which token to which rank, an event)"""
        assert topk_idx.dtype == torch.int64 and topk_idx.is_cuda
        new = topk_idx.new_empty
        size = self.group.size()
        to_ranks = new(size, dtype=torch.int32)
        which = new(topk_idx.size(0), size, dtype=torch.bool)
        return to_ranks, None, new(num_experts, dtype=torch.int32), which, EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """(rows, expert of each among this rank's, its weights, rows of each expert, the way back, an event)"""
        assert x.dtype == torch.bfloat16 and x.dim() == 2 and x.is_contiguous()
        if handle is not None:  # as before: nothing to learn
            return x.new_empty(handle.came, x.size(1)), None, None, None, None, EventOverlap()
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype == torch.float32
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None
        num_tokens_per_rank.sum().item()  # the host waits to learn how many come
        tokens, choices = topk_idx.shape
        came = tokens * min(choices, self.group.size())
        counts = balanced(tokens * choices, torch.empty(num_tokens_per_expert.numel() // self.group.size())).int()
        experts = topk_idx.new_empty(came, choices)
        weights = topk_weights.new_empty(came, choices)
        return x.new_empty(came, x.size(1)), experts, weights, counts.tolist(), Handle(tokens, came), EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """(rows, weights, an event)"""
        assert x.dtype == torch.bfloat16 and x.size(0) == handle.came and x.is_contiguous()
        weights = None if topk_weights is None else topk_weights.new_empty(handle.sent, topk_weights.size(1))
        return x.new_empty(handle.sent, x.size(1)), weights, EventOverlap()


def install() -> None:
    """Be `deep_ep` in this process."""
    contents = {
        "": {"Buffer": Buffer, "Config": Config},
        ".utils": {"EventHandle": EventHandle, "EventOverlap": EventOverlap},
    }
    for path, names in contents.items():
        module = ModuleType(f"deep_ep{path}", "A stand-in of the tests.")
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        vars(module).update(names)
        sys.modules[module.__name__] = module
