"""The receiver of an engine that takes pieces alone, whatever carries them: NCCL or CUDA IPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from hpcrl.engine.weight_loading import Receiver, UpdateRejected


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand: members meet when they are told of the plan."""


@dataclass
class NoUpdate(WeightTransferUpdateInfo):
    """Whole tensors do not come this way."""


class PiecesReceiver(Receiver):
    """Takes pieces, which weight_receiver.py hands to it."""

    init_info_cls, update_info_cls = NoInit, NoUpdate

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def receive_weights(self, update_info: Any) -> None:
        raise UpdateRejected("this engine takes pieces alone: an update of whole tensors does not reach it")
