"""Handing the GPUs that trainer and engines share (--colocate) back and forth, the trainer's side.

    sharing = GpuSharing(context)   # on every rank, before it uses a GPU: returns when all engines are up and asleep
    sharing.start(driver, ...)      # the trainer has the GPUs from the start
    sharing.take_gpus()             # requests stop, engines sleep, the trainer's state comes back onto the GPUs
    sharing.give_back(publish)      # offloads gradients and optimizer, wakes the engines' weights, calls `publish`,
                                    # offloads the weights, wakes the engines

Invariants: every step of the hand-over is allowed by `hpcrl.weights.colocation` on this rank, in every engine and in
the rollout process, or the run ends; no rank continues before all have done their part; the side that frees memory is
told before the side that allocates it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from hpcrl.engine.membership.broadcast import EngineBroadcast, fleet_of
from hpcrl.engine.membership.http import TURN
from hpcrl.run.role import RoleContext, say
from hpcrl.trainer.megatron.host_memory import DeviceState
from hpcrl.transport.client import QueueClient, Unanswered
from hpcrl.weights.colocation import ENGINES_UP, Event, HandOver, TrainerHolds

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy

SLACK = 30.0  #: seconds beyond --engine-start-timeout, so that the engine itself says why it did not come up
T = TypeVar("T")


class GpuSharing:
    """One rank's part in the hand-over; every method is collective.

    Raises:
        DeadlineError, PeerError: if an engine does not come up.
    """

    def __init__(self, context: RoleContext) -> None:
        self._options = context.options
        patience = context.options.engine_start_timeout + SLACK
        self._fleet: EngineBroadcast = fleet_of(context.rundir, context.plan, context.options.update_timeout, patience)
        self._mine = HandOver("the trainer", ENGINES_UP)
        self._state = DeviceState(())
        self._driver = False
        self._client = None
        self._together: Callable[[], None] = lambda: None  # before process groups exist
        self.seconds = 0.0  #: that the last round of the hand-over took, without what was done in it

    def start(self, driver: bool, together: Callable[[], None]) -> None:
        """The trainer's turn: engines that are up sleep.

        Args:
            driver: this rank speaks for all.
            together: waits for all ranks.
        """
        self._driver = driver
        self._together = together
        self._tell(Event.TAKE)

    def use(self, policies: Sequence[Policy], client: QueueClient | None) -> None:
        """What leaves the GPUs between turns, and how the driver reaches the rollout process, which starts in the
        trainer's turn."""
        self._client = client
        if self._options.offloads_train:
            self._state = DeviceState(policies)

    def take_gpus(self) -> None:
        """Make it the trainer's turn, if it is not."""
        if self._mine.at.trainer == TrainerHolds.ALL:
            return
        begun = time.monotonic()
        self._tell(Event.SLEEP)
        self._tell(Event.TAKE)
        self._state.come_back()
        self.seconds = time.monotonic() - begun

    def give_back(self, publish: Callable[[], T]) -> T:
        """Make it the engines' turn; `publish` brings them the weights.

        Returns:
            What it returns.
        """
        begun = time.monotonic()
        self._state.put_away_rest()
        self._tell(Event.SHRINK)
        self._tell(Event.WAKE_WEIGHTS)
        publishing = time.monotonic()
        found = publish()
        begun += time.monotonic() - publishing  # it has a metric of its own
        self._tell(Event.UPDATED)
        self._state.put_away_weights()
        self._tell(Event.LEAVE)
        self._tell(Event.WAKE)
        self.seconds += time.monotonic() - begun
        return found

    def _tell(self, event: Event) -> None:
        """Wait until all ranks have reached `event`, then tell all roles."""
        self._mine.tell(event)
        self._together()
        if self._driver:
            if event == Event.SLEEP:
                self._tell_rollout(event)  # nothing is sent any more
            answers = self._fleet.post(f"the hand-over's {event}", TURN, {"event": event})
            if event != Event.SLEEP:
                self._tell_rollout(event)
            freed = sum(answer["bytes"] for answer in answers)
            if freed:
                say(f"the engines sleep, and have given back {freed / 2**20:.0f} MiB")
        self._together()

    def _tell_rollout(self, event: Event) -> None:
        if self._client is not None:
            with contextlib.suppress(Unanswered):  # the run is to stop: it saves and ends without the rollout process
                self._client.call("turn", self._options.rollout_timeout, event=event)
