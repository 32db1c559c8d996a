"""Every request of an engine with an adapter is computed under it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Client:
    """An engine's, as far as requests need it."""

    async def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None) -> Any:
        return name, lora_request


def test_a_request_is_under_the_adapter() -> None:
    """Whatever asked for it, and however often the client was attached."""
    from hpcrl.engine.sampling_route import COMES_LATER, attach_adapter
    from hpcrl.models.lora.serving import NAME, NUMBER

    client: Any = Client()
    for _ in range(2):
        attach_adapter(client)
        name, made = asyncio.run(client.add_request("a", [1], params=None))
        assert (name, made.lora_name, made.lora_int_id, made.lora_path) == ("a", NAME, NUMBER, COMES_LATER)
