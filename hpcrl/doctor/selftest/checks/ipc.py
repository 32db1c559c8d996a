"""Two processes of this node hand a buffer of the GPU's from one to the other by CUDA IPC, as --weight-transfer ipc
does.

The other process is this module, started with `python -m`: it opens the buffer once, and at each line that it reads it
compares all of it with what must be there by then; at the end it measures how fast it copies out of it, against a copy
of its own memory.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from hpcrl.doctor.selftest.registry import Check, CheckContext, Outcome, Skip
from hpcrl.errors import HpcrlError
from hpcrl.run.process import PARENT, die_with_parent

if TYPE_CHECKING:
    import torch

    from hpcrl.weights.pieces.device_memory import DeviceMemory

BYTES = 256 << 20
TURNS = 5  #: times that the buffer is rewritten
COPIES = 20
LIMIT = 60.0  #: seconds of any wait


def pattern(turn: int, size: int, device: torch.device) -> torch.Tensor:
    """int64 [size / 8]: what the buffer holds in a turn."""
    import torch

    return torch.arange(size // 8, device=device).add_(turn << 40)


class Other:
    """The other process, as this one talks to it: a line of JSON there, a line back."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {PARENT: str(os.getpid())},
        )
        self.answer = self.request(told)

    def request(self, what: Any) -> Any:
        """Its answer.

        Raises:
            HpcrlError: if it has ended; the standard library's TimeoutError after LIMIT.
        """
        from hpcrl.engine.membership.broadcast import in_thread

        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        line = in_thread(self.process.stdout.readline).result(LIMIT)
        if not line:
            raise HpcrlError(f"the other process ended with {self.process.wait(LIMIT)}")
        found = json.loads(line)
        if "error" in found:
            raise HpcrlError(found["error"])
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)


def hand_over(device: torch.device, size: int) -> Outcome:
    """A buffer of `size` bytes on a device."""
    import torch

    from hpcrl.weights.pieces.choose_transport import memory_of
    from hpcrl.weights.pieces.device_memory import settle

    memory = memory_of(device)
    block = memory.allocate(size)
    name = base64.b64encode(memory.name(block)).decode()
    other = Other({"device": str(device), "name": name, "size": size, "place": memory.place})
    try:
        for turn in range(TURNS):
            block.buffer.view(torch.int64).copy_(pattern(turn, size, device))
            settle(memory, LIMIT)
            if not other.request({"turn": turn})["same"]:
                return Outcome(
                    "failed", f"what was written in turn {turn} is not what the other process reads", {"turn": turn}
                )
        rates = other.request({"turn": None})
    finally:
        other.end()
    shown = f"{size / 2**20:.0f} MiB read {TURNS} times without a difference, at {rates['opened'] / 1e9:.3g} GB/s"
    shown += f" ({rates['opened'] / rates['own']:.0%} of a copy of own memory)"
    numbers = {"bytes_per_second": rates["opened"], "own_copy_bytes_per_second": rates["own"], "bytes": size}
    return Outcome("passed", shown, numbers)


def rate(memory: DeviceMemory, source: torch.Tensor) -> float:
    """Bytes a second of copies of a buffer to memory of this process."""
    import torch

    from hpcrl.weights.pieces.device_memory import settle

    target = torch.empty_like(source)
    target.copy_(source)
    settle(memory, LIMIT)
    begin = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source)
    settle(memory, LIMIT)
    return COPIES * source.numel() / (time.perf_counter() - begin)


def other_process() -> None:
    """Answer the lines on stdin until there are no more."""
    import torch

    from hpcrl.weights.pieces.choose_transport import memory_of

    told = json.loads(sys.stdin.readline())
    device = torch.device(told["device"])
    memory = memory_of(device)
    block = memory.open(base64.b64decode(told["name"]), told["size"], told["place"])
    print(json.dumps({"open": True}), flush=True)
    for line in sys.stdin:
        if (turn := json.loads(line)["turn"]) is not None:
            same = torch.equal(block.buffer.view(torch.int64), pattern(turn, told["size"], device))
            print(json.dumps({"same": same}), flush=True)
        else:
            own = torch.ones_like(block.buffer)
            print(json.dumps({"opened": rate(memory, block.buffer), "own": rate(memory, own)}), flush=True)


def main() -> int:
    die_with_parent()
    try:
        other_process()
    except (HpcrlError, RuntimeError, OSError, ValueError) as error:
        print(json.dumps({"error": f"the other process: {error}"}), flush=True)
    return 0


def work(place: CheckContext) -> Outcome:
    if place.device.type != "cuda":
        raise Skip("no GPU: processes share the host's memory, which --weight-transfer shm uses")
    return hand_over(place.device, BYTES)


CHECK = Check(
    "a process reads what another wrote into the GPU's memory (--weight-transfer ipc)", 65, "alone", work, ("torch",)
)

if __name__ == "__main__":
    sys.exit(main())
