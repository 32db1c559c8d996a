"""A submission to Slurm that is refused, cut off, or cannot be noted leaves no job and no directory behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.cli.main import main
from hpcrl.errors import HpcrlError
from hpcrl.launch.broken_hosts import note_broken_host
from hpcrl.launch.job import reopen_job
from hpcrl.launch.slurm import submission
from hpcrl.launch.slurm.batch_process import SlurmAllocation
from hpcrl.run.job_files import read_job, replace_job
from tests.support.rundirs import FakeSlurm
from tests.support.runs import REPO

RECIPE = str(REPO / "examples/quickstart.toml")
#: one ordinary job, of nodes without GPUs
ALIKE = ("--layout", "homogeneous", "--set", "trainer.gpus_per_node=0", "engine.gpus_per_node=0")


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


def test_an_array_may_not_be_given_past_us(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", RECIPE, "--set", "trainer.extra.array=0-3"]) == 2
    assert "a loop around" in capsys.readouterr().err


def test_a_container_sees_a_run_whose_name_has_commas(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Lists of mounts are divided by commas: the directory above is mounted."""
    pyxis = ("container.kind=pyxis", "container.image=docker://x")
    words = ("--run-dir", "runs/lr=1,seed=2", "--dry-run", *ALIKE, *pyxis)
    assert main(["submit", RECIPE, *words]) == 0
    root = tmp_path / "runs"
    assert f"--container-mounts={root}:{root}" in capsys.readouterr().out.replace("'", "").replace('"', "")


def test_a_run_may_save_where_it_is_told(slurm: FakeSlurm, tmp_path: Path) -> None:
    words = ("--grpo.save", "{run}/ck", "--grpo.load", "{run}/ck")
    assert main(["submit", RECIPE, *words, "--run-dir", "s", *ALIKE]) == 0
    stage = reopen_job(tmp_path / "s").stages[-1]
    assert stage.save == stage.load == str(tmp_path / "s/ck")


def test_the_first_are_cancelled_when_one_is_refused(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of a chain all jobs stay in the queue, or none."""
    numbers = tmp_path / "number"
    refuse = f"[ $(wc -l < {numbers}) -lt 3 ] || {{ echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; }}"
    slurm.command("sbatch", before=f'echo x >> {numbers}; {refuse}; echo "Submitted batch job $(wc -l < {numbers})"')
    assert main(["submit", RECIPE, "--chain", "4", "--run-dir", "s", *ALIKE]) == 2
    assert "QOSMaxSubmitJobPerUserLimit" in capsys.readouterr().err
    assert slurm.calls("scancel") == ["2", "1"] and not (tmp_path / "s").exists()


def test_a_job_that_cannot_be_noted_is_cancelled(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = submission._note_job

    def full(noted: submission.Submission, job: object, *more: object) -> None:
        if job is not None:
            raise HpcrlError("no space left")
        real(noted, job, *more)

    monkeypatch.setattr(submission, "_note_job", full)
    assert main(["submit", RECIPE, "--run-dir", "s", *ALIKE]) == 1
    assert slurm.calls("scancel") == ["77"] and not (tmp_path / "s").exists()


def test_a_job_whose_call_cannot_be_kept_is_cancelled(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch has taken it, and what it begins with cannot be put into its place."""
    from submitit.core.utils import JobPaths

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JobPaths, "move_temporary_file", full)
    assert main(["submit", RECIPE, "--run-dir", "s", *ALIKE]) == 1
    assert slurm.calls("scancel") == ["77"] and not (tmp_path / "s").exists()


@pytest.fixture
def terminal() -> Iterator[None]:
    """SIGHUP means what it does at a terminal, also where the tests were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["HUP", "TERM"])
@pytest.mark.usefixtures("terminal")
def test_a_lost_connection_cancels_what_was_submitted(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """It waits for sbatch's answer: a job whose number is not known could not be cancelled."""
    slurm.command("sbatch", "Submitted batch job 77\n", before=f"kill -{name} {os.getpid()}; sleep 0.2")
    assert main(["submit", RECIPE, "--chain", "2", "--run-dir", "s", *ALIKE]) == 143
    assert f"SIG{name} came" in capsys.readouterr().err
    assert slurm.calls("scancel") == ["77"] and len(slurm.calls("sbatch")) == 1
    assert not (tmp_path / "s").exists()


