"""What is said of a run: its phase, its numbers, whether it will be done in time; also from damaged directories."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.cli.main import main
from hpcrl.report import metrics
from hpcrl.report.run_files import Run
from hpcrl.report.run_status import RESTARTED, Status, judge_run, span
from hpcrl.report.status_text import line, page, strip_control, table
from hpcrl.run.job_files import STOP
from hpcrl.run.queued_job import GONE, QueuedJob
from tests.support.cpu_seconds import slowdown
from tests.support.rundirs import HERE, NOW, begin, log, make, put, steps, submitted


def look(root: Path, now: float = NOW, **kwargs: Any) -> Status:
    return judge_run(Run(root), now, **kwargs)


RUNNING = QueuedJob("running", "RUNNING")


# ---- the launcher's word


@pytest.mark.parametrize("phase", ["preparing", "starting", "running", "saving", "finished", "stopped"])
def test_a_fresh_word_counts(tmp_path: Path, phase: str) -> None:
    found = look(make(tmp_path, phase=phase), NOW + 24)
    assert (found.phase, found.message, found.silent) == (phase, "", 24.0)
    found = look(make(tmp_path, phase=phase), NOW + 59)
    overdue = "no word from its launcher for 59 s" if phase not in ("finished", "stopped") else ""
    assert (found.phase, found.message) == (phase, overdue)


def test_a_run_that_starts_says_what_it_waits_for(tmp_path: Path) -> None:
    root = make(tmp_path, phase="starting", attempt=0)
    here = begin(root, start=None)
    assert "  starting    starting processes" in page(look(root)).splitlines()
    put(here / "peers" / "store-0.json", {})
    assert look(root).awaits == "waiting for engines, 0 of 1 up" and look(root, brief=True).awaits == ""


def test_a_launcher_that_has_fallen_silent_is_lost(tmp_path: Path) -> None:
    root = make(tmp_path, phase="running")
    found = look(root, NOW + 300)
    assert (found.phase, found.message) == ("lost", "no sign of life for 5 min (its launcher was on node7)")
    assert look(root, NOW + 300, queued=RUNNING).message.endswith("though Slurm says RUNNING")
    assert look(root, NOW + 300, queued=GONE).message.endswith("and Slurm has no job of it")
    assert look(root, NOW + 1, here=False).message.startswith("its launcher on node7")
    assert look(make(tmp_path, phase="finished"), NOW + 9e6, here=False).phase == "finished", "its last word stays good"


def test_failed_run_shows_error_hint_and_log(tmp_path: Path) -> None:
    """A failed run shows its first error, the hint and the log."""
    root = make(tmp_path, ("sft", "grpo"), phase="failed", attempt=1, message="engine-0: it died; see it")
    begin(root / "grpo", 0)
    here = begin(root / "grpo", 1)
    put(here / "error.json", {"role": "engine", "index": 0, "message": "out of memory; lower --x", "time": NOW})
    path = root / "grpo/logs/attempt-1/engine-0.log"
    path.parent.mkdir(parents=True)
    path.write_text("boom\n")
    found = look(root)
    assert (found.phase, found.message, found.log) == ("failed", "engine-0: out of memory; lower --x", str(path))
    assert {"error", "log", "next"} <= {row.split()[0] for row in page(found).splitlines()[1:]}
    assert f"hpcrl resume {root}" in page(found)


def test_live_code_is_said(tmp_path: Path) -> None:
    """Of a run that imports custom functions from where they are, and of no other."""
    root = make(tmp_path, phase="stopped")
    assert "--live-code" not in page(look(root))
    (root / "live-code").touch()
    assert "--live-code" in page(look(root))


def test_the_way_to_go_on_is_one_that_is_open(tmp_path: Path) -> None:
    """hpcrl resume refuses a run whose script was given to sbatch by hand, and one under mpirun."""
    root = make(tmp_path, phase="stopped")
    submitted(root, "100")
    assert f"SCRIPT --run-dir {root}" in page(look(root))
    record = json.loads((root / "job.json").read_text())
    put(root / "job.json", record | {"site": {"name": "mine"}})
    assert f"hpcrl resume {root}" in page(look(root))
    put(root / "job.json", record | {"scheduler": "mpirun"})
    assert f"hpcrl launch --resume {root} --hostfile FILE" in page(look(root))


def test_rank_error_points_to_hosts_first_log(tmp_path: Path) -> None:
    """The error of a rank is in the log of the first rank on its host."""
    root = make(tmp_path, phase="failed")
    put(begin(root) / "error.json", {"role": "trainer", "index": 3, "message": "bad", "time": NOW})
    for name in ("trainer-0.log", "trainer-2.log", "trainer-4.log"):
        put(root / "logs/attempt-0" / name, "")
    assert look(root).log == str(root / "logs/attempt-0/trainer-2.log")


def test_failed_job_points_to_newest_output(tmp_path: Path) -> None:
    """A job that failed before any role started points to its newest output."""
    root = make(tmp_path, phase="failed", message="no")
    for number, name in enumerate(("job-2.out", "job-1.out", "prepare.log")):
        os.utime(put(root / "logs" / name, ""), (NOW + number, NOW + number))
    assert look(root).log == str(root / "logs/job-1.out")


def test_sampling_only_run_counts_rollouts(tmp_path: Path) -> None:
    """A run that only samples counts its rollouts; an evaluation has none."""
    root = make(tmp_path / "sampling", phase="finished", attempt=0)
    begin(root, total=2)
    log(root, *({"rollout_id": i, "time": NOW, "rollout/reward": 0.25, "perf/step_time": 1.0} for i in range(2)))
    assert "  step        2 of 2" in page(look(root)).splitlines() and "2/2" in line(look(root))
    root = make(tmp_path / "eval", phase="finished", attempt=0)
    begin(root, total=0)
    put(root / "options.json", {"num_rollout": 0, "eval_interval": 1})
    log(root, {"rollout_id": -1, "time": NOW, "eval/a/accuracy": 0.5, "eval/a/reward_errors": 3.0})
    shown = page(look(root)).splitlines()
    assert "  accuracy    a 0.500" in shown and "note        3 evaluation gradings failed" in page(look(root))
    assert not any(row.startswith("  step") for row in shown)
    assert line(look(root)).startswith("finished  a accuracy 0.500  3 evaluation gradings failed")
    log(root, {"rollout_id": -1, "time": NOW, "eval/a/accuracy": 0.5, "eval/a/right_or_wrong": 0.0})
    assert "  reward      a 0.500" in page(look(root)).splitlines() and "a reward 0.500" in line(look(root))


def test_earlier_attempts_error_is_hidden(tmp_path: Path) -> None:
    """An error of an earlier attempt is not shown for this one."""
    root = make(tmp_path, phase="failed", attempt=1, message="no host answers")
    put(begin(root, 0) / "error.json", {"role": "engine", "index": 0, "message": "old", "time": NOW - 100})
    assert look(root).message == "no host answers"


# ---- the scheduler's word


def test_a_pending_job_says_why(tmp_path: Path) -> None:
    root = make(tmp_path)
    submitted(root, "12")
    found = look(root, queued=QueuedJob("pending", "PENDING", "waits for free nodes (Resources)"))
    assert (found.phase, found.message, found.job_state, found.job_id) == (
        "pending",
        "waits for free nodes (Resources)",
        "PENDING",
        "12",
    )
    never = look(
        root,
        queued=QueuedJob("pending", "PENDING", "more nodes than its partition has (PartitionNodeLimit)", never=True),
    )
    assert never.message.startswith("will never start: more nodes")
    assert look(root).phase == "pending", "without Slurm it has been submitted, and that is all that is known"
    assert look(root, queued=GONE).phase == "lost"


def test_queue_overrules_earlier_state(tmp_path: Path) -> None:
    """The queue overrules the last state of an earlier start."""
    root = make(tmp_path, phase="requeued", time=NOW - 100)
    submitted(root, "12")
    assert look(root).phase == "requeued"
    assert look(root, queued=QueuedJob("pending", "PENDING", "may not begin yet")).phase == "pending"
    found = look(root, queued=QueuedJob("running", "RUNNING", start=NOW - 50))
    assert (found.phase, found.message, found.awaits, found.engines) == ("starting", RESTARTED, "", [])
    assert look(root, queued=QueuedJob("running", "RUNNING", start=NOW - 102)).phase == "requeued", "it is about to be"
    assert look(root, queued=GONE).phase == "lost"


def test_a_resumed_job_is_not_what_it_was(tmp_path: Path) -> None:
    root = make(tmp_path, phase="stopped", time=NOW - 100)
    submitted(root, "13", at=NOW - 10)
    assert look(root).phase == "pending"
    assert look(root, queued=QueuedJob("running", "RUNNING", start=NOW - 5)).phase == "starting"
    assert look(root, queued=QueuedJob("ended", "CANCELLED", "cancelled", "cancelled")).phase == "cancelled"


@pytest.mark.parametrize("phase", ["failed", "cancelled", "requeued"])
def test_job_ended_before_its_launcher(tmp_path: Path, phase: str) -> None:
    """A job that ended before its launcher wrote anything."""
    root = make(tmp_path, phase="running", time=NOW - 5)
    submitted(root, "12")
    ended = QueuedJob("ended", "OVER", "somehow", phase, start=NOW - 400)
    found = look(root, queued=ended)
    assert (found.phase, found.message, found.job_state) == (phase, "somehow", "OVER")
    put(begin(root) / "error.json", {"role": "engine", "index": 2, "message": "lost its node", "time": NOW - 10})
    told = look(root, queued=ended).message
    assert (told == "engine-2: lost its node") == (phase == "failed"), "who knows more is heard"
    told = look(root, queued=msgspec.structs.replace(ended, cause=True)).message
    assert told == ("somehow (first seen as: engine-2: lost its node)" if phase == "failed" else "somehow"), (
        "the cause comes first"
    )
    put(begin(root) / "error.json", {"role": "engine", "index": 2, "message": "old", "time": NOW - 4000})
    assert "old" not in look(root, queued=ended).message, "of an attempt before"


def test_launchers_last_state_stays(tmp_path: Path) -> None:
    """The launcher's last state stays valid when the job is gone."""
    root = make(tmp_path, phase="finished", time=NOW - 300)
    submitted(root, "12")
    for queued in (
        None,
        GONE,
        QueuedJob("ended", "COMPLETED", "it ended", "failed", start=NOW - 400),
        QueuedJob("running", "COMPLETING", start=NOW - 400),
    ):
        assert look(root, queued=queued).phase == "finished"


