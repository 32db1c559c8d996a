"""How large a message may be that comes to a server."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from hpcrl.run.peers import RolloutPeer, find
from hpcrl.transport import messages
from tests.support.queues import Served, make_rundir

#: ZMTP's, of a client with CURVE
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def test_cut_and_joined() -> None:
    """A message is joined to the same bytes from frames of bounded size, and refused beyond the reader's bound."""
    for size in (0, 1, messages.PIECE, messages.PIECE + 1, 3 * messages.PIECE + 5):
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        cut = messages.cut(message)
        assert messages.joined(cut, size) == message
        assert max(map(len, cut)) <= messages.PIECE
    with pytest.raises(ValueError, match="bytes, at most 100 are allowed"):
        messages.joined([b"x" * 60, b"x" * 60], 100)


@pytest.mark.parametrize(("size", "stays"), [(messages.LIMIT, True), (messages.LIMIT + 1, False)])
def test_a_large_frame_ends_the_connection(size: int, stays: bool, tmp_path: Path) -> None:
    """Before its bytes have come, of a peer that has shown no key."""
    served = Served(make_rundir(tmp_path / "run"), {})
    peer = find(served.rundir, RolloutPeer)
    assert peer is not None
    with socket.create_connection((peer.host, peer.port), timeout=1.0 if stays else 20.0) as one:
        one.sendall(GREETING + b"\x06" + struct.pack(">Q", size))
        came = b"?"
        try:
            while came:
                came = one.recv(4096)
        except TimeoutError:
            pass
        except ConnectionError:
            came = b""
        assert bool(came) is stays
    served.close()
