"""--rm-type remote_rm: the reward that a server at --rm-url gives (slime's `remote_rm`).

It is sent a POST with the JSON object {"prompt": ..., "response": ..., "label": ...} and answers with a number, or with
an object of which --reward-key names the number.  A server that cannot be reached or answers 408, 429 or 5xx is asked
again (`remote_server.py`), within --reward-timeout.
"""

from __future__ import annotations

from typing import Any

from hpcrl.config.options import Options
from hpcrl.rollout.remote_server import RemoteServer
from hpcrl.sample import Sample

LABELS = ()


class RemoteReward:
    """Asks the server."""

    def __init__(self) -> None:
        self._server: RemoteServer | None = None

    async def __call__(self, options: Options, sample: Sample) -> Any:
        """What the server answered.

        Raises:
            PeerError: names the address and what came instead.
        """
        url = str(options.rm_url)
        if self._server is None or self._url != url:
            self._server, self._url = RemoteServer(f"--rm-url {url}", url), url
        body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        return await self._server.ask_patiently("", body, options.reward_timeout)


reward = RemoteReward()