@pytest.mark.parametrize("written", [NOW - 2, NOW - 600])
def test_a_job_that_its_scheduler_is_ending(tmp_path: Path, written: float) -> None:
    """Its launcher has had no last word, or was on the node that was lost."""
    root = make(tmp_path, phase="running", time=written)
    submitted(root, "12")
    found = look(root, queued=QueuedJob("running", "COMPLETING", start=NOW - 300, ending=True))
    assert found.phase == "ending" and "ending its last start" in found.message
    make(tmp_path / "saves", phase="saving", time=written)
    submitted(tmp_path / "saves", "12")
    queued = QueuedJob("running", "COMPLETING", start=NOW - 300, ending=True)
    assert look(tmp_path / "saves", queued=queued).phase == "saving"


def test_a_requeued_job_that_waits_has_no_launcher(tmp_path: Path) -> None:
    root = make(tmp_path, phase="requeued")
    submitted(root, "12")
    assert "launcher on node7" in page(look(root))
    assert "launcher on" not in page(look(root, queued=QueuedJob("pending", "PENDING", "waits for free nodes")))


def test_a_job_cancelled_while_it_starts(tmp_path: Path) -> None:
    """Its launcher ends as after `hpcrl stop`; the phase is the queue's, unless a stop was requested."""
    root = make(tmp_path, phase="stopped", time=NOW - 2)
    ended = QueuedJob("ended", "CANCELLED", "cancelled by user 0", "cancelled")
    found = look(root, queued=ended)
    assert found.phase == "cancelled" and "cancelled by user 0" in found.message
    assert look(root, queued=QueuedJob("ended", "FAILED", "ended with status 143", "failed")).phase == "stopped"
    (root / STOP).touch()
    assert look(root, queued=ended).phase == "stopped"


