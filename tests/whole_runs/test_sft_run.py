"""Real runs without an engine: resume after every kind of end, and errors that name what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpcrl.cli.main import main
from hpcrl.report.trackers import record, wandb
from hpcrl.report.trackers.record import TrackedStage
from hpcrl.run.attempt_log import lowered_settings
from hpcrl.run.role import read_options
from hpcrl.run.rundir import RunDir
from tests.support.able import require
from tests.support.faults.attack_kinds import attack_kinds
from tests.support.faults.campaign import Campaign
from tests.support.faults.checks import Reference
from tests.support.faults.kinds import HANG, local_kinds
from tests.support.faults.local import LocalBed
from tests.support.out_of_memory import SAID
from tests.support.runs import KEPT, SFT, Run, all_gone, events, hold, metrics, recipe, samples, series
from tests.support.stand_in_trackers import stand_ins

pytestmark = pytest.mark.process


def start(path: Path, task: Path, env: Mapping[str, str] | None = None, **values: object) -> Run:
    path.mkdir(exist_ok=True)
    root = path / "run"
    return Run(recipe(path, task, **(SFT | {"run_dir": str(root)} | values)), root=root, **(env or {}))


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    """A run on two data-parallel ranks that nobody disturbed."""
    run = start(tmp_path_factory.mktemp("uncut"), task, actor_num_gpus_per_node=2)
    status, out = run.end()
    assert status == 0, out + run.logs()
    assert list(metrics(run.root)) == list(range(6))
    losses = [row["train/loss"] for row in metrics(run.root).values()]
    assert losses[-1] < losses[0], "six steps of fine-tuning lower the loss"
    return run.root


def same_as(uncut: Path, root: Path) -> None:
    assert metrics(root) == metrics(uncut)
    assert samples(root) == samples(uncut)


def resume(root: Path, env: Mapping[str, str] | None = None) -> None:
    again = Run("--resume", root, root=root, **(env or {}))
    status, out = again.end()
    assert status == 0, out + again.logs()


def test_ranks_agree_on_what_is_common(uncut: Path) -> None:
    """Ranks have different parts of the optimizer's state, of which Megatron would warn."""
    logs = [path.read_text() for path in uncut.glob("logs/*/trainer-*.log")]
    assert logs and not any("common state dict differs" in text for text in logs)


