"""The policy's weights on their way to the engines: sent in pieces by every rank, or gathered on rank 0.

    exporter = WeightExporter(policy, patient group, address, ...)
    sender.publish(exporter.stream(), version)        # on every rank: rank 0 directs, the others follow its commands

Invariants: rank 0's command is broadcast before any rank acts; a rank that cannot send keeps its error until rank 0 has
said how the update ended, so that no rank waits for it in vain; nothing is pickled.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from hpcrl.config.options import Options
from hpcrl.errors import PeerError
from hpcrl.models.files.fp8 import Scheme, quantized, scheme_of
from hpcrl.models.lora.serving import served_as
from hpcrl.trainer.collectives import broadcast_bytes, broadcast_json, gather_json
from hpcrl.trainer.megatron.hf_weights import export
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.megatron.parameter_shards import holdings, part_group
from hpcrl.weights.pieces.choose_transport import memory_of
from hpcrl.weights.pieces.elements import OwnTensor, PieceValues, prepare_values
from hpcrl.weights.pieces.ipc_transport import ExportedMemory
from hpcrl.weights.pieces.messages import pieces_of
from hpcrl.weights.pieces.piece_sender import JoinCommand, PieceSender, join_as_rank
from hpcrl.weights.pieces.planning import HeldTensor
from hpcrl.weights.pieces.wire import process_identity
from hpcrl.weights.vllm_transfer import IpcHandle, ShareCommand

TEXT = 512  #: characters of an error's text
Word = Literal["gather", "describe", "join", "prepare_values", "send", "share", "end"]
Pairs = Iterator[tuple[str, torch.Tensor]]


def sent_part(policy: Policy, options: Options) -> Policy:
    """The policy, to be sent of it what engines get: all weights, the adapter, or the weights with it added in."""
    served = served_as(options, policy.family, policy.hf_config)
    return policy if served is None else policy.with_part("sent" if served == "adapter" else "merged")


@dataclass
class WeightExporter:
    """What a rank keeps between updates.

    Attributes:
        policy: the trained model.
        patient: a gloo group of all ranks.
        host: this rank's own address.
        checkpoint: the directory that the engines serve.
        heads: engines draft with the layers that predict further tokens, so that they get these too.
    """

    policy: Policy
    patient: dist.ProcessGroup
    host: str
    checkpoint: str | None
    heads: bool = False
    own: dict[str, OwnTensor] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    piece_sender: PieceSender | None = None
    numbers: PieceValues | None = None

    def __post_init__(self) -> None:
        coded = self.checkpoint is not None and not self.policy.of_adapters
        self.scheme: Scheme | None = scheme_of(self.checkpoint) if coded else None

    @property
    def rank(self) -> int:
        return self.policy.ranks.rank

    @cached_property
    def exported_memory(self) -> ExportedMemory:
        """Memory on the GPU of the weights that engines open."""
        return ExportedMemory(memory_of(next(self.policy.modules[0].parameters()).device))

    def stream(self) -> WeightStream:
        """For one update."""
        return WeightStream(self)

    # ---- what every rank does at rank 0's word

    def describe(self) -> tuple[dict[str, HeldTensor], list[str]]:
        held, self.own = holdings(self.policy, self.heads)
        return held, gather_json(process_identity(), self.patient)

    def join(self, command: JoinCommand, pieces: np.ndarray) -> None:
        self.leave()
        exported = self.exported_memory if command.update_group.ipc else None
        self.piece_sender = join_as_rank(command, pieces, self.rank, self.host, exported)
        self.dtypes = command.dtypes

    def prepare(self) -> None:
        self.numbers = prepare_values(self.own, self.dtypes, self.scheme, self._agree)

    def _agree(self, largest: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Raise values to the largest of all ranks that hold parts of the same tensors."""
        for expert in (False, True):
            group = part_group(self.policy, expert)
            mine = [values for name, values in largest if (".experts." in name) == expert]
            if not mine or dist.get_world_size(group) == 1:
                continue
            flat = torch.cat([values.view(-1) for values in mine])
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
            for values, new in zip(mine, flat.split([values.numel() for values in mine]), strict=True):
                values.copy_(new.view(values.shape))

    def send(self) -> int:
        assert self.piece_sender is not None and self.numbers is not None, "join() and prepare() come first"
        return self.piece_sender.send(self.numbers)

    def everywhere(self) -> Pairs:
        """Every whole tensor, as it is sent, on the GPU of every rank; collective."""

        def brought() -> Pairs:
            for name, tensor in export(self.policy, self.patient, heads=self.heads):
                if self.rank:
                    tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.policy.ranks.device)
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, 0)
                yield name, whole

        return quantized(brought(), self.scheme)

    def share(self, command: ShareCommand) -> None:
        stream = ((name, tensor.to(getattr(torch, command.dtypes[name]))) for name, tensor in self.everywhere())
        with contextlib.suppress(RankZeroFailed):  # which says it, and what happens next
            share(stream, command, self.rank, self.patient)

    def leave(self) -> None:
        """Give up memory and group."""
        if self.piece_sender is not None:
            self.piece_sender.close()
            self.piece_sender = None