def test_a_run_is_slurms_before_it_is_sent(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What is left of a submission that was killed is never resumed on the login node."""
    slurm.command("sbatch", before=f"cp -r {tmp_path}/s {tmp_path}/left; exit 1")
    assert main(["submit", RECIPE, "--run-dir", "s", *ALIKE]) == 2
    root = tmp_path / "left"
    assert (read_job(root).scheduler, read_job(root).job_id) == ("slurm", None)
    assert main(["status", str(root)]) == 0
    assert "it is being submitted" in capsys.readouterr().out
    assert main(["resume", str(root)]) == 2
    assert "process is submitting" in capsys.readouterr().err
    replace_job(root, msgspec.structs.replace(read_job(root), submitted=time.time() - 1000))
    assert main(["status", str(root)]) == 0
    assert "lost" in (said := capsys.readouterr().out) and "cut short" in said
    slurm.command("sbatch", "Submitted batch job 78\n")
    assert main(["resume", str(root)]) == 0
    assert read_job(root).job_id == "78"


def test_another_layout_asks_for_other_nodes(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Nothing has changed where Slurm refuses the job; a later resume keeps what has."""
    assert main(["submit", RECIPE, "--run-dir", "s", *ALIKE]) == 0
    root = tmp_path / "s"
    before = (root / "recipe.json").read_bytes()
    words = ["resume", str(root), "--grpo.actor-num-nodes=4", "--grpo.vllm-max-num-seqs=8", "--time=2:00:00"]
    slurm.command("sbatch", status=1, error="sbatch: error: Node count specification invalid")
    assert main(words) == 2 and (root / "recipe.json").read_bytes() == before
    slurm.command("sbatch", "Submitted batch job 78\n")
    for again in (words, words[:2]):
        assert main(again) == 0
        stage = reopen_job(root).stages[1]
        assert (stage.actor_num_nodes, stage.vllm["max_num_seqs"]) == (4, 8)
        script = (root / "job.sbatch").read_text()
        assert "#SBATCH --nodes=5\n" in script and "#SBATCH --time=2:00:00\n" in script


@pytest.mark.parametrize(
    ("release", "parameters", "words", "asked"),
    [
        ("25.11.4", "enable_expedited_requeue", (), "requeue=expedite"),
        ("26.05.0", "idle_on_node_suspend,enable_expedited_requeue", (), "requeue=expedite"),
        ("25.11.4", "(null)", (), "requeue"),
        ("25.05.2", "enable_expedited_requeue", (), "requeue"),
        ("25.11.4", "enable_expedited_requeue", ("requeue=false",), "no-requeue"),
    ],
)
def test_lost_nodes_cost_no_queue(
    slurm: FakeSlurm, tmp_path: Path, release: str, parameters: str, words: tuple[str, ...], asked: str
) -> None:
    """A Slurm that knows expedited requeues, and where they are enabled, else it would refuse the job."""
    slurm.command("scontrol", f"SlurmctldParameters     = {parameters}\n")
    slurm.command("sbatch", f"slurm-wlm {release}\nSubmitted batch job 77\n")
    assert main(["submit", RECIPE, "--run-dir", "s", *ALIKE, *words]) == 0
    assert f"#SBATCH --{asked}\n" in (tmp_path / "s" / "job.sbatch").read_text()


@pytest.mark.parametrize(
    ("shown", "ends"),
    [
        ("JobState=RUNNING Requeue=1 ExpeditedRequeue=Yes", True),
        ("JobState=RUNNING Requeue=1", False),
        ("JobState=PENDING,COMPLETING Requeue=1 ExpeditedRequeue=Yes", False),
    ],
)
def test_an_ended_run_is_not_held(slurm: FakeSlurm, tmp_path: Path, shown: str, ends: bool) -> None:
    """Slurm would hold a job with an expedited requeue that fails by itself; one that it queues again stays so."""
    slurm.command("scontrol", f"JobId=77 {shown}\n")
    allocation = SlurmAllocation.__new__(SlurmAllocation)
    allocation.job_id = "77"
    allocation.end_for_good()
    assert ("update jobid=77 requeue=0" in slurm.calls("scontrol")) == ends


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
    assert main(["submit", RECIPE, "--run-dir", "s", *ALIKE]) == 2
    assert hint in capsys.readouterr().err


def test_a_job_submits_the_run_again(slurm: FakeSlurm, tmp_path: Path) -> None:
    """From inside a job, without the host that broke."""
    assert main(["submit", RECIPE, "--run-dir", "s", *ALIKE]) == 0
    root = tmp_path / "s"
    note_broken_host(root, "n3", "CUDA error")
    slurm.command("sbatch", "Submitted batch job 78\n")
    assert SlurmAllocation.continue_elsewhere(None, root, read_job(root)) == "78"  # type: ignore[arg-type]
    assert read_job(root).job_id == "78" and "#SBATCH --exclude=n3\n" in (root / "job.sbatch").read_text()
