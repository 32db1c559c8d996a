"""Weights that are sent are finished: vLLM's producer copies on its own streams, and knows nothing of ours.

Its own code is used where vLLM is installed, and a copy on another stream where it is not.  The wait that hpcrl makes
before it must bring the finished tensor every time; that without it a stale one can be sent is reported, as a measure
of whether this GPU would show the fault at all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcrl.selftest.registry import Check, CheckContext, Outcome, Skip

if TYPE_CHECKING:
    import torch

TRIALS = 20
BYTES = 64 << 20
SIZE = 8192  #: rows and columns of the products that delay the tensor


class Recorder:
    """In the place of NCCL: a copy on the stream that is current."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.sent.append(tensor.clone())


class NothingPending:
    """In the place of the engines' answers, which `wait_for_gpu` looks at."""

    def check(self) -> None:
        """All is well."""


def sender() -> tuple[str, Callable[[torch.Tensor, Recorder], Any]]:
    """(what it is, what sends a tensor to a group on its own streams)."""
    if importlib.util.find_spec("vllm") is not None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        def produce(tensor: torch.Tensor, group: Recorder) -> None:
            packed_nccl_broadcast_producer(iter([("x", tensor)]), group, 0, lambda pair: pair[1], 1 << 30, 2)

        return "vLLM's producer", produce
    import torch

    def copy(tensor: torch.Tensor, group: Recorder) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            group.broadcast(torch.cat([tensor.view(-1)]), 0)
        stream.synchronize()

    return "a copy on another stream", copy


def stale(waits: bool, send: Callable[[torch.Tensor, Recorder], Any]) -> int:
    """In how many of TRIALS what was sent is not what was written last."""
    import torch

    from hpcrl.weights.transports.nccl import wait_for_gpu

    factor, wrong = torch.randn(SIZE, SIZE, device="cuda"), 0
    for _ in range(TRIALS):
        group = Recorder()
        tensor = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        for _ in range(10):
            factor @ factor  # what a gather queues before the tensor is written
        tensor.fill_(7)
        if waits:
            wait_for_gpu(NothingPending())
        send(tensor, group)
        torch.cuda.synchronize()
        wrong += int((group.sent[0] != 7).any())
    return wrong


def work(place: CheckContext) -> Outcome:
    if place.device.type != "cuda":
        raise Skip("no GPU: there are no streams")
    name, send = sender()
    without, wrong = stale(False, send), stale(True, send)
    numbers = {"stale_without_wait": without, "stale_with_wait": wrong, "trials": TRIALS}
    shown = f"{name}: {wrong} of {TRIALS} stale with the wait, {without} without"
    return Outcome("failed" if wrong else "passed", shown, numbers)


CHECK = Check("what is sent to engines is what was written last", 60, "alone", work, ("torch",))
