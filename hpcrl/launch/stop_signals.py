"""Signals by which the launcher, or the process of a host, is asked to stop: counted, and acted on where it is safe.

`launch/attempt.py` and on each host `launch/host.py` (`_watch`) act on them: the first writes `stop` into the run
directory, which the trainer (`trainer/rollout_calls.py`) and the rollout process see; the second ends all at once.

Invariant: a handler only counts; the handlers that were there before are back when the context is left.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class SignalFlags:
    """Signals that the process of a host got: the first asks to save and end, the second to end now.  A context."""

    #: signals that ask to stop, and those that are for the launcher, should they come here as well
    COUNTED: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGTERM, signal.SIGINT)
    IGNORED: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

    requests: int = 0
    handlers: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> SignalFlags:
        for number in self.COUNTED:
            self.handlers[number] = signal.signal(number, self.count)
        for number in self.IGNORED:
            self.handlers[number] = signal.signal(number, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def count(self, number: int, _: object) -> None:
        """The handler."""
        self.requests += 1


@dataclass
class StopRequest(SignalFlags):
    """What the launcher was asked for so far.

    Attributes:
        requests: 0 nothing, 1 save and end, 2 end now.
        why: for the user.
        seconds: that the run may take to save, instead of --stop-timeout.
        nudges: how often SIGUSR1 has come, with which a scheduler says that time is short; the holder of the time limit
            decides.
    """

    COUNTED: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    IGNORED: ClassVar[tuple[signal.Signals, ...]] = ()

    why: str = ""
    nudges: int = 0
    seconds: float = 0.0

    def __enter__(self) -> StopRequest:
        super().__enter__()
        return self

    def count(self, number: int, _: object) -> None:
        """The handler."""
        if number == signal.SIGUSR1:
            self.nudges += 1
        else:
            self.requests += 1

    def ask(self, why: str, seconds: float = 0.0) -> None:
        """Ask to save and end, once.

        Args:
            seconds: that the run may take for it, instead of --stop-timeout; 0: no other.
        """
        if not self.requests:
            self.requests = 1
            self.why = why
            self.seconds = seconds
