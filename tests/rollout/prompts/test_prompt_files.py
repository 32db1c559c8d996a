"""Prompt files, tokenizers and epochs: bad lines are named, positions are exact."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import NFKC
from tokenizers.processors import TemplateProcessing

from hpcrl.config.eval_sets import eval_sets
from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.prompts import prompt_files
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile, read_prompts
from hpcrl.rollout.prompts.prompt_source import PromptSource, count_rollouts
from hpcrl.rollout.prompts.row_checks import Keys
from hpcrl.rollout.prompts.tokenizer import Tokenizer, load_tokenizer
from tests.support.tiny import make_tokenizer

GOOD = '{"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and config of a model; no weights."""
    path = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(
        json.dumps({"vocab_size": 128, "max_position_embeddings": 2048, "eos_token_id": 1})
    )
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture
def read(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., PromptFile]:
    def go(text: str, **values: Any) -> PromptFile:
        (tmp_path / "p.jsonl").write_text(text)
        options = Options(
            **({"input_key": "prompt", "label_key": "label", "apply_chat_template": True, "rm_type": "math"} | values)
        )
        return read_prompts(tmp_path / "p.jsonl", Keys.from_options(options), tokenizer)

    return go


@given(st.lists(st.text(st.sampled_from("a1 é\ufdfa世\n"), max_size=40), min_size=1, max_size=6), st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_sure_to_fit_without_encoding(model: Path, texts: list[str], limit: int) -> None:
    """What is sure to fit without being encoded does fit."""
    tokenizer = Tokenizer(model)
    for text in texts:
        if tokenizer.surely_within(text, limit):
            assert 0 < len(tokenizer.encode([text])[0]) <= limit
    assert tokenizer.surely_within("1" * 100, 108) and not tokenizer.surely_within("1" * 101, 108)
    assert tokenizer.surely_within("1", None) and not tokenizer.surely_within(" \n", None)


def test_only_what_may_be_too_long_is_encoded(
    read: Callable[..., PromptFile], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, texts: Any) -> Any:
        encoded.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    rows = [json.dumps({"prompt": "1" * count, "label": "2"}) + "\n" for count in (5, 50, 95, 120)]
    file = read("".join(rows), rollout_max_prompt_len=100)
    assert (len(file), file.dropped) == (3, 1)
    assert sorted(len(text) for text in encoded if len(text) > 1) == [
        len("<|user|><|end|><|assistant|>") + n for n in (95, 120)
    ]


def test_rendered_prompt_keeps_its_source(read: Callable[..., PromptFile], tokenizer: Tokenizer) -> None:
    """A prompt is rendered and keeps its source text."""
    row = {"prompt": "1+1=", "label": 2, "metadata": {"source": "made up"}}
    file = read(f"{GOOD}\n\n{json.dumps(row)}\n")
    first, second = file.prompts
    assert tokenizer.decode(first.tokens) == "<|user|>1+1=<|end|><|assistant|>"
    assert (second.tokens == first.tokens).all(), "text is one user message"
    assert first.tokens.dtype == np.int32
    assert (first.where[-6:], second.where[-6:]) == ("line 1", "line 3")
    assert (second.raw, second.label, second.metadata) == ("1+1=", 2, {"source": "made up"})
    content = f"{GOOD}\n\n{json.dumps(row)}\n".encode()
    assert (file.sha256, file.size) == (hashlib.sha256(content).hexdigest(), len(content))


def test_without_a_template_the_text_is_the_prompt(read: Callable[..., PromptFile], tokenizer: Tokenizer) -> None:
    file = read('{"prompt": "1+1=", "label": "2"}', apply_chat_template=False)
    assert tokenizer.decode(file.prompts[0].tokens) == "1+1="


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "not JSON"),
        ('{"prompt": "a", "label": "\\ud800"}', "not JSON"),
        ('{"prompt": "a", "label": NaN}', "not JSON"),
        ("[1, 2]", "object but a list"),
        ('{"label": "4"}', "key 'prompt'; its keys"),
        ('{"prompt": "2+2="}', "key 'label'; its keys"),
        ('{"prompt": "2+2=", "label": null}', "'label' is null"),
        ('{"prompt": [{"role": "user", "content": null}], "label": "4"}', "chat message is null"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "label": "4"}',
            "chat message is 'image'",
        ),
        (
            '{"prompt": "2+2=", "label": "4", "metadata": {"rm_type": 3}}',
            "metadata rm_type is 3",
        ),
        ('{"prompt": "2+2=", "label": "4", "tools": "{"}', "'tools' is text"),
        ('{"prompt": "2+2=", "label": "4", "tools": 4}', "list of objects but"),
        ('{"prompt": 4, "label": "4"}', "list of chat messages"),
        ('{"prompt": "", "label": "4"}', "the prompt is empty"),
        ('{"prompt": [], "label": "4"}', "empty list"),
        ('{"prompt": [{"role": "user"}], "label": "4"}', "role and content"),
        ('{"prompt": ["2+2="], "label": "4"}', "role and content"),
        ('{"prompt": "2+2=", "label": "4", "metadata": 3}', "object but a number"),
    ],
)
def test_a_bad_line_is_named(read: Callable[..., PromptFile], line: str, words: str, tmp_path: Path) -> None:
    extra = {"apply_chat_template": False} if '"prompt": ""' in line else {}
    good = '{"prompt": "1+1=", "label": "2"}'
    with pytest.raises(DataError) as caught:
        read(f"{good}\n{good}\n{line}\n{good}\n", **extra)
    assert f"{tmp_path / 'p.jsonl'}, line 3: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"rollout_max_prompt_len": 9}, 9),
        ({"rollout_max_context_len": 12}, 11),
        ({"rollout_max_prompt_len": 99, "rollout_max_context_len": 9}, 8),
    ],
)
def test_a_prompt_may_be_as_long_as_the_limit(
    read: Callable[..., PromptFile], values: dict[str, int], limit: int
) -> None:
    row = lambda n: json.dumps({"prompt": "1" * (n - 3), "label": "2"})  # noqa: E731  (the template adds three tokens)
    assert len(read(row(limit), **values).prompts[0].tokens) == limit
    with pytest.raises(DataError, match=f"each of its 2 prompts is longer than.*{limit} tokens"):
        read(f"{row(limit + 1)}\n{row(limit + 2)}", **values)
    file = read("\n".join(row(n) for n in (limit + 1, limit, limit + 9, 4)), **values)
    assert (file.dropped, [prompt.where[-6:] for prompt in file.prompts]) == (2, ["line 2", "line 4"])
    assert "2 prompts in" in str(file) and "2 more were dropped" in str(file)


