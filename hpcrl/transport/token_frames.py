"""What goes between the rollout process and an engine on our own route: token ids in, raw arrays out.

    POST /hpcrl/generate    GroupRequest                 -> frames, one a sample, in the order in which they finish
    POST /hpcrl/abort       the names of samples         -> nothing; those frames come early, with what was there

Bodies are msgpack; a frame is its length (4 bytes, little-endian) and an Answer.  Both routes ask for the key of the
run.

Invariants: nothing here is text but names and errors, and no Python object exists for a token; what does not fit is a
ValueError, never a wrong array.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

GENERATE, ABORT = "/hpcrl/generate", "/hpcrl/abort"
EXPERTS = (
    "hpcrl_routed_experts"  #: among the extra_args of params: whether an answer is to hold the experts of its tokens
)
LONGEST = 2**28  #: bytes of a frame
_LENGTH = struct.Struct("<I")


class GroupRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Some samples of one prompt.

    Attributes:
        names: of each sample, unlike all others in flight.
        seeds: of each, None: the engine's own noise.
        prompt: int32 token ids, little- endian.
        params: vLLM's SamplingParams but for the seed, by their names.
    """

    names: list[str]
    seeds: list[int | None]
    prompt: bytes
    params: dict[str, Any]


class SampleAnswer(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """How sample number `index` of a request ended.

    Attributes:
        reason: vLLM's finish reason, or "error" with the error's text.
        tokens: int32 [n], logprobs: float32 [n] or empty where none were asked for, both little-endian.
        spans: (weight version, start, end) over the tokens.
        experts: uint8 [prompt + n - 1, *routing], the experts of each token that was read, by layers and bytes of a
            layer, where they were asked for.
    """

    index: int
    reason: str
    tokens: bytes = b""
    logprobs: bytes = b""
    spans: list[tuple[str, int, int]] = []
    error: str = ""
    experts: bytes = b""
    routing: tuple[int, int] = (0, 0)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 tokens and float32 log-probs, writable.

        Raises:
            ValueError: if their bytes are not whole numbers.
        """
        return np.frombuffer(self.tokens, "<i4").astype(np.int32), np.frombuffer(self.logprobs, "<f4").astype(
            np.float32
        )


_ENCODER = msgspec.msgpack.Encoder()
_REQUEST = msgspec.msgpack.Decoder(GroupRequest)
_NAMES = msgspec.msgpack.Decoder(list[str])
_ANSWER = msgspec.msgpack.Decoder(SampleAnswer)
encode = _ENCODER.encode


def read_request(data: bytes) -> tuple[GroupRequest, list[int]]:
    """A request and its prompt's token ids.

    Raises:
        ValueError: if it is none.
    """
    request = _REQUEST.decode(data)  # msgspec's errors are ValueErrors
    if not request.names or len(request.names) != len(request.seeds):
        raise ValueError(f"{len(request.names)} names and {len(request.seeds)} seeds")
    return request, np.frombuffer(request.prompt, "<i4").tolist()


def read_names(data: bytes) -> list[str]:
    """The samples to end.

    Raises:
        ValueError: if it is not a list of names.
    """
    return _NAMES.decode(data)


def frame(answer: SampleAnswer) -> bytes:
    """An answer as it goes over the wire."""
    body = _ENCODER.encode(answer)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Answers from a stream of bytes that comes in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[SampleAnswer]:
        """The answers that are whole with `data`.

        Raises:
            ValueError: for what is none.
        """
        data, at = self._rest + data if self._rest else data, 0
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > LONGEST:
                raise ValueError(f"a frame of {length} bytes")
            end = at + _LENGTH.size + length
            if end > len(data):
                break
            yield _ANSWER.decode(memoryview(data)[at + _LENGTH.size : end])
            at = end
        self._rest = data[at:]

    @property
    def rest(self) -> int:
        """Bytes of a frame that has not ended."""
        return len(self._rest)
