"""The fake Slurm of the tests (tests/support/fake_slurm) does and says what Slurm does: the same tests over both."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.batch import FakeSlurmQueue, Queue
from tests.support.cluster import ENDED
from tests.support.runs import alive

over_both = pytest.mark.parametrize(
    "queue",
    [
        pytest.param("fake", marks=[pytest.mark.process, pytest.mark.core]),
        pytest.param("slurm", marks=pytest.mark.cluster),
    ],
    indirect=True,
)
OPTIONS = "#SBATCH --job-name=x-hpcrl --comment=hpcrl:abc --time=5 --open-mode=append --signal=B:USR1@110\n"


def submit(queue: Queue, path: Path, options: str, lines: str) -> str:
    """The number of a job with that script, whose output is `path`/out."""
    (path / "job.sh").write_text(f"#!/bin/bash\n{OPTIONS}#SBATCH --output={path}/out\n{options}{lines}")
    return said(queue, "sbatch", "--parsable", str(path / "job.sh")).split(";")[0].strip()


def said(queue: Queue, *words: str) -> str:
    done = queue.cluster.run(words, check=False)
    return done.stdout + done.stderr


def until(condition: Callable[[], bool], what: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def ends(queue: Queue, number: str) -> str:
    """The state in which a job ends."""
    until(
        lambda: queue.cluster.job(int(number))["JobState"] in ENDED,
        lambda: said(queue, "scontrol", "show", "job", number),
    )
    return queue.cluster.job(int(number))["JobState"]


def output(path: Path) -> list[str]:
    """The lines of a job's output; of what differs between two jobs, or two configurations of slurmd, nothing."""
    text = (path / "out").read_text()
    for pattern, plain in (
        (r"\d{4}-\d\d-\d\dT[\d:]+", "TIME"),
        (r"StepId=\d+", "StepId=N"),
        (r"(STEP|JOB) \d+", r"\1 N"),
        (r"slurmstepd-\w+:", "slurmstepd:"),
    ):
        text = re.sub(pattern, plain, text)
    return [line for line in text.splitlines() if "Force Terminated" not in line]


@over_both
def test_steps_of_a_heterogeneous_job(queue: Queue, tmp_path: Path) -> None:
    """Components and nodes, tasks and their environment, and what srun says of tasks that end."""
    step = "srun --overlap --kill-on-bad-exit=1 --wait=0 --mpi=none --export=ALL"
    task = "echo $SLURM_LOCALID $SLURM_NODEID $SLURMD_NODENAME > {}/task$SLURM_PROCID; [ $SLURM_PROCID = 1 ] && sleep 1 && exit 3; exec sleep 100"
    number = submit(
        queue,
        tmp_path,
        "#SBATCH --hold --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --mem=1G\n#SBATCH hetjob\n#SBATCH --nodes=1 --mem=1G\n",
        f"""
echo $SLURM_HET_SIZE $SLURM_JOB_NODELIST_HET_GROUP_0 $SLURM_JOB_NODELIST_HET_GROUP_1 $SLURMD_NODENAME
{step} --het-group=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 bash -c '{task.format(tmp_path)}'
echo status $?
{step} --het-group=1 --nodes=1 --ntasks=1 bash -c 'echo $SLURMD_NODENAME; sleep 1; kill -9 $$'
echo status $?
{step} --het-group=0 --nodelist=node2 --nodes=1 --ntasks=1 bash -c 'echo $SLURMD_NODENAME'
exit 7
""",
    )
    form = "--format=%i|%T|%r|%D|%j|%k|%b|%l|%P|%N|%e"
    component = "PENDING|JobHeldUser|{}|x-hpcrl|hpcrl:abc|{}|5:00|main||N/A"
    assert sorted(said(queue, "squeue", "--noheader", "--jobs", number, form).splitlines()) == [
        f"{number}+0|{component.format(2, 'gres:gpu:1')}",
        f"{number}+1|{component.format(1, 'N/A')}",
    ]
    said(queue, "scontrol", "release", number)
    assert ends(queue, number) == "FAILED"
    lines = output(tmp_path)
    cancelled = "slurmstepd: error: *** STEP N.{} ON node{} CANCELLED AT TIME ***"
    if isinstance(queue, FakeSlurmQueue):  # Slurm's own line comes only where the task ends after it is sent
        assert cancelled.format(0, 1) in lines
    assert [line for line in lines if line not in (cancelled.format(0, 1), cancelled.format(1, 3))] == [
        "2 node[1-2] node3 node1",
        "srun: error: node2: task 1: Exited with exit code 3",
        "srun: launch/slurm: _step_signal: Terminating StepId=N.0",
        "srun: error: node1: task 0: Terminated",
        "status 143",
        "node3",
        "srun: error: node3: task 0: Killed",
        "srun: launch/slurm: _step_signal: Terminating StepId=N.1",
        "status 137",
        "node2",
    ]
    assert [(tmp_path / f"task{rank}").read_text() for rank in (0, 1)] == ["0 0 node1\n", "0 1 node2\n"]
    job = queue.cluster.job(int(number))
    assert (job["ExitCode"], job["NodeList"], job["Restarts"]) == ("7:0", "node[1-2]", "0")


