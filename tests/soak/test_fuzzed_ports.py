"""Strangers' bytes against every port of a run, as a second account: drawn anew for each connection, for a while.

The process stays up, its memory and descriptors stay bounded, and honest peers are answered meanwhile and afterwards.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.attacked import FILES, start
from tests.support.second_user import SecondUser
from tests.support.strangers import attack

SECONDS = 30.0
HTTP = ("idle", "headers", "one-header", "url", "body", "chunks", "pipeline", "bad")
KINDS = {"store": ("idle", "greeting"), "queue": ("idle", "greeting"), "engine": HTTP, "endpoint": HTTP}


@pytest.mark.soak
@pytest.mark.parametrize("port", KINDS)
def test_fuzzed_ports(port: str, second_user: SecondUser, tmp_path: Path) -> None:
    """Noise in the words of each protocol, and then each kind of heavy connection."""
    pair = [start(port, tmp_path / name) for name in ("attacked", "other")]
    for kind in ("noise", *KINDS[port]):
        cost = attack(second_user, kind, *pair, count=1_000, seconds=SECONDS if kind == "noise" else 5.0)
        assert pair[0].process.poll() is None, kind
        assert cost.grown <= 64e6 and cost.files < FILES / 2, (kind, cost.grown, cost.files)
        assert len(cost.calls) > 5, kind
        pair[0].again()
    for one in pair:
        one.close()
