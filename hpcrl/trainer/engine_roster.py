"""The registry of engines as trainer rank 0 asks it: calls over the rollout queue.

Invariant: the registry lives in the rollout process alone; nothing of it is kept here.
"""

from __future__ import annotations

from typing import Any

from hpcrl.queue.client import QueueClient


class QueueRoster:
    """`weights.updates.Roster` over the queue; timeout: seconds that a call may take."""

    def __init__(self, client: QueueClient, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    def engines(self) -> dict[str, Any]:
        return self._client.call("engines", self._timeout)

    def updated(self, engines: list[list[int]], version: int, alone: bool) -> None:
        self._client.call("engines_updated", self._timeout, engines=engines, version=version, alone=alone)

    def lost(self, engines: list[list[Any]]) -> None:
        self._client.call("engines_lost", self._timeout, engines=engines)
