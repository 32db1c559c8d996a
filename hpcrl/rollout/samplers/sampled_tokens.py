"""What engines sampled of a returned sample: under which version, with which log-prob, after which tokens.

slime's functions say no versions, some of them no log-probs, and some ask with other tokens than those that they
return: they encode text again, or leave out what the chat template writes.

Invariants: what is trained was sampled by an engine after exactly the tokens before it, so that its log-prob is the
policy's.  A sample of which that does not hold is made of the engines' own requests and answers instead, with the mask
that the function gave to what it took of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hpcrl.rollout.endpoint.session import AskedTurn, Session
from hpcrl.rollout.worker_messages import ERROR, CustomResult
from hpcrl.sample import Sample, unpack

UNSAMPLED = "unsampled_tokens"  #: in metadata: trained tokens of a sample that no engine sampled there


class SampledPart(NamedTuple):
    """Part of an answer in a response.

    Attributes:
        turn: number of the answer.
        at: where in the response it begins.
        count: tokens.
        exact: the engine was asked with exactly the tokens before.
    """

    turn: int
    at: int
    count: int
    exact: bool


def received(done: CustomResult, prompt: Sample, session: Session) -> tuple[CustomResult, list[Sample]]:
    """(what came of a call, the samples that it returned); of its prompt counts what it was asked with."""
    who = {"group": prompt.group, "index": prompt.index, "prompt": prompt.prompt, "label": prompt.label}
    found = [replace(unpack(sent), **who) for sent in done.samples or ()]
    if done.given is None:
        return done, found
    alone = len(found) == 1
    pairs = zip(found, done.given, strict=True)
    known = [
        one
        for sample, given in pairs
        for one in known_samples(sample, session.turns, given, alone, session.making.version)
    ]
    if any(sample.loss_mask.any() for sample in found) and not any(sample.loss_mask.any() for sample in known):
        text = "returned tokens that no engine sampled for this response, and no rollout_log_probs"
        return CustomResult(done.id, failure=ERROR, text=text), []
    return done, known


def known_samples(sample: Sample, turns: Sequence[AskedTurn], given: bool, alone: bool, version: int) -> list[Sample]:
    """The sample with what is known of its tokens, or those of the requests that it was made with.

    Args:
        given: whether its log-probs are the function's own.
        alone: whether the response has no other sample, so that every request was for this one.
        version: of tokens before the first that an engine sampled.
    """
    mask = sample.loss_mask.astype(bool)
    parts = _parts(sample.tokens, sample.response_length, mask, turns)
    known, sampled = np.zeros((2, sample.response_length), bool)
    for part in parts:
        known[part.at : part.at + part.count] = True
        sampled[part.at : part.at + part.count] = part.exact
    lost = int(np.count_nonzero(mask & ~sampled))
    used = {part.turn: mask[part.at : part.at + part.count] for part in parts}
    if not given and alone:  # its text was encoded again: all that was said is in it
        used = {number: used.get(number, np.ones(len(turn.answer.tokens), bool)) for number, turn in enumerate(turns)}
    if lost and used and not (given and (mask & ~known).any()):
        counted = replace(sample, metadata=sample.metadata | {UNSAMPLED: lost})
        return _as_asked(counted, turns, used)
    return [_attributed(sample, turns, parts, given, version)]


def _attributed(
    sample: Sample, turns: Sequence[AskedTurn], parts: Sequence[SampledPart], given: bool, version: int
) -> Sample:
    """The sample with versions, and with log-probs where it has none; without any that fits it, as it is or, where
    log-probs are missing, as context."""
    count, mask = sample.response_length, sample.loss_mask.astype(bool)
    versions, logprobs = np.full(count, -1, np.int32), sample.logprobs.copy()
    sampled = np.zeros(count, bool)
    for part in parts:
        here, answer = slice(part.at, part.at + part.count), turns[part.turn].answer
        versions[here] = answer.versions[: part.count]
        sampled[here] = True
        if not given:
            logprobs[here] = answer.logprobs[: part.count]
    for at in range(count):
        if versions[at] < 0:
            versions[at] = versions[at - 1] if at else version
    mask = mask if given else mask & sampled
    logprobs = np.where(mask, logprobs, 0).astype(np.float32)
    return replace(sample, loss_mask=mask.astype(np.uint8), logprobs=logprobs, versions=versions)


def _as_asked(sample: Sample, turns: Sequence[AskedTurn], used: Mapping[int, np.ndarray]) -> list[Sample]:
    """Samples of the requests and answers themselves: one for each conversation, which a request continues that begins
    with all of it."""
    talks: list[Sample] = []
    for number in sorted(used):
        turn, kept = turns[number], used[number]
        answer, asked = turn.answer, turn.tokens
        mask = np.zeros(len(answer.tokens), np.uint8)
        mask[: len(kept)] = kept[: len(mask)]
        logprobs = np.where(mask, answer.logprobs, 0).astype(np.float32)
        before = next((talk for talk in talks if np.array_equal(asked[: len(talk.tokens)], talk.tokens)), None)
        told = 0 if before is None else len(asked) - len(before.tokens)
        nothing = np.zeros(told, np.float32)
        said = replace(
            sample,
            tokens=np.concatenate([asked, answer.tokens]).astype(np.int32),
            response_length=told + len(answer.tokens),
            loss_mask=np.concatenate([nothing, mask]).astype(np.uint8),
            logprobs=np.concatenate([nothing, logprobs]),
            versions=np.concatenate([np.full(told, before.versions[-1] if before else 0), answer.versions]),
            metadata=dict(sample.metadata),
        )
        if before is None:
            talks.append(said)
            continue
        columns = {
            name: np.concatenate([getattr(before, name), getattr(said, name)])
            for name in ("loss_mask", "logprobs", "versions")
        }
        length = before.response_length + said.response_length
        talks[next(at for at, talk in enumerate(talks) if talk is before)] = replace(
            said, response_length=length, **columns
        )
    return [replace(talk, versions=talk.versions.astype(np.int32)) for talk in talks]


def _parts(tokens: np.ndarray, count: int, mask: np.ndarray, turns: Sequence[AskedTurn]) -> list[SampledPart]:
    """The answers in a response, each used once, from its beginning."""
    found: list[SampledPart] = []
    waiting: dict[int, list[int]] = {}  # the first token of answers -> their numbers
    for number, turn in enumerate(turns):
        if len(turn.answer.tokens):
            waiting.setdefault(int(turn.answer.tokens[0]), []).append(number)
    prompt, at = len(tokens) - count, 0
    while at < count:
        numbers = waiting.get(int(tokens[prompt + at]), ())
        fits = [(*_fit(tokens, prompt + at, mask[at:], turns[number]), -number) for number in numbers]
        how, length, last = max(fits, default=(0, 0, 0))
        if not how:
            at += 1
            continue
        found.append(SampledPart(-last, at, length, how == 2))
        waiting[int(tokens[prompt + at])].remove(-last)
        at += length
    return found


def _fit(tokens: np.ndarray, at: int, mask: np.ndarray, turn: AskedTurn) -> tuple[int, int]:
    """(how well an answer fits at this place, how many tokens of it).

    2: the engine was asked with exactly the tokens before; 1: with others, but its whole answer is here, or all that is
    left of it before the response ends, and some of it is trained; 0: it is another.
    """
    answer = turn.answer.tokens
    length = min(len(answer), len(mask))
    equal = tokens[at : at + length] == answer[:length]
    alike = length if equal.all() else int(np.argmin(equal))
    if len(turn.tokens) == at and np.array_equal(turn.tokens, tokens[:at]):
        return 2, alike
    return (1, alike) if alike == length and mask[:alike].any() else (0, 0)
