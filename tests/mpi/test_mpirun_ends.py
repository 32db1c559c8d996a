"""`hpcrl launch` does not wait for ever for an mpirun that never ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hpcrl.mpi import last_word, mpirun
from hpcrl.mpi.host_rank import HostRank
from hpcrl.mpi.placement import Placement, RankPlace

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mpirun, "GRACE", 0.5)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


WORD = last_word.drawn()


def run(script: str) -> int:
    return mpirun._run(["env", f"{last_word.ENVIRONMENT}={WORD}", "sh", "-c", script], "openmpi", "ssh", WORD)


def test_what_is_left_after_the_run_has_ended_is_ended(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """As where a host's link is cut for ever: rank 0 has said its last word, and mpirun waits for the host."""
    begun = time.monotonic()
    tell = f"{sys.executable} -c 'from hpcrl.mpi.last_word import tell; tell(3)'"
    assert run(f"echo error >&2; {tell}; printf more >&2; sleep 100") == 3
    assert time.monotonic() - begun < 60
    said = capfdbinary.readouterr().err
    assert said.startswith(b"error\nmore") and b"mpirun did not end within" in said, said


def test_one_that_ends_by_itself_is_waited_for_and_heard_to_its_end(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Though somebody who outlives it keeps its output open."""
    text = "".join(f"line {i}\n" for i in range(20_000))
    begun = time.monotonic()
    assert (
        run(
            f"sleep 1; i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done >&2; sleep 90 & echo $! > {tmp_path}/pid; exit 5"
        )
        == 5
    )
    assert time.monotonic() - begun < 60
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert capfdbinary.readouterr().err.decode() == text


def test_another_launchs_word_is_not_ours(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    other = f"{last_word.drawn()} 7"
    assert run(f"echo {other} >&2; sleep 2") == 0
    assert capfdbinary.readouterr().err.decode() == f"{other}\n"


class Silence:
    """A channel to a launcher of which nothing has come for too long."""

    rank = 1

    def receive(self) -> list[tuple[int, Any]]:
        return []

    def beat(self, to: list[int]) -> None:
        """Nobody hears it."""

    def silent(self) -> list[int]:
        return [0]


def test_a_rank_that_has_lost_rank_0_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where it is rank 0's host whose link is cut."""
    monkeypatch.setenv(last_word.ENVIRONMENT, WORD)
    places = tuple(RankPlace(rank, f"node{rank + 1}", 0) for rank in range(2))
    status = HostRank(cast(Any, Silence()), Placement(places, (), per_slot=False)).run()
    said = capfd.readouterr().err
    assert status and "the launcher on rank 0 was silent" in said and f"{WORD} {status}\n" in said
