"""What a row says, key by key, and where the rows of a file lie: pure functions of small files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.plugin_names import declared, plugin_names
from hpcrl.config.prompt_words import read_word
from hpcrl.errors import DataError
from hpcrl.rollout.prompts.row_checks import Keys, read_row
from hpcrl.rollout.prompts.rows import kind_of_json, open_rows
from hpcrl.rollout.rewards.f1 import f1

CHAT = Keys("q", "a", "m", "t", chat_template=True, label_needed=True)
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("row", "keys", "found"),
    [
        ({"q": "x", "a": "1"}, CHAT, (None, [{"role": "user", "content": "x"}], "1", {}, None)),
        ({"q": [USER], "a": 1, "m": {"k": 1}, "t": [{"n": 1}]}, CHAT, (None, [USER], 1, {"k": 1}, [{"n": 1}])),
        ({"q": "x", "a": "1", "m": None, "t": []}, CHAT, (None, [{"role": "user", "content": "x"}], "1", {}, None)),
        ({"q": "x", "a": "1", "t": '[{"n": 2}]'}, CHAT, (None, [{"role": "user", "content": "x"}], "1", {}, [{"n": 2}])),
        ({"q": "x", "a": "1", "t": [{"n": 1}]}, Keys("q", "a", tools="t"), ("x", None, "1", {}, None)),
        ({"q": "x"}, Keys("q"), ("x", None, None, {}, None)),
        ({"q": "x", "a": None}, Keys("q", "a"), ("x", None, None, {}, None)),
        ({"q": "x", "a": "1", "metadata": {"rm_type": None}}, Keys("q", "a"), ("x", None, "1", {"rm_type": None}, None)),
        ({"q": "x", "a": "1", "metadata": {"rm_type": 3}}, Keys("q", "a", own_types=False), ("x", None, "1", {"rm_type": 3}, None)),
        ({"q": "x", "metadata": {"rm_type": "random"}}, Keys("q", "a", label_needed=True), ("x", None, None, {"rm_type": "random"}, None)),
        ({"q": [USER | {"content": ["a", {"text": "b"}, {"type": "text", "text": "c"}]}], "a": 1}, CHAT, (None, [USER | {"content": "abc"}], 1, {}, None)),
        ({"q": [{"role": "assistant", "content": None, "tool_calls": [1]}], "a": 1}, CHAT, (None, [{"role": "assistant", "content": None, "tool_calls": [1]}], 1, {}, None)),
        ({"q": [{"role": "assistant", "tool_calls": [1]}], "a": 1}, CHAT, (None, [{"role": "assistant", "content": None, "tool_calls": [1]}], 1, {}, None)),
    ],
)  # fmt: skip
def test_what_a_row_says(row: dict[str, Any], keys: Keys, found: tuple[Any, ...]) -> None:
    read = read_row("f, line 1", row, keys)
    assert (read.text, read.messages, read.label, read.metadata, read.tools) == found
    assert read.raw == row["q"] and read.learned == ()


LEARNS = Keys("q", "a", learned=("a", "b"), label_needed=True)
TALK = Keys("q", chat_template=True, conversation=True)


@pytest.mark.parametrize(
    ("row", "keys", "said"),
    [
        ({"a": "1"}, CHAT, "no key 'q'"),
        ({"q": None, "a": "1"}, CHAT, "'q' is null"),
        ({"q": "x"}, CHAT, "no key 'a'"),
        ({"q": "x", "a": None}, CHAT, "'a' is null"),
        ({"q": "x"}, Keys("q", "a"), "no key 'a'"),
        ({"q": "x", "metadata": {"rm_type": "math"}}, Keys("q", "a"), "no key 'a'"),
        ({"q": "x", "a": "1", "m": []}, CHAT, "'m' is not"),
        ({"q": "x", "a": "1", "m": {"rm_type": 3}}, CHAT, "rm_type is 3"),
        ({"q": "x", "a": "1", "t": "{"}, CHAT, "'t' is text"),
        ({"q": "x", "a": "1", "t": [1]}, CHAT, "list of objects but"),
        ({"q": "x", "a": "1", "t": {"n": 1}}, CHAT, "list of objects but"),
        ({"q": [USER], "a": "1"}, Keys("q", "a"), "of chat messages"),
        ({"q": [], "a": "1"}, CHAT, "empty list"),
        ({"q": [1], "a": "1"}, CHAT, "role and content"),
        ({"q": [{"role": 1, "content": "x"}], "a": "1"}, CHAT, "role and content"),
        ({"q": [{"role": "user"}], "a": "1"}, CHAT, "message is null"),
        ({"q": [{"role": "user", "content": 3}], "a": "1"}, CHAT, "message is a number"),
        ({"q": [{"role": "user", "content": [{"type": "image"}]}], "a": "1"}, CHAT, "'image', only text"),
        ({"q": [{"role": "user", "content": [3]}], "a": "1"}, CHAT, "'a number', only text"),
        ({"q": [{"role": "user", "content": [{"text": 3}]}], "a": "1"}, CHAT, "only text"),
        ({"q": 3, "a": "1"}, CHAT, "messages but a number"),
        ({"q": "x", "a": True, "b": "y"}, LEARNS, "the label is neither"),
        ({"q": "x", "a": "y", "b": [1]}, LEARNS, "response ('b') is neither"),
        ({"q": "x", "a": "y"}, LEARNS, "no key 'b'"),
        ({"q": [USER]}, TALK, "message of 'user'"),
        ({"q": "x"}, TALK, "the prompt is text"),
    ],
)  # fmt: skip
def test_what_no_row_may_say(row: dict[str, Any], keys: Keys, said: str) -> None:
    with pytest.raises(DataError, match="f, line 1: ") as error:
        read_row("f, line 1", row, keys)
    assert said in str(error.value)


def test_pairs_and_conversations() -> None:
    assert read_row("f", {"q": "x", "a": 1, "b": 2.5}, LEARNS).learned == (1, 2.5)
    talk = [USER, {"role": "assistant", "content": "yes"}]
    assert read_row("f", {"q": talk}, TALK).messages == talk


@pytest.mark.parametrize(
    ("flags", "needed", "conversation", "learned"),
    [
        ({"rm_type": "math", "label_key": "a"}, True, False, ()),
        ({"rm_type": "random", "label_key": "a"}, False, False, ()),
        ({"rm_type": "math", "custom_rm_path": "x.y", "label_key": "a"}, False, False, ()),
        ({"loss_type": "sft_loss", "label_key": "a"}, True, False, ("a",)),
        ({"loss_type": "sft_loss"}, True, True, ()),
        ({"loss_type": "dpo_loss", "label_key": "a", "rejected_key": "b"}, None, False, None),
    ],
)
def test_keys_of_a_run(flags: dict[str, Any], needed: bool | None, conversation: bool, learned: Any) -> None:
    options = Options(input_key="q", metadata_key="m", tool_key="t", apply_chat_template=True, **flags)
    keys = Keys.from_options(options)
    assert (keys.input, keys.metadata, keys.tools, keys.chat_template) == ("q", "m", "t", True)
    assert keys.conversation is conversation and keys.own_types is ("custom_rm_path" not in flags)
    if needed is not None:
        assert (keys.label_needed, keys.learned) == (needed, learned)
    assert keys.rewards == ((flags["rm_type"],) if "rm_type" in flags and "custom_rm_path" not in flags else ())


NAN = float("nan")
#: labels that no answer can match, and what is said of them
UNMATCHED = [
    ("", "empty text"), ("  \n", "empty text"), ("so 7 ####  ", "empty text"), ([], "an empty list"), (["7", ""], "empty text"),
    (["7", None], "a list with null"), (NAN, "nan"), (float("inf"), "inf"), ({"ground_truth": "7"}, "an object"),
    ({}, "an object"), (["7", {}], "a list with an object"), ("['7']", "a list written as text"),
    (' ["7"]', "a list written as text"), ('{"ground_truth": "7"}', "an object written as text"),
]  # fmt: skip


@pytest.mark.parametrize("reward", plugin_names())
def test_labels_that_no_answer_can_match(reward: str) -> None:
    """Every reward of hpcrl's that looks at labels refuses those that no answer can match, in whatever way it is
    named; a function of the user's takes anything."""
    keys = Keys("q", "a", rewards=(reward,))
    named = {"metadata": {"rm_type": f" boxed_{reward} "}}
    for label, said in UNMATCHED:
        taken = not declared(reward)["LABELS"] or ("written" in said and "json" in declared(reward)["LABELS"])
        if reward == "ifbench":
            continue
        for row, given in (({"q": "x", "a": label}, keys), ({"q": "x", "a": label} | named, Keys("q", "a"))):
            if taken:
                read_row("f, line 3", row, given)
                continue
            with pytest.raises(DataError, match="f, line 3: ") as error:
                read_row("f, line 3", row, given)
            told = said if not isinstance(label, list) or reward != "gpqa" else "is a list"  # of which it takes none
            assert told in str(error.value), label
        read_row("f", {"q": "x", "a": label}, Keys("q", "a"))
        read_row("f", {"q": "x", "a": label} | named, Keys("q", "a", own_types=False))
    if declared(reward)["LABELS"]:
        for label in ("7", 7, 0, "[0, 1]", r"\{1, 2\}", "so\n#### 7"):
            assert read_row("f", {"q": "x", "a": label}, keys).label == label


