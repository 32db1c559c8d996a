"""What a chat template puts behind a turn of the policy: tokens of tools and users, without encoding the policy's
again.

Invariant: the policy's own tokens are never part of what is encoded here, so they stay as they were sampled, whatever
the template would make of their text (another split into tokens, a thought left out, a space trimmed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcrl.rollout.prompts.tokenizer import Messages, Tokenizer

#: stands for the policy's turn while a template is rendered; no template and no tool writes it
MARK = "\u2063hpcrl-turn\u2063"


def opening(tokenizer: Tokenizer, messages: Messages, tools: Messages | None = None) -> np.ndarray:
    """int32: the chat up to where the policy's turn begins.  ValueError with the template's words if it refuses the
    messages."""
    return tokenizer.encode([tokenizer.render(messages, generation=True, tools=tools)])[0]


def continuation(
    tokenizer: Tokenizer, before: Messages, after: Messages, last: int | None, tools: Messages | None = None
) -> np.ndarray:
    """int32: what follows a turn of the policy when `after` was said, up to where its next turn begins.

    before: the messages up to that turn, without it; last: the turn's last token, so that the token that ends a turn is
    not written twice, or None.  ValueError if the template refuses the messages, or leaves the turn's place out.
    """
    text = tokenizer.render([*before, {"role": "assistant", "content": MARK}, *after], generation=True, tools=tools)
    _, mark, rest = text.rpartition(MARK)
    if not mark:
        raise ValueError(
            "the chat template leaves out what the assistant said before a message: such a chat cannot be gone on with"
        )
    tokens = tokenizer.encode([rest])[0]
    if last in tokenizer.eos_ids and len(tokens) and int(tokens[0]) in tokenizer.eos_ids:
        return tokens[1:]  # the turn has its end already, be it another token than the template's
    return tokens


def plain(content: Any) -> str:
    """A message's content as text: text itself, the text parts of a list, "" for null.  ValueError for other kinds."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise ValueError("a message's content is neither text nor a list of text parts")
