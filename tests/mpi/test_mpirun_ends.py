"""`hpcrl launch` does not wait for ever for an mpirun that never ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.mpi import mpirun


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mpirun, "GRACE", 0.5)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_is_left_after_the_run_has_ended_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where a host's link is cut for ever: rank 0 has said its last word, and mpirun waits for the host."""
    begun = time.monotonic()
    script = 'echo 3 > "$HPCRL_LAUNCH_FOLDER/ended"; sleep 100'
    assert mpirun._run(["sh", "-c", script], "openmpi", "ssh", tmp_path / mpirun.ENDED) == 3
    assert time.monotonic() - begun < 30
    assert "mpirun did not end within" in capsys.readouterr().err


def test_one_that_ends_by_itself_is_waited_for(tmp_path: Path) -> None:
    assert mpirun._run(["sh", "-c", "sleep 1; exit 5"], "openmpi", "ssh", tmp_path / mpirun.ENDED) == 5
