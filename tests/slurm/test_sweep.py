"""Sweeps and Slurm: one script for the array, all runs or none, and which task of an array is which run's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.cli import main
from hpcrl.commands.find_run import ASK
from hpcrl.commands.sweep import SweepView
from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.launch import sweep as launch_sweep
from hpcrl.launch.job import reopen_job
from hpcrl.launch.preflight import writes_to
from hpcrl.run.job_files import read_job, replace_job
from hpcrl.run.queued_job import JobKey
from hpcrl.run.started_runs import read_recipe_file
from hpcrl.run.sweep_file import SweepFile, SweepRun, read_sweep, write_sweep
from hpcrl.slurm.batch_process import job_number
from hpcrl.slurm.squeue import look
from tests.support.rundirs import FakeSlurm, make, put, row
from tests.support.runs import REPO

RECIPE = str(REPO / "examples/quickstart.toml")
SWEEP = ("--sweep", "grpo.lr=1e-4,2e-4", "--seeds", "2")
#: one ordinary job, of nodes without GPUs
ALIKE = ("--layout", "homogeneous", "--set", "trainer.gpus_per_node=0", "engine.gpus_per_node=0")
NAMES = [f"grpo.lr={lr},seed={seed}" for lr in ("0.0001", "0.0002") for seed in (1234, 1235)]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A Slurm that takes every job as number 77."""
    fake = FakeSlurm(tmp_path / "bin")
    fake.command("sbatch", "Submitted batch job 77\n")
    for name in ("srun", "scancel", "squeue"):
        fake.command(name)
    monkeypatch.setenv("PATH", f"{fake.bin}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    monkeypatch.delenv("HPCRL_SITE", raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


# ---- the script


def test_one_script_for_all_tasks(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["submit", RECIPE, *SWEEP, "--at-once", "3", "--run-dir", "a b", "--dry-run", *ALIKE]) == 0
    out = capsys.readouterr().out
    script = out[out.index("#!/bin/bash") : out.index("# nothing was written")]
    assert "#SBATCH --array=0-3%3\n" in script
    assert f"#SBATCH --output='{tmp_path}/a b/tasks/%a/logs/job-%A_%a.out'" in script
    assert [line for line in script.splitlines() if line.startswith("# task")] == [
        f"# task {number}: {name}" for number, name in enumerate(NAMES)
    ]
    assert f"'{tmp_path}/a b/submitit'" in script.splitlines()[-2] and not (tmp_path / "a b").exists()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=240)