def test_a_text_that_no_context_holds_is_never_encoded(
    read: Callable[..., PromptFile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Encoding takes memory of hundreds of times its length: a line of 100 MB would take more than a host has."""
    monkeypatch.setattr(prompt_files, "MOST_TEXT", 60)
    plain, seen = Tokenizer.encode, []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, texts: seen.extend(map(len, texts)) or plain(self, texts))
    long = json.dumps({"prompt": "1" * 200, "label": "2"})
    file = read(f"{long}\n{GOOD}\n{long}")
    assert (file.dropped, [prompt.where[-6:] for prompt in file.prompts]) == (2, ["line 2"])
    with pytest.raises(DataError, match="each of its 1 prompts is longer"):
        read(json.dumps({"prompt": "1", "label": "3" * 200}), loss_type="sft_loss", rollout_num_gpus=0)
    assert seen and max(seen) <= 60


def test_messages_without_a_template_are_an_error(read: Callable[..., PromptFile]) -> None:
    with pytest.raises(DataError, match=r"line 1: .*--apply-chat-template"):
        read(GOOD, apply_chat_template=False)


def test_files_that_are_none(read: Callable[..., PromptFile], tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no prompts"):
        read("\n\n")
    reading = Keys.from_options(Options())
    with pytest.raises(DataError, match=r"absent\.jsonl: No such file"):
        read_prompts(tmp_path / "absent.jsonl", reading, tokenizer)
    with pytest.raises(DataError, match=r"p\.csv is not a \.jsonl or \.parquet"):
        read_prompts(tmp_path / "p.csv", reading, tokenizer)


@pytest.mark.parametrize(
    "values", [{"rm_type": "math"}, {"loss_type": "sft_loss"}, {"loss_type": "dpo_loss", "rejected_key": "r"}]
)
def test_labels_that_are_needed_need_a_key(tokenizer: Tokenizer, values: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="--label-key"):
        Keys.from_options(Options(**values))
    assert Keys.from_options(Options(custom_rm_path="a.b")).label is None


def test_evaluation_has_its_own_keys(tokenizer: Tokenizer) -> None:
    options = Options(
        input_key="a",
        label_key="b",
        eval_input_key="c",
        loss_type="sft_loss",
        eval_prompt_data=["p.jsonl"],
        rm_type="math",
    )
    keys = Keys.of_set(eval_sets(options)[0])
    assert (keys.input, keys.label, keys.learned, keys.label_needed) == ("c", "b", (), True)
    assert Keys.from_options(options).learned == ("b",)


# ---- fine-tuning


def test_the_label_becomes_the_tokens_to_learn(read: Callable[..., PromptFile], tokenizer: Tokenizer) -> None:
    for label in ("2", "2<|end|>", 2):
        file = read(json.dumps({"prompt": "1+1=", "label": label}), loss_type="sft_loss")
        prompt = file.prompts[0]
        assert tokenizer.decode(prompt.tokens) == "<|user|>1+1=<|end|><|assistant|>"
        assert prompt.target.tolist() == [*tokenizer.encode(["2"])[0], 1], "the label, then the end of the turn, once"


def test_what_a_template_adds_around_the_answer(model: Path, tmp_path: Path) -> None:
    """As Qwen3's: an empty thought before the answer is learned, the newline after the end of the turn is not."""
    hf = make_tokenizer()
    hf.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}(){% endif %}{{ m['content'] "
        "}}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "1+1="}]
    target = tokenizer.target(messages, tokenizer.render(messages, generation=True), "2")
    assert target == "()2<|end|>"


def test_a_normalizer_may_lengthen_a_text(model: Path, tmp_path: Path) -> None:
    """NFKC makes four signs of one of three bytes: what is sure to fit does fit then, too."""
    hf = make_tokenizer()
    hf.backend_tokenizer.normalizer = NFKC()
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    tokenizer = Tokenizer(tmp_path)
    text = "\u2487" * 20  # (20)
    (tokens,) = tokenizer.encode([text])
    assert len(tokens) == 80
    assert min(limit for limit in range(1000) if tokenizer.surely_within(text, limit)) >= 80


@pytest.mark.parametrize("parts", [(), ((3, 1.0), (4, 2.0))])
@pytest.mark.parametrize("shuffle", [True, False])
def test_groups_are_handed_out_again(parts: tuple[tuple[int, float], ...], shuffle: bool) -> None:
    """Under their numbers, whatever epoch they were of, and without a step of the source itself."""
    prompts = tuple(Prompt(f"p{i}", np.zeros(1, np.int32)) for i in range(7))
    source = PromptSource(PromptFile(Path("p"), prompts, 1, "x", parts=parts), 5, shuffle)
    first = source.next_groups(30)
    assert source.again([29, 0, 6, 7, 8, 14, 13, 21]) == [first[i] for i in (0, 6, 7, 8, 13, 14, 21, 29)]
    assert source.again(range(30)) == first
    assert source.next_groups(1)[0].number == 30


def test_a_label_that_stands_in_the_answer_twice(model: Path, tmp_path: Path) -> None:
    """A template that ends a channel with a token that ends a response, and names channels as labels may be: the text
    to learn ends behind the label itself."""
    hf = make_tokenizer()
    hf.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}4=2+2<|end|><|assistant|>{% endif %}"
        "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "1+1="}]
    prompt = tokenizer.render(messages, generation=True)
    for label in ("2", "4", "2+2", "7"):
        assert tokenizer.target(messages, prompt, label) == f"4=2+2<|end|><|assistant|>{label}<|end|>"


def test_a_label_that_does_not_fit_the_context(read: Callable[..., PromptFile]) -> None:
    row = json.dumps({"prompt": "1+1=", "label": "2" * 20})
    assert len(read(row, loss_type="sft_loss", rollout_max_context_len=28).prompts[0].target) == 21
    assert read(f'{row}\n{{"prompt": "1", "label": 2}}', loss_type="sft_loss", rollout_max_context_len=27).dropped == 1


def test_a_label_that_is_no_text(read: Callable[..., PromptFile]) -> None:
    with pytest.raises(DataError, match="line 1:.*label is neither text"):
        read('{"prompt": "a", "label": ["b"]}', loss_type="sft_loss")


def test_a_pair_of_responses(read: Callable[..., PromptFile], tokenizer: Tokenizer) -> None:
    pairs = {"loss_type": "dpo_loss", "rejected_key": "bad"}
    (prompt,) = read('{"prompt": "1+1=", "label": "2", "bad": "33"}', **pairs).prompts
    assert [tokenizer.decode(tokens) for tokens in (prompt.target, prompt.rejected)] == ["2", "33"]
    assert prompt.target[-1] == prompt.rejected[-1] == 1, "the end of the turn is learned"
    assert (prompt.label, prompt.worse) == ("2", "33")
    with pytest.raises(DataError, match="line 1:.*keys are label, prompt; --rejected-key chooses one"):
        read('{"prompt": "1+1=", "label": "2"}', **pairs)
    with pytest.raises(DataError, match=r"line 1: the worse response \('bad'\) is neither text nor"):
        read('{"prompt": "1+1=", "label": "2", "bad": {}}', **pairs)
    long = json.dumps({"prompt": "1+1=", "label": "2", "bad": "3" * 20})
    with pytest.raises(DataError, match="each of its 1 prompts is longer"):
        read(long, rollout_max_context_len=27, **pairs)


# ---- tokenizer


def test_a_tokenizer_that_does_not_fit_the_model(model: Path, tmp_path: Path) -> None:
    make_tokenizer(200).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(DataError, match="token ids up to 199, the model's vocab_size is 128"):
        load_tokenizer(str(tmp_path))


def test_a_missing_template_is_named(model: Path, tmp_path: Path) -> None:
    hf = make_tokenizer()
    hf.chat_template = None
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "p.jsonl").write_text(GOOD)
    tokenizer = Tokenizer(tmp_path)
    options = Options(input_key="prompt", apply_chat_template=True)
    with pytest.raises(DataError, match="has no chat template"):
        read_prompts(tmp_path / "p.jsonl", Keys.from_options(options), tokenizer)


def test_a_template_that_refuses_is_quoted(model: Path, tmp_path: Path) -> None:
    hf = make_tokenizer()
    hf.chat_template = "{{ raise_exception('only system messages') }}"
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "p.jsonl").write_text(GOOD)
    tokenizer = Tokenizer(tmp_path)
    options = Options(input_key="prompt", apply_chat_template=True)
    with pytest.raises(DataError, match="line 1: the chat template refuses"):
        read_prompts(tmp_path / "p.jsonl", Keys.from_options(options), tokenizer)


