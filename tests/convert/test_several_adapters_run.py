"""docs/lora.md as printed: several adapters over the same weights in one run, each of which then has files of its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.convert.test_lora_run import hpcrl
from tests.support.runs import REPO, Run, role_pid, rows

pytestmark = pytest.mark.vllm

RECIPE = "examples/recipes/several_adapters.toml"
NAMES = ("digits", "signs", "slow")
DROPOUT = ("--lora-dropout", "0.1")  # what it draws begins with the seed of each
SAME = ("rollout/reward", "train/loss", "train/grad_norm", "policy_version")


def steps_of(place: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def test_several_adapters_from_run_to_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    hpcrl("run", RECIPE, "--run-dir", run, "--num-rollout", 3, "--check-weight-update-equal")
    digits, signs, slow = (steps_of(run / "adapters" / name) for name in ("digits", "signs", "slow"))
    assert [len(steps) for steps in (digits, signs, slow)] == [3, 3, 4]
    for steps in (digits, signs, slow):
        assert [row["policy_version"] for row in steps] == list(range(1, len(steps) + 1))
        assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in steps) < 2e-5
        assert {row["staleness/max"] for row in steps} == {0.0}
    assert digits[0]["rollout/reward"] == slow[0]["rollout/reward"], "the same weights, prompts and noise"
    assert digits[2]["rollout/reward"] > digits[0]["rollout/reward"] + 0.2
    assert signs[2]["rollout/reward"] > signs[0]["rollout/reward"] + 0.2
    together = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["rollout_id"] for row in together} == set(range(10))
    assert together[1]["signs/rollout/reward"] == signs[0]["rollout/reward"]
    shown = hpcrl("status", run)
    assert "10 of 10" in shown and f"slow: step 4 of 4, reward {slow[-1]['rollout/reward']:.3f}" in shown
    assert "reward" in hpcrl("samples", run / "adapters/signs")
    written = {name: run / "adapters" / name / "hf" for name in ("digits", "signs")}
    for name in written:
        hpcrl("convert", "to-hf", run / "adapters" / name)
    one, other = (load_file(place / "adapter_model.safetensors") for place in written.values())
    assert one.keys() == other.keys() and any(bool((one[name] != other[name]).any()) for name in one)


def told(place: Path) -> list[float]:
    """What the steps of an adapter have logged of themselves."""
    return [row[name] for row in steps_of(place) for name in SAME]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """What each adapter logs in a run that nothing disturbs."""
    run = tmp_path_factory.mktemp("whole") / "run"
    hpcrl("run", REPO / RECIPE, "--run-dir", run, *DROPOUT)
    return {name: told(run / "adapters" / name) for name in NAMES}


def logged(run: Run) -> int:
    return len(list(rows(run.root)))


@pytest.mark.soak
def test_an_adapter_of_several_is_as_one_alone(whole: dict[str, list[float]], tmp_path: Path) -> None:
    alone = tmp_path / "alone.toml"
    text = (REPO / RECIPE).read_text().partition("[adapter.")[0].replace("{recipe}/..", str(REPO / "examples"))
    alone.write_text(text.replace("{seed}", "1234") + 'custom_rm_path = "examples.algorithms.digits.signs"\nseed = 2\n')
    hpcrl("run", alone, "--run-dir", tmp_path / "alone", *DROPOUT)
    assert told(tmp_path / "alone") == pytest.approx(whole["signs"], rel=1e-6, abs=1e-7)


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_several_adapters_resume(whole: dict[str, list[float]], tmp_path: Path, how: signal.Signals) -> None:
    root = tmp_path / "run"
    run = Run(REPO / RECIPE, "--run-dir", root, "--save-interval", "2", *DROPOUT, root=root)
    run.until(lambda: logged(run) >= 8)
    os.kill(run.process.pid, how)
    run.end()
    status, out = Run("--resume", root, root=root).end()
    assert status == 0, out
    for name in NAMES:
        assert told(root / "adapters" / name) == pytest.approx(whole[name], rel=1e-6, abs=1e-7)
    numbers = [row["rollout_id"] for row in rows(root) if any(key.endswith("/train/loss") for key in row)]
    assert set(numbers) == set(range(16))


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["hpcrl.engine.server", "hpcrl.trainer", "hpcrl.rollout.main"])
def test_several_adapters_after_a_fault(whole: dict[str, list[float]], tmp_path: Path, victim: str) -> None:
    root = tmp_path / "run"
    more = ["--attempts", "3", "--engine-restarts", "2", "--save-interval", "1", "--check-weight-update-equal"]
    run = Run(REPO / RECIPE, "--run-dir", root, *more, *DROPOUT, root=root)
    run.until(lambda: logged(run) >= 6)
    os.kill(role_pid(root, victim), signal.SIGKILL)
    status, out = run.end()
    assert status == 0, out + run.logs()
    for name in NAMES:
        assert told(root / "adapters" / name) == pytest.approx(whole[name], rel=1e-6, abs=1e-7)