class WeightStream:
    """One update: on rank 0 a `Source` of pieces (`hpcrl/weights/pieces/planning.py`), which the others follow."""

    def __init__(self, exporter: WeightExporter) -> None:
        self.exporter = exporter
        self.ended = False
        self._gathering: Pairs = iter(())
        self._begun = False  #: whether the other ranks are in that export

    # ---- rank 0

    def gathered(self) -> Pairs:
        """Every whole tensor."""
        self._gathering = self._gathered()
        return self._gathering

    def _gathered(self) -> Pairs:
        self._begun = True
        self._say("gather")
        yield from export(self.exporter.policy, self.exporter.patient, heads=self.exporter.heads)

    def describe(self) -> tuple[dict[str, HeldTensor], list[str]]:
        self._say("describe")
        return self.exporter.describe()

    def join(self, command: JoinCommand, plan: bytes) -> None:
        self._say("join", msgspec.to_builtins(command))
        self._join(command, broadcast_bytes(plan, group=self.exporter.patient))

    def prepare(self) -> None:
        self._say("prepare_values")
        self.exporter.prepare()

    def send(self) -> int:
        self._say("send")
        return self._outcome(self.exporter.send)

    def share(self, command: ShareCommand, checked: Callable[[Pairs], Pairs], client: Any) -> None:
        self._say("share", msgspec.to_builtins(command))
        share(checked(self.exporter.everywhere()), command, 0, self.exporter.patient, client)

    def abort(self) -> None:
        """From another thread: have what is under way here fail."""
        self.exporter.leave()

    def finish_update(self) -> None:
        """Let the other ranks continue; nothing more is asked of them.

        An export that was begun is gone through to its end first, since it is collective.
        """
        if not self.ended:
            self.ended = True
            if self._begun:
                with contextlib.suppress(ValueError):  # a thread that did not give up is in it: that error says it
                    deque(self._gathering, maxlen=0)
            self._say("end")

    def _say(self, word: Word, what: Any = None) -> None:
        broadcast_json([word, what], group=self.exporter.patient)

    # ---- the others

    def follow(self) -> None:
        """Do what rank 0 asks for until it has nothing more to ask."""
        while True:
            word, what = broadcast_json(None, group=self.exporter.patient)
            if word == "end":
                return
            if word == "gather":
                deque(export(self.exporter.policy, self.exporter.patient, heads=self.exporter.heads), maxlen=0)
            elif word == "join":
                plan = broadcast_bytes(None, group=self.exporter.patient)
                self._join(msgspec.convert(what, JoinCommand), plan)
            elif word == "send":
                self._outcome(self.exporter.send)
            elif word == "prepare_values":
                self.exporter.prepare()
            elif word == "share":
                self.exporter.share(msgspec.convert(what, ShareCommand))
            else:
                self.exporter.describe()

    # ---- all

    def _join(self, command: JoinCommand, plan: bytes) -> None:
        self._outcome(lambda: self.exporter.join(command, pieces_of(self.exporter.rank, plan)))

    def _outcome(self, work: Callable[[], int | None]) -> int:
        """Do it; rank 0 learns whether all did: bytes of all together, or the error of the first that failed.

        The others raise nothing: rank 0 decides what happens next.
        """
        sent = 0
        error = None
        try:
            sent = work() or 0
        except Exception as caught:  # noqa: BLE001  (told to rank 0)
            error = caught
            self.exporter.leave()  # members that wait for this rank get an error
        text = f"trainer rank {self.exporter.rank}: {error}"[:TEXT] if error is not None else ""
        told = gather_json([sent, text], self.exporter.patient)
        texts = [text for _, text in told]
        if any(texts):
            self.exporter.leave()
        if self.exporter.rank == 0 and error is not None:
            raise error
        if self.exporter.rank == 0 and any(texts):
            raise PeerError(next(filter(None, texts)))
        return sum(sent for sent, _ in told)


class RankZeroFailed(PeerError):
    """The engines have failed, as rank 0 has said."""


def share(stream: Pairs, command: ShareCommand, rank: int, patient: dist.ProcessGroup, client: Any = None) -> None:
    """What each rank does in an update over CUDA IPC; collective.

    Args:
        stream: every whole tensor, on this rank's GPU, as it is sent.
        patient: a gloo group of all ranks.
        client: of rank 0.

    Raises:
        PeerError: if the engines fail; RankZeroFailed on the other ranks.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerWeightTransferEngine

    class Trainer(IPCTrainerWeightTransferEngine):
        """vLLM's, with handles as JSON, and with ranks that end together when the engines fail."""

        failed: Exception | None = None

        def _all_gather_and_merge_handles(self, handles: list[dict[str, tuple[Any, ...]]]) -> list[dict[str, Any]]:
            mine = {gpu: IpcHandle.of(found) for gpu, found in handles[0].items()}
            return [dict(pair for found in gather_json(mine) for pair in found.items())]

        def _do_send(self, *what: Any, **named: Any) -> None:
            try:
                super()._do_send(*what, **named)
            except Exception as error:  # noqa: BLE001  (raised where all ranks learn it)
                self.failed = error

        def _post_send_sync(self) -> None:
            said = broadcast_json(self.failed and str(self.failed), group=patient)
            if self.failed or said:
                raise self.failed or RankZeroFailed(f"trainer rank 0: {said}")
            torch.cuda.ipc_collect()

    Trainer(
        client=client,
        source=stream,  # type: ignore[arg-type]
        is_sender=rank == 0,
        packed=True,
        packed_buffer_size_bytes=command.limit,
    ).send_weights()
