"""--weight-update gathered as a plan of pieces: rank 0 alone sends, and holds every tensor whole.

    source = GatheredSource(host)
    source.start_update(ranks, stream)     # an update: `stream` collects whole tensors on rank 0
    source.describe(); source.join(command, plan); source.prepare(); source.send()

Rank 0 packs pieces out of the stream as it comes.  Where all of them lie in one round, as on one host, it does that
while engines still generate.

Invariants: every tensor of the plan is drawn from the stream once, and nothing is left in it; a tensor is kept no
longer than pieces of it are to be packed, which for a stream in the order of the plan is one round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from hpcrl.errors import HpcrlError
from hpcrl.models.files.fp8 import Stream
from hpcrl.weights.pieces.elements import copy
from hpcrl.weights.pieces.messages import pieces_of
from hpcrl.weights.pieces.piece_sender import JoinCommand, PieceSender, join_as_rank
from hpcrl.weights.pieces.planning import HeldTensor, Source
from hpcrl.weights.redistribution.layouts import Rectangle, whole


class StreamedValues:
    """Whole tensors out of a stream, as what a rank can send (`PieceValues`).

    Attributes:
        dtypes: those that the engines want, by name.
        uses: how many pieces of each tensor will be asked for.
    """

    def __init__(self, stream: Stream, dtypes: Mapping[str, str], uses: Mapping[str, int]) -> None:
        self.dtypes = dtypes
        self._stream = stream
        self._left = dict(uses)
        self._here: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def write(self, name: str, area: Rectangle, out: torch.Tensor) -> None:
        """The rectangle of a tensor into `out` (of its shape, in the wanted dtype).

        Raises:
            HpcrlError: if the stream ends before that tensor.
        """
        while name not in self._here:
            found, tensor = next(self._stream, (None, None))
            if found is None or tensor is None:
                raise HpcrlError(f"the trainer has not exported {name}, a tensor of the engines")
            self._here[found] = tensor.detach()
        tensor = self._here[name]
        matrix = tensor if tensor.dim() == 2 else tensor.view(len(tensor), -1)
        top, bottom, left, right = area
        copy(out, matrix[top:bottom, left:right])
        self._left[name] -= 1
        if not self._left[name]:
            del self._here[name]

    def close(self) -> None:
        """Once all pieces are packed: let the stream come to its end, where it is checked that it brought all."""
        deque(self._stream, maxlen=0)


class GatheredSource:
    """Rank 0 as the only rank of a plan, kept from update to update."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._ranks: Source | None = None
        self._stream: Stream = iter(())
        self._dtypes: dict[str, str] = {}
        self._uses: Counter[str] = Counter()
        self.sender: PieceSender | None = None
        self.values: StreamedValues | None = None

    def start_update(self, ranks: Source, stream: Stream) -> None:
        """A new update.

        Args:
            stream: (name, whole tensor as it is sent) of every tensor of the engines.
        """
        self._ranks = ranks
        self._stream = stream
        self.values = None

    def describe(self) -> tuple[dict[str, HeldTensor], list[str]]:
        """Every tensor, held by rank 0 alone."""
        assert self._ranks is not None, "start_update() comes first"
        held, hosts = self._ranks.describe()
        parts = {tensor.shape: (whole(tensor.shape, (0,)),) for tensor in held.values()}
        return {name: HeldTensor(tensor.shape, parts[tensor.shape]) for name, tensor in held.items()}, hosts[:1]

    def join(self, command: dict[str, Any], plan: bytes) -> None:
        """Join the workers' group, as its only rank."""
        self.abort()
        known = msgspec.convert(msgspec.to_builtins(command), JoinCommand)
        pieces = pieces_of(0, plan)
        self.sender = join_as_rank(known, pieces, 0, self._host)
        self._dtypes = known.dtypes
        self._uses = Counter(known.names[tensor] for tensor in pieces[:, 0].tolist())

    def prepare(self) -> None:
        """Pack what there is room for."""
        assert self.sender is not None, "join() comes first"
        self.values = StreamedValues(self._stream, self._dtypes, self._uses)
        if self.sender.stage(self.values):
            self.values.close()

    def send(self) -> int:
        """Send everything; how many bytes."""
        assert self.sender is not None and self.values is not None, "prepare() comes first"
        sent = self.sender.send(self.values)
        self.values.close()
        return sent

    def abort(self) -> None:
        """Give up memory and group; from any thread."""
        sender = self.sender
        self.sender = None
        if sender is not None:
            sender.close()