def test_a_cancelled_run_says_from_where_it_resumes(tmp_path: Path) -> None:
    root = make(tmp_path, phase="cancelled", message="cancelled", time=NOW - 2)
    (root / "checkpoints").mkdir()
    (root / "checkpoints/latest_checkpointed_iteration.txt").write_text("85")
    found = look(root)
    assert found.phase == "cancelled" and "resumes after step 85" in found.message


# ---- runs without a state.json


def test_runs_of_before(tmp_path: Path) -> None:
    root = make(tmp_path, ("sft", "grpo"))
    assert look(root, here=True).phase == "starting"
    assert look(root).phase == "lost"
    begin(root / "sft", start=None)
    here = begin(root / "grpo", start=None)
    assert look(root, here=True).phase == "starting"
    begin(root / "grpo")
    assert look(root, here=True).phase == "running"
    log(root / "grpo", *steps(3))
    assert look(root, NOW + 5).phase == "running", "it is at work somewhere"
    assert look(root, NOW + 5, here=False).phase == "lost"
    assert look(root, NOW + 500).message.endswith("for 8 min 20 s")
    put(root / "grpo/summary.json", {"status": "stopped", "attempt": 0, "rollout_id": 3, "total": 10})
    assert (look(root).phase, look(root).message) == ("stopped", "saved after 3 of 10 steps")
    put(root / "grpo/summary.json", {"status": "finished", "attempt": 0, "rollout_id": 10, "total": 10})
    assert look(root).phase == "finished"
    put(here / "error.json", {"role": "launcher", "index": 0, "message": "disk full", "time": NOW})
    assert (look(root).phase, look(root).message) == ("failed", "disk full")


