"""The engine role, with a server that can be given work from within: what its engine's client costs when nobody speaks
HTTP.

POST /bench/own     [groups, samples of a group, tokens of a prompt, tokens of a response]
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from hpcrl.engine import main, sampling_route, server, server_settings
from hpcrl.engine.sampling_route import LeanRoute, Receive, Send

OWN = "/bench/own"
ROUTE = "bench.rollout_roles.engine.OwnRoute"


class OwnRoute(LeanRoute):
    """Our route, and one that does the same work without any."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self._ours[OWN] = own


async def own(client: Any, receive: Receive, send: Send) -> None:
    """As vLLM's own code has it: `AsyncLLM.generate` for each sample, with the same parameters, and nothing made of the
    outputs."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    groups, each, prompt, tokens = msgspec.json.decode(
        await sampling_route._body(receive), type=tuple[int, int, int, int]
    )

    async def one(number: int, index: int) -> None:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            stop_token_ids=[1],
            detokenize=False,
            logprobs=0,
            min_tokens=tokens,
            seed=number * each + index,
        )
        params.output_kind = RequestOutputKind.FINAL_ONLY
        inputs = tokens_input([5 + number % 90] * prompt)
        async for _ in client.generate(inputs, params, f"own-{number}-{index}"):
            pass

    await asyncio.gather(*(one(number, index) for number in range(groups) for index in range(each)))
    await sampling_route._text(send, 200, "")


if __name__ == "__main__":
    if len(sys.argv) > 1 and "HPCRL_LISTEN_FD" in __import__("os").environ:
        server_settings.ROUTE = ROUTE
        sys.exit(server.main())
    main.SERVER = "bench.rollout_roles.engine"
    sys.exit(main.main())
