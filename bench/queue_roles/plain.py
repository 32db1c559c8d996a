"""What lies below: plain ZeroMQ PUSH/PULL, open and with CURVE, a TCP connection, memory.

A message is a group of 8 samples, 4 buffers.
"""

from __future__ import annotations

import socket
import struct
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import zmq

from bench.queue_roles.work import (
    DIFFERENT,
    GROUP,
    SAMPLES,
    Control,
    Passes,
    batches,
    columns,
    facts,
    groups,
    read,
    timed,
)

MESSAGES = SAMPLES // GROUP
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_SIZES = struct.Struct("<4Q")


# ---- ZeroMQ


def zmq_produce(control: Control, passes: Passes, scratch: Path, encrypted: bool = False) -> None:
    work, context = batches(), zmq.Context()
    push = context.socket(zmq.PUSH)
    public, secret = zmq.curve_keypair() if encrypted else (b"", b"")
    if encrypted:
        push.curve_secretkey, push.curve_server = secret, True
    push.bind("tcp://127.0.0.1:0")
    control.tell([push.last_endpoint.decode(), public.decode()])
    for number in range(passes.total):
        if number % passes.batches == 0:
            control.hear()
        for group in groups(work[number % DIFFERENT]):
            push.send_multipart([_pack(facts(group)), *columns(group)], copy=False)
    control.hear()
    push.close()
    context.term()


def zmq_consume(control: Control, passes: Passes, scratch: Path) -> list[float]:
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    address, key = control.hear()
    if key:
        pull.curve_publickey, pull.curve_secretkey = zmq.curve_keypair()
        pull.curve_serverkey = key.encode()
    pull.connect(address)

    def receive(number: int) -> int:
        total = 0
        for _ in range(MESSAGES):
            head, ids, mask, _ = pull.recv_multipart(copy=False)
            _unpack(head.buffer)
            total += read(np.frombuffer(ids, np.int32), np.frombuffer(mask, np.uint8))
        return total

    seconds = timed(control, passes, receive)
    pull.close()
    context.term()
    return seconds


def zmq_produce_encrypted(control: Control, passes: Passes, scratch: Path) -> None:
    zmq_produce(control, passes, scratch, encrypted=True)


# ---- TCP


def tcp_produce(control: Control, passes: Passes, scratch: Path) -> None:
    work = batches()
    with socket.create_server(("127.0.0.1", 0)) as server:
        control.tell(server.getsockname()[1])
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        for number in range(passes.total):
            if number % passes.batches == 0:
                control.hear()
            for group in groups(work[number % DIFFERENT]):
                buffers = [memoryview(_pack(facts(group))), *(memoryview(c).cast("B") for c in columns(group))]
                _send(connection, [memoryview(_SIZES.pack(*map(len, buffers))), *buffers])
        control.hear()


def _send(connection: socket.socket, buffers: list[memoryview]) -> None:
    while buffers:
        sent = connection.sendmsg(buffers)
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if sent:
            buffers[0] = buffers[0][sent:]


def tcp_consume(control: Control, passes: Passes, scratch: Path) -> list[float]:
    connection = socket.create_connection(("127.0.0.1", control.hear()))
    buffer = memoryview(bytearray(2**20))

    def exactly(view: memoryview) -> memoryview:
        got = 0
        while got < len(view):
            got += connection.recv_into(view[got:]) or 1 / 0
        return view

    def receive(number: int) -> int:
        nonlocal buffer
        total = 0
        for _ in range(MESSAGES):
            sizes = _SIZES.unpack(exactly(buffer[: _SIZES.size]))
            if sum(sizes) > len(buffer):
                buffer = memoryview(bytearray(2 * sum(sizes)))
            rest = exactly(buffer[: sum(sizes)])
            cuts = np.cumsum((0, *sizes))
            head, ids, mask, _ = (rest[a:b] for a, b in pairwise(cuts))
            _unpack(head)
            total += read(np.frombuffer(ids, np.int32), np.frombuffer(mask, np.uint8))
        return total

    seconds = timed(control, passes, receive)
    connection.close()
    return seconds


# ---- memory


def memory(control: Control, passes: Passes, scratch: Path) -> list[float]:
    """Copy the same arrays within one process, group by group, and read the copy."""
    work = batches()

    def receive(number: int) -> int:
        total = 0
        for group in groups(work[number % DIFFERENT]):
            _unpack(_pack(facts(group)))
            ids, mask, _ = columns(group)
            total += read(ids, mask)
        return total

    return timed(control, passes, receive)
