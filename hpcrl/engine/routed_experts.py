"""Which experts each token went to: seen in a vLLM worker whose model runner does not tell (that of the CPU build), and
fetched for our route, from such a worker or from vLLM's own answer.

vLLM's routers have a hook for seeing their choice, and its runner says which rows of a forward pass
belong to which request; the rest is a table for every request that asks for it.  On CUDA vLLM's own
`--enable-return-routed-experts` does the same.

Invariants: nothing of vLLM is replaced; a request's table has a row for every token that was read, at that token's
position, however its prompt was cut into passes, and the choice of a rejected draft is overwritten by that of the token
which came in its place; tokens that come from a cache are not seen, so the prefix cache must be off; a worker keeps
tables only of requests that have asked, and each is taken or dropped when its request ends.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner

from hpcrl.transport.token_frames import EXPERTS

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


class RequestRows(NamedTuple):
    """Rows [begin, end) of a forward pass are the tokens of a request from `position` on."""

    table: np.ndarray
    position: int
    begin: int
    end: int


class ExpertTables:
    """The tables of one worker.

    Attributes:
        runner: vLLM's model runner.

    Raises:
        ValueError: if its routers' choice cannot be seen.
    """

    def __init__(self, runner: Any) -> None:
        # type: ignore[var-annotated]
        self._runner = runner
        self._tables = {}
        self._pass = []
        layers = sorted((m for m in runner.model.modules() if isinstance(m, MoERunner)), key=lambda m: m.layer_id)
        if not layers:
            raise ValueError("the model has no layer with experts")
        for place, layer in enumerate(layers):
            if layer._quant_method.is_monolithic:
                raise ValueError(f"{type(layer._quant_method).__name__} chooses experts inside its kernel")
            layer.router.set_capture_fn(partial(self._see, place))
        first = layers[0].router
        dtype = np.dtype("u1") if first.global_num_experts <= 256 else np.dtype("<u2")
        self._shape = (len(layers), first.top_k)
        self._dtype = dtype

    def pop_table(self, request: str, tokens: int) -> tuple[int, int, bytes]:
        """(layers with experts, bytes of each, the table [tokens, layers, bytes]) of a request, which is then
        forgotten.

        Args:
            tokens: that were read, at most; there are fewer, or none, of a request that ended before.
        """
        table = self._tables.pop(request, np.zeros((0, *self._shape), self._dtype))
        return self._shape[0], self._shape[1] * self._dtype.itemsize, table[:tokens].tobytes()

    def _see(self, place: int, experts: torch.Tensor) -> None:
        """A router has chosen [rows, experts a token]."""
        if place == 0:
            self._pass = self._whose()
        if self._pass:
            chosen = experts.cpu().numpy()
            for rows in self._pass:
                rows.table[rows.position : rows.position + rows.end - rows.begin, place] = chosen[rows.begin : rows.end]

    def _whose(self) -> list[RequestRows]:
        """The rows of the pass that has just begun, of requests that ask."""
        batch = self._runner.input_batch
        found = []
        bounds = self._runner.query_start_loc.np
        for number, name in enumerate(batch.req_ids):
            params = self._runner.requests[name].sampling_params
            if params is None or not (params.extra_args or {}).get(EXPERTS):
                continue
            begin = int(bounds[number])
            end = int(bounds[number + 1])
            position = int(batch.num_computed_tokens_cpu[number])
            table = self._tables.get(name)
            if (
                table is None and position == 0
            ):  # else it has been taken: a pass that was under way when the request ended
                most = self._runner.requests[name].num_prompt_tokens + (params.max_tokens or 0)
                table = self._tables[name] = np.zeros((most, *self._shape), self._dtype)
            if table is not None:  # drafts may go past max_tokens: of these none is sampled
                end = min(end, begin + len(table) - position)
                if begin < end:
                    found.append(RequestRows(table, position, begin, end))
        return found


def asks_for_experts(params: SamplingParams) -> bool:
    """Whether the experts of its tokens are to come with the answer."""
    return bool((params.extra_args or {}).get(EXPERTS))


class ExpertSource:
    """The experts of one server's requests."""

    def __init__(self) -> None:
        self._open = False

    async def open(self, client: AsyncLLM) -> None:
        """Have them kept from now on; to be called before a request that asks for them.

        Raises:
            ValueError: if they cannot be seen.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        if not self._open and not native(client):
            try:
                await client.collective_rpc("hpcrl_see_experts")
            except EngineDeadError:
                raise
            except Exception as error:  # whatever its workers raise comes as an Exception
                raise ValueError(f"the chosen experts are unknown: {error}") from error
        self._open = True


class Experts:
    """Those of a sample, whose prompt has `prompt` tokens."""

    def __init__(self, source: ExpertSource, client: AsyncLLM, prompt: int) -> None:
        self._source = source
        self._client = client
        self._prompt = prompt

    async def table_of(self, request: str, output: CompletionOutput) -> tuple[tuple[int, int], bytes]:
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

    async def forget(self, request: str) -> None:
        """Drop the table of a request that ended otherwise."""
        if not native(self._client):
            await self._client.collective_rpc("hpcrl_take_experts", args=(request, 0))


def native(client: AsyncLLM) -> bool:
    """Whether vLLM itself returns them."""
    return client.vllm_config.aux_output_config.enabled
