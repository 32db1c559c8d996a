"""What a run records and shows: every step once, whole lines, a picture, the closing line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.plan import Location, Plan
from hpcrl.report import metrics, progress
from hpcrl.report.closing_line import closing_line, held_out, what_next
from hpcrl.report.curves import MANY, PANELS, series, smooth, titled
from hpcrl.report.metrics import MetricsLog, measure, read_metrics
from hpcrl.report.not_learning import failed_gradings
from hpcrl.report.page.charts import draw
from hpcrl.report.progress import Progress
from hpcrl.run import storage_errors
from hpcrl.run.peers import EnginePeer, MeetingPeer, StorePeer, TrainerPeer, publish
from hpcrl.run.rundir import TRACKER, RunDir
from tests.support.runs import events

REPO = Path(__file__).parents[2]


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
    assert list(read_metrics(rundir.metrics_file)) == STEPS


def test_a_damaged_line_does_not_stop_a_run(rundir: RunDir) -> None:
    write(rundir, *STEPS[:2])
    with rundir.metrics_file.open("ab") as file:
        file.write(b"\0" * 40 + b"\n" + json.dumps(STEPS[2]).encode() + b"\n[]\n")
    assert list(read_metrics(rundir.metrics_file)) == STEPS[:3]


@pytest.mark.parametrize(("start", "kept"), [(0, []), (1, STEPS[:2]), (2, STEPS)])
def test_resuming_forgets_the_steps_that_come_again(rundir: RunDir, start: int, kept: list) -> None:
    write(rundir, *STEPS)
    log = MetricsLog(rundir)
    log.with_events = False
    log.truncate(start)
    assert list(read_metrics(rundir.metrics_file)) == kept
    log.append(start, {"train/loss": 2.0})
    assert [row["rollout_id"] for row in read_metrics(rundir.metrics_file)] == [row["rollout_id"] for row in kept] + [
        start
    ]


def test_an_evaluation_that_is_logged_is_known(rundir: RunDir) -> None:
    write(rundir, *STEPS)
    assert MetricsLog(rundir).evaluated(1) and MetricsLog(rundir).evaluated(-1)
    assert MetricsLog(rundir).evaluated(0), "a later one makes up for it"
    assert not MetricsLog(rundir).evaluated(2)


def scalars(rundir: RunDir, tag: str) -> list[tuple[int, float]]:
    return events(rundir.root)[tag]


def test_tensorboard_without_torch(rundir: RunDir) -> None:
    """TensorBoard has the same numbers without torch."""
    log = MetricsLog(rundir)
    for step in range(3):
        log.append(step, {"train/loss": 1.5 - step})
    log.close()
    assert scalars(rundir, "train/loss") == [(1, 1.5), (2, 0.5), (3, -0.5)]
    code = (
        "import sys; from hpcrl.report.metrics import *; EventFile(Path(sys.argv[1]), 0, None); sys.exit('torch' in "
        "sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code, rundir.root / "elsewhere"],
        check=True,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        timeout=240,
    )


def test_tensorboard_hides_repeated_steps(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard hides repeated steps and nothing else."""
    now = iter(range(1_000_000, 1_001_000))
    monkeypatch.setattr(metrics.time, "time", lambda: float(next(now)))
    first = MetricsLog(rundir)
    first.truncate(0)
    for step in range(4):
        first.append(step, {"train/loss": float(step)})
    again = MetricsLog(RunDir(rundir.root, 1))
    again.truncate(2)
    again.append(1, {"eval/heldout/accuracy": 0.5})  # was due when the first was killed
    for step in (2, 3):
        again.append(step, {"train/loss": 10.0 + step})
    assert scalars(rundir, "train/loss") == [(1, 0.0), (2, 1.0), (3, 12.0), (4, 13.0)]
    assert scalars(rundir, "eval/heldout/accuracy") == [(2, 0.5)]


def test_a_number_that_is_none_is_still_json(rundir: RunDir) -> None:
    log = MetricsLog(rundir)
    log.append(0, {"train/grad_norm": float("nan"), "train/loss": 1.0})
    assert "NaN" not in rundir.metrics_file.read_text()
    assert next(read_metrics(rundir.metrics_file))["train/grad_norm"] is None
    assert series(list(read_metrics(rundir.metrics_file)), {"": "train/grad_norm"}) == {}


