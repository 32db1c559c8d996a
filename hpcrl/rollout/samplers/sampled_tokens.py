"""What engines sampled of a returned sample: under which version, with which log-prob, after which tokens.

slime's functions say no versions, some of them no log-probs, and some return tokens that no engine sampled: text that
they encoded again, or an end of their own.

Invariants: what is trained was sampled by an engine after exactly the tokens before it, for an answer that lies in the
sample, and with the log-prob that the engine said; any other token is taken out of the mask, and counted.  What a
function asked and did not return trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcrl.rollout.endpoint.recorded_turns import AskedTurn, alike
from hpcrl.rollout.endpoint.session import Session
from hpcrl.rollout.worker_messages import ERROR, CustomResult, unpack
from hpcrl.sample import Sample

UNSAMPLED = "unsampled_tokens"  #: in metadata: trained tokens of a sample that no engine sampled there


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


def received(done: CustomResult, prompt: Sample, session: Session) -> tuple[CustomResult, list[Sample]]:
    """(what came of a call, the samples that it returned); of its prompt counts what it was asked with."""
    found = [unpack(sent).replace(prompt=prompt.prompt, label=prompt.label) for sent in done.samples or ()]
    known = [known_sample(sample, session.turns, session.making.version) for sample in found]
    if _trains(found) and not _trains(known):
        text = (
            "returned tokens that no engine sampled for this response: nothing of it can be trained; return "
            "the tokens that the engine answered, and do not encode their text again"
        )
        return CustomResult(done.id, failure=ERROR, text=text), []
    return done, known


def _trains(samples: Sequence[Sample]) -> bool:
    return any(sample.array("loss_mask").any() for sample in samples)


def known_sample(sample: Sample, turns: Sequence[AskedTurn], version: int) -> Sample:
    """A sample that says versions and log-probs as it is; another with those of what engines sampled, and other tokens
    are not trained.  Log-probs that a function has set are taken where it has asked no engine at all.

    Args:
        version: of tokens before the first that an engine sampled.
    """
    count, mask = sample.response_length, sample.array("loss_mask").astype(bool)
    given = sample.has("rollout_log_probs")
    if given and sample.has("versions"):
        return sample
    if given and not turns:
        return sample.replace(versions=np.full(count, version, np.int32))
    versions, logprobs = np.full(count, -1, np.int32), np.zeros(count, np.float32)
    sampled = np.zeros(count, bool)
    for part in _parts(sample.array("tokens"), count, turns):
        here, answer = slice(part.at, part.at + part.count), turns[part.turn].answer
        versions[here], logprobs[here] = answer.versions[: part.count], answer.logprobs[: part.count]
        sampled[here] = True
    for at in range(count):
        if versions[at] < 0:
            versions[at] = versions[at - 1] if at else version
    lost = int(np.count_nonzero(mask & ~sampled))
    mask &= sampled
    logprobs = np.where(mask, logprobs, 0).astype(np.float32)
    metadata = sample.metadata | {UNSAMPLED: lost} if lost else sample.metadata
    return sample.replace(
        loss_mask=mask.astype(np.uint8), rollout_log_probs=logprobs, versions=versions, metadata=metadata
    )


def _parts(tokens: np.ndarray, count: int, turns: Sequence[AskedTurn]) -> list[SampledPart]:
    """The answers in a response that were sampled there, each used once, from its beginning."""
    found: list[SampledPart] = []
    by_length: dict[int, list[int]] = {}  # tokens that an engine was asked with -> the answers
    for number, turn in enumerate(turns):
        by_length.setdefault(turn.length, []).append(number)
    prompt, at = len(tokens) - count, 0
    while at < count:
        here = prompt + at
        found_here = [
            (alike(turns[number].answer.tokens, tokens[here:]), -number)
            for number in by_length.get(here, ())
            if np.array_equal(turns[number].tokens, tokens[:here])
        ]
        length, last = max(found_here, default=(0, 0))
        if length:
            found.append(SampledPart(-last, at, length))
        at += max(length, 1)
    return found
