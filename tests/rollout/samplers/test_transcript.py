"""What is kept of a response's turns and commands: exact, bounded, nothing for one turn."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hpcrl.report.sample_records import Record
from hpcrl.report.sample_view import parts
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.transcript import MOST, commands_of, cut_texts, turns_of
from hpcrl.sample import Sample
from hpcrl.sandbox.accounts import COMMANDS, Recording
from tests.support.tiny import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"vocab_size": 128, "eos_token_id": 1}')
    return Tokenizer(path)


def sample(tokenizer: Tokenizer, *turns: tuple[int, str], end: bool = True) -> Sample:
    """Of these turns, and a token that ends it."""
    pieces = [tokenizer.encode([text])[0] for _, text in turns]
    mask = [own for (own, _), piece in zip(turns, pieces, strict=True) for _ in piece]
    tokens = np.concatenate([[7], *pieces, [1] * end]).astype(np.int32)
    count = len(tokens) - 1
    column = np.asarray(mask + mask[-1:] * end, np.uint8)
    made = Sample(tokens=tokens, response_length=count, loss_mask=column)
    made.response = tokenizer.decode(tokens[1:])
    return made


def test_turns_are_lengths_of_the_response(tokenizer: Tokenizer) -> None:
    said = sample(tokenizer, (1, "ls<|end|>"), (0, "<|user|>a b<|end|>"), (1, "done"))
    assert turns_of(said, tokenizer) == {"turns": [[1, 9], [0, 18], [1, 4]]}
    record = Record(response=said.response, transcript=turns_of(said, tokenizer))
    assert parts(record) == [("the policy", "ls<|end|>"), ("told", "<|user|>a b<|end|>"), ("the policy", "done")]


def test_one_turn_has_none(tokenizer: Tokenizer) -> None:
    for mask in (0, 1):
        assert turns_of(sample(tokenizer, (mask, "abc")), tokenizer) == {}


def test_turns_of_another_response_text(tokenizer: Tokenizer) -> None:
    """As a function may set one: their own texts are kept, bounded."""
    said = sample(tokenizer, (1, "ab"), (0, "c" * 3 * MOST), (1, "d"))
    said.response = "something else"
    turns = turns_of(said, tokenizer)["turns"]
    assert turns[0] == [1, "ab"] and turns[2] == [1, "d"]
    assert MOST // 2 - 10 < len(turns[1][1]) < MOST // 2 + 10 and " ... " in turns[1][1]
    assert parts(Record(response="something else", transcript={"turns": turns}))[0] == ("the policy", "ab")


def test_texts_share_their_room() -> None:
    texts = ["a", "\u00e9" * 1000, "b" * 5000, "c" * 10]
    cut = cut_texts(texts, 1000)
    assert cut[0] == "a" and cut[3] == "c" * 10
    assert sum(len(text.encode()) for text in cut) <= 1000 + 2 * len(" ... ")
    assert cut[1].startswith("\u00e9" * 120) and cut[1].endswith("\u00e9" * 120)
    assert cut_texts(texts, 1 << 20) == texts and cut_texts([], 5) == []


def test_commands_are_plain_and_bounded() -> None:
    record, box, other = Recording(), object(), object()
    assert commands_of(record) == {}
    record.add(box, "exit 3", 3, 0.0, [])
    record.add(other, ["sleep", "9"], None, 0.0, ["time"])
    first, second = commands_of(record)["commands"]
    assert (first["box"], first["command"], first["code"]) == (1, "exit 3", 3) and "limits" not in first
    assert (second["box"], second["command"], second["limits"]) == (2, "sleep 9", ["time"]) and "code" not in second
    for _ in range(COMMANDS + 7):
        record.add(box, "x" * 5000, 0, 0.0, [])
    found = commands_of(record)
    assert found["left_out"] == 9 and len(msgspec.json.encode(found)) < 2 * MOST
    shown = parts(Record(response="r", transcript=found))
    assert shown[0] == ("the policy", "r") and "9 commands" in shown[1][1] and "exit 3: exit" not in shown[1][1]
    assert shown[1][1].splitlines()[0].endswith("exit 3")


def test_what_is_no_transcript_shows_the_response() -> None:
    for bad in ({"turns": 3}, {"commands": [1]}, {"turns": [["x", {}]]}, {}):
        assert parts(Record(response="r", transcript=bad)) == [("the policy", "r")]
    assert parts(Record(response="abc", transcript={"turns": [[1, -5], [0, 99]]})) == [
        ("the policy", ""),
        ("told", "abc"),
    ]
