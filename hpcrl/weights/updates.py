"""Which engines get the weights, and what happens when one of them ends during an update.

Every trainer rank creates and drives one `Updates`, since the export of the weights is collective; rank 0 asks the
registry of engines (in the rollout process) which ones to send to, and reports the outcome to it.

Invariants: all ranks take the same branch, because rank 0's decision is broadcast before any rank acts; an update is
repeated, whole, without the engines that ended during it, until all that are left hold the version; an engine that
joins or comes back gets its own update; one that gets adapters, before that the weights under them and all of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcrl.engines.fleet import EngineLate, EngineLost
from hpcrl.engines.http import Address
from hpcrl.engines.registry import Engine
from hpcrl.errors import DeadlineError
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.toolbox.deadline import Deadline
from hpcrl.weights.sender import WeightSender

if TYPE_CHECKING:
    from hpcrl.queue.client import QueueClient
    from hpcrl.weights.pieces.planning import Source

SLACK = 30.0  #: seconds beyond --engine-start-timeout, so that the engine itself says why it did not come up
LOOK = 0.2  #: seconds between two questions while engines start

Export = Callable[[], "Source"]


@dataclass(frozen=True)
class FirstUpdate:
    """What an engine is sent once, before it can serve: the weights under adapters, or one of several adapters.

    Attributes:
        sender: of it.
        export: of it, which is done within `around`.
        leave: gives up what the sending has taken; None: the next updates need it.
        slot: see `WeightSender.slot`.
    """

    sender: WeightSender
    export: Export
    leave: Callable[[], None] | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    slot: int = 0


class Updates:
    """Weight updates of one attempt.

    Attributes:
        sender: this rank's sender.
        start_timeout: --engine-start-timeout, in seconds.
        client: of the queue, on the driver alone: whom the registry in the rollout process is asked by.
        key: (index, incarnation) -> the HTTP key of an engine.
        together: broadcasts rank 0's value to every rank.
        firsts: what engines that get adapters are sent, once each, before these.
    """

    def __init__(
        self,
        sender: WeightSender,
        rundir: RunDir,
        start_timeout: float,
        client: QueueClient | None,
        key: Callable[[int, int], str],
        together: Callable[[Any], Any],
        firsts: Sequence[FirstUpdate] = (),
    ) -> None:
        self._sender = sender
        self._rundir = rundir
        self._start_timeout = start_timeout
        self._client = client
        self._key = key
        self._together = together
        self._firsts = firsts
        self._ready: set[tuple[int, int]] = set()  # (index, incarnation) of engines that have had them

    def wait(self) -> None:
        """Wait for the engines that start with the run, on the driver.

        Raises:
            DeadlineError: names the one that does not come up.
        """
        if self._client is not None:
            self._wait_for_all()

    def publish(self, export: Export, version: int, slot: int = 0) -> dict[str, float]:
        """Put the policy into all engines as `version`; every rank calls it.

        Args:
            slot: see `WeightSender.slot`.

        Errors as `WeightSender.publish`, but for EngineLost.

        Returns:
            Metrics (on the driver).
        """
        return self._send(export, version, slot, alone=False)

    def join(self, export: Export, version: int, slot: int = 0) -> dict[str, float]:
        """Put `version` into engines that wait for it, if there are any; the others continue.  Every rank calls it."""
        return self._send(export, version, slot, alone=True)

    def close(self) -> None:
        """Give up memory and groups; the engines stay as they are."""
        self._sender.close()

    def _wait_for_all(self) -> None:
        end = Deadline(self._start_timeout + SLACK)
        while starting := self._registry("engines").get("starting"):
            self._rundir.check()
            if end.over:
                raise DeadlineError(
                    f"{starting[0]} did not come up within {self._start_timeout:.0f} s", f"see {self._rundir.logs}"
                )
            time.sleep(LOOK)

    def _send(self, export: Export, version: int, slot: int, alone: bool) -> dict[str, float]:
        lost: list[list[Any]] = []
        while True:
            members = self._together(self._members(alone, lost) if self._client else None)
            if not members:
                self._tell([], version, alone)
                return {}
            if lost := self._send_firsts(members, version):
                continue
            self._sender.slot = slot
            metrics, lost = self._try(self._sender, members, export, version)
            if not (lost := self._together(lost)):
                self._tell(members, version, alone)
                return metrics

    def _send_firsts(self, members: list[list[Any]], version: int) -> list[list[Any]]:
        """Engines that ended while they were sent what comes before any update, on every rank the same."""
        if not (new := [m for m in members if (m[0], m[1]) not in self._ready] if self._firsts else []):
            return []
        for first in self._firsts:
            first.sender.slot = first.slot
            with first.around():
                _, lost = self._try(first.sender, new, first.export, version)
            if first.leave is not None:
                first.sender.close()
                first.leave()
            if lost := self._together(lost):
                return lost
        self._ready |= {(m[0], m[1]) for m in new}
        return []

    def _members(self, alone: bool, lost: list[list[Any]]) -> list[list[Any]]:
        """The engines that the registry lists, once it knows which were lost."""
        if lost:
            self._registry("engines_lost", engines=lost)
        return self._registry("engines").get("waiting" if alone else "update", [])

    def _registry(self, method: str, **params: Any) -> dict[str, Any]:
        """The registry's answer; none once the run is to stop and the rollout process is silent: then there are no
        engines."""
        from hpcrl.queue.client import Unanswered

        assert self._client is not None
        try:
            return self._client.call(method, **params)
        except Unanswered:
            return {}

    def _try(
        self, sender: WeightSender, members: list[list[Any]], export: Export, version: int
    ) -> tuple[dict[str, float], list[list[Any]]]:
        """Metrics, and [index, incarnation, why] of those that ended; all ranks have done their part."""
        source = export()
        if self._client is None:
            source.follow()
            return {}, []
        try:
            sender.connect(
                [
                    Engine.at(Address(host, port, self._key(index, incarnation)), index, incarnation)
                    for index, incarnation, host, port in members
                ]
            )
            return sender.publish(source, version), []
        except (EngineLost, EngineLate) as error:
            if not sender.may_lose:
                raise
            engines = error.engines if isinstance(error, EngineLost) else (error.engine,)
            say(f"the weight update to version {version} continues without {', '.join(map(str, engines))}: {error}")
            source.end()  # the other ranks wait for a word
            return {}, [[engine.index, engine.incarnation, str(error)] for engine in engines]

    def _tell(self, members: list[list[Any]], version: int, alone: bool) -> None:
        if self._client is not None and (members or not alone):
            engines = [[index, incarnation] for index, incarnation, *_ in members]
            self._registry("engines_updated", engines=engines, version=version, alone=alone)