def test_a_stage_that_is_done_is_not_the_run(tmp_path: Path) -> None:
    root = make(tmp_path, ("sft",))
    (root / "recipe.toml").write_text('[[stage]]\nname = "sft"\n[[stage]]\nname = "grpo"\n')
    begin(root / "sft")
    put(root / "sft/summary.json", {"status": "finished", "attempt": 0, "rollout_id": 10, "total": 10})
    assert look(root).phase == "lost"


DAMAGE = [b"", b"{", b"[]", b"null", b'{"phase": 3}', b'{"role": {}}', b"\x00" * 64, b"\xff\xfe", b'"x"']


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_noted_and_never_an_error(tmp_path: Path, damage: bytes) -> None:
    root = make(tmp_path, phase="failed")
    submitted(root, "12")
    here = begin(root)
    for path in (
        root / "state.json",
        root / "job.json",
        root / "recipe.json",
        root / "options.json",
        root / "summary.json",
    ):
        path.write_bytes(damage)
    for path in (here / "error.json", here / "plan.json", here / "peers/trainer-0.json", root / "metrics.jsonl"):
        path.write_bytes(damage)
    (root / "recipe.toml").write_bytes(damage)
    found = look(root)
    assert found.phase in {"lost", "failed", "pending"}
    assert any("state.json is damaged" in note for note in found.notes)
    assert page(found) and table([found]) and line(found)


def test_empty_and_absurd_directories(tmp_path: Path) -> None:
    """An empty directory, and one where every entry is a directory."""
    assert look(tmp_path).phase == "lost"
    for name in ("state.json", "job.json", "recipe.json", "recipe.toml", "options.json", "metrics.jsonl"):
        (tmp_path / name).mkdir()
    assert look(tmp_path).phase == "lost"


# ---- the numbers


def test_the_numbers(tmp_path: Path) -> None:
    root = make(tmp_path, ("sft", "grpo"), phase="running", ends=NOW + 3600, restarts=1, attempt=1)
    begin(root / "sft")
    begin(root / "grpo", 1, start=2, total=40)
    log(root / "sft", *steps(5, until=NOW - 100))
    log(
        root / "grpo",
        *steps(3),
        {"rollout_id": 2, "time": NOW, "eval/a/accuracy": 0.75, "eval/a/n": 8.0, "eval/b/accuracy": None},
    )
    found = look(root, NOW + 1)
    assert (found.stage, found.stages, found.attempt, found.step, found.total) == ("grpo", ["sft", "grpo"], 1, 3, 40)
    assert (found.reward, found.tokens_per_sec, found.staleness, found.step_time, found.last_step) == (
        0.5,
        1000.0,
        1.0,
        2.0,
        1.0,
    )
    assert (found.accuracy, found.accuracy_after) == ({"a": 0.75}, 3)
    assert found.needs == pytest.approx(37 * 2.0 - 1.0)
    assert (found.left, found.fits) == (3599.0, True)
    text = page(found)
    assert "grpo (2 of 2)" in text and "3 of 40, attempt 1" in text and "restarted 1 time" in text
    assert "stage grpo needs about 1 min 13 s, 59 min 59 s to the time" in text