@pytest.mark.parametrize("label", ["the", "A, an", "?!", "the ..."])
def test_labels_without_a_word_for_f1(label: str) -> None:
    """f1 leaves out punctuation and articles, and nothing is left of these."""
    with pytest.raises(DataError, match="without a word"):
        read_row("f", {"q": "x", "a": label}, Keys("q", "a", rewards=("f1",)))
    for taken in (f"{label} cat", "猫。", "an.d"):
        assert f1(taken, taken) == 1 and read_row("f", {"q": "x", "a": taken}, Keys("q", "a", rewards=("f1",)))
    assert f1(label, label) == 0


def test_what_stands_in_place_of_a_label() -> None:
    """The metadata of gpqa and ifbench, of which a row needs one key or a label."""
    gpqa, ifbench = (Keys("q", None, rewards=(name,)) for name in ("gpqa", "ifbench"))
    read_row("f", {"q": "x", "metadata": {"correct_letter": "B"}}, gpqa)
    read_row("f", {"q": "x", "metadata": {"instruction_id_list": ["a"]}}, ifbench)
    for keys in (gpqa, ifbench):
        with pytest.raises(DataError, match="f: .*(letter|id_list).* metadata"):
            read_row("f", {"q": "x"}, keys)
    with pytest.raises(DataError, match="true or false"):
        read_row("f", {"q": "x", "a": True}, Keys("q", "a", rewards=("gpqa",)))
    with pytest.raises(DataError, match="--label-key"):
        read_row("f", {"q": "x", "metadata": {"rm_type": "math"}}, Keys("q"))


