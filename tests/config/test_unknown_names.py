"""Unknown names: slips lead to what was meant, and nothing to what is merely alike in letters."""

from __future__ import annotations

import pytest

from hpcrl.config import passthrough
from hpcrl.config.flags import parse_flags
from hpcrl.config.setting_names import gather, nearest, own
from hpcrl.errors import UsageError, UsageErrors


def told(*words: str) -> str:
    with pytest.raises(UsageError) as error:
        parse_flags(words)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zzz-yyy", "see hpcrl run --help"),
        ("n-sample-per-prompt", "did you mean --n-samples-per-prompt?"),
        ("recompute-granularty", "did you mean --recompute-granularity?"),
        ("colocated", "did you mean --colocate?"),
        ("rollout-maxresponse-len", "did you mean --rollout-max-response-len?"),
    ],
)
def test_a_slip_is_corrected(name: str, hint: str) -> None:
    assert f"--{name} is an unknown option; {hint}" in told(f"--{name}", "1")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("learning-rate", "vllm-video-pruning-rate"),
        ("batch-size", "vllm-ubatch-size"),
        ("over-sampling-batch-size", "global-batch-size"),
        ("partial-rollout", "num-rollout"),
        ("wandb-key", "label-key"),
        ("sglang-enable-dp-attention", "vllm-enable-dbo"),
        ("custom-generate-function-path", "custom-rm-path"),
    ],
)
def test_what_is_merely_alike_in_letters_is_no_hint(name: str, wrong: str) -> None:
    known = [*own(), *passthrough.spellings("megatron"), *passthrough.spellings("vllm")]
    assert wrong not in (nearest(name, known) or "")


def test_all_flag_errors_at_once() -> None:
    """All errors of a command line are reported at once."""
    words = "r.toml --learning-rate 1e-5 --num-rolout 3 --lr fast --vllm-api-key k --seed -1 --bf16=yes -n 3 --top-p 1"
    lines = told(*words.split()).splitlines()
    assert lines[0] == "7 things are wrong:" and len(lines) == 8
    for line, part in zip(
        lines[1:],
        ("--learning-rate", "--num-rolout", "--lr fast", "--vllm-api-key", "--bf16 takes no value", "-n is", "--top-p"),
        strict=True,
    ):
        assert line.startswith(f"  {part}")
    assert "\n" not in told("--num-rolout", "3")


def test_all_recipe_errors_at_once() -> None:
    """All errors of a recipe are reported at once."""
    values = {"learning_rate": 1, "lr": "a", "vllm": {"max_num_seq": 1, "api_key": "k"}, "megatron": 3, "seed": 1}
    with pytest.raises(UsageErrors) as error:
        gather(values, "r.toml")
    assert [str(part).split("; ")[0] for part in error.value.parts] == [
        "r.toml: learning_rate is an unknown option",
        'r.toml: lr = "a": expected a number >= 0',
        "r.toml: [vllm]: max_num_seq is an unknown option",
        "r.toml: [vllm]: api_key cannot be set: every route of an engine asks for the key of the run",
        "r.toml: megatron = 3: expected a table",
    ]
    assert "did you mean max_num_seqs?" in str(error.value)
