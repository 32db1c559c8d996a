"""The table of a sweep: which run is the best, and what the seeds of a setting have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.report.run_files import Run
from hpcrl.report.run_status import judge_run
from hpcrl.report.sweep_table import BestEvaluation, BestEvaluations, SweepStatus, sweep_page, sweep_row, sweep_status
from hpcrl.run.sweep_file import SweepFile, SweepRun
from tests.support.rundirs import NOW, begin, log, make, steps

VALUES = [{"lr": lr, "seed": seed} for lr in (1e-6, 2e-6) for seed in (1, 2)]


def name(values: dict[str, Any]) -> str:
    return ",".join(f"{option}={value}" for option, value in values.items())


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Four runs at work that have logged nothing yet."""
    for values in VALUES:
        begin(make(tmp_path / name(values), phase="running", attempt=0))
    return tmp_path


def look(root: Path, swept: list[dict[str, Any]] = VALUES) -> SweepStatus:
    record = SweepFile(list(swept[0]), [SweepRun(name(values), values) for values in swept], "slurm", "77")
    runs = [Run(path) for path in record.roots(root)]
    best = BestEvaluations()
    rows = [
        sweep_row(each, run, judge_run(run, NOW, brief=True), best) for each, run in zip(record.runs, runs, strict=True)
    ]
    return sweep_status(root, record, rows)


def evaluation(after: int, **accuracy: float) -> dict[str, Any]:
    return {"rollout_id": after - 1, "time": NOW} | {f"eval/{key}/accuracy": value for key, value in accuracy.items()}


def test_nothing_is_best_before_there_are_numbers(sweep: Path) -> None:
    found = look(sweep)
    assert (found.by, found.best) == ("", "") and [row.name for row in found.runs] == list(map(name, VALUES))
    page = sweep_page(found)
    assert "4 runs, job array 77: 4 running" in page and "*" not in page and "REWARD" not in page


def test_by_reward_until_one_has_evaluated(sweep: Path) -> None:
    """The mean of the last 20 steps, so that one lucky step decides nothing."""
    log(sweep / name(VALUES[1]), *steps(30, **{"rollout/reward": 0.4}))
    log(sweep / name(VALUES[2]), *steps(29), {**steps(1, 29)[0], "rollout/reward": 0.9})
    found = look(sweep)
    assert (found.by, found.best) == ("reward", name(VALUES[2]))
    assert found.runs[0].reward == pytest.approx((19 * 0.5 + 0.9) / 20)
    log(sweep / name(VALUES[1]), evaluation(30, heldout=0.1))
    found = look(sweep)
    assert (found.by, found.best) == ("accuracy", name(VALUES[1]))


def test_each_runs_best_evaluation_counts(sweep: Path) -> None:
    """Of several sets the mean; runs without an evaluation come last."""
    log(sweep / name(VALUES[0]), evaluation(0, a=0.1, b=0.1), evaluation(5, a=0.9, b=0.5), evaluation(10, a=0.2, b=0.4))
    log(sweep / name(VALUES[3]), evaluation(0, a=0.1, b=0.1), evaluation(10, a=0.8, b=0.8))
    found = look(sweep)
    assert [(row.name, row.accuracy, row.accuracy_after) for row in found.runs] == [
        (name(VALUES[3]), pytest.approx(0.8), 10),
        (name(VALUES[0]), pytest.approx(0.7), 5),
        (name(VALUES[1]), None, None),
        (name(VALUES[2]), None, None),
    ]
    first = next(line for line in sweep_page(found).splitlines() if line.startswith("*"))
    assert first.split()[:3] == ["*", "2e-06", "2"] and "0.800" in first


def test_mean_and_spread_over_seeds(sweep: Path) -> None:
    for values, accuracy in zip(VALUES, (0.2, 0.4, 0.9, 0.9), strict=True):
        log(sweep / name(values), *steps(3), evaluation(3, heldout=accuracy))
    found = look(sweep)
    assert [(row.values, row.runs, row.accuracy, row.accuracy_spread) for row in found.settings] == [
        ({"lr": 2e-6}, 2, pytest.approx(0.9), pytest.approx(0.0)),
        ({"lr": 1e-6}, 2, pytest.approx(0.3), pytest.approx(0.02**0.5)),
    ]
    assert "0.300 +- 0.141" in sweep_page(found)
    alone = [values for values in VALUES if values["seed"] == 1]
    assert look(sweep, alone).settings == [], "one seed each has no spread"


def test_the_evaluation_before_training_is_no_result(sweep: Path) -> None:
    """It is the same for all runs, and better than any of one that got worse."""
    log(sweep / name(VALUES[0]), evaluation(0, a=0.9), evaluation(5, a=0.3))
    log(sweep / name(VALUES[1]), evaluation(0, a=0.9))
    found = look(sweep)
    assert [(row.accuracy, row.accuracy_after) for row in found.runs[:2]] == [(0.3, 5), (None, None)]


def test_a_setting_that_lacks_seeds_comes_last(sweep: Path) -> None:
    """The mean of those that did not crash is not that of all."""
    log(sweep / name(VALUES[0]), *steps(3), evaluation(3, heldout=0.9))
    log(sweep / name(VALUES[1]), *steps(3))
    for values in VALUES[2:]:
        log(sweep / name(values), *steps(3), evaluation(3, heldout=0.4))
    found = look(sweep)
    assert [(row.values["lr"], row.counted, row.runs) for row in found.settings] == [(2e-6, 2, 2), (1e-6, 1, 2)]
    assert "1 of 2" in sweep_page(found)


def test_only_what_has_come_is_read(sweep: Path) -> None:
    """Where a resumed run has written its record anew, that alone counts."""
    run = sweep / name(VALUES[0])
    file, best = run / "metrics.jsonl", BestEvaluation(run)
    log(run, *steps(5), evaluation(5, heldout=0.6))
    assert best.look() == (0.6, 5)
    text = file.read_text()
    file.write_text("#" * len(text))  # in place: had it been read again, the best would be gone
    log(run, evaluation(6, heldout=0.7))
    assert best.look() == (0.7, 6)
    (sweep / "new").write_text("".join(text.splitlines(keepends=True)[:5]))
    (sweep / "new").rename(file)
    log(run, evaluation(8, heldout=0.2))
    assert best.look() == (0.2, 8)


def test_seeds_alone_are_one_setting(sweep: Path) -> None:
    for value in (1, 2):
        log(make(sweep / f"seed={value}", phase="finished"), *steps(3, **{"rollout/reward": 0.1 * value}))
    found = look(sweep, [{"seed": 1}, {"seed": 2}])
    (setting,) = found.settings
    assert (setting.values, setting.reward) == ({}, pytest.approx(0.15))
    assert "deviation over seed" in sweep_page(found)


def test_fine_tuning_has_a_loss_and_no_best_run(sweep: Path) -> None:
    for values in VALUES:
        log(sweep / name(values), *({k: v for k, v in row.items() if "reward" not in k} for row in steps(3)))
    found = look(sweep)
    assert (found.by, found.best) == ("", "") and "LOSS" in sweep_page(found) and "0.100" in sweep_page(found)