def test_a_full_disk_is_one_error_that_names_the_file(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_errors, "PATIENCE", 0.0)
    monkeypatch.setattr(metrics, "open_append", lambda path: Path("/dev/full").open("ab"))  # noqa: SIM115
    with pytest.raises(HpcrlError, match="cannot write .*metrics.jsonl: .*full .No space left on device.*; free space"):
        MetricsLog(rundir).append(0, {"train/loss": 1.0})


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), TypeError("of its package")])
def test_tensorboard_that_fails_ends_no_run(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """In the middle, with a disk that is full or an error of the package: said once; metrics.jsonl has every step, and
    the next attempt continues the series."""
    log = MetricsLog(rundir)
    log.truncate(0)
    log.append(0, {"train/loss": 0.0})

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(metrics.EventFile, "_write", fails)
        for step in (1, 2):
            log.append(step, {"train/loss": float(step)})
    log.append(3, {"train/loss": 3.0})
    log.close()
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith("note: cannot write") and str(rundir.tensorboard) in told and error.args[-1] in told
    assert [row["train/loss"] for row in read_metrics(rundir.metrics_file)] == [0.0, 1.0, 2.0, 3.0]
    again = MetricsLog(RunDir(rundir.root, 1))
    again.truncate(4)
    again.append(4, {"train/loss": 4.0})
    assert scalars(rundir, "train/loss") == [(1, 0.0), (5, 4.0)]


def test_the_closing_line(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(rundir.root.parent))
    monkeypatch.chdir("/dev")
    assert closing_line(rundir.root, rundir.root) == f"finished  {rundir.root}"  # a shell expands no ~ in a variable
    monkeypatch.chdir(rundir.root.parent)
    assert closing_line(rundir.root, rundir.root) == "finished  run"
    write(rundir, *STEPS)
    assert held_out(rundir.root) == {"heldout": [(-1, 0.25), (1, 0.75)]}
    assert closing_line(rundir.root, rundir.root) == "held-out accuracy: 0.25 -> 0.75  run"
    write(rundir, *STEPS, {"rollout_id": 1, "eval/other/accuracy": 0.5})
    assert closing_line(rundir.root, rundir.root) == "held-out accuracy: heldout 0.25 -> 0.75, other 0.50  run"


def commands(rundir: RunDir) -> list[str]:
    return [line.partition("hpcrl ")[2] for line in what_next(Options(), rundir.root, rundir.root)]


def test_commands_that_continue_have_input(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands offered to continue have something to work on."""
    monkeypatch.chdir(rundir.root.parent)
    assert commands(rundir) == ["report run"]
    (rundir.root / "samples").mkdir(exist_ok=True)
    (rundir.root / "samples" / "eval-heldout--1.jsonl").touch()
    assert commands(rundir) == ["report run", "samples run --eval heldout"]
    (rundir.root / "samples" / "00000000.jsonl").touch()
    assert commands(rundir) == ["report run", "samples run"]
    rundir.checkpoints.mkdir(exist_ok=True)
    (rundir.checkpoints / TRACKER).write_text("1")
    assert commands(rundir)[2:] == ["convert to-hf run", "resume run --num-rollout N"]
    assert not any("\n" in line for line in what_next(Options(), rundir.root, rundir.root))


def test_failed_gradings_are_counted_and_placed(rundir: RunDir) -> None:
    said = "reward my.parts raised ValueError: no (good) one (my_rewards.py:11 in parts)"
    records = [{"reward": 1.0}, {"grading": "error", "grading_error": said}]
    (rundir.root / "samples").mkdir(exist_ok=True)
    for name in ("00000002.jsonl", "eval-a--1.jsonl"):
        (rundir.root / "samples" / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = [
        {"rollout_id": -1, "eval/a/reward_errors": 3.0, "eval/a/reward_timeouts": 1.0, "eval/b/reward_errors": 0.0},
        {"rollout_id": 1, "rollout/reward_errors": None, "rollout/reward_timeouts": 0.0},
        {"rollout_id": 2, "rollout/reward_timeouts": 1.0},
    ]
    assert failed_gradings(rundir.root, rows) == [
        "1 rollout grading failed and trained nothing (my_rewards.py:11)",
        "4 evaluation gradings failed and counted as reward 0 (my_rewards.py:11)",
    ]
    assert failed_gradings(rundir.root, rows[1:]) == [
        "1 rollout grading failed since step 1 and trained nothing (my_rewards.py:11)"
    ]
    records[1]["grading_error"] = "reward math took more than --reward-timeout 3 s"
    (rundir.root / "samples" / "00000002.jsonl").write_text(json.dumps(records[1]) + "\n")
    assert failed_gradings(rundir.root, rows)[0].endswith("nothing (reward math took more than --reward-timeout 3 s)")
    assert failed_gradings(rundir.root, [{"rollout_id": 0, "rollout/reward_errors": 0.0}]) == []


@pytest.mark.parametrize(
    ("values", "flags", "said"),
    [
        ([0.09], [], "accuracy: 0.09"),
        ([-3.5, 2.0], [], "reward: -3.50 -> 2.00"),
        ([0.25, 0.5], [1.0, 1.0], "accuracy: 0.25 -> 0.50"),
        ([0.0, 0.5], [1.0, 0.0], "reward: 0.00 -> 0.50"),  # the first had wrong answers alone
    ],
)
def test_evaluation_curve_and_accuracy(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, values: list[float], flags: list[float], said: str
) -> None:
    """One evaluation is one number; it is an accuracy only if every reward was 0 or 1, wherever it is shown."""
    monkeypatch.chdir(rundir.root.parent)
    rows: list[dict[str, Any]] = [{"rollout_id": i - 1, "eval/heldout/accuracy": v} for i, v in enumerate(values)]
    for row, flag in zip(rows, flags, strict=False):
        row |= {"eval/heldout/right_or_wrong": flag, "eval/heldout/reward/accuracy": 3.0}  # a part of the reward
    write(rundir, *rows)
    assert closing_line(rundir.root, rundir.root) == f"held-out {said}  run"
    what = said.partition(":")[0]
    assert measure(rows) == what
    assert [panel.title for panel in titled(rows)].count(f"held-out {what}") == 1
    bar = Progress(rundir, "grpo", None)
    bar._draw_if_due()
    assert bar.text() == f"heldout {what} {values[-1]:.2f}"


def test_the_picture(rundir: RunDir) -> None:
    assert not draw(rundir), "nothing to draw yet"
    write(rundir, *STEPS)
    assert series(STEPS, {"*": "eval/*/accuracy"}) == {"heldout": ([0, 2], [0.25, 0.75])}
    assert not series([{"rollout_id": 0, "eval/a/reward/accuracy": 3.0}], {"*": "eval/*/accuracy"})
    assert series(STEPS, {"mean": "train/loss", "max": "train/none"}) == {"mean": ([1, 2], [1.0, 0.5])}
    assert draw(rundir)
    titles = [text.text for text in ET.parse(rundir.root / "curves.svg").iter() if text.get("class") == "title"]
    assert titles[0] == rundir.root.name and {"held-out accuracy", "reward"} <= set(titles)


@pytest.mark.parametrize(("steps", "panels"), [(1, 2), (60, 4)])
def test_the_picture_of_one_step_and_of_many(rundir: RunDir, steps: int, panels: int) -> None:
    names = [name.replace("*", "a") for panel in PANELS[-panels:] for name in panel.metrics.values()]
    write(rundir, *({"rollout_id": i} | dict.fromkeys(names, float(i % 2)) for i in range(steps)))
    assert draw(rundir, "many")
    drawn = ET.parse(rundir.root / "curves.svg").findall(".//{*}polyline")
    assert len(drawn) == len(names) * (1 if steps < MANY else 2), "pale, and their means"
    assert not list(rundir.root.glob(".curves*"))


def test_the_mean_over_a_window_keeps_ends_and_lines() -> None:
    line = [float(i) for i in range(60)]
    assert smooth(line) == pytest.approx(line)
    assert smooth([0.0] * 30 + [60.0] + [0.0] * 29)[28:33] == pytest.approx([60 / 7] * 5)


def test_progress_shows_the_latest_numbers(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", screen)
    monkeypatch.setattr(progress, "GLANCE", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    bar = Progress(rundir, "grpo", None)
    bar.poll()
    write(rundir, *STEPS)
    publish(rundir, TrainerPeer(start=0, total=4))
    bar.poll()
    bar.poll()
    assert bar.text() == "reward 0.400, staleness 0, heldout accuracy 0.75"
    bar.close()
    first, last = screen.getvalue().splitlines()  # a line that would say the same again is not written
    assert "grpo: 0/?  starting: looking for hosts" in first
    assert "2/4" in last and "reward 0.400" in last and "\r" not in screen.getvalue()


def test_what_a_start_waits_for_is_said_and_said_again(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", screen)
    for name in ("GLANCE", "EVERY", "AGAIN"):
        monkeypatch.setattr(progress, name, 0.0)
    bar = Progress(rundir, "grpo", 4)
    place = Location("h", ())
    rundir.plan_file.write_bytes(msgspec.json.encode(Plan("r", 0, (place,), (place, place), place)))
    bar.poll()
    publish(rundir, StorePeer(host="h", port=1))
    publish(rundir, MeetingPeer(host="h", port=1, rpc_port=2))  # of an engine that is not up yet
    bar.poll()
    for index, incarnation in ((0, 0), (0, 1), (1, 0)):
        publish(rundir, EnginePeer(host="h", port=1, incarnation=incarnation), index)
        bar.poll()
    publish(rundir, TrainerPeer(start=0, total=4))
    bar.poll()
    bar.poll()
    write(rundir, {"rollout_id": 0, "rollout/reward": 0.5, "perf/step_time": 1.0})
    bar.poll()
    bar.poll()
    bar.close()
    assert [line.partition("0/4  ")[2].partition("  [")[0] or line for line in screen.getvalue().splitlines()][:-1] == [
        "starting: starting processes",
        "starting: waiting for engines, 0 of 2 up",
        "starting: waiting for engines, 1 of 2 up",
        "starting: waiting for engines, 1 of 2 up",
        "starting: loading the model",
        "first step",
        "first step",
    ]
    assert screen.getvalue().splitlines()[-1].startswith("grpo: 1/4  reward 0.500")


def test_progress_of_fine_tuning_shows_loss_and_speed(rundir: RunDir) -> None:
    write(rundir, {"rollout_id": 0, "train/loss": 0.5, "perf/train_tokens": 300.0, "perf/step_time": 0.5})
    bar = Progress(rundir, "sft", 1)
    bar.close()
    assert bar.text() == "loss 0.500, 600 tok/s"


def test_resumed_progress(rundir: RunDir) -> None:
    """Progress of a resumed stage begins where it resumes."""
    publish(rundir, TrainerPeer(start=3, total=9))
    bar = Progress(rundir, "grpo", 9)
    bar.poll()
    assert (bar.done, bar.total) == (3, 9)
    bar.close()


def test_metrics_that_were_removed_are_missed(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """When the run goes on; what is written meanwhile is whole, and a run that was not touched says nothing."""
    log = MetricsLog(rundir)
    log.truncate(0)
    for step in range(3):
        log.append(step, {"train/loss": 1.0})
    rundir.metrics_file.unlink()
    log.append(3, {"train/loss": 1.0})
    log.append(4, {"train/loss": 1.0})
    assert "lacks" not in capsys.readouterr().err
    assert [row["rollout_id"] for row in read_metrics(rundir.metrics_file)] == [3, 4]
    again = MetricsLog(RunDir(rundir.root, 1))
    again.truncate(5)
    assert "lacks 3 of the 5 steps before this start, 0 the first" in capsys.readouterr().err


def test_failed_write_leaves_no_partial_line(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that could not be written leaves no partial line."""
    monkeypatch.setattr(storage_errors, "PATIENCE", 0.0)
    log = MetricsLog(rundir)
    log.append(0, {"train/loss": 1.0})
    plain, calls = os.write, []

    def half(number: int, data: bytes) -> int:
        calls.append(number)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return plain(number, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(HpcrlError, match="file system is full"):
        log.append(1, {"train/loss": 2.0})
    monkeypatch.undo()
    log.append(1, {"train/loss": 2.0})
    assert [row["rollout_id"] for row in read_metrics(rundir.metrics_file)] == [0, 1]
    assert rundir.metrics_file.read_text().count("\n") == 2
