"""Which tokens of a returned sample an engine sampled, found in what the response was answered."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hpcrl.rollout.endpoint.recorded_turns import AskedTurn, History
from hpcrl.rollout.engines.completion import Completion
from hpcrl.rollout.samplers.sampled_tokens import UNSAMPLED, known_sample, received
from hpcrl.rollout.worker_messages import ERROR, CustomResult, pack
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import COMPLETED


def turn(asked: list[int], said: list[int], version: int) -> AskedTurn:
    logprobs = -np.asarray(said, np.float32) / 8
    versions = np.full(len(said), version, np.int32)
    answer = Completion(np.asarray(said, np.int32), logprobs, versions, COMPLETED)
    return History(np.asarray(asked[:0], np.int32)).grow(np.asarray(asked, np.int32), answer)


def returned(response: list[int], trained: list[int], prompt: tuple[int, ...] = (1, 2)) -> Sample:
    count = len(response)
    logprobs = np.full(count, -9, np.float32)
    tokens = np.asarray([*prompt, *response], np.int32)
    mask = np.asarray(trained, np.uint8)
    return Sample(tokens=tokens, response_length=count, loss_mask=mask, rollout_log_probs=logprobs)


def known(sample: Sample, turns: list[AskedTurn], given: bool, version: int = 0) -> Sample:
    return known_sample(sample if given else sample.replace(rollout_log_probs=None), turns, version)


def test_two_turns_with_a_tool_between_them() -> None:
    turns = [turn([1, 2], [8, 16], 3), turn([1, 2, 8, 16, 5], [24], 4)]
    found = known(returned([8, 16, 5, 24], [1, 1, 0, 1]), turns, False)
    assert found.rollout_log_probs == [-1, -2, 0, -3] and found.versions == [3, 3, 3, 4]
    assert UNSAMPLED not in found.metadata


def test_log_probs_of_sampled_tokens_are_engines() -> None:
    """Whatever a function says of them, placeholders of 0 for instance; those of a function that asked nothing are its
    own."""
    found = known(returned([8, 16], [1, 1]), [turn([1, 2], [8, 16], 3)], True, 2)
    assert found.rollout_log_probs == [-1, -2] and found.versions == [3, 3]
    found = known(returned([7], [1]), [], True, 2)
    assert (found.rollout_log_probs, found.versions, found.loss_mask) == ([-9], [2], [1])


def test_a_sample_that_says_versions_is_taken_as_it_is() -> None:
    """What a `Conversation` makes says both; versions alone do not do."""
    own = returned([7], [1]).replace(versions=np.full(1, 6, np.int32))
    assert known(own, [turn([1, 2], [8, 16], 3)], True) is own
    assert known(own, [turn([1, 2], [7], 3)], False).versions == [3]


def test_a_token_of_the_functions_own_is_not_trained() -> None:
    """It is counted, and keeps nothing else from what was sampled."""
    for given in (False, True):
        found = known(returned([8, 16, 5], [1, 1, 1]), [turn([1, 2], [8, 16], 3)], given)
        assert found.loss_mask == [1, 1, 0] and found.rollout_log_probs == [-1, -2, 0]
        assert found.metadata[UNSAMPLED] == 1
        turns = [turn([1, 2], [8, 16], 3), turn([1, 2, 816, 5], [24], 4)]
        found = known(returned([8, 16, 5, 24, 6], [1, 1, 0, 1, 1]), turns, given)
        assert found.loss_mask == [1, 1, 0, 0, 0] and found.metadata[UNSAMPLED] == 2


def test_nothing_that_an_engine_sampled_is_a_failure() -> None:
    """Text that was encoded again, every token another; what trains nothing by its own mask is none."""
    session = SimpleNamespace(turns=[turn([1, 2], [8, 16], 3)], making=SimpleNamespace(version=0))
    for mask, failure in (([1], ERROR), ([0], "")):
        result = CustomResult(1, [pack(returned([816], mask))])
        done, found = received(result, returned([7], [1]), session)  # type: ignore[arg-type]
        assert done.failure == failure and len(found) == (not failure)


def test_a_mask_of_the_functions_own_is_kept() -> None:
    """Tokens that were sampled and that it does not train stay so, wherever they are in a turn."""
    found = known(returned([8, 16, 24], [0, 1, 0]), [turn([1, 2], [8, 16, 24], 3)], False)
    assert found.loss_mask == [0, 1, 0] and found.rollout_log_probs == [0, -2, 0]
    assert found.versions == [3, 3, 3]


def test_the_turn_asked_with_these_tokens_wins() -> None:
    """Of answers that begin alike, and of two that are the same, the one that saw the tokens before."""
    turns = [turn([1, 9], [8], 3), turn([1, 2], [8, 16], 4), turn([1, 2], [8], 5)]
    assert known(returned([8, 16], [1, 1]), turns, False).versions == [4, 4]
    assert known(returned([8], [1], (1, 9)), turns, False).versions == [3]


def test_a_turn_may_be_cut() -> None:
    """A function may drop the end of a turn."""
    found = known(returned([8, 5], [1, 0]), [turn([1, 2], [8, 16], 3)], False)
    assert found.loss_mask == [1, 0] and found.rollout_log_probs == [-1, 0]


def test_an_answer_after_other_tokens_is_not_trained() -> None:
    """A history that was encoded again: the first turn is the engine's, the second saw other tokens."""
    turns = [turn([1, 2], [8, 16], 3), turn([1, 9, 5], [32], 5)]
    found = known(returned([8, 16, 5, 32], [1, 0, 0, 1]), turns, False)
    assert found.loss_mask == [1, 0, 0, 0] and found.metadata[UNSAMPLED] == 1
    assert found.versions == [3, 3, 3, 3]
