"""Which tokens of a returned sample an engine sampled, found in what the response was answered."""

from __future__ import annotations

import numpy as np

from hpcrl.rollout.endpoint.session import AskedTurn
from hpcrl.rollout.engines.completion import Completion
from hpcrl.rollout.samplers.sampled_tokens import UNSAMPLED, attributed
from hpcrl.sample import COMPLETED, Sample


def turn(asked: list[int], said: list[int], version: int) -> AskedTurn:
    logprobs = -np.asarray(said, np.float32) / 8
    versions = np.full(len(said), version, np.int32)
    return AskedTurn(np.asarray(asked), Completion(np.asarray(said, np.int32), logprobs, versions, COMPLETED))


def returned(response: list[int], mask: list[int], prompt: tuple[int, ...] = (1, 2)) -> Sample:
    count = len(response)
    logprobs, versions = np.full(count, -9, np.float32), np.zeros(count, np.int32)
    tokens = np.asarray([*prompt, *response], np.int32)
    return Sample(0, 0, tokens, count, np.asarray(mask, np.uint8), logprobs, versions)


def test_two_turns_with_a_tool_between_them() -> None:
    turns = [turn([1, 2], [8, 16], 3), turn([1, 2, 8, 16, 5], [24], 4)]
    found = attributed(returned([8, 16, 5, 24], [1, 1, 0, 1]), turns, False, 2)
    assert found.logprobs.tolist() == [-1, -2, 0, -3] and found.versions.tolist() == [3, 3, 3, 4]
    assert UNSAMPLED not in found.metadata


def test_log_probs_of_the_functions_own_are_kept() -> None:
    """Only the versions are found; where nothing fits, they are the policy's when the response was asked for."""
    found = attributed(returned([8, 16, 5], [1, 1, 1]), [turn([1, 2], [8, 16], 3)], True, 2)
    assert found.logprobs.tolist() == [-9] * 3 and found.versions.tolist() == [3, 3, 3]
    assert attributed(returned([7], [1]), [], True, 2).versions.tolist() == [2]
    assert found.loss_mask.tolist() == [1, 1, 1]


def test_the_turn_asked_with_these_tokens_wins() -> None:
    """Of answers that begin alike, and of two that are the same, the one that saw the tokens before."""
    turns = [turn([1, 9], [8], 3), turn([1, 2], [8, 16], 4), turn([1, 2], [8], 5)]
    assert attributed(returned([8, 16], [1, 1]), turns, False, 0).versions.tolist() == [4, 4]
    assert attributed(returned([8], [1], (1, 9)), turns, False, 0).versions.tolist() == [3]


def test_a_turn_may_be_cut_and_is_used_once() -> None:
    """A function may drop the end of a turn; the same answer does not vouch for two places."""
    found = attributed(returned([8, 5, 8], [1, 0, 1]), [turn([1, 2], [8, 16], 3)], False, 0)
    assert found.loss_mask.tolist() == [1, 0, 0] and found.metadata[UNSAMPLED] == 1
    assert found.logprobs.tolist() == [-1, 0, 0]


def test_what_no_engine_sampled_is_context() -> None:
    found = attributed(returned([7, 8, 16], [1, 1, 1]), [turn([1, 2, 3], [8, 16], 3)], False, 0)
    assert found.loss_mask.tolist() == [0, 1, 1] and found.versions.tolist() == [0, 3, 3]