def test_submitted_as_one_array(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each run has its directory, its seeds and its task; the sweep has the number of the array."""
    assert main(["submit", RECIPE, *SWEEP, "--run-dir", "s", "--after", "5", *ALIKE]) == 0
    root = tmp_path / "s"
    assert re.match(rf"jobs 77_0 to 77_3, 4 runs\nsweep directory: {root}\n", capsys.readouterr().out)
    assert len([call for call in slurm.calls("sbatch") if "test-only" not in call]) == 1
    script = (root / "job.sbatch").read_text()
    assert "--array=0-3\n" in script and "--dependency=afterok:5" in script
    record = read_sweep(root)
    assert (record.swept, record.job_id, [run.name for run in record.runs]) == (["grpo.lr", "seed"], "77", NAMES)
    identities = set()
    for number, (name, values) in enumerate((run.name, run.values) for run in record.runs):
        job, begun = read_job(root / name), read_recipe_file(root / name)
        assert (job.job_id, job.script, job.site["layout"]) == (f"77_{number}", f"{root}/job.sbatch", "homogeneous")
        assert f"--comment=hpcrl:{job.array}\n" in script
        assert begun.overrides["grpo.lr"] == values["grpo.lr"] and begun.overrides["seed"] == values["seed"]
        assert begun.overrides["rollout_seed"] == 42 + values["seed"] - 1234
        assert (root / "tasks" / str(number) / "logs").resolve() == root / name / "logs"
        assert (root / "submitit" / f"77_{number}_submitted.pkl").is_file()
        identities |= {job.identity, job.array}
    assert len(identities) == 5, "four runs and one array"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seeds", "2", "--chain", "3"), "--chain and a sweep"),
        (("--seeds", "2", "--print"), "--print writes the script"),
        (("--at-once", "2"), "--at-once has no effect"),
        (("--seeds", "2", "--at-once", "2"), "--at-once 2 has no effect"),
        (("--seeds", "2", "--at-once", "0"), "--at-once 0: "),
        (("--seeds", "1"), "--seeds 1"),
        (("--sweep", "grpo.lr=1,x"), "--grpo.lr x: expected a number"),
        (("--sweep", "grpo.eval-interval=1,0"), "grpo.eval-interval=0: "),
        (("--sweep", "sft.kl-coef=0,0.1"), "sft.kl-coef=0.1: stage sft: --kl-coef"),
        (("--seeds", "2", "--run-dir", "50%a"), "have % in its"),
        (("--seeds", "2", "--grpo.save", "CK", "--grpo.load", "CK"), "--grpo.save CK: runs seed=1234 and seed=1235"),
        (("--seeds", "2", "--sft.save", "CK", "--grpo.save", "{run}/b"), "--sft.save CK: runs seed=1234"),
        (("--seeds", "2", "--grpo.save-debug-rollout-data", "d/{rollout_id}"), "--grpo.save-debug-rollout-data d/"),
        (("--sweep", "grpo.save=a,b/", "--sweep", "grpo.lr=1,2"), "--grpo.save a: runs grpo.save=a,grpo.lr=1.0"),
        (("--sweep", "grpo.save=a,b", "--sft.load", "a"), "--load a: run grpo.save=a would write what run grpo.save=b"),
        (
            ("--sweep", "eps-clip=0.1,0.2", "--sweep", "grpo.eps-clip=0.2,0.1"),
            "=0.1,grpo.eps-clip=0.2 and eps-clip=0.2",
        ),
    ],
)
def test_refused_before_anything_is_submitted(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    assert main(["submit", RECIPE, *words, *ALIKE]) == 2
    assert said in capsys.readouterr().err
    assert slurm.calls("sbatch") == [] and not list(tmp_path.glob("runs/*")) and not (tmp_path / "50%a").exists()


def test_an_array_may_not_be_given_past_us(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", RECIPE, "--set", "trainer.extra.array=0-3"]) == 2
    assert "--sweep or --seeds" in capsys.readouterr().err


def test_a_container_sees_a_run_whose_name_has_commas(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Lists of mounts are divided by commas: the directory of the sweep is mounted, for an array and for each job."""
    pyxis = ("container.kind=pyxis", "container.image=docker://x")
    for layout in ("homogeneous", "heterogeneous"):
        words = ("--run-dir", layout, "--layout", layout, "--dry-run", "--set", *ALIKE[3:], *pyxis)
        assert main(["submit", RECIPE, *SWEEP, *words]) == 0
        root = tmp_path / layout
        assert f"--container-mounts={root}:{root}" in capsys.readouterr().out.replace("'", "").replace('"', "")


def test_runs_whose_steps_differ_are_separate_jobs(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """One script could not start a task for each rank in one run and one for each node in another."""
    words = ("--sweep", "rank-launcher=torchrun,ranks", "--run-dir", "s", "--dry-run")
    assert main(["submit", RECIPE, *words, *ALIKE]) == 0
    said = capsys.readouterr()
    assert "not one array" in said.err and "--array" not in said.out


def test_each_run_may_save_where_it_is_told(slurm: FakeSlurm, tmp_path: Path) -> None:
    words = (
        "--grpo.save",
        "{run}/ck",
        "--grpo.load",
        "{run}/ck",
        "--sft.save-debug-rollout-data",
        "{run}/{rollout_id}",
    )
    assert main(["submit", RECIPE, "--seeds", "2", *words[:4], "--run-dir", "s", *ALIKE]) == 0
    stage = reopen_job(tmp_path / "s" / "seed=1235").stages[-1]
    assert stage.save == stage.load == str(tmp_path / "s/seed=1235/ck")


def test_what_is_written_elsewhere_is_known() -> None:
    """An option that names a place to write to is among those that runs of a sweep may not share."""
    named = [name for name, field in Options.model_fields.items() if re.match("save|.*_dir$", name) and "str" in str(field.annotation)]  # fmt: skip
    known = [name for name, _ in writes_to(Options(save="a", save_debug_rollout_data="b"))]
    assert sorted(named) == sorted([*known, "run_dir", "update_weight_disk_dir"])


# ---- all or none


def test_heterogeneous_runs_are_separate_jobs(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    numbers = tmp_path / "number"
    slurm.command("sbatch", before=f'echo x >> {numbers}; echo "Submitted batch job $(wc -l < {numbers})"')
    words = ("--run-dir", "s", "--layout", "heterogeneous")
    assert main(["submit", RECIPE, *SWEEP, *words]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("jobs 1 to 4, 4 runs") and "arrays of heterogeneous jobs" in said.err
    assert [read_job(tmp_path / "s" / name).job_id for name in NAMES] == ["1", "2", "3", "4"]
    assert read_sweep(tmp_path / "s").job_id == "" and read_job(tmp_path / "s" / NAMES[0]).array == ""
    assert main(["submit", RECIPE, *SWEEP, "--at-once", "2", "--run-dir", "t", "--layout", "heterogeneous"]) == 2
    assert "--at-once 2 needs a job array" in capsys.readouterr().err


def test_the_first_are_cancelled_when_one_is_refused(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    numbers = tmp_path / "number"
    refuse = f"[ $(wc -l < {numbers}) -lt 3 ] || {{ echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; }}"
    slurm.command("sbatch", before=f'echo x >> {numbers}; {refuse}; echo "Submitted batch job $(wc -l < {numbers})"')
    assert main(["submit", RECIPE, *SWEEP, "--run-dir", "s", "--layout", "heterogeneous"]) == 2
    assert "QOSMaxSubmitJobPerUserLimit" in capsys.readouterr().err
    assert slurm.calls("scancel") == ["2", "1"] and not (tmp_path / "s").exists()


@pytest.mark.parametrize("where", ["note_job", "write_sweep"])
def test_an_array_that_cannot_be_noted_is_cancelled(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    count = 0

    def full(*words: object, **more: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise HpcrlError("no space left")
        real(*words, **more)

    real = getattr(launch_sweep, where)
    monkeypatch.setattr(launch_sweep, where, full)
    assert main(["submit", RECIPE, *SWEEP, "--run-dir", "s", *ALIKE]) == 1
    assert sorted(slurm.calls("scancel")) == [f"77_{number}" for number in range(4)]
    assert not (tmp_path / "s").exists()


def test_a_job_whose_call_cannot_be_kept_is_cancelled(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch has taken it, and what it begins with cannot be put into its place."""
    from submitit.core.utils import JobPaths

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JobPaths, "move_temporary_file", full)
    assert main(["submit", RECIPE, *SWEEP, "--run-dir", "s", *ALIKE]) == 1
    assert slurm.calls("scancel") == ["77"] and not (tmp_path / "s").exists()


@pytest.fixture
def terminal() -> Iterator[None]:
    """SIGHUP means what it does at a terminal, also where the tests were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["HUP", "TERM"])
@pytest.mark.parametrize("layout", ["homogeneous", "heterogeneous"])
@pytest.mark.usefixtures("terminal")
def test_a_lost_connection_cancels_what_was_submitted(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, layout: str
) -> None:
    """It waits for sbatch's answer: a job whose number is not known could not be cancelled."""
    slurm.command("sbatch", "Submitted batch job 77\n", before=f"kill -{name} {os.getpid()}; sleep 0.2")
    given = ALIKE if layout == "homogeneous" else ("--layout", layout)
    assert main(["submit", RECIPE, "--seeds", "2", "--run-dir", "s", *given]) == 143
    assert f"SIG{name} came" in capsys.readouterr().err
    assert slurm.calls("scancel") == (["77_1", "77_0"] if layout == "homogeneous" else ["77"])
    assert not (tmp_path / "s").exists() and len(slurm.calls("sbatch")) == 1
    assert main(["submit", RECIPE, "--run-dir", "t", *given]) == 143
    assert slurm.calls("scancel")[-1] == "77" and not (tmp_path / "t").exists()


@pytest.mark.parametrize("words", [("--seeds", "2"), ()])
def test_a_run_is_the_schedulers_before_it_is_sent(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """What is left of a submission that was killed is never resumed on the login node."""
    slurm.command("sbatch", before=f"cp -r {tmp_path}/s {tmp_path}/left; exit 1")
    assert main(["submit", RECIPE, *words, "--run-dir", "s", *ALIKE]) == 2
    root = tmp_path / "left" / ("seed=1234" if words else "")
    assert (read_job(root).scheduler, read_job(root).job_id) == ("slurm", None)
    assert main(["status", str(root)]) == 0
    assert "it is being submitted" in capsys.readouterr().out
    assert main(["resume", str(root)]) == 2
    assert "is being submitted" in capsys.readouterr().err
    replace_job(root, msgspec.structs.replace(read_job(root), submitted=time.time() - 1000))
    assert main(["status", str(root)]) == 0
    assert "lost" in (said := capsys.readouterr().out) and "cut short" in said
    slurm.command("sbatch", "Submitted batch job 78\n")
    assert main(["resume", str(root)]) == 0
    assert read_job(root).job_id == "78"


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("AssocMaxSubmitJobLimit", "jobs to end"),
        ("QOSMaxSubmitJobPerUserLimit", "jobs to end"),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, users size and/or time limits)", "jobs to end"),
        ("QOSMaxWallDurationPerJobLimit (job submit limit, users size and/or time limits)", "less with --time"),
        ("Requested time limit is invalid", "less with --time"),
    ],
)  # fmt: skip
def test_limits_on_submission_have_their_own_hint(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], said: str, hint: str
) -> None:
    slurm.command("sbatch", status=1, error=f"sbatch: error: {said}")
    assert main(["submit", RECIPE, "--seeds", "2", "--run-dir", "s", *ALIKE]) == 2
    assert hint in capsys.readouterr().err


# ---- which task is which run's


def test_the_number_of_a_task() -> None:
    """SLURM_JOB_ID of one of the tasks is the array's number, by which Slurm means all of them."""
    assert job_number({"SLURM_JOB_ID": "77"}) == "77"
    assert job_number({"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}) == "77_3"


def test_tasks_are_told_apart_by_number(slurm: FakeSlurm) -> None:
    """All carry the array's identity; one that said otherwise is that run's alone."""
    keys = [JobKey(f"77_{number}", f"id-{number}", 0.0, array="arr") for number in range(4)]
    slurm.command(
        "squeue",
        row("77_3", "PENDING", "JobArrayTaskLimit", raw="77", comment="hpcrl:arr")
        + row("77_0", raw="78", comment="hpcrl:arr")
        + row("77_1", "FAILED", raw="79", comment="hpcrl:id-1 disk full")
        + row("77_2", raw="80", comment="hpcrl:another"),
    )
    jobs = look([*keys, JobKey("78", "arr", 0.0), JobKey("77", "arr", 0.0)]).jobs
    assert [jobs[key].phase for key in keys] == ["running", "ended", "gone", "pending"]
    assert jobs[keys[2]].foreign and jobs[keys[1]].reason == "disk full"
    assert jobs[keys[3]].reason.startswith("waits for other tasks")
    assert jobs[JobKey("78", "arr", 0.0)].phase == "running", "by its number as a job"
    assert jobs[JobKey("77", "arr", 0.0)].phase == "gone", "a task that has not begun has none"
    (call,) = slurm.calls("squeue")
    assert "--array" in call and "--jobs 77_0,77_1,77_2,77_3,78,77 " in call


def test_tasks_that_were_cancelled_unseparated(slurm: FakeSlurm) -> None:
    """Accounting has one row for all of them, under the array's number."""
    keys = [JobKey(f"77_{number}", f"id-{number}", 0.0, array="arr") for number in (0, 3, 5, 7)]
    words = ("CANCELLED by 0", 1, 2, 2, 0, "me", "x-hpcrl", "hpcrl:arr")
    slurm.command("sacct", "\x1f".join(map(str, ("77_[1-3,6-8:2%4]", 77, *words))) + "\n"
        + "\x1f".join(map(str, ("77_0", 78, "COMPLETED", *words[1:]))) + "\n")  # fmt: skip
    jobs = look(keys).jobs
    assert [jobs[key].word for key in keys] == ["COMPLETED", "CANCELLED", "", ""]
    assert [jobs[key].phase for key in keys] == ["ended", "ended", "gone", "gone"]
    assert "-j 77 " in slurm.calls("sacct")[0] and jobs[keys[1]].outcome == "cancelled"


@pytest.fixture
def sweep(slurm: FakeSlurm, tmp_path: Path) -> Path:
    """A sweep in ./runs: one run finished, one at work, one in the queue."""
    root = tmp_path / "runs/SWEEP"
    now = time.time()
    phases = {"lr=1": {"phase": "finished", "time": now}, "lr=2": {"phase": "running", "time": now}, "lr=3": {}}
    for number, (name, state) in enumerate(phases.items()):
        make(root / name, **state)
        put(root / name / "job.json", {"scheduler": "slurm", "job_id": f"77_{number}", "submitted": now - 60, "array": "arr", "site": {}})  # fmt: skip
    write_sweep(root, SweepFile(["lr"], [SweepRun(name, {"lr": int(name[3:])}) for name in phases], "slurm", "77"))
    slurm.command(
        "squeue",
        row("77_0", "COMPLETED", raw="78", comment="hpcrl:arr", start=int(now - 60))
        + row("77_1", raw="79", comment="hpcrl:arr", start=int(now - 60))
        + row("77_2", "PENDING", "Priority", raw="77", comment="hpcrl:arr"),
    )
    return root


@pytest.mark.parametrize("word", ["runs/SWEEP", "SWEEP", "77"])
def test_a_sweep_by_path_name_and_number(sweep: Path, capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main(["status", word, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["status"]["phase"] for row in found["runs"]] == ["finished", "running", "pending"]
    assert main(["status", word]) == 0
    assert "runs/SWEEP: 3 runs, job array 77: 1 finished, 1 running, 1 pending" in capsys.readouterr().out


def test_a_sweep_goes_with_its_last_run(sweep: Path, slurm: FakeSlurm) -> None:
    """But not what somebody has put there."""
    for name in ("launch", "submitit", "tasks"):
        (sweep / name).mkdir()
    for name in ("job.sbatch", "notes"):
        (sweep / name).touch()
    slurm.command("squeue")
    for name in ("lr=1", "lr=2"):
        make(sweep / name, phase="failed", time=time.time())
    make(sweep / "lr=3", phase="running", time=time.time())
    assert main(["runs", "--clean", "--yes"]) == 0
    assert sorted(path.name for path in sweep.iterdir() if "=" in path.name) == ["lr=3"]
    assert (sweep / "sweep.json").exists() and (sweep / "launch").exists()
    make(sweep / "lr=3", phase="failed", time=time.time())
    assert main(["runs", "--clean", "--yes"]) == 0
    assert [path.name for path in sweep.iterdir()] == ["notes"]


def test_its_runs_are_runs(sweep: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert sorted(capsys.readouterr().out.split()) == ["runs/SWEEP/lr=1", "runs/SWEEP/lr=2", "runs/SWEEP/lr=3"]
    make(sweep.parents[1] / "SWEEP", phase="finished")
    assert main(["status", "SWEEP"]) == 0
    assert capsys.readouterr().out.startswith("SWEEP: finished"), "a run that is here is meant by its name"
    assert main(["status", "77_1"]) == 0
    assert "runs/SWEEP/lr=2: running" in capsys.readouterr().out
    assert main(["cancel", "lr=3"]) == 0
    assert slurm.calls("scancel") == ["77_2"]
    capsys.readouterr()
    for words in (["logs", "77"], ["resume", str(sweep)]):
        assert main(words) == 2
        assert "is a sweep" in capsys.readouterr().err
    assert main(["resume", str(sweep / "lr=2")]) == 2


def answers(slurm: FakeSlurm, sweep: Path, state: str, later: str) -> None:
    """squeue gives a task's `state` alone where it is asked for it, and `later` once there is SWEEP/now."""
    alone = f'case "$*" in *=%T) echo {state}; exit;; esac'
    before = f"{alone}; [ ! -e {sweep}/now ] || {{ echo '{later.strip()}'; exit 0; }}"
    slurm.command("squeue", (slurm.bin / "squeue.txt").read_text(), before=before)


def test_stop_of_a_sweep(sweep: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """What waits never starts: it is held before it is cancelled.  What is at work saves and ends."""
    slurm.command("scontrol")
    slurm.command("scancel", before=f"touch {sweep}/now")
    answers(slurm, sweep, "PENDING", row("77_2", "CANCELLED", raw="77", comment="hpcrl:arr"))
    assert main(["stop", "SWEEP"]) == 0
    assert (slurm.calls("scontrol"), slurm.calls("scancel")) == (["hold 77_2"], ["77_2"])
    assert [path.parent.name for path in sweep.glob("*/stop")] == ["lr=2"]
    asked = [call for call in slurm.calls("squeue") if not call.endswith("=%T")]
    assert len(asked) == 2, "one question for all, and whether it has begun meanwhile"
    assert json.loads((sweep / "lr=3" / "state.json").read_text())["phase"] == "cancelled"


def test_stop_spares_what_begins_meanwhile(sweep: Path, slurm: FakeSlurm) -> None:
    """It is asked to save, and its launcher has the word on it."""
    state = make(sweep / "other", phase="starting", time=time.time()) / "state.json"
    slurm.command("scontrol", before=f"cp {state} {sweep}/lr=3/state.json; touch {sweep}/now")
    slurm.command("scancel")
    answers(slurm, sweep, "RUNNING", row("77_2", raw="80", comment="hpcrl:arr", start=int(time.time())))
    assert main(["stop", "SWEEP"]) == 0
    assert slurm.calls("scontrol") == ["hold 77_2", "release 77_2"] and slurm.calls("scancel") == []
    assert sorted(path.parent.name for path in sweep.glob("*/stop")) == ["lr=2", "lr=3"]
    assert json.loads((sweep / "lr=3" / "state.json").read_text())["phase"] == "starting"


def test_cancel_leaves_a_live_launcher_the_last_word(sweep: Path, slurm: FakeSlurm) -> None:
    state = make(sweep / "other", phase="starting", time=time.time()) / "state.json"
    slurm.command("scancel", before=f"[ $1 != 77_2 ] || cp {state} {sweep}/lr=3/state.json")
    assert main(["cancel", "SWEEP"]) == 0
    assert json.loads((sweep / "lr=3" / "state.json").read_text())["phase"] == "starting"


def test_cancel_of_a_sweep(sweep: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """What waits first: it would start in the place of what is ended."""
    assert main(["cancel", "SWEEP"]) == 0
    assert slurm.calls("scancel") == ["77_2", "77_1"]
    make(sweep / "lr=2", phase="finished", time=time.time())
    slurm.command("squeue", "", 1, "slurm_load_jobs error: Invalid job id specified")
    assert main(["cancel", "77"]) == 1
    assert "none of its runs" in capsys.readouterr().err


def test_one_that_cannot_be_cancelled_keeps_no_other(
    sweep: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.command("scancel", before='[ "$1" != 77_2 ] || { echo "Access denied" >&2; exit 1; }')
    assert main(["cancel", "77"]) == 1
    assert slurm.calls("scancel") == ["77_2", "77_1"] and "scancel 77_2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("phases", "status"), [(("finished", "finished"), 0), (("finished", "stopped"), 143), (("failed", "stopped"), 1)]
)
def test_watch_ends_with_the_worst(
    sweep: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    phases: tuple[str, str],
    status: int,
) -> None:
    monkeypatch.setattr("hpcrl.commands.find_run.PATIENCE", 0.0)
    for name, phase in zip(("lr=2", "lr=3"), phases, strict=True):
        make(sweep / name, phase=phase, time=time.time())
    (sweep.parents[1] / "bin" / "squeue").unlink()
    assert main(["watch", "SWEEP"]) == status
    out = capsys.readouterr().out
    assert f"lr=2  {phases[0]}" in out and "runs/SWEEP: 3 runs" in out


def test_runs_that_have_ended_are_not_asked_for(sweep: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they make the others be asked for every few seconds."""
    monkeypatch.setattr("hpcrl.commands.find_run.PATIENCE", 0.0)
    make(sweep / "lr=1", phase="stopped", time=time.time())
    view = SweepView(sweep)
    assert [row.status.phase for row in view.look().runs] == ["stopped", "running", "pending"]
    assert view.interval == ASK and not view.ended
    view.ask()
    assert "--jobs 77_1,77_2 " in slurm.calls("squeue")[-1]
    (sweep / "lr=1" / "state.json").unlink()
    assert [row.status.phase for row in view.look().runs] == ["stopped", "running", "pending"], (
        "it is looked at no more"
    )
    for name in ("lr=2", "lr=3"):
        make(sweep / name, phase="finished", time=time.time())
    slurm.command("squeue")
    view.ask()
    view.look()
    assert view.ended


def test_a_damaged_record_names_the_file(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweep / "sweep.json").write_text("{")
    assert main(["status", "runs/SWEEP"]) == 1
    assert "runs/SWEEP/sweep.json cannot be read" in capsys.readouterr().err
