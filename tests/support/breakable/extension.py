"""The worker extension plus calls that spoil something."""

import os
import signal
import time

from hpcrl.engine import cpu_build, weight_loading
from hpcrl.engine.weight_receiver import WorkerExtension


class Extension(WorkerExtension):
    def break_repairs(self) -> None:
        """From now on a tied head stays as it is, as in stock vLLM."""
        weight_loading.pack_heads = lambda model: None

    def mend_repairs(self) -> None:
        """Undo that."""
        weight_loading.pack_heads = cpu_build.pack_heads

    def break_experts(self) -> None:
        """From now on experts that arrive are not arranged again, as in stock vLLM."""
        weight_loading.drop_expert_kernels = lambda model: []

    def mend_experts(self) -> None:
        """Undo that."""
        weight_loading.drop_expert_kernels = cpu_build.drop_expert_kernels

    def forget(self, name: str) -> None:
        """From now on an update that brings this tensor is refused."""
        del self.weight_transfer_engine.take_stock().pieces[name]

    def remember(self) -> None:
        """Undo that."""
        self.weight_transfer_engine.parameters = None

    def load_twice(self) -> None:
        """From now on what an adapter's B becomes is twice what an update brings, as if it were added by two workers."""
        slot = self.weight_transfer_engine.slot
        load = type(slot).load
        slot.load = lambda tensors: load(slot, [(n, 2 * t if "lora_B" in n else t) for n, t in tensors])

    def leave_out(self, name: str) -> None:
        """From now on this tensor of an adapter stays as it is, whatever an update brings."""
        slot = self.weight_transfer_engine.slot
        load = type(slot).load
        slot.load = lambda tensors: load(slot, [pair for pair in tensors if pair[0] != name])

    def take_long(self, seconds: str) -> None:
        """As an update does: nothing else is answered meanwhile."""
        time.sleep(float(seconds))

    def die_in_pieces(self) -> None:
        """The next update in pieces ends this process once its first message was taken."""
        assert self._hpcrl_pieces is not None
        assembly = self._hpcrl_pieces.assembly
        take = assembly.read_message

        def last(*args: object) -> object:
            if assembly.missing != assembly.size:
                os.kill(os.getpid(), signal.SIGKILL)
            return take(*args)

        assembly.read_message = last