def test_directories_that_hold_no_tokenizer(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--hf-checkpoint is not given"):
        load_tokenizer(None)
    with pytest.raises(DataError, match="is not a directory"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="no config.json there"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(DataError, match="no usable tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="no usable tokenizer"):
        load_tokenizer(str(tmp_path))


def test_all_end_of_sequence_tokens(model: Path, tmp_path: Path) -> None:
    """Every end-of-sequence token counts and is left out of the text."""
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_ids == {1, 3}
    two = int(tokenizer.encode(["2"])[0][0])
    assert tokenizer.decode(np.asarray([two, 3], np.int32)) == "2"
    assert tokenizer.decode(np.asarray([3, two], np.int32)) == "<|user|>2"
    assert tokenizer.decode(np.asarray([two, two], np.int32), frozenset({two})) == "2"


def test_a_tokenizer_adds_nothing_of_its_own(model: Path, tmp_path: Path) -> None:
    hf = make_tokenizer()
    hf.backend_tokenizer.post_processor = TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", 2)])
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    tokenizer = Tokenizer(tmp_path)
    assert 2 not in tokenizer.encode(["1+1="])[0]


def test_reading_data_imports_no_torch(model: Path) -> None:
    code = (
        f"import sys; from hpcrl.rollout.prompts.tokenizer import Tokenizer; Tokenizer({str(model)!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], timeout=240).returncode == 0


# ---- epochs


def prompts(count: int, content: str = "x") -> PromptFile:
    rows = tuple(Prompt(i, np.asarray([i], np.int32)) for i in range(count))
    return PromptFile(Path("p.jsonl"), rows, count, content)


def test_the_order_of_an_epoch_is_slimes() -> None:
    """random.Random(seed + epoch).shuffle of the lines' numbers: the same prompts in the same order as with slime."""
    source = PromptSource(prompts(8), 42, True)
    numbers = [group.prompt.raw for group in source.next_groups(16)]
    assert numbers[:8] == [3, 4, 6, 7, 2, 5, 0, 1] and numbers[8:] == [6, 7, 4, 3, 1, 5, 2, 0]
    assert [group.prompt.raw for group in PromptSource(prompts(8), 42, False).next_groups(8)] == list(range(8))


def test_facts_of_a_model_whose_text_part_stands_apart(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    text = {"vocab_size": 200, "max_position_embeddings": 77, "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1, "text_config": text}))
    found = Tokenizer(tmp_path)
    assert (found.vocab_size, found.context) == (200, 77) and 5 in found.eos_ids


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 9), max_size=8), st.integers(0, 8), st.booleans())
def test_a_source_goes_on_where_it_stood(count: int, takes: list[int], cut: int, shuffle: bool) -> None:
    whole = PromptSource(prompts(count), 42, shuffle)
    expected = [g for n in takes for g in whole.next_groups(n)]
    first = PromptSource(prompts(count), 42, shuffle)
    found = [g for n in takes[:cut] for g in first.next_groups(n)]
    second = PromptSource(prompts(count), 42, shuffle)
    second.restore(json.loads(json.dumps(first.state())))
    found += [g for n in takes[cut:] for g in second.next_groups(n)]
    assert [(g.number, g.prompt.raw) for g in found] == [(g.number, g.prompt.raw) for g in expected]
    assert [g.number for g in found] == list(range(sum(takes)))


def test_a_restored_source_is_in_its_epoch() -> None:
    first = PromptSource(prompts(50), 42, True)
    second = PromptSource(prompts(50), 42, True)
    first.next_groups(60)
    second.restore(first.state())
    assert second.next_groups(30) == first.next_groups(30)


def test_epochs_are_permutations() -> None:
    """Every epoch has every prompt once, in its own order."""
    source = PromptSource(prompts(50), 7, True)
    epochs = [[g.prompt.raw for g in source.next_groups(50)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [g.prompt.raw for g in PromptSource(prompts(50), 7, False).next_groups(50)] == list(range(50))
    assert [g.prompt.raw for g in PromptSource(prompts(50), 8, True).next_groups(50)] == epochs[1], (
        "epoch 1 of seed 7 is epoch 0 of seed 8"
    )


def test_a_changed_file_is_refused() -> None:
    state = PromptSource(prompts(5, "old"), 0, False).state()
    with pytest.raises(DataError, match="changed since the checkpoint"):
        PromptSource(prompts(5, "new"), 0, False).restore(state)
    for damage in ({"offset": 6}, {"epoch": -1}, {"file": None}, {"next_group": "x"}):
        with pytest.raises(DataError):
            PromptSource(prompts(5, "old"), 0, False).restore(state | damage)


def test_epochs_become_rollouts() -> None:
    assert count_rollouts(Options(num_rollout=7, num_epoch=2), 1) == 7
    assert count_rollouts(Options(num_epoch=2, rollout_batch_size=8), 20) == 4
    with pytest.raises(DataError, match="fewer than --rollout-batch-size 32"):
        count_rollouts(Options(num_epoch=1), 31)
    with pytest.raises(UsageError, match="neither --num-rollout nor --num-epoch"):
        count_rollouts(Options(), 31)
