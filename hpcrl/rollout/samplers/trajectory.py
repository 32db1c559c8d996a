"""The tokens of one response over several turns, exactly as they were sampled and read.

Invariants: a token that an engine sampled is never decoded and encoded again, whatever a chat template would make of
its text (another split into tokens, a thought left out, a space trimmed); what tools or an environment put in between
is in the tokens, with loss mask 0 and log-prob 0; every token knows its policy version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcrl.rollout.prompts.tokenizer import Messages, Tokenizer
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import COMPLETED, TRUNCATED

#: why a turn ended: by itself, or as it had no room left
STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True)
class Turn:
    """What the policy said in one turn.

    Attributes:
        tokens: int32 [n], the token that ended it included.
        logprobs: float32 [n].
        versions: int32 [n].
        finish: STOP or LENGTH.
        text: without the token that ended it.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: str
    text: str = ""


@dataclass
class Trajectory:
    """A prompt, then turns of the policy and what it was told between them.

    Attributes:
        tokens: of all.
        loss_mask, logprobs, versions: of the response alone, which begins behind the prompt.
    """

    prompt: Sequence[int]
    version: int  #: that the prompt was asked under
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = STOP

    def __post_init__(self) -> None:
        self.tokens = [int(token) for token in self.prompt]

    @property
    def response_length(self) -> int:
        return len(self.loss_mask)

    def add_sampled(self, turn: Turn) -> None:
        """The policy's turn is over: its tokens are learned from."""
        self._grow(turn.tokens.tolist(), 1, turn.logprobs.tolist(), turn.versions.tolist())
        self.finish = turn.finish

    def add_observed(self, tokens: Sequence[int]) -> None:
        """Tokens of a tool or an environment, which are not learned from; of the version of the token before them."""
        ids = [int(token) for token in tokens]
        before = self.versions[-1] if self.versions else self.version
        self._grow(ids, 0, [0.0] * len(ids), [before] * len(ids))

    def _grow(self, tokens: list[int], mask: int, logprobs: list[float], versions: list[int]) -> None:
        self.tokens += tokens
        self.loss_mask += [mask] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions

    def sample(self, asked: Sample, tokenizer: Tokenizer) -> Sample:
        """All of it as a sample of the same prompt as `asked`.

        What it was told after its last turn is left out, of its text too: no token follows that could be learned.
        """
        length = max((i + 1 for i, mask in enumerate(self.loss_mask) if mask), default=self.response_length)
        tokens = np.asarray(self.tokens[: len(self.prompt) + length], np.int32)
        return asked.replace(
            tokens=tokens,
            response_length=length,
            loss_mask=np.asarray(self.loss_mask[:length], np.uint8),
            rollout_log_probs=np.asarray(self.logprobs[:length], np.float32),
            versions=np.asarray(self.versions[:length], np.int32),
            status=TRUNCATED if self.finish == LENGTH else COMPLETED,
            response=tokenizer.decode(tokens[len(self.prompt) :]),
            metadata=dict(asked.metadata),
            rewards={},
        )


# ---- what a chat template writes between turns

#: stands for the policy's turn while a template is rendered; no template and no tool writes it
MARK = "\u2063hpcrl-turn\u2063"


def opening(tokenizer: Tokenizer, messages: Messages, tools: Messages | None = None) -> np.ndarray:
    """int32: the chat up to where the policy's turn begins.

    Raises:
        ValueError: with the template's words if it refuses the messages.
    """
    return tokenizer.encode([tokenizer.render(messages, generation=True, tools=tools)])[0]


def continuation(
    tokenizer: Tokenizer,
    before: Messages,
    after: Messages,
    last: int | None,
    tools: Messages | None = None,
    calls: Messages | None = None,
) -> np.ndarray:
    """int32: what follows a turn of the policy when `after` was said, up to where its next turn begins.

    Args:
        before: the messages up to that turn, without it.
        last: the turn's last token, so that the token that ends a turn is not written twice, or None.
        calls: the turn's calls of tools, for a template that refuses a tool's answer behind a turn without any.

    Raises:
        ValueError: if the template refuses the messages, or leaves the turn's place out.
    """
    turn = [*before, {"role": "assistant", "content": MARK}]
    try:
        _, mark, rest = tokenizer.render([*turn, *after], generation=True, tools=tools).rpartition(MARK)
    except ValueError:
        if not calls:
            raise
        mark, rest = MARK, _behind_calls(tokenizer, turn, after, tools, calls)
    if not mark:
        raise ValueError("the chat template drops earlier turns of the assistant: the chat cannot be continued")
    tokens = tokenizer.encode([rest])[0]
    ends = last in tokenizer.eos_ids and len(tokens) and int(tokens[0]) in tokenizer.eos_ids
    # the turn has its end already, even if the token is not the template's, unless it begins what was said: GLM's
    # models end a turn with the token of the role that speaks next, and may have expected another one
    if ends and (int(tokens[0]) == last or _ends_turns(tokenizer, turn, tools)):
        return tokens[1:]
    return tokens


def _behind_calls(
    tokenizer: Tokenizer, turn: Messages, after: Messages, tools: Messages | None, calls: Messages
) -> str:
    """What a template writes behind a turn that calls tools: what it ends any turn with, and `after`.

    Raises:
        ValueError: if the template writes the turn otherwise once something follows it.
    """
    end = tokenizer.render(turn, generation=False, tools=tools).rpartition(MARK)[2]
    called = [*turn[:-1], turn[-1] | {"tool_calls": calls}]
    alone = tokenizer.render(called, generation=False, tools=tools)
    whole = tokenizer.render([*called, *after], generation=True, tools=tools)
    # from the turn on: what comes before it a template may write otherwise once a user has spoken again
    alone, whole = (text.rpartition(MARK)[2] for text in (alone, whole))
    begin = alone.removesuffix(end)
    if not alone.endswith(end) or not whole.startswith(begin):
        raise ValueError("the chat template writes a turn that calls tools otherwise once their answers follow it")
    return whole.removeprefix(begin)


def _ends_turns(tokenizer: Tokenizer, turn: Messages, tools: Messages | None) -> bool:
    """Whether the template ends a turn with a token of its own, whatever follows."""
    try:
        _, mark, end = tokenizer.render(turn, generation=False, tools=tools).rpartition(MARK)
    except ValueError:
        return True
    tokens = tokenizer.encode([end])[0]
    return not mark or (len(tokens) > 0 and int(tokens[0]) in tokenizer.eos_ids)


def plain(content: Any) -> str:
    """A message's content as text: text itself, the text parts of a list, "" for null.

    Raises:
        ValueError: for other kinds.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise ValueError("a message's content is neither text nor a list of text parts")
