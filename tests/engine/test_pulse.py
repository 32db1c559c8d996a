"""How long something has been stopped: counted from look to look, and anew once it goes on or nobody could look."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from hpcrl.engine.pulse import Stopped


@dataclass
class Process:
    pid: int
    state: str = psutil.STATUS_RUNNING

    def status(self) -> str:
        if self.state == psutil.STATUS_DEAD:
            raise psutil.NoSuchProcess(self.pid)
        return self.state


def test_who_has_been_stopped_and_for_how_long() -> None:
    at, first, second = [0.0], Process(11), Process(12)
    stopped = Stopped(lambda: [first, second], lambda: at[0])

    def look(seconds: float) -> tuple[int, float] | None:
        at[0] += seconds
        return stopped.longest()

    assert look(0) is None
    first.state = psutil.STATUS_STOPPED
    assert look(1) is None, "it is not yet time to look"
    assert look(1) == (11, 0)
    second.state = psutil.STATUS_TRACING_STOP
    assert look(10) == (11, 10)
    first.state = psutil.STATUS_SLEEPING
    assert look(2) == (12, 2)
    first.state, second.state = psutil.STATUS_STOPPED, psutil.STATUS_DEAD
    assert look(2) == (11, 0), "what went on begins anew"
    assert look(100) == (11, 0), "nobody looked: whoever looks was perhaps stopped with it"
