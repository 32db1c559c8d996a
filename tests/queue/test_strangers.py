"""What strangers cost a server before they have proved a key: connections, descriptors, memory, and honest peers' time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpcrl.queue import frames
from tests.support.attacked import FILES, Attacked, start
from tests.support.second_user import SecondUser
from tests.support.strangers import attack


def test_cut_and_joined() -> None:
    """A message is joined to the same bytes from frames of bounded size, and refused beyond the reader's bound."""
    for size in (0, 1, frames.PIECE, frames.PIECE + 1, 3 * frames.PIECE + 5):
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        cut = frames.cut(message)
        assert frames.joined(cut, size) == message
        assert max(map(len, cut)) <= frames.PIECE
    with pytest.raises(ValueError, match="bytes, 100 are allowed"):
        frames.joined([b"x" * 60, b"x" * 60], 100)


# ---- as a second account, against processes


@pytest.fixture(scope="module", params=["queue"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Attacked]]:
    """A server to attack, and one like it that is left alone."""
    folder = tmp_path_factory.mktemp(request.param)
    both = [start(request.param, folder / name) for name in ("attacked", "other")]
    yield both
    for one in both:
        one.close()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["idle", f"frames={frames.LIMIT}", "frames=8000000"])
def test_a_thousand_connections_cost_little(pair: list[Attacked], second_user: SecondUser, kind: str) -> None:
    """A thousand strangers' connections, each as heavy as it can be, cost at most 64 MB, and honest calls are answered
    meanwhile."""
    cost = attack(second_user, kind, *pair)
    assert cost.grown <= 64e6
    assert cost.made >= 64
    pair[0].again()


@pytest.mark.process
def test_descriptors_remain(pair: list[Attacked], second_user: SecondUser) -> None:
    """More connections than the process may have descriptors leave it enough of them, and it lets honest peers in."""
    cost = attack(second_user, "idle", *pair, count=FILES + 500, seconds=6.0)
    assert cost.files < 0.8 * FILES
    pair[0].again()
    assert pair[0].process.poll() is None
