"""What the launcher makes of signals."""

from __future__ import annotations

import signal

import pytest

from hpcrl.launch.stop_signals import StopRequest


def test_third_interruption_waits_for_nothing() -> None:
    """The first two are looked at in time; where nothing has looked by then, the third ends what is under way."""
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.requests == 2
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
