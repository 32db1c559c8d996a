"""Whole conversations to learn from: the mask is exactly the assistant's, or the row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import DataError
from hpcrl.rollout.prompts.prompt_files import Prompt, read_prompts
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.row_checks import Keys
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.sampler import LabelSampler, ResponseRequest
from tests.support.tiny import make_tokenizer

PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}"
)
#: as Qwen3's: thoughts are shown in the last turn alone, which has an empty one if there is none
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% if loop.last %}({{ m.get('reasoning_content', '') }}){% endif %}{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: as GLM-4's: a turn has no end of its own, the next role ends it
ROLES = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


def learn(
    path: Path, template: str, messages: list[dict[str, Any]], eos: Any = 1, **values: Any
) -> tuple[Tokenizer, Prompt]:
    hf = make_tokenizer()
    hf.chat_template = template
    hf.save_pretrained(path)
    (path / "config.json").write_text(
        json.dumps({"vocab_size": 128, "max_position_embeddings": 2048, "eos_token_id": eos})
    )
    (path / "talk.jsonl").write_text(json.dumps({"messages": messages}))
    options = Options(loss_type="sft_loss", input_key="messages", apply_chat_template=True, **values)
    tokenizer = Tokenizer(path)
    (prompt,) = read_prompts(path / "talk.jsonl", Keys.from_options(options), tokenizer).prompts
    return tokenizer, prompt


def said(tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    """What is learned, each run of learned tokens by itself."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], prompt.mask, [0]])))
    return [tokenizer._hf.decode(prompt.target[a:b]) for a, b in edges.reshape(-1, 2)]


def test_all_assistant_turns_are_learned(tmp_path: Path) -> None:
    """Every turn of the assistant is learned, with its end."""
    tokenizer, prompt = learn(tmp_path, PLAIN, TALK)
    assert said(tokenizer, prompt) == ["2<|end|>", "4<|end|>"]
    assert tokenizer._hf.decode(prompt.tokens) == "<|user|>1+1=<|end|>\n<|assistant|>"
    whole = tokenizer.render(TALK, generation=False)
    assert tokenizer._hf.decode(np.concatenate([prompt.tokens, prompt.target])) == whole.rstrip("\n"), (
        "up to the last turn's end"
    )


def test_the_sample_carries_the_mask(tmp_path: Path) -> None:
    import asyncio

    _, prompt = learn(tmp_path, PLAIN, TALK)
    (sample,) = asyncio.run(LabelSampler().make(ResponseRequest(Group(0, prompt), 0, 0, 0)))
    assert (sample.array("loss_mask") == prompt.mask).all() and 0 < sample.array("loss_mask").sum() < len(
        sample.array("loss_mask")
    )
    assert sample.response_length == len(prompt.target)


def test_a_message_may_be_left_out_of_the_loss(tmp_path: Path) -> None:
    talk = [TALK[0], TALK[1] | {"step_loss_mask": 0}, *TALK[2:]]
    tokenizer, prompt = learn(tmp_path, PLAIN, talk)
    assert said(tokenizer, prompt) == ["4<|end|>"]
    with pytest.raises(DataError, match="line 1: no message is left"):
        learn(tmp_path, PLAIN, [message | {"step_loss_mask": 0} for message in TALK])


def test_template_with_a_special_last_turn(tmp_path: Path) -> None:
    """Each turn is learned as the model will be asked for it: the earlier one as it stands in the prompt of the later
    one."""
    thought = [*TALK[:3], TALK[3] | {"reasoning_content": "22"}]
    tokenizer, prompt = learn(tmp_path, THINKING, thought)
    assert said(tokenizer, prompt) == ["2<|end|>", "(22)4<|end|>"]
    with pytest.raises(DataError, match=r"line 1:.*chat template leaves out.*2 \(a thought"):
        learn(tmp_path, THINKING, [TALK[0], TALK[1] | {"reasoning_content": "11"}, *TALK[2:]])


def test_a_template_whose_turns_end_with_the_next_role(tmp_path: Path) -> None:
    tokenizer, prompt = learn(tmp_path, ROLES, TALK, eos=[1, 3])
    assert tokenizer.end_texts() == ["<|end|>", "<|user|>"]
    assert said(tokenizer, prompt) == ["2<|user|>", "4<|end|>"], "the next role's token is what ends a response"
    with pytest.raises(DataError, match="chat template ends message 2 with no end-of-sequence token"):
        learn(tmp_path, ROLES, TALK)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (
            "{% for m in messages %}{{ loop.revindex }}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}",
            TALK,
            "message 2 cannot be found",
        ),
        (
            PLAIN,
            [TALK[0], {"role": "assistant", "content": "2<|end|>3"}],
            "message 2 holds <|end|>, the token that ends",
        ),
        (PLAIN, TALK[:3], "ends with a message"),
    ],
)
def test_what_cannot_be_masked_exactly_is_refused(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(DataError) as caught:
        learn(tmp_path, template, messages)
    assert "talk.jsonl, line 1: " in str(caught.value) and words in str(caught.value)


def test_conversation_beyond_the_context(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="each of its 1 prompts is longer"):
        learn(tmp_path, PLAIN, TALK, rollout_max_context_len=12)
