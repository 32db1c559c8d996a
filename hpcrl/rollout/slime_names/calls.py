"""One call of a custom generate function that was written for slime: what it gets, and what becomes of what it returns.

Invariants: a call asks under its own key; the prompt is the text of the very tokens that the run has of it, where that
text is encoded as them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcrl.config.options import Options
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.slime_names import types
from hpcrl.rollout.slime_names.arguments import SlimeArguments
from hpcrl.rollout.slime_names.conversion import EACH, from_slime, to_slime
from hpcrl.rollout.slime_names.http import ROUTER, Router
from hpcrl.rollout.slime_names.state import TEXT
from hpcrl.rollout.worker_messages import CustomCall
from hpcrl.sample import Sample


class SlimeCall:
    """What a function is called with.

    Attributes:
        args, sample, params: its arguments.
    """

    def __init__(self, options: Options, tokenizer: Tokenizer, call: CustomCall, asked: Sample) -> None:
        """Create one, which is that of this task from now on."""
        router = Router.from_base_url(call.base_url, call.api_key)
        ROUTER.set(router)
        EACH.set(call.n_samples_per_prompt)
        self._options = options
        self._asked = asked
        self._key = call.reward_key
        self.args = SlimeArguments(options, router)
        self.sample: types.SlimeSample = to_slime(asked, options, _text(options, tokenizer, asked), pending=True)
        skipped = {"skip_special_tokens": options.rollout_skip_special_tokens}
        self.params: dict[str, Any] = call.sampling_params | TEXT | skipped

    def taken(self, returned: Any) -> tuple[list[Sample] | None, list[bool]]:
        """(the samples that it returned, which of them have log-probs of their own); None if it returned None.

        Raises:
            NotSlimes: if they are none.
        """
        if returned is None:
            return None, []
        several: Sequence[Any] = returned if isinstance(returned, list | tuple) else [returned]
        pairs = [from_slime(made, self._asked, self._options, self._key) for made in several]
        return [sample for sample, _ in pairs], [given for _, given in pairs]

    def untouched(self) -> Sample:
        """The sample that it was given, as it is now: with a reward or metadata that it may have set."""
        return from_slime(self.sample, self._asked, self._options, self._key)[0]


def longest_response(options: Options, tokenizer: Tokenizer, most: int) -> int:
    """Tokens of a response at most: in slime --rollout-max-response-len bounds each turn, and the context all.

    Args:
        most: of a turn.
    """
    return max(most, options.rollout_max_context_len or tokenizer.context or most)


def _text(options: Options, tokenizer: Tokenizer, asked: Sample) -> Any:
    """The prompt as slime has it: with --apply-chat-template the text that the model reads."""
    if not options.apply_chat_template:
        return asked.prompt
    text = tokenizer.decode_text(asked.tokens)
    if np.array_equal(tokenizer.encode([text])[0], asked.tokens):
        return text
    messages = asked.prompt if isinstance(asked.prompt, list) else [{"role": "user", "content": asked.prompt}]
    return tokenizer.render(messages, generation=True)