def test_a_stage_evaluates_after_its_last_step(tmp_path: Path) -> None:
    root = make(tmp_path, phase="running")
    begin(root, 0, start=0, total=3)
    log(root, *steps(3))
    assert "evaluates or saves" in page(look(root, NOW + 1))


def test_a_resumed_stage_begins_where_it_goes_on(tmp_path: Path) -> None:
    root = make(tmp_path, phase="running")
    begin(root, start=7)
    assert (look(root).step, look(root).total, look(root).needs) == (7, 10, None)


def test_fine_tuning_shows_learned_tokens(tmp_path: Path) -> None:
    """Fine-tuning shows the number of learned tokens."""
    root = make(tmp_path, phase="running")
    begin(root)
    learned = {"perf/train_tokens": 300.0, "perf/train_tokens_per_sec": 900.0}
    log(root, {"rollout_id": 0, "time": NOW, "train/loss": 0.5, "perf/step_time": 0.5} | learned)
    assert look(root).tokens_per_sec == 600.0
    assert "loss        0.500" in page(look(root)) and "tokens/s    600\n" in page(look(root))


def test_speed_is_told_by_role(tmp_path: Path) -> None:
    """Tokens a second sampled, trained and a GPU of the run; MFU with what it is a share of, unless that is not known."""
    root = make(tmp_path, phase="running")
    begin(root, device="NVIDIA H100", tflops=989.4)
    more = {"perf/train_tokens_per_sec": 4210.4, "perf/step_tokens_per_sec_per_gpu": 31.2}
    log(root, *steps(1, **more))
    assert "1000 sampled, 4210 trained; 31 a GPU" in page(look(root)) and "MFU" not in page(look(root))
    log(root, *steps(1, 1, **more, **{"perf/mfu": 0.4124}))
    assert "41.2 % (NVIDIA H100: 989 TFLOP/s in BF16)" in page(look(root))
    assert line(look(root)).endswith("1000 tok/s  MFU 41 %")
    begin(root, device="NVIDIA Q1")
    assert "41.2 %\n" in page(look(root))


def test_numbers_that_are_none(tmp_path: Path) -> None:
    root = make(tmp_path, phase="running")
    begin(root)
    log(
        root, {"rollout_id": 0, "time": None, "train/loss": None, "rollout/reward": "x", "perf/step_time": float("inf")}
    )
    found = look(root)
    assert (found.step, found.reward, found.loss, found.step_time, found.last_step, found.needs) == (
        1,
        None,
        None,
        None,
        None,
        None,
    )
    assert page(found) and table([found])


def test_run_that_will_not_finish_in_time(tmp_path: Path) -> None:
    """A run that will not finish in time shows what will happen to it."""
    root = make(tmp_path, phase="running", ends=NOW + 10)
    submitted(root, "12")
    begin(root)
    log(root, *steps(2))
    found = look(root)
    assert (found.needs, found.left, found.fits) == (16.0, 10.0, False)
    assert "it needs about 16 s, 10" in page(found) and "will not finish before" in page(found)
    assert "16 s !" in table([found])
    assert look(root, queued=QueuedJob("running", "RUNNING", start=NOW - 100, ends=NOW + 99)).fits, (
        "Slurm knows its limit best"
    )


# ---- the estimate


def test_a_step_is_the_median_of_the_last_twenty() -> None:
    rows = steps(50, each=100.0, until=NOW - 500) + steps(19, first=50, each=2.0) + steps(2, first=69, each=900.0)
    assert metrics.step_time(rows) == 2.0
    assert metrics.step_time([]) is None


def test_pauses_for_checkpoints_and_evaluations_count() -> None:
    """A step of 2 s; 3 s to save after every second step, 7 s more to evaluate after every fourth."""
    rows: list[dict[str, Any]] = []
    at = NOW
    for i in range(10):
        at += 2.0
        rows.append({"rollout_id": i, "time": at, "train/loss": 0.0, "perf/step_time": 2.0})
        at += 3.0 if (i + 1) % 2 == 0 else 0.0
        if (i + 1) % 4 == 0:
            at += 7.0
            rows.append({"rollout_id": i, "time": at, "eval/a/accuracy": 0.5})
    # 10 steps are done (and saved); of 14, steps 11 to 14 follow: two pauses of 3 s, two of them with 7 s (12, and 14:
    # the end)
    left = metrics.seconds_left(rows, 10, 14, 2, 4, rows[-1]["time"])
    assert left == pytest.approx(4 * 2.0 + 2 * 3.0 + 2 * 7.0)
    assert metrics.seconds_left(rows, 10, 14, 2, None, rows[-1]["time"]) is not None
    assert metrics.seconds_left(rows, 14, 14, 2, 4, NOW) == 0.0


