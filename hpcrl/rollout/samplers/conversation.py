"""What a custom function gets to ask the policy with: `args.engine` for exact tokens, `Conversation` for turns and
tools.

Invariant: what the policy said goes back to it as the tokens that it said, whatever text they make.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from hpcrl.rollout.prompts.tokenizer import Messages
from hpcrl.rollout.samplers.trajectory import LENGTH, Trajectory, Turn, continuation
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.sample import Sample
from hpcrl.utils.waiting import Deadline, Pauses, retry_async

#: what a text is made of tokens with, in slime
TEXT = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
FULL = "context_length_exceeded"  #: what the endpoint says when tokens leave no room for an answer
RESET = 60.0  #: seconds within which a connection that ends without an answer was one too many for the endpoint


class ContextFull(Exception):
    """The tokens leave no room for another turn."""


class PolicyClient:
    """The policy, for one response.  Many may be asked at once."""

    def __init__(self, base_url: str, api_key: str, http: aiohttp.ClientSession) -> None:
        self._url = f"{base_url}/tokens"
        self._http = http
        self._headers = {"Authorization": f"Bearer {api_key}"}

    async def generate(self, tokens: Sequence[int], sampling_params: dict[str, Any] | None = None) -> Turn:
        """The policy's turn after `tokens`; sampling_params as the function got them, of which max_new_tokens may be
        less and stop and stop_token_ids more.

        ContextFull if no room is left.

        Raises:
            ValueError: for other tokens or params.
            ConnectionError: when the run has failed.
        """
        params = {name: value for name, value in (sampling_params or {}).items() if name not in TEXT}
        body = {"tokens": [int(token) for token in tokens], "sampling_params": params}
        # Asking again is safe: this route changes no conversation.  Where the session has not seen the first request,
        # the second is that one; where it has, its answer is lost to us, and the second is one of other noise, as if
        # the function had asked with these tokens twice, with the tokens, log-probs and versions that belong to it.
        asked = await retry_async(
            lambda: self._http.post(self._url, json=body, headers=self._headers),
            passing=_reset_before_answer,
            deadline=Deadline(RESET),
            pauses=Pauses(1.0, 1.0),
            attempts=2,
        )
        async with asked as answer:
            found = await answer.json()
        if answer.status == 200:
            columns = zip(("tokens", "logprobs", "versions"), (np.int32, np.float32, np.int32), strict=True)
            return Turn(
                *(np.asarray(found[name], kind) for name, kind in columns), found["finish_reason"], found["text"]
            )
        error = found["error"]
        if error["code"] == FULL:
            raise ContextFull(error["message"])
        raise (ValueError if answer.status < 500 and answer.status != 401 else ConnectionError)(error["message"])


def _reset_before_answer(error: Exception) -> bool:
    """Whether the connection ended before an answer had begun."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return True
    return isinstance(error, aiohttp.ClientOSError) and error.errno in (errno.ECONNRESET, errno.EPIPE)


class Conversation:
    """Turns of the policy and what it reads between them, from a prompt on."""

    def __init__(
        self,
        args: Arguments,
        sample: Sample,
        sampling_params: dict[str, Any],
        tokens: Sequence[int] | None = None,
        messages: Messages | None = None,
    ) -> None:
        """Create one.

        Args:
            tokens, messages: of another prompt than the response's.
        """
        self._args = args
        self._sample = sample
        self._params = sampling_params
        self.trajectory = Trajectory(args.prompt_tokens if tokens is None else tokens, args.version)
        self._messages: Messages = args.messages if messages is None else messages

    @property
    def room(self) -> int:
        """Tokens that the response may still grow by, what the policy reads included (--rollout-max-response-len)."""
        return self._params["max_new_tokens"] - self.trajectory.response_length

    async def turn(self, **changes: Any) -> Turn:
        """The policy's next turn.  Without room for one: no tokens, finish "length"."""
        most = min(self.room, changes.pop("max_new_tokens", self.room))
        try:
            if most < 1:
                raise ContextFull
            turn = await self._args.engine.generate(
                self.trajectory.tokens, self._params | changes | {"max_new_tokens": most}
            )
        except ContextFull:
            nothing = np.zeros(0, np.int32)
            turn = Turn(nothing, nothing.astype(np.float32), nothing, LENGTH)
        self.trajectory.add_sampled(turn)
        if len(turn.tokens):
            self._messages = [*self._messages, {"role": "assistant", "content": turn.text}]
        return turn

    def tell(self, what: str | Sequence[int]) -> None:
        """Text, or tokens, as they are, behind all that was said: of a tool or an environment, not learned from."""
        self.trajectory.add_observed(self._args.tokenizer.encode([what])[0].tolist() if isinstance(what, str) else what)

    def tell_messages(self, *messages: dict[str, Any], tools: Messages | None = None) -> None:
        """Chat messages behind the policy's turn, as the chat template writes them, up to where its next turn begins.

        Raises:
            ValueError: if the template refuses them.
        """
        before, last = self._messages[:-1], self.trajectory.tokens[-1]
        self.trajectory.add_observed(continuation(self._args.tokenizer, before, list(messages), last, tools).tolist())
        self._messages = [*self._messages, *messages]

    def sample(self) -> Sample:
        """All of it as a sample: a function may return several, of several conversations."""
        return self.trajectory.sample(self._sample, self._args.tokenizer)
