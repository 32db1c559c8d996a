"""Every request of an engine with an adapter is computed under it, though there are no files of it to name.

Invariant: what a cache that is shared, or outlives this process, has computed under an adapter of another is not used.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from hpcrl.models.lora.serving import NAME, NUMBER

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

#: in the place of a path to an adapter's files: there are none, an engine without the adapter ends by looking for them
COMES_LATER = f"updates bring it: {secrets.token_hex(8)}"  #: vLLM tells what it has computed of prompts by it


def attach_adapter(client: AsyncLLM) -> None:
    """From now on every request is computed under the adapter that updates bring, whichever route it came by."""
    from vllm.lora.request import LoRARequest

    if vars(client).get("add_request") is not None:
        return
    given, adapter = client.add_request, LoRARequest(NAME, NUMBER, COMES_LATER)

    async def add_request(*args: Any, **kwargs: Any) -> RequestOutputCollector:
        return await given(*args, **kwargs | {"lora_request": adapter})

    client.add_request = add_request  # type: ignore[method-assign]
