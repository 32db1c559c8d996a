"""Which tokens of a returned sample an engine sampled, found in what the response was answered."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hpcrl.rollout.endpoint.asked_turns import AskedTurn
from hpcrl.rollout.engines.completion import Completion
from hpcrl.rollout.samplers.sampled_tokens import UNSAMPLED, known_samples, received
from hpcrl.rollout.worker_messages import ERROR, MOST, CustomResult
from hpcrl.sample import COMPLETED, Sample, pack


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
    [found] = known_samples(sample, turns, given, alone, version, spell)
    return found


def spell(tokens: np.ndarray) -> str:
    """Each digit of an id is a character, 9 a special token's: 78 is the text of 7 and 8."""
    return "".join(str(token) for token in tokens.tolist() if token != 9)


def test_two_turns_with_a_tool_between_them() -> None:
    turns = [turn([1, 2], [8, 16], 3), turn([1, 2, 8, 16, 5], [24], 4)]
    found = known(returned([8, 16, 5, 24], [1, 1, 0, 1]), turns, False)
    assert found.logprobs.tolist() == [-1, -2, 0, -3] and found.versions.tolist() == [3, 3, 3, 4]
    assert UNSAMPLED not in found.metadata


def test_log_probs_of_sampled_tokens_are_engines() -> None:
    """Whatever a function says of them, placeholders of 0 for instance; those of a function that asked nothing are its
    own."""
    found = known(returned([8, 16], [1, 1]), [turn([1, 2], [8, 16], 3)], True, 2)
    assert found.logprobs.tolist() == [-1, -2] and found.versions.tolist() == [3, 3]
    found = known(returned([7], [1]), [], True, 2)
    assert found.logprobs.tolist() == [-9] and found.versions.tolist() == [2] and found.loss_mask.tolist() == [1]


def test_a_token_of_the_functions_own_is_not_trained() -> None:
    """It is counted, and keeps nothing else from what was sampled."""
    for given in (False, True):
        found = known(returned([8, 16, 5], [1, 1, 1]), [turn([1, 2], [8, 16], 3)], given)
        assert found.loss_mask.tolist() == [1, 1, 0] and found.logprobs.tolist() == [-1, -2, 0]
        assert found.metadata[UNSAMPLED] == 1
        turns = [turn([1, 2], [8, 16], 3), turn([1, 2, 816, 5], [24], 4)]
        talks = known_samples(returned([8, 16, 5, 24, 6], [1, 1, 0, 1, 1]), turns, given, True, 0, spell)
        assert [talk.tokens.tolist() for talk in talks] == [[1, 2, 8, 16], [1, 2, 816, 5, 24]]
        assert [talk.loss_mask.tolist() for talk in talks] == [[1, 1], [1]]


def test_candidates_not_returned_train_nothing() -> None:
    """Of the best of three, encoded again, its own request alone is trained; nor is a judge's answer."""
    turns = [turn([1, 2], [4, 3, 9], 3), turn([1, 2], [4, 5, 6, 9], 3), turn([1, 2], [4, 7, 9], 3), turn([8], [5], 3)]
    for response in ([45, 6, 9], [4, 56, 9]):
        found = known(returned(response, [1] * len(response)), turns, False)
        assert found.tokens.tolist() == [1, 2, 4, 5, 6, 9] and found.loss_mask.tolist() == [1, 1, 1, 1]
        assert found.metadata[UNSAMPLED]


def test_turns_encoded_again_are_found_in_order() -> None:
    """Each in text that is trained and that no other turn has."""
    turns = [turn([1, 2], [4, 3], 3), turn([1, 2, 43, 5], [6, 7], 3), turn([1, 2, 43, 5, 67, 5], [4, 3], 4)]
    talks = known_samples(returned([43, 5, 67, 5, 43], [1, 0, 1, 0, 1]), turns, False, True, 0, spell)
    assert [talk.tokens.tolist()[-2:] for talk in talks] == [[4, 3], [6, 7], [4, 3]]
    talks = known_samples(returned([43, 5, 67], [0, 0, 1]), turns, False, True, 0, spell)
    assert [talk.tokens.tolist()[-2:] for talk in talks] == [[6, 7]]


def test_more_conversations_than_samples_are_refused() -> None:
    """One clear failure, whose text names the bound."""
    turns = [turn([1, 100 + number], [200 + number], 3) for number in range(300)]
    response = [200 + number for number in range(300)]
    sent = [pack(returned(response, [1] * 300))]
    tokenizer = SimpleNamespace(spelled=lambda tokens, skip_special: spell(tokens))
    session = SimpleNamespace(turns=turns, tokenizer=tokenizer, making=SimpleNamespace(version=0))
    done, found = received(CustomResult(1, sent, given=[False]), returned([7], [1]), session)  # type: ignore[arg-type]
    assert not found and done.failure == ERROR and str(MOST) in done.text


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
        first, second = known_samples(sample, turns, given, True, 0, spell)
        assert first.tokens.tolist() == [1, 2, 8, 16, 5, 24] and first.response_length == 4
        assert first.loss_mask.tolist() == [1, 0, 0, 1] and first.versions.tolist() == [3, 3, 3, 4]
        assert first.logprobs.tolist() == [-1, 0, 0, -3]
        assert second.tokens.tolist() == [1, 9, 5, 32] and second.logprobs.tolist() == [-4]
        assert {found.metadata[UNSAMPLED] for found in (first, second)} == {1}


def test_of_several_samples_each_has_its_own_turns() -> None:
    """Where there are others, a request that does not fit a sample is not taken for its own."""
    [found] = known_samples(returned([7], [1]), [turn([1, 2], [8], 3)], False, False, 2, spell)
    assert found.loss_mask.tolist() == [0] and found.versions.tolist() == [2]