def test_evaluation_without_later_step() -> None:
    """An evaluation that no step has followed yet is shown."""
    rows = [*steps(4, each=1.0), {"rollout_id": 3, "time": NOW + 50, "eval/a/accuracy": 0.5}]
    assert metrics.seconds_left(rows, 4, 6, None, 2, NOW) == pytest.approx(2 * 1.0)
    assert metrics.seconds_left(rows, 4, 7, None, 4, NOW) == pytest.approx(3 * 1.0)
    assert metrics.seconds_left(rows, 4, 9, None, 4, NOW) == pytest.approx(5 * 1.0 + 50.0), "after step 8"
    assert metrics.pauses(rows, lambda done: done % 4 == 0) == {False: 0.0, True: 50.0}


def test_lost_steps_are_not_a_pause() -> None:
    """Steps that were lost between two records do not count as a pause."""
    rows = [*steps(1, until=NOW - 500), *steps(1, first=5)]
    assert metrics.pauses(rows, lambda _: "any") == {}


def test_elapsed_part_of_a_step() -> None:
    """What has elapsed of a step is subtracted, but no more than one step."""
    rows = steps(5, each=10.0)
    assert metrics.seconds_left(rows, 5, 7, None, None, NOW) == pytest.approx(20.0)
    assert metrics.seconds_left(rows, 5, 7, None, None, NOW + 4) == pytest.approx(16.0)
    assert metrics.seconds_left(rows, 5, 7, None, None, NOW + 4000) == pytest.approx(10.0)


def test_a_restart_is_no_pause() -> None:
    rows = steps(5, each=1.0, until=NOW - 5000) + steps(5, first=5, each=1.0)
    assert metrics.seconds_left(rows, 10, 20, None, None, NOW) == pytest.approx(10.0)


