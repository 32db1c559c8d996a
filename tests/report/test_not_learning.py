"""A run that does not learn says so: once while it runs, and at its end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.report.closing_line import remarks
from hpcrl.report.not_learning import WINDOW, not_learning
from hpcrl.report.progress import Progress
from hpcrl.run.rundir import RunDir

WELL = {
    "perf/step_time": 1.0,
    "rollout/zero_std": 0.3,
    "rollout/truncated_ratio": 0.1,
    "rollout/unknown_ratio": 0.0,
    "train/grad_norm": 0.5,
}


def steps(count: int, first: int = 0, **values: float) -> list[dict[str, Any]]:
    return [{"rollout_id": first + i, **WELL, **values} for i in range(count)]


@pytest.mark.parametrize(
    ("metric", "bad", "almost", "said"),
    [
        ("rollout/zero_std", 0.97, 0.94, "97%.*hpcrl samples RUN"),
        ("rollout/truncated_ratio", 1.0, 0.94, "100%.*hpcrl samples RUN --truncated"),
        ("rollout/unknown_ratio", 0.08, 0.05, "8%.*hpcrl samples RUN"),
        ("train/grad_norm", 0.0, 1e-9, "gradient.*0.*hpcrl samples RUN"),
    ],
)
def test_each_sign_needs_all_of_the_last_steps(metric: str, bad: float, almost: float, said: str) -> None:
    rows = steps(5) + steps(WINDOW, 5, **{metric: bad})
    found = not_learning(rows)
    assert found.keys() == {metric} and re.search(said, found[metric])
    assert not not_learning(rows[:-1]) and not not_learning(rows[-WINDOW + 1 :])
    assert not not_learning(rows[:-1] + steps(1, 14, **{metric: almost}))
    assert not not_learning([{k: v for k, v in row.items() if k != metric} for row in rows])


def test_it_is_said_once_and_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rundir = RunDir.create(tmp_path / "run")
    rows = steps(3 * WINDOW, **{"rollout/zero_std": 1.0})
    rundir.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = Progress(rundir, "grpo", 40)
    progress._draw_if_due()
    assert capsys.readouterr().err.count("equal rewards") == 1
    assert ["equal rewards" in line for line in remarks(rundir.root)] == [True]
