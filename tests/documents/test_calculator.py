"""The example's calculator: what it calculates, and that nothing which the policy writes can hold it up or break
out."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "examples" / "tools"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.process
def test_values_failures_and_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calculator = example("calculator")
    monkeypatch.setattr(calculator, "SECONDS", 5.0)
    asked = ["47*83", "-(2+3)*4", "1/8", "1/0", "a", "__import__('os')", "2*", "", "9**9**9**9", "x\ny", "6*7"]

    async def run() -> list[str]:
        tool = calculator.Calculator()
        try:
            return [await tool.value(text) for text in asked]
        finally:
            tool._process.kill()
            await tool._process.wait()

    begun = time.monotonic()
    assert asyncio.run(run()) == ["3901", "-20", "0.125", *["-"] * 7, "42"]
    assert time.monotonic() - begun < 20


def test_held_out_products(tmp_path: Path) -> None:
    """The prompts are products, and held-out ones appear nowhere else."""
    products = example("products")
    products.write_prompts(tmp_path, 7)
    read = lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]  # noqa: E731
    held = {row["prompt"] for row in read("heldout.jsonl")}
    first = lambda row: row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]  # noqa: E731
    assert len(held) == products.HELD_OUT
    kinds = {"<call>": 0, "\\boxed{": 0, "tool": 0}
    for row in (*read("train.jsonl"), *read("sft.jsonl")):
        assert first(row) not in held
        a, b = first(row).rstrip("=").split("*")
        assert row["label"] == str(int(a) * int(b))
        if isinstance(row["prompt"], list):
            assert (
                row["prompt"][-1] == {"role": "tool", "content": row["label"]}
                and row["response"] == f"\\boxed{{{row['label']}}}"
            )
            kinds["tool"] += 1
        elif "response" in row:
            kinds["<call>" if row["response"] == f"<call>{a}*{b}" else "\\boxed{"] += 1
    assert all(count == pytest.approx(products.SFT_LINES / 3, rel=0.1) for count in kinds.values())
