"""Loading an update into a running vLLM model, strictly: pieces as they come, or the files of a directory.

vLLM keeps a table of weight-transfer backends; `register_receiver` adds ours to it, under the names that the trainer's
side goes by (`hpcrl.weights.update_backend`).

Invariants: an update brings every tensor of the checkpoint once, by name, shape and dtype, and nothing else; any error
is raised by `update`, never by `finish` (after which vLLM would believe for ever that an update is going on); an update
that is refused leaves the old weights in place, unless part of the new ones had to be loaded before the error could be
seen.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hpcrl.engine.cpu_build import Kernels, drop_expert_kernels, pack_heads, return_expert_kernels
from hpcrl.engine.drafts.own_layers import OwnLayers
from hpcrl.engine.loading.disk_weights import check_digest, tensors
from hpcrl.engine.loading.text_part import named_as_in_files
from hpcrl.engine.params.adapter_slot import AdapterSlot
from hpcrl.engine.params.layers import Holdings
from hpcrl.errors import DataError
from hpcrl.models.files.safetensors_files import listing, read_header
from hpcrl.weights.comparison import dtype_name
from hpcrl.weights.update_backend import BACKENDS, VLLM, VLLM_IPC
from hpcrl.weights.vllm_transfer import IpcHandle

if TYPE_CHECKING:
    from hpcrl.engine.pieces.piece_receiver import PieceReceiver

Pair = tuple[str, torch.Tensor]
Pairs = Iterable[Pair]
#: of an FP8 cache of keys and values; checkpoints need not have them
OPTIONAL = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")


class UpdateRejected(ValueError):
    """An update that was not what the model needs."""


class UpdateChecklist:
    """Which of the tensors that a model needs an update has brought so far."""

    def __init__(self, held: Holdings) -> None:
        self.held = held
        self.seen = set[str]()

    def admit(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """UpdateRejected unless a tensor is wanted, new, and of the right shape and dtype."""
        piece = self.held.pieces.get(name)
        if name in self.seen:
            raise UpdateRejected(f"{name} came twice")
        if not self.held.takes(name):
            near = difflib.get_close_matches(name, [*self.held.pieces, *self.held.unseen], 1)
            raise UpdateRejected(f"the model has no {name}{f', nearest is {near[0]}' if near else ''}")
        if piece is not None and piece.same_as:
            raise UpdateRejected(f"{name} is tied to {piece.same_as}, which alone is to be sent")
        if (wanted := self.held.wants(name)) is not None and (shape, dtype) != wanted:
            raise UpdateRejected(f"{name} is {dtype}{list(shape)}, the model needs {wanted[1]}{list(wanted[0])}")
        self.seen.add(name)

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return self.held.wanted <= self.seen

    def close(self) -> None:
        """UpdateRejected if something is missing."""
        if missing := sorted(self.held.wanted - self.seen):
            raise UpdateRejected(f"{len(missing)} tensors are missing, the first is {missing[0]}")


def name_loaders(model: torch.nn.Module | OwnLayers) -> None:
    """Give every parameter's loader a name: vLLM 0.32 goes by it, and the loader of MiniMax-M2's norms, a
    functools.partial, has none."""
    for _, parameter in model.named_parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand: members join a group when they get the plan."""


@dataclass
class DirectoryInfo(WeightTransferUpdateInfo):
    """The directory, and the blake2b digest (16 bytes, hex) of each file in it."""

    directory: str
    files: dict[str, str]


