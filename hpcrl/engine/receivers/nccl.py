"""The receiving end of --weight-transfer nccl with --weight-update resharded: pieces alone, over `hpcrl/weights/pieces/nccl_wire.py`.

Whole tensors over NCCL go to vLLM's own backend.  This module has run on no GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from hpcrl.engine.weight_loading import Receiver, UpdateRejected


@dataclass
class NcclInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand: members meet when they are told of the plan."""


@dataclass
class NcclUpdate(WeightTransferUpdateInfo):
    """Whole tensors do not come this way."""


class NcclReceiver(Receiver):
    """Takes pieces, which weight_receiver.py hands to it."""

    init_info_cls, update_info_cls = NcclInit, NcclUpdate

    def init_transfer_engine(self, init_info: NcclInit) -> None:
        pass

    def receive_weights(self, update_info: Any) -> None:
        raise UpdateRejected("this engine takes pieces alone: it was started with --weight-update resharded")


RECEIVER = NcclReceiver