@over_both
def test_a_job_is_requeued_and_cancelled(queue: Queue, tmp_path: Path) -> None:
    """With all that it has started, also what left its process group."""
    number = submit(
        queue,
        tmp_path,
        "#SBATCH --mem=1G --requeue\n",
        f"""
trap 'echo warned' USR1
setsid sleep 1000 &
echo $! >> {tmp_path}/pids
echo start $SLURM_RESTART_COUNT
while true; do sleep 1; done
""",
    )
    until(lambda: "start" in (said(queue, "cat", f"{tmp_path}/out")), lambda: said(queue, "squeue"))
    said(queue, "scancel", "--batch", "--signal=USR1", number)
    until(lambda: "warned" in output(tmp_path), lambda: output(tmp_path))
    assert said(queue, "scontrol", "requeue", number) == ""
    assert said(queue, "scontrol", "requeue", number) == f"Job is pending execution for job {number}\n"
    until(lambda: "start 1" in output(tmp_path), lambda: output(tmp_path))
    said(queue, "scancel", number)
    assert ends(queue, number) == "CANCELLED"
    lines = [line for line in output(tmp_path) if "Terminated" not in line]
    cancelled = "slurmstepd: error: *** JOB N ON node1 CANCELLED AT TIME"
    assert lines == ["start", "warned", f"{cancelled} DUE TO JOB REQUEUE ***", "start 1", f"{cancelled} ***"]
    if isinstance(queue, FakeSlurmQueue):  # of the cluster, its fixture looks
        assert not [pid for pid in map(int, (tmp_path / "pids").read_text().split()) if alive(pid)]


@over_both
def test_what_is_refused(queue: Queue, tmp_path: Path) -> None:
    unknown = "{0}: unrecognized option '--bogus'\nTry \"{0} --help\" for more information\n"
    no_job = "Invalid job id specified"
    for words, answer in (
        *((f"{name} --bogus", unknown.format(name)) for name in ("sbatch", "srun", "squeue", "scontrol", "scancel")),
        ("scontrol hold 99", f"{no_job} for job 99\nslurm_suspend error: {no_job}\n"),
        ("scontrol requeue 99", f"{no_job} for job 99\n"),
        ("scontrol show job 99", f"slurm_load_jobs error: {no_job}\n"),
        ("squeue --jobs 99", f"slurm_load_jobs error: {no_job}\n"),
        ("scontrol show partition nope", "Partition nope not found\n"),
        ("scancel 99", ""),
    ):
        assert said(queue, *words.split()) == answer, words


@pytest.mark.process
@pytest.mark.core
@pytest.mark.parametrize("queue", ["fake"], indirect=True)
def test_jobs_wait_for_nodes_time_and_jobs(queue: Queue, tmp_path: Path) -> None:
    """A job that cannot be placed lets none pass; one ends at its time limit; another is not started without it."""
    whole = "#SBATCH --nodes=3 --exclusive\n"
    first = submit(queue, tmp_path, whole, "trap 'echo warned' USR1\nwhile true; do sleep 0.1; done\n")
    second = submit(queue, tmp_path, whole, "echo second\n")
    third = submit(queue, tmp_path, "#SBATCH --nodes=1\n", "echo third\n")
    chained = submit(
        queue, tmp_path, f"#SBATCH --dependency=afterok:{first} --kill-on-invalid-dep=yes\n", "echo never\n"
    )
    reasons = said(queue, "squeue", "--noheader", "--format=%i %t %R").splitlines()
    assert reasons[1:] == [f"{second} PD (Resources)", f"{third} PD (Priority)", f"{chained} PD (Dependency)"], reasons
    said(queue, "scontrol", "update", f"jobid={first}", "timelimit=1")  # within its margin, and then past its end
    until(lambda: "warned" in output(tmp_path), lambda: said(queue, "squeue"))
    said(queue, "scontrol", "update", f"jobid={first}", "timelimit=0")
    assert [ends(queue, job) for job in (first, second, third, chained)] == [
        "TIMEOUT",
        "COMPLETED",
        "COMPLETED",
        "CANCELLED",
    ]
    assert any("DUE TO TIME LIMIT" in line for line in output(tmp_path))
    assert "never" not in output(tmp_path)
