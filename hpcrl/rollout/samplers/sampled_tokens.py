"""What engines sampled of a returned sample: under which version, with which log-prob, after which tokens.

slime's functions say no versions, some of them no log-probs, and some ask with other tokens than those that they
return: they encode text again, or leave out what the chat template writes.

Invariants: what is trained was sampled by an engine after exactly the tokens before it, for an answer that lies in the
sample, and with the log-prob that the engine said.  A sample of which that does not hold is made of the engines' own
requests and answers instead, with the mask that the function gave to what it took of them; a trained token that no
engine sampled is taken out of the mask, and counted.  What a function asked and did not return trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hpcrl.rollout.endpoint.asked_turns import AskedTurn
from hpcrl.rollout.endpoint.session import Session
from hpcrl.rollout.worker_messages import ERROR, MOST, CustomResult
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

    def spell(tokens: np.ndarray) -> str:
        return session.tokenizer.spelled(tokens, skip_special=True)

    pairs = zip(found, done.given, strict=True)
    known: list[Sample] = []
    for sample, given in pairs:
        known += known_samples(sample, session.turns, given, alone, session.making.version, spell)
        if len(known) > MOST:
            text = (
                f"asked with tokens that it did not return: its turns are more than {MOST} conversations, one sample "
                "each; return samples with the very tokens that it asks with"
            )
            return CustomResult(done.id, failure=ERROR, text=text), []
    if any(sample.loss_mask.any() for sample in found) and not any(sample.loss_mask.any() for sample in known):
        text = "returned tokens of which no engine sampled any for this response: nothing of it can be trained"
        return CustomResult(done.id, failure=ERROR, text=text), []
    return done, known


def known_samples(
    sample: Sample,
    turns: Sequence[AskedTurn],
    given: bool,
    alone: bool,
    version: int,
    spell: Callable[[np.ndarray], str],
) -> list[Sample]:
    """The sample with what is known of its tokens, or those of the requests that it was made with.

    Args:
        given: whether its log-probs are the function's own; they are taken where it has asked no engine at all.
        alone: whether the response has no other sample, so that its requests were for this one.
        version: of tokens before the first that an engine sampled.
        spell: tokens -> their text without special ones.
    """
    mask = sample.loss_mask.astype(bool)
    if given and not turns:
        return [replace(sample, versions=np.full(sample.response_length, version, np.int32))]
    parts = _parts(sample.tokens, sample.response_length, mask, turns)
    sampled = np.zeros(sample.response_length, bool)
    for part in parts:
        sampled[part.at : part.at + part.count] = part.exact
    used = {part.turn: mask[part.at : part.at + part.count] for part in parts}
    if not (lost := int(np.count_nonzero(mask & ~sampled))):
        return [_attributed(sample, turns, parts, version)]
    counted = replace(sample, metadata=sample.metadata | {UNSAMPLED: lost})
    elsewhere = any(used[part.turn].any() for part in parts if not part.exact)
    if not given and alone:
        said, beaten = _spelled(counted, parts, turns, spell)
        elsewhere = elsewhere or bool(said)
        used = {number: kept for number, kept in used.items() if number not in beaten}
        used |= {number: np.ones(len(turns[number].answer.tokens), bool) for number in said}
    return _as_asked(counted, turns, used) if elsewhere else [_attributed(counted, turns, parts, version)]


def _spelled(
    sample: Sample, parts: Sequence[SampledPart], turns: Sequence[AskedTurn], spell: Callable[[np.ndarray], str]
) -> tuple[set[int], set[int]]:
    """(the answers whose text lies in what is trained of a response and is no answer's tokens, in the order in which
    they were asked for; those of which only a beginning is there, in the text of one of these)."""
    count, free = sample.response_length, sample.loss_mask.astype(bool)
    whole = {
        part.turn: part
        for part in parts
        if part.count == len(turns[part.turn].answer.tokens) or part.at + part.count == count
    }
    for part in whole.values():
        free[part.at : part.at + part.count] = False
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False)).reshape(-1, 2).tolist()
    response = sample.tokens[len(sample.tokens) - count :]
    texts = {begin: spell(response[begin:end]) for begin, end in edges}
    # number -> the (run, characters) that it takes: longer ones first, so that no short answer takes part of another
    places = {number: ((part.at, 0), (part.at, 0)) for number, part in whole.items()}
    answers = {number: spell(turn.answer.tokens).strip() for number, turn in enumerate(turns) if number not in whole}
    for number in sorted(answers, key=lambda number: (-len(answers[number]), number)):
        text = answers[number]
        low = max((end for other, (_, end) in places.items() if other < number), default=(0, 0))
        high = min((begin for other, (begin, _) in places.items() if other > number), default=(count, 0))
        for run, within in texts.items() if text else ():
            if not low[0] <= run <= high[0]:
                continue
            limit = high[1] if run == high[0] else len(within)
            if (at := within.find(text, low[1] if run == low[0] else 0, limit)) >= 0:
                places[number] = (run, at), (run, at + len(text))
                texts[run] = within[:at] + "\0" * len(text) + within[at + len(text) :]
                break
    said = places.keys() - whole.keys()
    runs = [edge for edge in edges if edge[0] in {places[number][0][0] for number in said}]
    beaten = {part.turn for part in parts if any(begin <= part.at < end for begin, end in runs)}
    return set(said), beaten - said


def _attributed(sample: Sample, turns: Sequence[AskedTurn], parts: Sequence[SampledPart], version: int) -> Sample:
    """The sample with versions and log-probs of what engines sampled; other tokens are not trained."""
    count = sample.response_length
    versions, logprobs = np.full(count, -1, np.int32), np.zeros(count, np.float32)
    sampled = np.zeros(count, bool)
    for part in parts:
        here, answer = slice(part.at, part.at + part.count), turns[part.turn].answer
        versions[here] = answer.versions[: part.count]
        if part.exact:
            sampled[here], logprobs[here] = True, answer.logprobs[: part.count]
    for at in range(count):
        if versions[at] < 0:
            versions[at] = versions[at - 1] if at else version
    mask = sample.loss_mask.astype(bool) & sampled
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
            if len(talks) > MOST:
                break  # too many are refused
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
    if turn.length == at and np.array_equal(turn.tokens, tokens[:at]):
        return 2, alike
    return (1, alike) if alike == length and mask[:alike].any() else (0, 0)
