"""What a stranger on the same node may do to a port of a run, as a process of its own: `python stranger.py HOW
HOST:PORT... `.

crowd: many connections that say nothing.  garbage: bytes that nobody sends, on several connections each: noise, lengths
without end, requests without a key, greetings of other protocols, and a pickle whose reading would make the file that
MARK names.

Prints how many connections were made.  Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

#: connections of a crowd to each port, and the seconds for which they are held
EACH = 400
HELD = 3.0
#: ZeroMQ's greeting (ZMTP 3.1) of somebody who wants no security, and its READY
PLAIN = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48) + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


class Bomb:
    """Makes the file MARK when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (Path(os.environ["MARK"]),)


def noise(chance: random.Random) -> list[bytes]:
    bomb = pickle.dumps(Bomb())
    return [
        chance.randbytes(chance.choice((1, 100, 100_000))),
        b"\xff" * 64,
        struct.pack("<Q", 1 << 62) + bytes(1000),
        struct.pack(">I", 0x7FFFFFFF) + bytes(1000),
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{",
        b"GET / HTTP/1.1\r\nAuthorization: Bearer " + b"A" * 200_000,
        PLAIN,
        PLAIN[:64] + struct.pack(">BQ", 2, 1 << 60) + bytes(100),
        bomb,
        struct.pack("<Q", len(bomb)) + bomb,
        struct.pack(">I", len(bomb)) + bomb,
    ]


def connect(where: tuple[str, int]) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.create_connection(where, timeout=1)
    return None


def crowd(where: tuple[str, int]) -> list[socket.socket]:
    held: list[socket.socket] = []
    while len(held) < EACH and (found := connect(where)):
        held.append(found)
    return held


def garbage(where: tuple[str, int], chance: random.Random) -> list[socket.socket]:
    held: list[socket.socket] = []
    for data in noise(chance):
        if not (found := connect(where)):
            break
        held.append(found)
        with contextlib.suppress(OSError):
            found.sendall(data)
            if chance.random() < 0.5:
                found.close()
    return held


def main() -> None:
    how, seed, *where = sys.argv[1:]
    ports = [(host, int(port)) for host, _, port in (one.rpartition(":") for one in where)]
    chances = [random.Random(f"{seed} {number}") for number in range(len(ports))]
    strike = {"crowd": lambda port, _: crowd(port), "garbage": garbage}[how]
    with ThreadPoolExecutor(
        len(ports)
    ) as pool:  # ports of gloo's that are closed by now drop what comes, and say nothing
        held = [one for some in pool.map(strike, ports, chances) for one in some]
    time.sleep(HELD if how == "crowd" else 1)
    print(len(held))


if __name__ == "__main__":
    main()
