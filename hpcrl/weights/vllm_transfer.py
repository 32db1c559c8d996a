"""The trainer's side of --weight-transfer vllm: whole tensors by vLLM's own trainer classes.

    update = VllmUpdate(fleet, manifests, options, scheme)
    update.stage(ranks, checked, compare, version)   # names, dtypes and shapes; the communicator, the first time
    update.send()                                    # the ranks gather, every worker takes its part

`VllmUpdate`: rank 0 broadcasts over NCCL, as member 0 of a communicator; the workers follow, engine by engine. NCCL's
name goes to the engines under their keys, so nothing listens.
`VllmIpcUpdate`: every rank packs all tensors into a buffer of its own GPU, which the worker on that GPU opens. vLLM
pickles the buffers' handles; here they are JSON.

Invariant: metadata and iteration have the same names in the same order, that of `WeightStream.describe`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from math import prod
from typing import Any

import msgspec
import torch

from hpcrl.config.options import Options
from hpcrl.engine.membership.broadcast import EngineBroadcast, PendingCalls, in_thread
from hpcrl.errors import DeadlineError
from hpcrl.models.files.fp8 import Scheme, Stream, quantized
from hpcrl.models.files.safetensors_files import ITEM_BYTES
from hpcrl.weights.pieces.choose_transport import current_device, use_device
from hpcrl.weights.pieces.device_transport import unique_id
from hpcrl.weights.pieces.piece_update import watched
from hpcrl.weights.pieces.planning import Manifests, Source, check_codes, check_tensors, coded, needed_tensors

PACKED = True  #: tensors go in messages of --update-weight-buffer-size, not one by one


class _Tensors:
    """A `WeightSource` of vLLM's: the stream of one update."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
        self.shapes = shapes
        self.dtypes = dtypes
        self.stream: Stream = iter(())

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, getattr(torch, self.dtypes[name]), shape) for name, shape in self.shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.stream


class _Calls:
    """A client of vLLM's trainer class: the sender has started the update, and finishes it."""

    def __init__(self, fleet: EngineBroadcast) -> None:
        self.fleet = fleet
        self.pending: PendingCalls | None = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        body = {"update_info": update_info}
        self.pending = self.fleet.post_all("the weight update", "/update_weights", [body] * len(self.fleet.engines))
        self.pending.results()

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    # what `watched` asks

    @property
    def futures(self) -> list[Any]:
        return [] if self.pending is None else self.pending.futures

    def check(self) -> None:
        if self.pending is not None:
            self.pending.check()


def _destroy(joined: Future[Any]) -> None:
    if joined.exception() is None:
        joined.result().destroy()


class _Update:
    """Updates of one fleet; `bytes` counts the tensors of one update once."""

    def __init__(self, fleet: EngineBroadcast, manifests: Manifests, options: Options, scheme: Scheme | None) -> None:
        self.fleet = fleet
        self.manifests = manifests
        self.options = options
        self.scheme = scheme
        self.bytes = 0
        self.calls = _Calls(fleet)

    def _described(self, ranks: Source) -> _Tensors:
        """Names, dtypes and shapes of what the ranks hold, in the order of their export.

        Raises:
            HpcrlError: for tensors that only one side has.
        """
        held, _ = ranks.describe()
        needs = needed_tensors(self.manifests)
        check_codes(held, needs, self.scheme)
        check_tensors(sent := coded(held, self.scheme), self.manifests)
        self.bytes = sum(prod(need.shape) * ITEM_BYTES[need.dtype] for need in needs.values())
        return _Tensors({name: sent[name].shape for name in sent}, {name: need.dtype for name, need in needs.items()})


