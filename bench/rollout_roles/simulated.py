"""Simulated engines: one process that listens on many ports and answers both routes at once, at next to no cost of its
own.

    python -m bench.rollout_roles.simulated COUNT TOKENS        prints the ports as one JSON line; ends with its stdin

Every sample gets TOKENS tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec
import numpy as np

from hpcrl.transport.token_frames import GENERATE, SampleAnswer, encode, read_request

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection.  Requests have a Content-Length, as aiohttp's have."""

    tokens = b""
    logprobs = b""
    json = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.rest = b""

    def data_received(self, data: bytes) -> None:
        self.rest += data
        while (end := self.rest.find(b"\r\n\r\n")) >= 0:
            head = self.rest[:end].lower()
            if b"content-length:" not in head:  # /health
                self.rest = self.rest[end + 4 :]
                self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                continue
            at = head.index(b"content-length:") + 15
            length = int(head[at : head.find(b"\r\n", at) if head.find(b"\r\n", at) >= 0 else None])
            if len(self.rest) < end + 4 + length:
                return
            body = self.rest[end + 4 : end + 4 + length]
            self.rest = self.rest[end + 4 + length :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        if GENERATE.encode() not in head:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(self.json)
                + self.json
            )
            return
        read_request(body)
        data = encode(SampleAnswer("length", self.tokens, self.logprobs, [("0", 0, len(self.tokens) // 4)]))
        self.transport.write(HEAD % len(data) + data)


def prepare(tokens: int) -> None:
    """The answers: the same to everybody."""
    ids = [5 + i % 90 for i in range(tokens)]
    logprobs = [-1.5 - i % 7 for i in range(tokens)]
    Engine.tokens = np.asarray(ids, "<i4").tobytes()
    Engine.logprobs = np.asarray(logprobs, "<f4").tobytes()
    content = [
        {"token": f"token_id:{i}", "token_id": i, "logprob": p, "rank": 1, "bytes": None, "top_logprobs": []}
        for i, p in zip(ids, logprobs, strict=True)
    ]
    choice = {"index": 0, "finish_reason": "length", "token_ids": ids, "logprobs": {"content": content}}
    choice["weight_versions"] = [{"version": "0", "start": 0, "end": tokens}]
    Engine.json = msgspec.json.encode({"request_id": "x", "choices": [choice]})


async def main(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0, backlog=512) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    prepare(int(sys.argv[2]))
    import uvloop

    uvloop.run(main(int(sys.argv[1])))
