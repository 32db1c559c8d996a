"""Calls of a method in all workers of all engines, also of those whose engines have data-parallel parts.

    calls = WorkerCalls(fleet, parts=4, host=own_address)
    calls.call("asking for the manifest", "hpcrl_manifest")        # -> [engine][worker]

vLLM hands a call to every data-parallel part, and its answer is that of the first alone.  Where there are several parts
each worker therefore puts its answer into a store that rank 0 serves for the time of the call (`AnswerStore`,
`WorkerExtension.hpcrl_answer`), under the number of its engine and its own name.

Invariants: an engine that has answered has put every answer
there; workers come in the order of parts, and within one in that of ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
from torch.distributed import TCPStore

from hpcrl.engine.membership.broadcast import EngineBroadcast
from hpcrl.errors import PeerError
from hpcrl.transport.torch_store import connect_store, open_store

LARGEST = 2**30  #: bytes of an answer


class AnswerStore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where workers put their answers.

    Attributes:
        engine: its number in the call.
    """

    host: str
    port: int
    engine: int
    seconds: float

    def put(self, worker: str, answer: Any) -> None:
        """Store what a worker answers, plain values."""
        packed = zlib.compress(json.dumps(answer).encode(), 1)
        connect_store(self.host, self.port, self.seconds).set(self._name(worker), packed)

    def pop_answer(self, store: TCPStore, worker: str) -> Any:
        """The answer of a worker.

        Raises:
            PeerError: if it is invalid.
        """
        packed = store.get(self._name(worker))
        opened = zlib.decompressobj()
        try:
            text = opened.decompress(packed, LARGEST)
            if not opened.eof:
                raise PeerError(f"engine worker {worker} answered with more than {LARGEST} bytes")
            return json.loads(text)
        except (zlib.error, ValueError) as error:
            raise PeerError(f"engine worker {worker} put an invalid answer into the store") from error

    def _name(self, worker: str) -> str:
        return f"answer {self.engine} {worker}"


def worker_name(part: int, rank: int) -> str:
    """How a worker is called within its engine: its data-parallel part, and its rank there."""
    return f"{part}.{rank}"


class WorkerCalls:
    """Calls to the workers of a fleet.

    Attributes:
        parts: data-parallel parts that each engine has, 1 for engines that are reached by HTTP alone.
        host: this process's address, where workers of several parts put their answers.
    """

    def __init__(self, fleet: EngineBroadcast, parts: int, host: str) -> None:
        self.fleet = fleet
        self.parts = parts
        self.host = host

    def call(self, phase: str, method: str, *arguments: str) -> list[list[Any]]:
        """Call a method with the same arguments everywhere; [engine][worker] -> what it returned."""
        return self.call_each(phase, method, [list(arguments)] * len(self.fleet.engines))

    def call_each(self, phase: str, method: str, arguments: Sequence[list[str]]) -> list[list[Any]]:
        """Call a method with the arguments of each engine.

        Raises:
            PeerError, DeadlineError: as of `EngineBroadcast`.
        """
        if self.parts == 1:
            bodies = [{"method": method, "args": mine} for mine in arguments]
            return [answer["results"] for answer in self.fleet.post_all(phase, "/collective_rpc", bodies).results()]
        server = open_store(self.host)
        stores = [AnswerStore(self.host, server.port, number, self.fleet.seconds) for number in range(len(arguments))]
        bodies = [
            {"method": "hpcrl_answer", "args": [msgspec.json.encode(store).decode(), method, *mine]}
            for store, mine in zip(stores, arguments, strict=True)
        ]
        answers = self.fleet.post_all(phase, "/collective_rpc", bodies).results()
        return [
            [
                store.pop_answer(server, worker_name(part, rank))
                for part in range(self.parts)
                for rank in range(len(answer["results"]))
            ]
            for store, answer in zip(stores, answers, strict=True)
        ]
