"""Where our route finds which experts the tokens of a request went to: in vLLM's own answer, or in its worker
(`routed_experts.py`).

Invariant: what a worker keeps of a request is taken or forgotten when the request ends, however it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpcrl.token_frames import EXPERTS

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


def asks_for_experts(params: SamplingParams) -> bool:
    """Whether the experts of its tokens are to come with the answer."""
    return bool((params.extra_args or {}).get(EXPERTS))


class ExpertSource:
    """Of one server."""

    def __init__(self) -> None:
        self._open = False

    async def open(self, client: AsyncLLM) -> None:
        """Have them kept from now on; to be called before a request that asks for them.  ValueError if they cannot be
        seen."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if not self._open and not native(client):
            try:
                await client.collective_rpc("hpcrl_see_experts")
            except EngineDeadError:
                raise
            except Exception as error:  # whatever its workers raise comes as an Exception
                raise ValueError(f"which experts were chosen cannot be told: {error}") from error
        self._open = True


class Experts:
    """Those of the samples of one prompt, of `prompt` tokens."""

    def __init__(self, source: ExpertSource, client: AsyncLLM, prompt: int) -> None:
        self._source = source
        self._client = client
        self._prompt = prompt

    async def of(self, request: str, output: CompletionOutput) -> tuple[tuple[int, int], bytes]:
        """((layers, bytes of each), the table [tokens, layers, bytes]) of a finished request: every token but the last
        was read."""
        read = self._prompt + len(output.token_ids) - 1
        if not native(self._client):
            layers, width, table = (await self._client.collective_rpc("hpcrl_take_experts", args=(request, read)))[0]
            return (layers, width), table
        if output.routed_experts is None:
            return (0, 0), b""
        found = np.ascontiguousarray(output.routed_experts[:read])
        return (found.shape[1], found.shape[2] * found.dtype.itemsize), found.tobytes()

    async def forget(self, requests: list[str]) -> None:
        """Of requests that ended otherwise."""
        if not native(self._client):
            for request in requests:
                await self._client.collective_rpc("hpcrl_take_experts", args=(request, 0))


def native(client: AsyncLLM) -> bool:
    """Whether vLLM itself returns them."""
    return client.vllm_config.aux_output_config.enabled
