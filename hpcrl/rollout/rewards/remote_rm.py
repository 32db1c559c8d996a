"""--rm-type remote_rm: the reward that a server at --rm-url gives (slime's `remote_rm`).

It is sent a POST with the JSON object {"prompt": ..., "response": ..., "label": ...} and answers with a number, or with
an object of which --reward-key names the number.  A server that cannot be reached or answers 408, 429 or 5xx is asked
again, up to ATTEMPTS times with growing pauses, within --reward-timeout.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import aiohttp
import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import PeerError
from hpcrl.sample import Sample
from hpcrl.toolbox.deadline import Deadline

NEEDS_LABEL = False
ATTEMPTS = 10
LONGEST_PAUSE = 30.0  #: seconds
CONNECTIONS = 64
AGAIN = {408, 429}  #: besides 5xx


class RemoteReward:
    """Asks the server; keeps its connections."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, options: Options, sample: Sample) -> Any:
        """What the server answered.  PeerError names the address and what came instead."""
        if self._session is None or self._loop is not asyncio.get_running_loop():  # a session belongs to its loop
            self._loop = asyncio.get_running_loop()
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS))
        url = str(options.rm_url)
        body = msgspec.json.encode({"prompt": sample.prompt, "response": sample.response, "label": sample.label})
        deadline = Deadline(0.95 * options.reward_timeout)
        trouble = "nothing"
        for attempt in range(ATTEMPTS):
            left = deadline.left
            if left <= 0:
                break
            try:
                return await self._ask(url, body, left)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                trouble = f"{type(error).__name__}: {error}".rstrip(": ")
                if isinstance(error, aiohttp.ClientResponseError) and error.status < 500 and error.status not in AGAIN:
                    break
            spread = hashlib.blake2b(body, digest_size=1).digest()[0] / 256  # so that not all ask again at once
            await asyncio.sleep(min(2.0**attempt + spread, LONGEST_PAUSE, deadline.left))
        raise PeerError(f"got no answer from --rm-url {url} in {attempt + 1} attempts; the last: {trouble}")

    async def _ask(self, url: str, body: bytes, seconds: float) -> Any:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=seconds)
        headers = {"Content-Type": "application/json"}
        async with self._session.post(url, data=body, headers=headers, timeout=timeout) as answer:
            answer.raise_for_status()
            text = await answer.read()
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise PeerError(
                f"got from --rm-url {url} what is not JSON: {text[:100].decode(errors='replace')!r}"
            ) from error


reward = RemoteReward()