# ---- text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.02, "20 ms"),
        (4.25, "4.2 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (310, "5 min 10 s"),
        (7380, "2 h 3 min"),
        (3601, "1 h"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_a_terminal_is_safe_from_what_a_run_says(tmp_path: Path) -> None:
    root = make(tmp_path, phase="failed", message="bad\x1b[2J\x1b]0;title\x07 thing\r\n\x9b1m end")
    for text in (page(look(root)), table([look(root)]), line(look(root))):
        assert not set(text) & set(map(chr, (*range(10), *range(11, 32), 127, 0x9B)))
    assert strip_control("a\x1b[31mred\x1b[0m\tb") == "ared\tb"


def test_table_omits_empty_columns(tmp_path: Path) -> None:
    """The table omits columns without values and truncates nothing."""
    found = [look(make(tmp_path / name, phase=phase, message=message)) for name, phase, message in
             [("one", "running", ""), ("two", "failed", "a long story " * 20)]]  # fmt: skip
    lines = table(found).splitlines()
    assert "REWARD" not in lines[0] and "STEP" not in lines[0]
    assert lines[1].endswith("lost") or lines[1].split()[1] in ("running", "lost")
    assert lines[2].endswith(("a long story " * 20).strip())
    assert table([]) == ""


# ---- the command


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, a registry of its own, and no Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_status_of_all_runs_and_of_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "runs are known here" in capsys.readouterr().out
    make(home / "runs/old", phase="finished", time=NOW - 1000)
    make(home / "runs/new", phase="failed", time=NOW, message="bad luck")
    make(home / "runs/zzz-live", phase="running", time=time.time(), host="elsewhere")
    (home / "runs/no-run").mkdir()
    assert main(["status"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [text.split()[0] for text in rows] == ["RUN", "runs/zzz-live", "runs/new", "runs/old"]
    assert main(["status", "--json"]) == 0
    assert [run["phase"] for run in json.loads(capsys.readouterr().out)] == ["running", "failed", "finished"]
    for word in ("runs/new", "new", str(home / "runs/new")):
        assert main(["status", word]) == 0
        assert "runs/new: failed" in capsys.readouterr().out
    assert main(["status", "new", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["message"] == "bad luck"


def test_a_stage_or_a_job_number_stands_for_its_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submitted(make(home / "runs/a", ("sft",), phase="finished"), "4711")
    (home / "a").mkdir()  # a directory of that name that is no run hides nothing
    for word in ("runs/a/sft", "4711", "a"):
        assert main(["status", word]) == 0
        assert "runs/a: finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["status", "nix"], "name a run directory"),
        (["status", "runs"], "not a run directory"),
        (["status", "x", "y"], "unrecognized arguments: y; see"),
        (["watch"], "following arguments are required"),
        (["status", "twice"], "may be"),
    ],
)
def test_wrong_usage(home: Path, capsys: pytest.CaptureFixture[str], argv: list[str], error: str) -> None:
    from hpcrl.run.started_runs import remember

    make(home / "runs/twice")
    remember(make(home / "more/twice"))
    assert main(argv) == 2
    assert error in capsys.readouterr().err


def test_dead_local_launcher_is_seen_at_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A launcher of this host that died is noticed at once."""
    root = make(home / "runs/a", phase="running", time=time.time(), host=HERE)
    (root / "lock").write_text(str(os.getpid()))  # a number that another process, ours, has now
    main(["status", "a"])
    assert "lost" in capsys.readouterr().out


@pytest.mark.parametrize(("phase", "code"), [("finished", 0), ("failed", 1), ("stopped", 143), ("cancelled", 1)])
def test_watch_ends_as_the_run_did(home: Path, capsys: pytest.CaptureFixture[str], phase: str, code: int) -> None:
    make(home / "runs/a", phase=phase)
    assert main(["watch", "a"]) == code
    assert f"  {phase}  " in capsys.readouterr().out.splitlines()[0] + "  "


def test_watch_tells_each_change_once(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcrl.cli import status as module

    root = make(home / "runs/a", phase="starting", time=time.time())
    begin(root)
    turns = iter(["starting", "running", "running", "finished"])

    def sleep(_: float) -> None:
        put(root / "state.json", {"phase": next(turns), "time": time.time(), "stage": ""})

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert main(["watch", "a"]) == 0
    assert [text.split()[1] for text in capsys.readouterr().out.splitlines()] == ["starting", "running", "finished"]


def test_requeued_job_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that stops in order to be requeued has not ended."""
    from hpcrl.cli import find_run

    now = [100.0]
    monkeypatch.setattr(find_run.time, "monotonic", lambda: now[0])

    def sure(ending: find_run.Ending, scheduler: str, *phases: str) -> list[bool]:
        found = []
        for phase in phases:
            found.append(ending.sure(Status("r", phase, scheduler=scheduler)))
            now[0] += find_run.PATIENCE * 0.6
        return found

    assert sure(ending := find_run.Ending(), "slurm", "stopped", "requeued", "stopped") == [False] * 3
    assert ending.interval < find_run.ASK, "it is worth asking"
    assert sure(find_run.Ending(), "slurm", "failed", "failed", "failed") == [False, False, True]
    assert sure(find_run.Ending(), "", "lost", "running", "lost", "stopped") == [False, False, False, True]
    assert sure(find_run.Ending(), "slurm", "finished") == [True]


@pytest.mark.parametrize("submit", [False, True])
def test_the_commands_are_light(home: Path, submit: bool) -> None:
    if submit:
        submitted(make(home / "runs/a"), "12")
    repo = str(Path(__file__).parents[2])
    script = (
        f"import sys; sys.path.insert(0, {repo!r}); from hpcrl.cli.main import main; code = main(['status'])\n"
        "heavy = {'torch', 'pydantic', 'rich', 'numpy', 'transformers'} & set(sys.modules)\n"
        "print(heavy); sys.exit(code or len(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_thousand_runs_are_listed_quickly(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make(home / "runs/r0", phase="finished")
    begin(first)
    log(first, *steps(100))
    for i in range(1, 1000):
        shutil.copytree(first, home / f"runs/r{i}", copy_function=os.link)
    begun = time.process_time()
    assert main(["status"]) == 0
    assert time.process_time() - begun < 5 * slowdown()
    assert len(capsys.readouterr().out.splitlines()) == 1001
