"""The quick start's task: the same for the same seed, held-out sums nowhere else, answers that mean what they say."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
spec = importlib.util.spec_from_file_location("arithmetic", EXAMPLES / "arithmetic.py")
arithmetic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(arithmetic)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task")
    arithmetic.write_prompts(path, 7)
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def content(row: dict) -> str:
    return row["prompt"][0]["content"]


def test_held_out_sums_are_nowhere_else(task: Path) -> None:
    held_out = {content(row) for row in lines(task / "heldout.jsonl")}
    assert len(held_out) == arithmetic.HELD_OUT
    for name in ("train.jsonl", "sft.jsonl"):
        assert not held_out & {content(row) for row in lines(task / name)}


def test_labels_and_worked_answers(task: Path) -> None:
    """Labels are right, and half of the answers are worked out."""
    worked = 0
    for row in lines(task / "sft.jsonl"):
        digits = [int(d) for d in content(row).removesuffix("=").split("+")]
        assert int(row["label"]) == sum(digits)
        boxed = re.search(r"\\boxed\{(\d+)\}$", row["response"])
        if "," in row["response"]:
            worked += 1
            assert boxed[1] == row["label"]
            assert row["response"].startswith(f"{sum(digits[:2])},{sum(digits[:3])},")
    assert worked / arithmetic.SFT_LINES == pytest.approx(1 - arithmetic.GUESSED, abs=0.03)


def test_the_same_seed_gives_the_same_files(task: Path, tmp_path: Path) -> None:
    arithmetic.write_prompts(tmp_path, 7)
    for path in task.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    arithmetic.write_prompts(tmp_path, 8)
    assert (task / "heldout.jsonl").read_bytes() != (tmp_path / "heldout.jsonl").read_bytes()


@pytest.mark.process
def test_small_model_and_lossless_tokenizer(tmp_path: Path) -> None:
    """The model is small and its tokenizer is lossless."""
    import subprocess

    subprocess.run(
        [sys.executable, EXAMPLES / "arithmetic.py", "--out", tmp_path], check=True, capture_output=True, timeout=240
    )
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    assert sum(t.numel() for t in load_file(tmp_path / "model" / "model.safetensors").values()) < 1_000_000
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "<|user|>3+8+5+9=<|end|><|assistant|>11,16,\\boxed{25}<|end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer("\\boxed{25}")["input_ids"]) == 4


def test_a_working_with_slips_and_sums_apart(tmp_path: Path) -> None:
    """All answers are worked out, some steps are wrong, and no order of held-out digits is anywhere else."""
    arithmetic.write_prompts(tmp_path, 7, guesses=0.0, slips=0.2, apart=True)
    digits = {
        name: {tuple(sorted(content(row).removesuffix("=").split("+"))) for row in lines(tmp_path / f"{name}.jsonl")}
        for name in ("train", "sft", "heldout")
    }
    assert len(lines(tmp_path / "heldout.jsonl")) == arithmetic.HELD_OUT
    assert not digits["heldout"] & (digits["train"] | digits["sft"])
    rows = lines(tmp_path / "sft.jsonl")
    assert all(re.fullmatch(r"\d+,\d+,\\boxed\{\d+\}", row["response"]) for row in rows)
    right = sum(row["response"].endswith(f"{{{row['label']}}}") for row in rows) / len(rows)
    assert right == pytest.approx((1 - 0.2 * 0.9) ** 3, abs=0.04), "three steps, each right nine times in ten or more"


def test_how_answers_are_made(tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    samples.mkdir()
    rows = [
        ("11,16,\\boxed{25}", 1),
        ("11,16,\\boxed{24}", 0),
        ("\\boxed{25}", 1),
        ("\\boxed{2}", 0),
        ("\\boxed{3}", 0),
    ]
    text = "".join(json.dumps({"response": response, "reward": reward}) + "\n" for response, reward in rows)
    (samples / "eval-heldout--1.jsonl").write_text(text)
    (samples / "eval-heldout-19.jsonl").write_text(json.dumps({"response": "1,2,3", "reward": 1}) + "\n")
    _, before, after = (line.split() for line in arithmetic.answers(tmp_path).splitlines())
    assert before == ["none", "0.400", "0.500", "0.333"] and after == ["19", "1.000", "1.000", "-"]