def test_a_label_inside_an_object() -> None:
    """verl's reward_model: the error names the key of its answer, and that key is read."""
    row = {"q": "x", "reward_model": {"style": "rule", "ground_truth": "34"}}
    with pytest.raises(DataError, match=r"--label-key reward_model\.ground_truth"):
        read_row("f", row, Keys("q", "reward_model", rewards=("math",)))
    key = "reward_model.ground_truth"
    assert read_row("f", row, Keys("q", key, rewards=("math",))).label == "34"
    assert read_row("f", row | {key: "35"}, Keys("q", key, rewards=("math",))).label == "35"
    with pytest.raises(DataError, match="no key 'reward_model.other'"):
        read_row("f", row, Keys("q", "reward_model.other", label_needed=True))
    assert read_row("f", {"q": "x", "r": {"a": 1, "b": 2}}, Keys("q", "r.a", learned=("r.a", "r.b"))).learned == (1, 2)


KINDS = [("x", "text"), (True, "true or false"), (1, "a number"), (0.5, "a number"), ([], "a list"), ({}, "an object")]


@pytest.mark.parametrize(("value", "name"), [*KINDS, (None, "null"), (b"", "a bytes")])
def test_kinds_of_values(value: Any, name: str) -> None:
    assert kind_of_json(value) == name


def test_lines_of_a_file(tmp_path: Path) -> None:
    """Blank lines count and are no rows, a byte-order mark is neither, and the last line needs no end."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 0}\n\n  \n{"n": 1}\n{"n": 2}\n\n{"n": 3}')
    lines = [1, 4, 5, 7]
    for word, rows in (
        (path, range(4)),
        (f"{path}@[1:]", range(1, 4)),
        (f"{path}@[1:3]", range(1, 3)),
        (f"{path}@[-1:]", [3]),
    ):
        found = open_rows(read_word(str(word), "--x"))
        assert [row["n"] for row in map(found.__getitem__, range(len(found)))] == list(rows)
        assert [found.where(at) for at in range(len(found))] == [f"{path}, line {lines[n]}" for n in rows]
        assert (found.size, found.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    for count in (1, 3, 4, 9):
        found = open_rows(read_word(str(path), "--x"), count)
        assert [(found.where(at), found[at]["n"]) for at in range(len(found))] == [
            (f"{path}, line {line}", n) for n, line in enumerate(lines)
        ][:count]


@pytest.mark.parametrize(("line", "said"), [("[1]", "but a list"), ("{", "not JSON"), ("3", "but a number")])
def test_lines_that_are_no_rows(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{json.dumps({'n': 0})}\n{line}\n")
    rows = open_rows(read_word(str(path), "--x"))
    assert rows[0] == {"n": 0}
    with pytest.raises(DataError, match=f"line 2: .*{said}"):
        rows[1]
    first = open_rows(read_word(str(path), "--x"), 1)
    assert (len(first), first.size) == (1, path.read_bytes().index(b"\n") + 1), "the first row alone"
    with pytest.raises(DataError, match="cannot read"):
        open_rows(read_word(str(tmp_path / "absent.jsonl"), "--x"), 1)


def test_a_mark_before_a_blank_line_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n{"n": 0}\n')
    found = open_rows(read_word(str(path), "--x"))
    assert (len(found), found[0], found.where(0)) == (1, {"n": 0}, f"{path}, line 2")
    assert open_rows(read_word(str(path), "--x"), 9)[0] == {"n": 0}
