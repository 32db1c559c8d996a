"""Loading an update into a running vLLM model, strictly: what every receiver of ours has in common, and the receiver of
engines that take pieces alone (NCCL or CUDA IPC).

Invariants: an update brings every tensor of the checkpoint once, by name, shape and dtype, and nothing else; any error
is raised by `update`, never by `finish` (after which vLLM would believe for ever that an update is going on); an update
that is refused leaves the old weights in place, unless part of the new ones had to be loaded before the error could be
seen, which `mixed` then tells.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hpcrl.engine.cpu_build import Kernels, drop_expert_kernels, pack_heads, return_expert_kernels
from hpcrl.engine.vllm_layers import Holdings, holdings
from hpcrl.model_files.safetensors_files import listing
from hpcrl.weights.bucket import Slot, dtype_name

if TYPE_CHECKING:
    from hpcrl.engine.pieces.piece_receiver import PieceReceiver

#: of an FP8 cache of keys and values; checkpoints need not have them
OPTIONAL = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")


class UpdateRejected(ValueError):
    """An update that was not what the model needs."""


class UpdateChecklist:
    """Which of the tensors that a model needs an update has brought so far."""

    def __init__(self, held: Holdings) -> None:
        self.held = held
        self.seen = set[str]()

    def admit(self, slots: Sequence[Slot]) -> None:
        """UpdateRejected unless each is wanted, new, and of the right shape and dtype."""
        for slot in slots:
            piece = self.held.pieces.get(slot.name)
            if slot.name in self.seen:
                raise UpdateRejected(f"{slot.name} came twice")
            if not self.held.takes(slot.name):
                near = difflib.get_close_matches(slot.name, [*self.held.pieces, *self.held.unseen], 1)
                raise UpdateRejected(f"the model has no {slot.name}{f', nearest is {near[0]}' if near else ''}")
            if piece is not None and piece.same_as:
                raise UpdateRejected(f"{slot.name} is tied to {piece.same_as}, which alone is to be sent")
            if (wanted := self.held.wants(slot.name)) is not None and (slot.shape, slot.dtype) != wanted:
                raise UpdateRejected(
                    f"{slot.name} is {slot.dtype}{list(slot.shape)}, the model needs {wanted[1]}{list(wanted[0])}"
                )
            self.seen.add(slot.name)

    def close(self) -> None:
        """UpdateRejected if something is missing."""
        if missing := sorted(self.held.wanted - self.seen):
            raise UpdateRejected(f"{len(missing)} tensors are missing, the first is {missing[0]}")


class Receiver(WeightTransferEngine):
    """What all receivers share: the checklist, loading, and restoring the old weights."""

    held: Holdings | None = None
    account: UpdateChecklist | None = None
    loading = False  #: the model is taken apart for loading
    mixed = False  #: the model holds tensors of two versions
    unfinished = False  #: the model holds all new tensors, but still goes by the old version
    _kernels: Kernels
    _loaded: set[str]
    _parameters: set[str]

    def take_stock(self) -> Holdings:
        """What the model holds; found once, before the first update."""
        if self.held is None:
            self.held = holdings(self.model, listing(self.model_config.model))
        return self.held

    def start_weight_update(self) -> None:
        self.account = UpdateChecklist(self.take_stock())

    def update_weights(self, update_info: Any) -> None:
        """Receive and load; any error is raised here, where vLLM ends the update by itself."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.put_back()
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def take_pieces(self, reader: PieceReceiver, changes: bool) -> None:
        """Receive and load all pieces of an update, or what has changed of them; errors as `update_weights`."""
        account = self._open_account()
        try:
            reader.receive(lambda tensors, last: self._load_complete(account, tensors, last), changes)
        except BaseException:
            self.put_back()
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _load_complete(self, account: UpdateChecklist, tensors: list[tuple[str, torch.Tensor]], last: bool) -> None:
        account.admit([Slot(name, dtype_name(tensor), tuple(tensor.shape), 0) for name, tensor in tensors])
        self.load(tensors, last)

    def finish_weight_update(self) -> None:
        if self.account is not None:
            self.put_back()
            raise UpdateRejected("the update was finished before its last bucket had come")
        self.unfinished = False

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], last: bool) -> None:
        """Give admitted tensors to vLLM's loaders; they must stay as they are until the last ones are loaded."""
        if not self.loading:
            self._kernels = drop_expert_kernels(self.model) if self.device.type == "cpu" else []
            self.loading = True
            self._loaded = set()
            used = {name for name, _ in self.model.named_parameters() if not name.endswith(OPTIONAL)}
            initialize_layerwise_reload(self.model)  # from here on it has the parameters that its loader fills
            self._parameters = used & {name for name, _ in self.model.named_parameters()}
        self.mixed = True
        self._loaded |= set(self.model.load_weights(iter(weights)) or ())
        if last:
            if left := sorted(self._parameters - self._loaded):
                raise UpdateRejected(f"vLLM left {len(left)} parameters as they were, the first is {left[0]}")
            self._put_together()
            self.mixed = False
            self.unfinished = True
            self.account = None

    def put_back(self) -> None:
        """End an update that failed: layers that were not loaded have their old tensors again."""
        self.account = None
        if self.loading:
            self._put_together()
            return_expert_kernels(self._kernels)

    def _put_together(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self.loading = False
        if self.device.type == "cpu":
            pack_heads(self.model)

    def shutdown(self) -> None:
        self.account = None

    def _open_account(self) -> UpdateChecklist:
        if self.account is None:
            raise UpdateRejected("no update was started")
        return self.account


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand: members join a group when they get the plan."""


@dataclass
class NoUpdate(WeightTransferUpdateInfo):
    """Whole tensors do not come this way."""


class PiecesReceiver(Receiver):
    """Takes pieces, which weight_receiver.py hands to it."""

    init_info_cls = NoInit
    update_info_cls = NoUpdate

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def receive_weights(self, update_info: Any) -> None:
        raise UpdateRejected("this engine takes pieces alone: an update of whole tensors does not reach it")
