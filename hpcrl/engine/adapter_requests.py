"""Under which adapter an engine computes a request: the only one, or that which the request names.

vLLM keeps what it has computed of prompts, and tells an adapter's from another's by the name and path of the request's
LoRARequest.  An update of one of several adapters changes that path, so what was computed under the old values is found
by no later request, and what belongs to the others stays.

Invariants: no request is computed from what was computed under other values of its adapter; where one is at work when
its adapter is updated, all that are at work are computed again.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from hpcrl.adapters.serving import requested_slot, vllm_id, vllm_name

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

#: in the place of a path to an adapter's files: there are none, an engine without the adapter ends by looking for them
COMES_LATER = "updates bring it"


class AdapterRequests:
    """Of an engine that holds so many adapters."""

    def __init__(self, slots: int) -> None:
        self._updates = [0] * slots
        self._own = secrets.token_hex(8)  # a cache that outlives this process, or is shared, knows paths of others too

    def attach(self, client: AsyncLLM) -> None:
        """From now on every request is computed under an adapter that updates bring, whichever route it came by; one
        that names none of several is refused."""
        if vars(client).get("add_request") is not None:
            return
        given = client.add_request

        async def add_request(name: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> RequestOutputCollector:
            slot = requested_slot(getattr(params, "extra_args", None), len(self._updates))
            return await given(name, prompt, params, *args, **kwargs | {"lora_request": self._of(slot)})

        client.add_request = add_request  # type: ignore[method-assign]

    async def renew(self, client: AsyncLLM, slot: int) -> None:
        """The adapter in a slot is about to change, while the engine is paused.

        Raises:
            ValueError: if there is no such slot.
        """
        if not 0 <= slot < len(self._updates):
            raise ValueError(f"there is no adapter {slot}: this engine holds {len(self._updates)}")
        self._updates[slot] += 1
        if any(state.lora_name == vllm_name(slot) for state in client.output_processor.request_states.values()):
            await client.reset_prefix_cache(reset_running_requests=True)

    def _of(self, slot: int) -> LoRARequest:
        from vllm.lora.request import LoRARequest

        return LoRARequest(vllm_name(slot), vllm_id(slot), f"{COMES_LATER}: {self._own}-{self._updates[slot]}")
