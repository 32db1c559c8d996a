"""Which adapter a request is computed under, and what an update of one of several makes an engine compute again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.token_frames import ADAPTER

pytestmark = pytest.mark.vllm


class Client:
    """An engine's, as far as requests need it."""

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={})
        self.resets = 0

    async def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None) -> Any:
        self.output_processor.request_states[name] = SimpleNamespace(lora_name=lora_request.lora_name)
        return lora_request

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        assert reset_running_requests
        self.resets += 1


def test_an_update_leaves_other_adapters_prefixes() -> None:
    """vLLM knows prefixes by name and path: the updated adapter's path changes alone, and caches are emptied only where
    a request of its is at work."""
    from hpcrl.engine.adapter_requests import AdapterRequests

    async def work() -> None:
        client: Any = Client()
        adapters = AdapterRequests(2)
        adapters.attach(client)
        adapters.attach(client)

        async def ask(name: str, slot: int) -> tuple[str, int, str]:
            made = await client.add_request(name, [1], SimpleNamespace(extra_args={ADAPTER: slot}))
            return made.lora_name, made.lora_int_id, made.lora_path

        first, second = await ask("a", 0), await ask("b", 1)
        assert first[:2] != second[:2]
        await adapters.renew(client, 1)
        assert client.resets == 1, "b is at work"
        del client.output_processor.request_states["b"]
        await adapters.renew(client, 1)
        assert client.resets == 1, "of the other adapter nothing has changed"
        assert await ask("c", 0) == first
        renewed = await ask("d", 1)
        assert renewed[:2] == second[:2] and renewed[2] != second[2]
        with pytest.raises(ValueError, match="no adapter 2: this engine holds 2"):
            await adapters.renew(client, 2)

    asyncio.run(work())
