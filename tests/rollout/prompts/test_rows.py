"""What a row may say, where rows lie, and how several files are mixed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.config.options import Options
from hpcrl.config.prompt_words import PromptWord, read_word
from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.prompts.prompt_files import PromptFile, read_training
from hpcrl.rollout.prompts.prompt_source import PromptSource, epoch_order, shares
from hpcrl.rollout.prompts.row_checks import Keys, read_row
from hpcrl.rollout.prompts.rows import open_rows
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from tests.support.tiny import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model")
    hf = make_tokenizer()
    hf.chat_template = (
        "{% if tools %}{% for t in tools %}{{ t['name'] }}{% endfor %}<|end|>{% endif %}{% for m in messages %}<|{{ "
        "m['role'] }}|>{{ m['content'] or '' }}{% for c in m.get('tool_calls') or [] %}{{ c['n'] }}{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if loud %}1+1{% endif %}{% endif %}"
    )
    hf.save_pretrained(path)
    (path / "config.json").write_text(
        json.dumps({"vocab_size": 128, "max_position_embeddings": 2048, "eos_token_id": 1})
    )
    return Tokenizer(path)


@pytest.fixture
def read(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., PromptFile]:
    """The prompts of these rows; a dict of lists of rows is several files, named as its keys."""

    def go(rows: Any, **values: Any) -> PromptFile:
        files = rows if isinstance(rows, dict) else {"p.jsonl": rows}
        for word, content in files.items():
            path = tmp_path / read_word(word, "").path
            path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in content))
        base = {"input_key": "prompt", "label_key": "label", "apply_chat_template": True, "rm_type": "math"}
        options = Options(**(base | {"prompt_data": [f"{tmp_path}/{word}" for word in files]} | values))
        return read_training(options, tokenizer)

    return go


def row(n: int) -> dict[str, str]:
    return {"prompt": str(n), "label": str(n)}


# ---- words


def test_words_name_files_slices_and_weights() -> None:
    assert read_word("a/b.jsonl", "--x") == PromptWord("a/b.jsonl", "a/b.jsonl")
    assert read_word("lr=3/b.parquet@[-5:]=0.5", "--x") == PromptWord(
        "lr=3/b.parquet@[-5:]=0.5", "lr=3/b.parquet", -5, None, 0.5
    )
    assert read_word("p@q.jsonl@[1:-2]", "--x").rows == slice(1, -2)
    assert read_word("somewhere", "--x") == PromptWord("somewhere", "somewhere")
    for bad in ("a.jsonl@[1]", "a.jsonl@[x:]", "a.jsonl@[1:2:3]", "a.jsonl=x", "a.jsonl=nan", "a.jsonl=-1", "a@[1:2]"):
        with pytest.raises(UsageError, match="--x "):
            read_word(bad, "--x")


# ---- rows


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["row", "blank"]), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(-14, 14)),
    st.one_of(st.none(), st.integers(-14, 14)),
    st.booleans(),
    st.booleans(),
)
def test_a_slice_is_pythons(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[str],
    start: int | None,
    stop: int | None,
    bom: bool,
    ended: bool,
) -> None:
    """Of the rows, blank lines left out, whatever the line ends and the first bytes; and each knows its line."""
    path = tmp_path_factory.mktemp("rows") / "p.jsonl"
    lines = [json.dumps({"n": number}) if kind == "row" else " " for number, kind in enumerate(kinds, 1)]
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + "\r\n".join(lines).encode() + (b"\r\n" if ended else b""))
    expected = [n for n, kind in enumerate(kinds, 1) if kind == "row"][start:stop]
    word = PromptWord("p", str(path), start, stop)
    if not expected:
        with pytest.raises(DataError, match="holds no prompts"):
            open_rows(word)
        return
    rows = open_rows(word)
    assert [rows[i]["n"] for i in range(len(rows))] == expected
    assert [rows.where(i) for i in range(len(rows))] == [f"{path}, line {n}" for n in expected]
    if start is None and stop is None:
        first = open_rows(word, 3)
        assert [first[i]["n"] for i in range(len(first))] == expected[:3]


def test_a_file_that_changes_under_the_run_is_refused(read: Callable[..., PromptFile], tmp_path: Path) -> None:
    file = read([row(1), row(2)])
    with (tmp_path / "p.jsonl").open("a") as more:
        more.write("\n")
    with pytest.raises(DataError, match="while the run reads"):
        file.prompts[0]


def test_prompts_are_not_held(read: Callable[..., PromptFile]) -> None:
    file = read([row(n) for n in range(3)])
    assert file.prompts[1] is not file.prompts[1] and file.prompts[1].where.endswith("p.jsonl, line 2")
    with pytest.raises(IndexError):
        file.prompts[3]


# ---- what a row says


@pytest.mark.parametrize("label", ["4", 4, 4.5, True, ["4", "four"], {"a": 1}])
def test_a_label_may_be_anything_but_null(read: Callable[..., PromptFile], label: Any) -> None:
    """A function of the user's is given what is there; hpcrl's own rewards take no object."""
    own = {"rm_type": None, "custom_rm_path": "m.f"} if isinstance(label, dict) else {}
    assert read([{"prompt": "1", "label": label}], **own).prompts[0].label == label


def test_null_labels_where_none_is_compared_with(read: Callable[..., PromptFile]) -> None:
    null = {"prompt": "1", "label": None}
    assert read([null], rm_type=None, custom_rm_path="m.f").prompts[0].label is None
    assert read([null], rm_type="random").prompts[0].label is None
    own = {"prompt": "1", "metadata": {"rm_type": "random"}}
    assert read([own]).prompts[0].label is None, "its own reward compares with none"
    with pytest.raises(DataError, match="line 1: 'label' is null"):
        read([null | {"metadata": {"rm_type": "f1"}}], rm_type="random")
    with pytest.raises(DataError, match="line 1: no key 'label'"):
        read([{"prompt": "1"}], rm_type="random")


def test_content_as_parts_and_null_beside_calls(read: Callable[..., PromptFile], tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+"}, "2="]},
        {"role": "assistant", "content": None, "tool_calls": [{"n": "33"}]},
        {"role": "user", "content": "3"},
    ]
    (prompt,) = read([{"prompt": messages, "label": 1}]).prompts
    assert tokenizer.decode(prompt.tokens) == "<|user|>1+2=<|end|><|assistant|>33<|end|><|user|>3<|end|><|assistant|>"
    assert prompt.raw == messages, "what stood there is kept"


def test_tools_are_shown_to_the_template(read: Callable[..., PromptFile], tokenizer: Tokenizer) -> None:
    tools = [{"name": "12"}, {"name": "3"}]
    for spelled in (tools, json.dumps(tools)):
        (prompt,) = read([row(1) | {"tools": spelled}]).prompts
        assert tokenizer.decode(prompt.tokens).startswith("123<|end|><|user|>1")
    assert tokenizer.decode(read([row(1) | {"tools": tools}], tool_key="other").prompts[0].tokens).startswith(
        "<|user|>1"
    )
    for text in ("{", "[" * 100_000):
        with pytest.raises(DataError, match="'tools' is text"):
            read([row(1) | {"tools": text}])


def test_what_the_template_is_given(read: Callable[..., PromptFile], tokenizer: Tokenizer) -> None:
    (prompt,) = read([row(1)], apply_chat_template_kwargs={"loud": True}).prompts
    assert tokenizer.decode(prompt.tokens).endswith("<|assistant|>1+1")
    with pytest.raises(
        UsageError,
        match="--apply-chat-template-kwargs: the chat template.*not use 'quiet';",
    ):
        read([row(1)], apply_chat_template_kwargs={"quiet": True})


def test_a_row_without_a_template_is_text() -> None:
    assert read_row("p", {"input": "a"}, Keys()).text == "a"
    with pytest.raises(DataError, match="list of chat messages;.*--apply-chat-template"):
        read_row("p", {"input": [{"role": "user", "content": "a"}]}, Keys())


# ---- several files


def test_several_files_are_one_set(read: Callable[..., PromptFile]) -> None:
    first = [row(n) for n in range(5)]
    second = [row(n) for n in range(10, 13)]
    together = read({"a.jsonl@[1:]": first, "b.jsonl": second})
    assert [p.raw for p in together.prompts] == ["1", "2", "3", "4", "10", "11", "12"]
    assert together.prompts[4].where.endswith("b.jsonl, line 1")
    alone = read({"p.jsonl": [*first[1:], *second]})
    taken = [[g.prompt.raw for g in PromptSource(file, 3, True).next_groups(7)] for file in (together, alone)]
    assert taken[0] == taken[1], "as if they were one file"


def test_a_changed_mixture_is_refused(read: Callable[..., PromptFile]) -> None:
    files = {"a.jsonl": [row(1), row(2)], "b.jsonl": [row(3), row(4)]}
    state = json.loads(json.dumps(PromptSource(read(files), 0, True).state()))
    PromptSource(read(files), 0, True).restore(state)
    weighted = {f"{name}=1": rows for name, rows in files.items()}
    for other in (
        dict(reversed(files.items())),
        weighted,
        files | {"a.jsonl": [row(1), row(5)]},
        {"a.jsonl": files["a.jsonl"]},
    ):
        with pytest.raises(DataError, match="changed since the checkpoint"):
            PromptSource(read(other), 0, True).restore(state)
    whole = PromptSource(read({"a.jsonl": [row(1), row(2)]}), 0, True).state()
    with pytest.raises(DataError, match="changed since the checkpoint"):
        PromptSource(read({"a.jsonl@[:1]": [row(1), row(2)]}), 0, True).restore(whole)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.2, 5)), min_size=2, max_size=4),
    st.integers(0, 3),
    st.booleans(),
)
def test_mixture_keeps_proportions(parts: list[tuple[int, float]], seed: int, shuffle: bool) -> None:
    """A mixture keeps its proportions and goes through each file."""
    count, weights = sum(n for n, _ in parts), [w for _, w in parts]
    try:
        wanted = shares(count, weights)
    except DataError:
        return
    assert sum(wanted) == count and all(
        abs(n - count * w / sum(weights)) < 1 for n, w in zip(wanted, weights, strict=True)
    )
    starts = np.cumsum([0, *(n for n, _ in parts)])
    epochs = [np.asarray(epoch_order(count, parts, seed, epoch, shuffle)) for epoch in range(5)]
    for order in epochs:
        assert np.histogram(order, starts)[0].tolist() == wanted
    for number, (size, _) in enumerate(parts):
        mine = np.concatenate([order[(order >= starts[number]) & (order < starts[number + 1])] for order in epochs])
        seen = Counter(mine.tolist())
        assert max(seen.values()) - (min(seen.values()) if len(seen) == size else 0) <= 1, (
            "none again before all were there"
        )
    again = np.asarray(epoch_order(count, parts, seed, 4, shuffle))
    assert (again == epochs[4]).all()


def test_a_mixture_in_order_is_spread_evenly() -> None:
    order = list(epoch_order(8, [(2, 1.0), (6, 3.0)], 0, 0, False))
    assert [n < 2 for n in order] == [False, True, False, False, False, True, False, False]
    assert [n for n in order if n < 2] == [0, 1] and [n for n in order if n >= 2] == [2, 3, 4, 5, 6, 7]
    with pytest.raises(DataError, match="the weight 0.001 of --prompt-data gives none"):
        epoch_order(8, [(2, 0.001), (6, 3.0)], 0, 0, False)
