"""Which engines get the weights.

Every trainer rank creates and drives one `Updates`, since the export of the weights is collective; rank 0 asks the
registry of engines (in the rollout process) which ones to send to, and reports the outcome to it.

Invariants: all ranks take the same branch, because rank 0's decision is broadcast before any rank acts; an engine that
ends during an update ends the attempt; one that comes back gets its own update; one that gets an adapter, before that
the weights under it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcrl.engine.membership.http import Address
from hpcrl.engine.membership.registry import Engine
from hpcrl.errors import DeadlineError
from hpcrl.run.rundir import RunDir
from hpcrl.utils.waiting import Deadline
from hpcrl.weights.sender import WeightSender

if TYPE_CHECKING:
    from hpcrl.transport.client import QueueClient
    from hpcrl.weights.pieces.planning import Source

SLACK = 30.0  #: seconds beyond --engine-start-timeout, so that the engine itself says why it did not come up
LOOK = 0.2  #: seconds between two questions while engines start

Export = Callable[[], "Source"]


@dataclass(frozen=True)
class FirstUpdate:
    """What an engine is sent once, before it can serve: the weights under an adapter.

    Attributes:
        sender: of them.
        export: of them.
        leave: gives up what the sending has taken.
    """

    sender: WeightSender
    export: Export
    leave: Callable[[], None]


@dataclass
class Updates:
    """Weight updates of one attempt.

    Attributes:
        sender: this rank's sender.
        start_timeout: --engine-start-timeout, in seconds.
        client: of the queue, on the driver alone: whom the registry in the rollout process is asked by.
        key: (index, incarnation) -> the HTTP key of an engine.
        together: broadcasts rank 0's value to every rank.
        first: what engines that get an adapter are sent before these.
        ready: (index, incarnation) of engines that have had it.
    """

    sender: WeightSender
    rundir: RunDir
    start_timeout: float
    client: QueueClient | None
    key: Callable[[int, int], str]
    together: Callable[[Any], Any]
    first: FirstUpdate | None = None
    ready: set[tuple[int, int]] = field(default_factory=set)

    def wait(self) -> None:
        """Wait for the engines that start with the run, on the driver.

        Raises:
            DeadlineError: names the one that does not come up.
        """
        if self.client is None:
            return
        end = Deadline(self.start_timeout + SLACK)
        while starting := self._registry("engines").get("starting"):
            self.rundir.check()
            if end.over:
                raise DeadlineError(
                    f"{starting[0]} did not come up within {self.start_timeout:.0f} s", f"see {self.rundir.logs}"
                )
            time.sleep(LOOK)

    def publish(self, export: Export, version: int) -> dict[str, float]:
        """Put the policy into all engines as `version`; every rank calls it.

        Errors as `WeightSender.publish`.

        Returns:
            Metrics (on the driver).
        """
        return self._send(export, version, alone=False)

    def join(self, export: Export, version: int) -> dict[str, float]:
        """Put `version` into engines that wait for it, if there are any; the others continue.  Every rank calls it."""
        return self._send(export, version, alone=True)

    def close(self) -> None:
        """Give up memory and groups; the engines stay as they are."""
        self.sender.close()

    def _send(self, export: Export, version: int, alone: bool) -> dict[str, float]:
        members = self.together(self._members(alone) if self.client else None)
        metrics: dict[str, float] = {}
        if members:
            new = [m for m in members if (m[0], m[1]) not in self.ready]
            if self.first is not None and new:
                self._publish(self.first.sender, new, self.first.export, version)
                self.first.sender.close()
                self.first.leave()
                self.ready |= {(m[0], m[1]) for m in new}
            metrics = self._publish(self.sender, members, export, version)
        if self.client is not None and (members or not alone):
            engines = [[index, incarnation] for index, incarnation, *_ in members]
            self._registry("engines_updated", engines=engines, version=version, alone=alone)
        return metrics

    def _members(self, alone: bool) -> list[list[Any]]:
        return self._registry("engines").get("waiting" if alone else "update", [])

    def _registry(self, method: str, **params: Any) -> dict[str, Any]:
        """The registry's answer; none once the run is to stop and the rollout process is silent: then there are no
        engines."""
        from hpcrl.transport.client import Unanswered

        assert self.client is not None
        try:
            return self.client.call(method, **params)
        except Unanswered:
            return {}

    def _publish(
        self, sender: WeightSender, members: list[list[Any]], export: Export, version: int
    ) -> dict[str, float]:
        """One update to these engines; metrics, on the driver."""
        source = export()
        if self.client is None:
            source.follow()
            return {}
        sender.connect(
            [
                Engine.at(Address(host, port, self.key(index, incarnation)), index, incarnation)
                for index, incarnation, host, port in members
            ]
        )
        return sender.publish(source, version)
