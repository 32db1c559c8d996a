"""Weights that are reported ready are finished: their reader does so on a stream, or in a process, that knows
nothing of the one that packs them.

The wait that hpcrl makes before it says so (`settle`) must bring the finished bytes every time to a copy on another
stream; that without it stale ones can be read is reported, as a measure of whether this GPU would show the fault at
all.
"""

from __future__ import annotations

from hpcrl.doctor.selftest.registry import Check, CheckContext, Outcome, Skip

TRIALS = 20
BYTES = 64 << 20
SECONDS = 60.0  #: that a wait may take
SIZE = 8192  #: rows and columns of the products that delay the tensor


def stale(waits: bool) -> int:
    """In how many of TRIALS what was read is not what was written last."""
    import torch

    from hpcrl.weights.pieces.choose_transport import current_device, memory_of
    from hpcrl.weights.pieces.device_memory import settle

    memory = memory_of(current_device())
    factor, wrong = torch.randn(SIZE, SIZE, device="cuda"), 0
    other = torch.cuda.Stream()
    for _ in range(TRIALS):
        tensor = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        for _ in range(10):
            factor @ factor  # what is queued before the tensor is written
        tensor.fill_(7)
        if waits:
            settle(memory, SECONDS)
        with torch.cuda.stream(other):
            seen = tensor.clone()
        torch.cuda.synchronize()
        wrong += int((seen != 7).any())
    return wrong


def work(place: CheckContext) -> Outcome:
    if place.device.type != "cuda":
        raise Skip("no GPU: there are no streams")
    without, wrong = stale(False), stale(True)
    numbers = {"stale_without_wait": without, "stale_with_wait": wrong, "trials": TRIALS}
    shown = f"{wrong} of {TRIALS} stale with the wait, {without} without"
    return Outcome("failed" if wrong else "passed", shown, numbers)


CHECK = Check(
    "readers get the last written weights, on other streams and in other processes", 60, "alone", work, ("torch",)
)
