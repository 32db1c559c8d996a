"""What goes between the rollout process and an engine on our own route: token ids in, raw arrays out.

    POST /hpcrl/generate    SampleRequest                -> SampleAnswer, once the sample has ended
    POST /hpcrl/abort       the names of samples         -> nothing; those end early, with what was there

Bodies are msgpack.  Both routes ask for the key of the run.

Invariants: nothing here is text but names, and no Python object exists for a token; what does not fit is a ValueError,
never a wrong array.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

GENERATE, ABORT = "/hpcrl/generate", "/hpcrl/abort"
EXPERTS = (
    "hpcrl_routed_experts"  #: among the extra_args of params: whether an answer is to hold the experts of its tokens
)


class SampleRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One sample of a prompt.

    Attributes:
        name: unlike all others in flight.
        prompt: int32 token ids, little-endian.
        params: vLLM's SamplingParams, by their names.
    """

    name: str
    prompt: bytes
    params: dict[str, Any]


class SampleAnswer(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """How a sample ended.

    Attributes:
        reason: vLLM's finish reason.
        tokens: int32 [n], little-endian.
        logprobs: float32 [n], little-endian; empty if none were requested.
        spans: (weight version, start, end) over the tokens.
        experts: uint8 [prompt + n - 1, *routing], the experts of each token that was read, by layers and bytes of a
            layer, where they were asked for.
    """

    reason: str
    tokens: bytes = b""
    logprobs: bytes = b""
    spans: list[tuple[str, int, int]] = []
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


# msgspec's errors are ValueErrors
encode = msgspec.msgpack.Encoder().encode
read_request = msgspec.msgpack.Decoder(SampleRequest).decode
read_names = msgspec.msgpack.Decoder(list[str]).decode
read_answer = msgspec.msgpack.Decoder(SampleAnswer).decode
