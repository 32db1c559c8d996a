"""Signals by which the launcher, the process of a host, or a submission is asked to stop: counted, and acted on where
it is safe.

`launch/attempts/attempt.py` and on each host `launch/host.py` (`_watch`) act on them: the first writes `stop` into the
run directory, which the trainer (`trainer/rollout_calls.py`) and the rollout process see; the second ends all at once.

Invariant: a handler only counts; the handlers that were there before are back when the context is left.  A submission
(`HeldSignals`) acts on them between two calls of the scheduler's, never during one, whose job would be lost.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from typing import ClassVar, Self

from hpcrl.errors import Interrupted, Stopped


@dataclass
class SignalFlags:
    """Signals that the process of a host got: the first asks to save and end, the second to end now.  A context."""

    #: signals that ask to stop, and those that are for the launcher, should they come here as well
    COUNTED: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGTERM, signal.SIGINT)
    IGNORED: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

    requests: int = 0
    handlers: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> Self:
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

    def count(self, number: int, _: object) -> None:
        """The handler."""
        if number == signal.SIGUSR1:
            self.nudges += 1
        else:
            self.requests += 1
        if number == signal.SIGINT and self.requests > 2:  # nothing has looked at the second one yet, or it takes long
            raise KeyboardInterrupt

    def request_stop(self, why: str, seconds: float = 0.0) -> None:
        """Ask to save and end, once.

        Args:
            seconds: that the run may take for it, instead of --stop-timeout; 0: no other.
        """
        if not self.requests:
            self.requests = 1
            self.why = why
            self.seconds = seconds


class HeldSignals:
    """Holds SIGTERM, SIGHUP and SIGINT back while what must be done whole, or undone, is under way.  A context.

    What came is raised by `check`; if none has, and no error ends the context, it is delivered at its end.  A signal
    that was ignored before (nohup) stays so; outside of the main thread nothing is held.
    """

    HELD: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self.HELD:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, lambda which, _: self._came.append(which))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is None and self._came:
            os.kill(os.getpid(), self._came[0])

    def check(self) -> None:
        """Raise Stopped, of SIGINT Interrupted, if one has come."""
        if self._came:
            name = signal.Signals(self._came[0]).name
            kind = Interrupted if self._came[0] == signal.SIGINT else Stopped
            raise kind(f"{name} came before all was submitted: nothing stays in the queue")