def test_files_are_of_their_user_alone(uncut: Path) -> None:
    """Under umask 000 every file of a run has mode 0600 or less and every directory 0700, whoever wrote it; and no key
    outlasts the run."""
    open_to_others = [
        f"{path.stat().st_mode:o} {path.relative_to(uncut)}"
        for path in [uncut, *uncut.rglob("*")]
        if not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    assert not open_to_others
    assert (uncut / "keys").is_dir() and not list((uncut / "keys").iterdir())


def test_checkpoints_have_megatrons_layout(uncut: Path) -> None:
    names = sorted(p.name for p in (uncut / "checkpoints").iterdir())
    assert names == ["iter_0000002", "iter_0000004", "iter_0000006", "latest_checkpointed_iteration.txt"]
    assert (uncut / "checkpoints" / names[-1]).read_text() == "6"
    inside = {p.name for p in (uncut / "checkpoints" / "iter_0000006").iterdir()}
    assert {"metadata.json", ".metadata", "hpcrl.json"} <= inside


def test_each_checkpoint_is_written_once(uncut: Path) -> None:
    """The last one is due after its step, and at the end of the run: it is one checkpoint."""
    said = "".join(path.read_text() for path in uncut.glob("logs/attempt-*/trainer-0.log"))
    assert re.findall(r"saved \S+/(iter_\d+)", said) == ["iter_0000002", "iter_0000004", "iter_0000006"]


def test_killed_during_a_save(tmp_path: Path, task: Path, uncut: Path) -> None:
    """Killed in the middle of a save: the previous checkpoint stays.  A tracker gets every step meanwhile, and one that
    refuses them stops nothing."""
    env = stand_ins(tmp_path, "wandb", "mlflow") | {"PACKAGES_BROKEN": "mlflow"}
    hook = {"custom_megatron_before_train_step_hook_path": "tests.support.runs.held_save"}
    values = {"actor_num_gpus_per_node": 2, "use_wandb": True, "wandb_group": "g", "report_to": ["mlflow"]}
    run = start(tmp_path, task, env, **hook | values)
    hold(run.root, 3)
    run.until((run.root / "checkpoints/.partial-iter_0000004/hpcrl.json").exists)
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    hold(run.root)
    assert all_gone(run.root, [])
    assert (run.root / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
    resume(run.root, env)
    same_as(uncut, run.root)
    for root in (uncut, run.root):
        tracked_alike(root)
    calls = (tmp_path / "calls").read_text()
    assert {*map(int, re.findall(r"'step': (\d+), .*'train/loss'", calls))} == {
        *range(1, 7)
    } and "'group': 'g'" in calls
    assert run.logs().count("warning: mlflow has not taken run: ConnectionError") == 2, "one for each attempt"


@pytest.mark.core
def test_a_stop_saves_first(tmp_path: Path, task: Path) -> None:
    """A run that is asked to stop saves what it has learned, although no checkpoint is due."""
    run = start(tmp_path, task, num_rollout=100000, save_interval=None)
    run.end_early(2, signal.SIGTERM)
    tracker = run.root / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.exists() and int(tracker.read_text()) == run.steps()


HOOK = """
def before_step(options, rollout_id, step_id, model, optimizer, scheduler):
    assert rollout_id < 2, "no more"
"""


def test_own_mistake_ends_a_run_at_once(tmp_path: Path, task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No second attempt; file and line come first, and what to do last: it works once the file is right."""
    (own := tmp_path / "own.py").write_text(HOOK)
    hook = {"custom_megatron_before_train_step_hook_path": "own.before_step"}
    run = start(tmp_path, task, **KEPT, **hook)
    status, out = run.end()
    assert status == 1 and "data and code" in out, out
    *_, last = out.splitlines()
    assert re.search(
        r"error: trainer-0: --custom-\S+ own.before_step raised AssertionError: no more \(own.py:3 in", last
    )
    again = f"hpcrl resume {run.root} --live-code"
    assert last.endswith(f"; fix own.py, then {again}") and os.listdir(run.root / "attempts") == ["0"]
    own.write_text(HOOK.replace("< 2", "< 99"))
    assert main(["status", str(run.root)]) == 0
    told = capsys.readouterr().out
    assert re.search(rf"next +{again}\n", told) and told.count("no more") == 1, told
    done = subprocess.run(
        [sys.executable, "-m", *again.split()], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and len(metrics(run.root)) == 6, done.stderr


def tracked_alike(root: Path) -> None:
    """TensorBoard has each number of metrics.jsonl, and each step once, also of a run that was killed and resumed."""
    told = events(root)
    for tag, points in series(root).items():
        assert told[tag] == [(step, pytest.approx(value, rel=1e-6)) for step, value in points], tag


def test_faults_in_a_row(tmp_path: Path, task: Path) -> None:
    """One run that is killed while it starts, loses a rank, is attacked, loses the rollout process, and is stopped: the
    campaign's eyes after each."""
    values = SFT | {"actor_num_gpus_per_node": 2, "num_rollout": 60, "save_interval": 1, "hang_timeout": HANG}
    began = time.monotonic()
    run = start(tmp_path / "untouched", task, **values)
    run.until(lambda: bool(metrics(run.root)))
    starts = time.monotonic() - began
    status, out = run.end()
    assert status == 0, out + run.logs()
    wanted = (
        "SIGKILL of the launcher",
        "SIGKILL of a trainer rank",
        "garbage on every port",
        "SIGKILL of the rollout process",
        "SIGTERM",
    )
    named = {kind.name: kind for kind in local_kinds() + attack_kinds()}
    kinds = [replace(named[name], early=name == wanted[0]) for name in wanted]
    with (tmp_path / "log").open("w") as log:
        campaign = Campaign(
            "row", 3, LocalBed(task, values), kinds, Reference.of(run.root), tmp_path / "runs", log, len(kinds)
        )
        campaign.start = (
            0.5 * starts
        )  # the first fault comes before the run trains, on a slow machine and on a quick one
        records = campaign.each()
    assert [record.kind for record in records] == list(wanted) and not [one for one in records if one.wrong], records
    assert records[0].early and campaign.runs == 1


def test_out_of_memory_in_a_step(tmp_path: Path, task: Path, uncut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In forward, backward, the optimizer and another thread of a rank, without a checkpoint in between: each time the next
    attempt uses less, which a resume keeps, and the losses are the same."""
    hook = {"custom_megatron_before_train_step_hook_path": "tests.support.out_of_memory.in_another_thread"}
    more = hook | {"attempts": 2, "oom_retries": 4, "save_interval": 9, "num_rollout": 5}
    run = start(tmp_path, task, actor_num_gpus_per_node=2, **more)
    status, out = run.end()
    assert status == 0, out + run.logs()
    *failures, last = (RunDir(run.root, attempt).failure() for attempt in range(4))
    assert {(failure.role, failure.message) for failure in failures} == {("trainer", f"OutOfMemoryError: {SAID}")}
    assert last.message.startswith("rank 1 on") and "CUDA error" in last.message, last
    assert [(one.attempt, one.step, one.setting) for one in lowered_settings(run.root)] == [
        (0, 1, "max_tokens_per_gpu"),
        (1, 2, "recompute_granularity"),
        (2, 3, "max_tokens_per_gpu"),
        (3, 4, "max_tokens_per_gpu"),
    ]
    note = "since attempt 1, step 1: --max-tokens-per-gpu 64 instead of 128, as trainer-1 ran out of memory"
    assert f"note: {note}" in out, out
    assert main(["status", str(run.root)]) == main(["report", str(run.root)]) == 0
    assert note in capsys.readouterr().out
    assert note in (run.root / "report.html").read_text()
    assert main(["resume", str(run.root), "--num-rollout", "6"]) == 0
    options = read_options(RunDir(run.root))
    assert options.max_tokens_per_gpu == 16 and options.megatron["recompute_granularity"] == "full"
    found = metrics(run.root)
    for step, row in metrics(uncut).items():
        for name in ("train/loss", "train/grad_norm"):
            assert found[step][name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), (step, name)


def test_a_finished_run_is_not_run_again(uncut: Path) -> None:
    before = metrics(uncut)
    resume(uncut)
    assert metrics(uncut) == before


def test_finished_run_is_extended(tmp_path: Path, uncut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run trains on when it is told how far; a tracker gets the steps of both parts in one series, the
    options, samples and the report."""
    root = tmp_path / "moved"
    shutil.copytree(uncut, root, symlinks=True)
    sent = list[TrackedStage]()
    opened = lambda stage: nullcontext(lambda stage: sent.append(stage) or "here")  # noqa: E731
    monkeypatch.setattr(wandb, "opened", opened)
    monkeypatch.setattr(record, "check_tracker", lambda tracker: None)
    assert main(["report", str(root), "--to", "wandb"]) == 0
    for number, words in ((3, "6 rollouts are done"), (8, "")):
        done = subprocess.run(
            [sys.executable, "-m", "hpcrl", "resume", str(root), "--num-rollout", str(number)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert (done.returncode, words in done.stderr) == (2 if words else 0, True), done.stderr
    longer = metrics(root)
    assert list(longer) == list(range(8)) and {step: longer[step] for step in range(6)} == metrics(uncut)
    tracked_alike(root)
    assert main(["report", str(root)]) == 0 and main(["report", str(root), "--to", "wandb"]) == 0
    first, second = sent
    assert {step for step, _ in first.rows} == {*range(1, 7)} and {step for step, _ in second.rows} == {7, 8}
    logged = series(root)
    assert all((step, value) in logged[tag] for step, row in first.rows + second.rows for tag, value in row.items())
    assert first.identity == second.identity and first.options["lr"] == 1e-3 and second.report is not None
    last = [json.loads(line) for line in samples(root)[max(samples(root))].splitlines()]
    assert [row[2] for row in second.samples] == [sample["response"] for sample in last][: len(second.samples)]
    assert main(["convert", "to-hf", str(root)]) == 0 and (root / "hf" / "model.safetensors").is_file()


def test_a_schedule_takes_all_of_the_epochs(tmp_path: Path, task: Path) -> None:
    """Forty prompts are two rollouts of twenty an epoch: how long the run is shows when they are counted."""
    schedule = {"lr_decay_style": "linear", "lr_warmup_fraction": 0.25}
    run = start(tmp_path, task, num_rollout=None, num_epoch=2, rollout_batch_size=20, save_interval=None, **schedule)
    status, out = run.end()
    assert status == 0, out + run.logs()
    rates = [row["train/lr"] for row in metrics(run.root).values()]
    assert rates == pytest.approx([0.0, 1e-3, 2e-3 / 3, 1e-3 / 3])


def test_one_process_per_run_directory(tmp_path: Path, task: Path) -> None:
    """A run directory is used by one process at a time."""
    run = start(tmp_path, task, num_rollout=100000, save_interval=None)
    run.until(lambda: run.steps() >= 1)
    second = Run("--resume", run.root, root=run.root)
    status, out = second.end()
    assert status == 2 and f"in use by process {run.process.pid}" in out, out
    run.process.send_signal(signal.SIGINT)
    status, out = run.end()
    assert status == 143, out
    assert "second signal ends" in out


def test_a_bad_prompt_line_is_named(tmp_path: Path, task: Path) -> None:
    good = (task / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([*good[:2], '{"prompt": "2+2="}', *good[3:]]) + "\n")
    run = start(tmp_path, task, prompt_data=str(tmp_path / "train.jsonl"))
    status, out = run.end()
    assert status not in (0, 143)
    error = next(text for text in out.splitlines() if text.startswith("hpcrl: error: "))
    assert all(word in error for word in ("train.jsonl", "3", "label")), error
    assert all_gone(run.root, [])


def test_full_disk(tmp_path: Path, task: Path, uncut: Path) -> None:
    """A full disk ends the run and loses nothing saved."""
    small = tmp_path / "small"
    small.mkdir()
    require("mounts")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "none", str(small)], check=True, timeout=240)
    try:
        hook = {"custom_megatron_before_train_step_hook_path": "tests.support.runs.held_step"}
        run = start(tmp_path, task, actor_num_gpus_per_node=2, save=str(small / "checkpoints"), **hook)
        hold(run.root, 2)
        run.until(lambda: (small / "checkpoints" / "iter_0000002").exists())
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        (small / "filler").write_bytes(b"x" * max(0, free - 100_000))
        hold(run.root)
        status, out = run.end()
        assert status not in (0, 143), out
        assert "iter_0000004 was not saved" in out and "0.0 MB are free" in out, out
        assert (small / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
        (small / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True, timeout=240)
        resume(run.root)
        same_as(uncut, run.root)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True, timeout=240)


def test_nothing_listens_but_on_the_plans_address(tmp_path: Path, task: Path) -> None:
    values = {"actor_num_gpus_per_node": 2, "num_rollout": 100000, "save_interval": None}
    run = start(tmp_path, task, **values)
    run.until(lambda: run.steps() >= 1)
    found = [
        c.laddr.ip.removeprefix("::ffff:")
        for pid in run.pids()
        for c in psutil.Process(pid).net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert len(found) >= 2 and set(found) == {"127.0.0.1"}, found


def test_checkpoints_of_another_run(tmp_path: Path, task: Path, uncut: Path) -> None:
    """Another run's checkpoints are not taken for its own."""
    run = start(tmp_path, task, actor_num_gpus_per_node=2, save=str(uncut / "checkpoints"))
    status, out = run.end()
    assert status == 1 and "saved by another run" in out and "--load" in out, out


def flip(shard: Path) -> Path:
    """Change one bit in the middle."""
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    return shard


def test_damaged_checkpoint_is_passed_over(tmp_path: Path, task: Path) -> None:
    """The newest whole one before it is taken, or the newest whole one where the tracker is gone: said once by launcher,
    rank 0 and status, and the run is that of one which nothing happened to; one that --ckpt-step names is an error."""
    run = start(tmp_path, task, num_rollout=6, actor_num_gpus_per_node=2, verify_checkpoint=True)
    assert run.end()[0] == 0
    whole = metrics(run.root), samples(run.root)
    (run.root / "summary.json").unlink()
    lost = tmp_path / "lost"
    named = tmp_path / "named"
    for copy in (lost, named):
        shutil.copytree(run.root, copy, symlinks=True)
    for root, tracker in ((run.root, True), (lost, False)):
        steps = root / "checkpoints"
        shard = flip(sorted((steps / "iter_0000006").glob("*.distcp"))[-1])
        damaged = shard.read_bytes()
        if not tracker:
            (steps / "latest_checkpointed_iteration.txt").unlink()
        status, out = (again := Run("--resume", root, root=root)).end()
        assert status == 0, out + again.logs()
        assert (metrics(root), samples(root)) == whole
        told = f"resumes from {steps / 'iter_0000004'}"
        assert out.count(told) == 1 and f"{shard} is damaged" in out, out
        assert (f"{steps / 'latest_checkpointed_iteration.txt'} is missing" in out) is not tracker
        assert (root / "logs" / "latest" / "trainer-0.log").read_text().count(told) == 1
        shown = subprocess.run(
            [sys.executable, "-m", "hpcrl", "status", str(root)], capture_output=True, text=True, timeout=60
        )
        assert "attempt 1:" in shown.stdout and "iter_0000004" in shown.stdout, shown.stdout + shown.stderr
        assert (steps / "latest_checkpointed_iteration.txt").read_text() == "6"
        assert shard.read_bytes() != damaged, "it was replaced"
    flip(sorted((named / "checkpoints" / "iter_0000006").glob("*.distcp"))[-1])
    for number, wanted in ((6, 1), (4, 0)):
        command = [sys.executable, "-m", "hpcrl", "resume", str(named), "--ckpt-step", str(number)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == wanted, done.stderr
        assert not wanted or "resume RUN --ckpt-step 4" in done.stderr, done.stderr
    assert (metrics(named), samples(named)) == whole


def test_unwritable_directory_is_named(tmp_path: Path, task: Path) -> None:
    """An unwritable directory is named."""
    (tmp_path / "file").touch()
    (tmp_path / "b").mkdir()
    other = start(tmp_path / "b", task, save=str(tmp_path / "file" / "x"))
    status, out = other.end()
    assert status == 1 and "--save" in out and "writable" in out, out