class Receiver(WeightTransferEngine):
    """The checklist, loading, and restoring the old weights."""

    init_info_cls = NoInit
    update_info_cls = DirectoryInfo
    drafts: OwnLayers | None = None  #: what updates bring in addition to the model
    slot: AdapterSlot | None = None  #: what they bring in its place: an adapter
    base = False  #: of an engine with an adapter: an update brings the weights under it
    parameters: Holdings | None = None
    account: UpdateChecklist | None = None
    loading = False  #: the model is taken apart for loading
    begun = False  #: an update of the adapter has begun and is not complete
    _of_drafts: Holdings | None = None
    _kernels: Kernels
    _loaded: set[str]
    _parameters: set[str]

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def take_stock(self) -> Holdings:
        """What the model holds, and what it drafts with; found once, before the first update."""
        if self.parameters is None:
            names = listing(self.model_config.model)
            if self.slot is not None and not self.base:
                self.parameters = self.slot.holdings(self.model_config.model, names)
                return self.parameters
            self.parameters = named_as_in_files(self.model, names)
            if self.drafts is not None:
                self._of_drafts = self.drafts.holdings(names)
                self.parameters = self.parameters.with_more(self._of_drafts)
        return self.parameters

    def hold_base(self, alone: bool) -> None:
        """From now on updates bring the weights under the adapter, or the adapter."""
        if self.slot is not None and self.base != alone:
            self.slot.show_base(alone)
            self.base = alone
            self.parameters = None

    def start_weight_update(self) -> None:
        self.account = UpdateChecklist(self.take_stock())

    def update_weights(self, update_info: Any) -> None:
        """Read and load a directory; any error is raised here, where vLLM ends the update by itself."""
        with self._put_back_unless_loaded():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: DirectoryInfo) -> None:
        account = self._open_account()
        paths = [Path(update_info.directory) / name for name in update_info.files]
        if any(path.name != name for path, name in zip(paths, update_info.files, strict=True)):
            raise UpdateRejected("the update names a file outside of its directory")
        try:
            for path, digest in zip(paths, update_info.files.values(), strict=True):
                check_digest(path, digest)
                for name, entry in read_header(path).items():
                    account.admit(name, entry.shape, entry.dtype)
            account.close()
            self.load(tensors(paths), last=True)
        except (OSError, DataError) as error:
            raise UpdateRejected(
                f"the weights cannot be read ({error}): --update-weight-disk-dir must lie on a file system that "
                "engines have too"
            ) from error

    def take_pieces(self, reader: PieceReceiver) -> None:
        """Receive and load all pieces of an update; errors as `update_weights`."""
        account = self._open_account()
        with self._put_back_unless_loaded():
            reader.receive(lambda tensors, last: self._load_complete(account, tensors, last))

    def load_whole(self, tensors: list[Pair]) -> None:
        """Check and load whole tensors; the last ones are those after which nothing is missing."""
        account = self._open_account()
        for name, tensor in tensors:
            account.admit(name, tuple(tensor.shape), dtype_name(tensor))
        self.load(tensors, last=account.complete)

    @contextlib.contextmanager
    def _put_back_unless_loaded(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.put_back()
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _load_complete(self, account: UpdateChecklist, tensors: list[tuple[str, torch.Tensor]], last: bool) -> None:
        for name, tensor in tensors:
            account.admit(name, tuple(tensor.shape), dtype_name(tensor))
        self.load(tensors, last)

    def finish_weight_update(self) -> None:
        if self.account is not None:
            self.put_back()
            raise UpdateRejected("the update was finished before its last tensor had come")

    def load(self, weights: Pairs, last: bool) -> None:
        """Give admitted tensors to vLLM's loaders; they must stay as they are until the last ones are loaded."""
        if self.slot is not None and not self.base:
            self._load_adapter(self.slot, weights, last)
            return
        if not self.loading:
            self._take_apart()
        drafts: list[Pair] = []
        self._loaded |= set(self.model.load_weights(self._of_model(weights, drafts)) or ())
        if drafts and self.drafts is not None:
            self._loaded |= self.drafts.load_weights(iter(drafts))
        if last:
            if left := sorted(self._parameters - self._loaded):
                raise UpdateRejected(f"vLLM left {len(left)} parameters as they were, the first is {left[0]}")
            self._put_together()
            self.account = None

    def _load_adapter(self, slot: AdapterSlot, weights: Pairs, last: bool) -> None:
        if not self.begun:
            slot.register()
        self.begun = True
        slot.load(weights)
        if last:
            self.begun = False
            self.account = None

    def _take_apart(self) -> None:
        self._kernels = []
        self.loading = True
        self._loaded = set()
        self._parameters = set()
        # an update fills the model, and the layers that it brings for drafts
        for part in (self.model, *([self.drafts] if self.drafts is not None else [])):
            if self.device.type == "cpu":
                self._kernels += drop_expert_kernels(part)
            used = {name for name, _ in part.named_parameters() if not name.endswith(OPTIONAL)}
            name_loaders(part)
            initialize_layerwise_reload(part)  # from here on it has the parameters that its loader fills
            self._parameters |= used & {name for name, _ in part.named_parameters()}

    def _of_model(self, weights: Pairs, drafts: list[Pair]) -> Iterator[Pair]:
        """The tensors that are the model's; those that it drafts with go to `drafts`."""
        held = self._of_drafts
        for name, tensor in weights:
            if held is not None and held.takes(name):
                drafts.append((name, tensor))
            else:
                yield name, tensor

    def put_back(self) -> None:
        """End an update that failed: layers that were not loaded have their old tensors again."""
        self.account = None
        if self.loading:
            self._put_together()
            return_expert_kernels(self._kernels)

    def _put_together(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.drafts is not None:
            finalize_layerwise_reload(self.drafts, self.drafts.model_config)
        self.loading = False
        if self.device.type == "cpu":
            pack_heads(self.model)

    def shutdown(self) -> None:
        self.account = None

    def _open_account(self) -> UpdateChecklist:
        if self.account is None:
            raise UpdateRejected("no update was started")
        return self.account


class _Loader:
    """What vLLM's engine takes for the model: it calls `load_weights` alone."""

    def __init__(self, receiver: VllmReceiver) -> None:
        self.receiver = receiver

    def load_weights(self, weights: Pairs) -> None:
        self.receiver.load_whole(list(weights))


class _IpcEngine(IPCWeightTransferEngine):
    """vLLM's engine, with handles as JSON: vLLM unpickles handles that come over HTTP."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        handles = msgspec.convert(update_dict["ipc_handles"], dict[str, IpcHandle])
        return super().parse_update_info(
            update_dict | {"ipc_handles": {gpu: handle.arguments() for gpu, handle in handles.items()}}
        )


class VllmReceiver(Receiver):
    """`Receiver` with vLLM's engine in it."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        kind = _IpcEngine if config.backend == VLLM_IPC else NCCLWeightTransferEngine
        self.wire: WeightTransferEngine = kind(config, vllm_config, device, cast("torch.nn.Module", _Loader(self)))
        self.init_info_cls = self.wire.init_info_cls

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return self.wire.parse_update_info(update_dict)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        if isinstance(self.wire, _IpcEngine):
            self.wire.shutdown()  # lets the trainer's buffer go

    def init_transfer_engine(self, init_info: Any) -> None:
        self.wire.shutdown()  # of an update that failed
        self.wire.init_transfer_engine(init_info)

    def receive_weights(self, update_info: Any) -> None:
        self._open_account()
        self.wire.receive_weights(update_info)

    def shutdown(self) -> None:
        super().shutdown()
        self.wire.shutdown()


def register_receiver() -> None:
    """Make it known to vLLM in this process, under each of our names; a name that is known already is left as it is."""
    for backend in BACKENDS:
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                backend, VllmReceiver if backend in (VLLM, VLLM_IPC) else Receiver
            )
