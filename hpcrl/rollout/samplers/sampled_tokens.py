"""Which tokens of a returned sample an engine sampled, and under which version and with which log-prob.

slime's functions say neither version nor, some of them, log-probs: those are found in what the session of the response
was answered.

Invariants: without log-probs of its own a sample is trained on tokens alone that an engine sampled in this response, in
this order; a token that it calls trained and no engine sampled is context, and counted.  What a function gives is not
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hpcrl.rollout.endpoint.session import AskedTurn, Session
from hpcrl.rollout.worker_messages import ERROR, CustomResult
from hpcrl.sample import Sample, unpack

UNSAMPLED = "unsampled_tokens"  #: in metadata: trained tokens of a sample that no engine sampled


def received(done: CustomResult, prompt: Sample, session: Session) -> tuple[CustomResult, list[Sample]]:
    """(what came of a call, the samples that it returned); of its prompt counts what it was asked with."""
    who = {"group": prompt.group, "index": prompt.index, "prompt": prompt.prompt, "label": prompt.label}
    found = [replace(unpack(sent), **who) for sent in done.samples or ()]
    if done.given is None:
        return done, found
    version = session.making.version
    pairs = zip(found, done.given, strict=True)
    known = [attributed(sample, session.turns, given, version) for sample, given in pairs]
    if any(sample.loss_mask.any() for sample in found) and not any(sample.loss_mask.any() for sample in known):
        text = "returned tokens that no engine sampled for this response, and no rollout_log_probs"
        return CustomResult(done.id, failure=ERROR, text=text), []
    return done, known


class SampledPart(NamedTuple):
    """Part of an answer in a response.

    Attributes:
        turn: number of the answer.
        at: where in the response it begins.
        count: tokens.
    """

    turn: int
    at: int
    count: int


def attributed(sample: Sample, turns: Sequence[AskedTurn], given: bool, version: int) -> Sample:
    """The sample with what is known of its tokens.

    Args:
        given: whether its log-probs are the function's own.
        version: of tokens before the first that an engine sampled.
    """
    tokens, count = sample.tokens, sample.response_length
    mask = sample.loss_mask.astype(bool)
    versions, logprobs = np.full(count, -1, np.int32), sample.logprobs.copy()
    sampled = np.zeros(count, bool)
    for part in _parts(tokens, count, mask, turns):
        here, answer = slice(part.at, part.at + part.count), turns[part.turn].answer
        versions[here] = answer.versions[: part.count]
        sampled[here] = True
        if not given:
            logprobs[here] = np.where(mask[here], answer.logprobs[: part.count], 0)
    for at in range(count):
        if versions[at] < 0:
            versions[at] = versions[at - 1] if at else version
    lost = 0 if given else int(np.count_nonzero(mask & ~sampled))
    if lost:
        mask &= sampled
    return replace(
        sample,
        loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        versions=versions,
        metadata=sample.metadata | ({UNSAMPLED: lost} if lost else {}),
    )


def _parts(tokens: np.ndarray, count: int, mask: np.ndarray, turns: Sequence[AskedTurn]) -> list[SampledPart]:
    """The answers that trained stretches of a response are made of, each used once."""
    found: list[SampledPart] = []
    unused = [number for number, turn in enumerate(turns) if len(turn.answer.tokens)]
    prompt, at = len(tokens) - count, 0
    while at < count and unused:
        if not mask[at]:
            at += 1
            continue
        end = at + int(np.argmin(mask[at:])) if not mask[at:].all() else count
        best = max((_fit(tokens, prompt + at, prompt + end, number, turns[number]) for number in unused), default=None)
        if best is None or not best[0]:
            at += 1
            continue
        part = SampledPart(-best[2], at, best[1])
        found.append(part)
        unused.remove(part.turn)
        at += part.count
    return found


def _fit(tokens: np.ndarray, at: int, end: int, number: int, turn: AskedTurn) -> tuple[int, int, int]:
    """(how well an answer fits at this place, how many tokens of it, minus its number, so that the first wins).

    2: the engine was asked with exactly the tokens before; 1: its whole answer is here, or all that is left of it
    before the stretch ends; 0: it is another.
    """
    answer = turn.answer.tokens
    length = min(len(answer), end - at)
    equal = tokens[at : at + length] == answer[:length]
    alike = length if equal.all() else int(np.argmin(equal))
    if alike and np.array_equal(turn.tokens, tokens[:at]):
        return 2, alike, -number
    return (1, alike, -number) if alike and alike == length else (0, 0, -number)