class VllmUpdate(_Update):
    """Over NCCL, for engines with GPUs of their own."""

    trainer: Any = None  #: vLLM's NCCLTrainerWeightTransferEngine

    def stage(self, ranks: Source, checked: Callable[[Stream], Stream], compare: bool, version: int) -> None:
        """What can be done while engines still generate.

        Raises:
            HpcrlError: for tensors that only one side has.
        """
        if self.trainer is None:
            self._connect(self._described(ranks))
        self.trainer.source.stream = checked(quantized(ranks.gathered(), self.scheme))

    def _connect(self, tensors: _Tensors) -> None:
        """Have rank 0 and all workers join a communicator.

        Raises:
            DeadlineError, PeerError: if not all come.
        """
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        name = unique_id()
        workers = [len(engine) for engine in self.manifests]
        packing = {"packed": PACKED, "packed_buffer_size_bytes": self.options.update_weight_buffer_size}
        common = {"world_size": 1 + sum(workers), "nccl_unique_id_b64": base64.b64encode(name).decode()} | packing
        bodies = [{"init_info": common | {"rank_offset": 1 + sum(workers[:at])}} for at in range(len(workers))]
        self.fleet.post("pausing", "/pause?mode=keep")  # NCCL may wait for kernels of a sample
        pending = self.fleet.post_all("the weight transfer's init", "/init_weight_transfer_engine", bodies)
        device = current_device()

        def join() -> Any:
            with use_device(device):
                return uid_init_process_group(name, 0, common["world_size"], device)

        joining = in_thread(join)  # NCCL has no deadline of its own
        try:
            pending.results()
            communicator = joining.result(self.fleet.seconds)
        except BaseException as error:
            joining.add_done_callback(_destroy)
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"rank 0 did not join NCCL within {self.fleet.seconds:.0f} s") from error
            raise
        self.trainer = NCCLTrainerWeightTransferEngine(client=self.calls, source=tensors, **packing)  # type: ignore[arg-type]
        self.trainer.model_update_group = communicator

    def send(self) -> None:
        """One update, between the engines' start and finish.

        Raises:
            PeerError, DeadlineError: name engine and phase.
        """
        assert self.trainer is not None, "stage() comes first"
        self.calls.pending = None
        watched(self.trainer.send_weights, self.calls, self.forget)

    def forget(self) -> None:
        """The next update begins with a new communicator."""
        trainer = self.trainer
        self.trainer = None
        if trainer is not None:
            trainer.shutdown()


class IpcHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer of bytes on a GPU, as torch's `reduce_tensor` describes it to other processes of the host."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: int
    memory: bytes
    storage_size: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool

    @classmethod
    def of(cls, found: Sequence[Any]) -> IpcHandle:
        """From the arguments of torch's `rebuild_cuda_tensor`."""
        _, size, stride, offset, _, _, *rest = found
        device, memory, storage_size, storage_offset, _, *counted = rest
        return cls(tuple(size), tuple(stride), offset, device, memory, storage_size, storage_offset, *counted)

    def arguments(self) -> tuple[Any, ...]:
        """Of torch's `rebuild_cuda_tensor`."""
        kind = torch.Tensor, torch.Size(self.size), self.stride, self.offset, torch.storage.TypedStorage, torch.uint8
        place = self.device, self.memory, self.storage_size, self.storage_offset, False
        return (*kind, *place, self.counter, self.counter_offset, self.event, self.waits)


class ShareCommand(msgspec.Struct, frozen=True):
    """The message to every rank of an update over CUDA IPC: dtypes by name, and bytes of its buffer."""

    dtypes: dict[str, str]
    limit: int


class VllmIpcUpdate(_Update):
    """Over CUDA IPC, for engines on the trainer's GPUs."""

    command: ShareCommand | None = None

    def stage(self, ranks: Source, checked: Callable[[Stream], Stream], compare: bool, version: int) -> None:
        """Tell the engines that packed buffers will come, the first time.

        Raises:
            HpcrlError: for tensors that only one side has.
        """
        if self.command is None:
            tensors = self._described(ranks)
            largest = max(prod(shape) * ITEM_BYTES[tensors.dtypes[name]] for name, shape in tensors.shapes.items())
            init = {"init_info": {"packed": True}}
            self.fleet.post("the weight transfer's init", "/init_weight_transfer_engine", init)
            self.command = ShareCommand(tensors.dtypes, max(self.options.update_weight_buffer_size, largest))
        self.share = lambda: ranks.share(self.command, checked, self.calls)

    def send(self) -> None:
        """One update, between the engines' start and finish.

        Raises:
            PeerError, DeadlineError: name engine and phase.
        """
        self.share()

    def forget(self) -> None:
        """Nothing is kept."""
