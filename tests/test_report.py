"""What a run records and shows: every step once, whole lines, a picture, the closing line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.report.metrics import MetricsLog, read
from hpcrl.report.picture import draw, series
from hpcrl.report.progress import Progress
from hpcrl.report.summary import closing_line, held_out
from hpcrl.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "run")
    made.begin()
    return made


def write(rundir: RunDir, *rows: dict) -> None:
    rundir.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


STEPS = [
    {"rollout_id": -1, "eval/heldout/accuracy": 0.25},
    {"rollout_id": 0, "train/loss": 1.0, "rollout/reward": 0.1},
    {"rollout_id": 1, "train/loss": 0.5, "rollout/reward": 0.4, "staleness/max": 0.0},
    {"rollout_id": 1, "eval/heldout/accuracy": 0.75},
]


def test_a_torn_last_line_does_not_count(rundir: RunDir) -> None:
    write(rundir, *STEPS)
    with rundir.metrics_file.open("a") as file:
        file.write('{"rollout_id": 2, "train/lo')
    assert list(read(rundir.metrics_file)) == STEPS


@pytest.mark.parametrize(("start", "kept"), [(0, []), (1, STEPS[:2]), (2, STEPS)])
def test_resuming_forgets_the_steps_that_come_again(rundir: RunDir, start: int, kept: list) -> None:
    write(rundir, *STEPS)
    log = MetricsLog(rundir)
    log.events = False
    log.truncate(start)
    assert list(read(rundir.metrics_file)) == kept
    log.append(start, {"train/loss": 2.0})
    assert [row["rollout_id"] for row in read(rundir.metrics_file)] == [row["rollout_id"] for row in kept] + [start]


def test_an_evaluation_that_is_logged_is_known(rundir: RunDir) -> None:
    write(rundir, *STEPS)
    assert MetricsLog(rundir).evaluated(1) and MetricsLog(rundir).evaluated(-1)
    assert not MetricsLog(rundir).evaluated(0)


@pytest.mark.process  # torch's import takes seconds
def test_tensorboard_has_the_same_numbers(rundir: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(rundir)
    for step in range(3):
        log.append(step, {"train/loss": 1.5 - step})
    log.close()
    events = EventAccumulator(str(rundir.tensorboard)).Reload().Scalars("train/loss")
    assert [(e.step, e.value) for e in events] == [(1, 1.5), (2, 0.5), (3, -0.5)]


def test_the_closing_line(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rundir.root.parent)
    assert closing_line(rundir.root, rundir.root) == "finished  run"
    write(rundir, *STEPS)
    assert held_out(rundir.root) == [(-1, 0.25), (1, 0.75)]
    assert closing_line(rundir.root, rundir.root) == "held-out accuracy: 0.25 -> 0.75  run"


def test_the_picture(rundir: RunDir) -> None:
    assert not draw(rundir), "nothing to draw yet"
    write(rundir, *STEPS)
    assert series(STEPS, "eval/") == {"heldout": ([0, 2], [0.25, 0.75])}
    assert series(STEPS, "train/loss") == {"": ([1, 2], [1.0, 0.5])}
    assert draw(rundir)
    assert (rundir.root / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_progress_shows_the_latest_numbers(rundir: RunDir) -> None:
    bar = Progress(rundir, "grpo", 4)
    write(rundir, *STEPS)
    bar.looked = 0.0
    bar.poll()
    assert bar.bar.n == 2
    assert bar.text() == "reward 0.400, loss 0.500, staleness 0, heldout accuracy 0.75"
    bar.close()
