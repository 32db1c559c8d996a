"""Which tokens of a returned sample an engine sampled, found in what the response was answered."""

from __future__ import annotations

import numpy as np

from hpcrl.rollout.endpoint.session import AskedTurn
from hpcrl.rollout.engines.completion import Completion
from hpcrl.rollout.samplers.sampled_tokens import UNSAMPLED, known_samples
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


def known(sample: Sample, turns: list[AskedTurn], given: bool, version: int = 0, alone: bool = True) -> Sample:
    """The one sample that comes of it."""
    [found] = known_samples(sample, turns, given, alone, version)
    return found


def test_two_turns_with_a_tool_between_them() -> None:
    turns = [turn([1, 2], [8, 16], 3), turn([1, 2, 8, 16, 5], [24], 4)]
    found = known(returned([8, 16, 5, 24], [1, 1, 0, 1]), turns, False)
    assert found.logprobs.tolist() == [-1, -2, 0, -3] and found.versions.tolist() == [3, 3, 3, 4]
    assert UNSAMPLED not in found.metadata


def test_log_probs_of_the_functions_own_are_kept() -> None:
    """Only the versions are found; where nothing fits, they are the policy's when the response was asked for."""
    found = known(returned([8, 16, 5], [1, 1, 1]), [turn([1, 2], [8, 16], 3)], True, 2)
    assert found.logprobs.tolist() == [-9] * 3 and found.versions.tolist() == [3, 3, 3]
    assert found.loss_mask.tolist() == [1, 1, 1]
    assert known(returned([7], [1]), [], True, 2).versions.tolist() == [2]


def test_a_mask_of_the_functions_own_is_kept() -> None:
    """Tokens that were sampled and that it does not train stay so, wherever they are in a turn."""
    found = known(returned([8, 16, 24], [0, 1, 0]), [turn([1, 2], [8, 16, 24], 3)], False)
    assert found.loss_mask.tolist() == [0, 1, 0] and found.logprobs.tolist() == [0, -2, 0]
    assert found.versions.tolist() == [3, 3, 3]


def test_the_turn_asked_with_these_tokens_wins() -> None:
    """Of answers that begin alike, and of two that are the same, the one that saw the tokens before."""
    turns = [turn([1, 9], [8], 3), turn([1, 2], [8, 16], 4), turn([1, 2], [8], 5)]
    assert known(returned([8, 16], [1, 1]), turns, False, alone=False).versions.tolist() == [4, 4]
    assert known(returned([8], [1], (1, 9)), turns, False, alone=False).versions.tolist() == [3]


def test_a_turn_may_be_cut() -> None:
    """A function may drop the end of a turn."""
    found = known(returned([8, 5], [1, 0]), [turn([1, 2], [8, 16], 3)], False)
    assert found.loss_mask.tolist() == [1, 0] and found.logprobs.tolist() == [-1, 0]


def test_text_encoded_again_is_what_was_sampled() -> None:
    """The engine's own request and answer take the place of tokens that no engine sampled; they are counted."""
    found = known(returned([7, 8, 16], [1, 1, 1], (1,)), [turn([1, 2, 3], [8, 16], 3)], False)
    assert found.tokens.tolist() == [1, 2, 3, 8, 16] and found.response_length == 2
    assert found.loss_mask.tolist() == [1, 1] and found.logprobs.tolist() == [-1, -2]
    assert found.metadata[UNSAMPLED] == 3 and found.versions.tolist() == [3, 3]


def test_turns_after_other_tokens_are_samples() -> None:
    """A chat whose history is written otherwise: every conversation is a sample, and a request that begins with all of
    one continues it.  The mask of what the function took is its own."""
    turns = [turn([1, 2], [8, 16], 3), turn([1, 2, 8, 16, 5], [24], 4), turn([1, 9, 5], [32], 5)]
    sample = returned([8, 16, 5, 24, 5, 32], [1, 0, 0, 1, 0, 1])
    for given in (False, True):
        first, second = known_samples(sample, turns, given, True, 0)
        assert first.tokens.tolist() == [1, 2, 8, 16, 5, 24] and first.response_length == 4
        assert first.loss_mask.tolist() == [1, 0, 0, 1] and first.versions.tolist() == [3, 3, 3, 4]
        assert first.logprobs.tolist() == [-1, 0, 0, -3]
        assert second.tokens.tolist() == [1, 9, 5, 32] and second.logprobs.tolist() == [-4]
        assert {found.metadata[UNSAMPLED] for found in (first, second)} == {1}


def test_of_several_samples_each_has_its_own_turns() -> None:
    """Where there are others, a request that does not fit a sample is not taken for its own."""
    [found] = known_samples(returned([7], [1]), [turn([1, 2], [8], 3)], False, False, 2)
    assert found.loss_mask.tolist() == [0] and found.versions.tolist() == [2]
