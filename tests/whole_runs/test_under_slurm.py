"""Whole runs under a real Slurm, over several hosts: heterogeneous and homogeneous jobs, cut, requeued, broken."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.runs import KEPT, Run, metrics, policy, rows, sft
from tests.support.slurm import ENV, HURRY, MEMORY, Job, hpcrl, submit
from tests.support.status_watch import StatusWatch

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def het(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, task: Path) -> Job:
    """A finished run as a heterogeneous job, tensor-parallel over two hosts, the rollout process on a component of its
    own.

    Its directory has what sbatch would replace in the name of an output file.
    """
    path = tmp_path_factory.mktemp("het")
    job = submit(
        cluster,
        policy(path, task, tensor_model_parallel_size=2),
        path / "100%j run",
        settings=("rollout.partition=main",),
    )
    job.ends()
    return job


def test_heterogeneous_job_over_four_hosts(het: Job) -> None:
    """A heterogeneous job trains to the end over four hosts."""
    assert list(metrics(het.root)) == list(range(5))
    for row in metrics(het.root).values():
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-5 and row["train/grad_norm"] > 0
    plan = json.loads((het.root / "attempts/0/plan.json").read_text())
    hosts = [*(place["host"] for place in plan["trainers"]), plan["engines"][0]["host"], plan["rollout"]["host"]]
    assert len(set(hosts)) == 4
    assert [p["address"] for p in plan["trainers"]] == [het.cluster.layout.address(p["host"]) for p in plan["trainers"]]
    assert {place["interface"] for place in plan["trainers"]} == {"eth0"}


def test_percent_sign_in_run_directory(cluster: Cluster, het: Job) -> None:
    """A percent sign in the run directory is not one of Slurm's patterns."""
    assert (het.root / "logs" / f"job-{het.number}.out").is_file()
    assert cluster.job(het.number)["StdOut"].startswith(str(het.root.parent / "100"))


def test_submitits_job_knows_state_output_and_result(cluster: Cluster, het: Job) -> None:
    code = (
        f"import json; from hpcrl.launch.slurm.het_executor import HetJob;job = HetJob({str(het.root / 'submitit')!r}, "
        f"{str(het.number)!r}); print(json.dumps([job.state, job.result()]))"
    )
    state, result = json.loads(cluster.run([sys.executable, "-c", code], env=ENV).stdout.splitlines()[-1])
    assert state == "COMPLETED"
    assert result == json.loads((het.root / "summary.json").read_text())
    assert result["status"] == "finished" and result["rollout_id"] == 5


#: before the page's code, and after it
BEFORE = """
import json, time, hpcrl
long = hpcrl.submit(RECIPE, site="mine", set={"trainer.mem": "8G"}, run_dir="runs/long", num_rollout=100000)
"""
AFTER = """
trained = lambda run: len([row for row in run.metrics(frame=False) if "train/loss" in row])
run = hpcrl.open("runs/one")
found = {"one": [run.status.phase, run.status.step, trained(run), len(run.checkpoints)]}
second = hpcrl.open(job.job_id)
found["by_number"] = str(second.root) == str(run.root)
other = hpcrl.open(HET)
found["het"] = [other.status.phase, trained(other), len(other.checkpoints), other.samples()]
run = hpcrl.open("runs/long")
until = time.monotonic() + 200
while (run.status.step or 0) < 2:
    assert time.monotonic() < until, run.status
    time.sleep(0.2)
found["working"] = [run.status.phase, long.state]
run.stop()
ended = run.wait(200)
while not long.done():
    assert time.monotonic() < until, long.state
    time.sleep(0.2)
found["stopped"] = [ended.phase, ended.step, trained(run), [path.name for path in run.checkpoints]]
print(json.dumps(found))
"""


def test_the_python_of_the_document_runs(cluster: Cluster, het: Job, tmp_path: Path, task: Path) -> None:
    """`hpcrl.submit` returns submitit's Job, which waits for the run's summary; `hpcrl.open` says of that run, of one
    with samples, and of one that trains meanwhile what became of them, and `stop` has the last save and end."""
    page = (Path(__file__).parents[2] / "docs/slurm.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "mine.toml").write_text('[trainer]\nmem = "8G"\ngpus_per_node = 0\n')
    done = cluster.run(
        [
            sys.executable,
            "-c",
            f"HET = {str(het.root)!r}\n"
            + (BEFORE + code + AFTER)
            .replace('"recipe.toml"', "RECIPE")
            .replace("num_rollout=100\n", "num_rollout=2\n")
            .replace("RECIPE", repr(str(sft(tmp_path, task)))),
        ],
        env=ENV | {"HPCRL_SITES": str(tmp_path)},
        cwd=tmp_path,
    )
    assert "'status': 'finished'" in done.stdout and len(metrics(tmp_path / "runs/one")) == 2
    assert "--gpus-per-node" not in (tmp_path / "runs/one/job.sbatch").read_text()
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["one"] == ["finished", 2, 2, 1] and found["by_number"]
    phase, steps, checkpoints, samples = found["het"]
    assert (phase, steps) == ("finished", 5) and checkpoints
    assert samples and {"prompt", "response", "reward"} <= samples[0].keys()
    assert found["working"] == ["running", "RUNNING"]
    phase, step, steps, names = found["stopped"]
    assert phase == "stopped" and step == steps >= 2 and names[-1] == f"iter_{step:07d}"


def test_status_of_a_finished_job(cluster: Cluster, het: Job) -> None:
    """Status knows a finished job with and without Slurm."""
    for node in ("head", "node1"):
        assert "finished" in hpcrl(cluster, "status", het.root, node=node).stdout
    bare = ["env", f"PATH={Path(sys.executable).parent}", sys.executable, "-m", "hpcrl", "status", str(het.root)]
    assert "finished" in cluster.run(bare, env=ENV).stdout


def test_script_given_to_sbatch(cluster: Cluster, het: Job, tmp_path: Path, task: Path) -> None:
    """A homogeneous script given to sbatch directly gives the same losses."""
    path = policy(tmp_path, task, tensor_model_parallel_size=2)
    settings = ["--layout", "homogeneous", "--set", "trainer.mem=8G", "engine.mem=8G", "rank_launcher=ranks"]
    printed = hpcrl(cluster, "submit", path, "--print", *settings).stdout
    script = tmp_path / "job.sbatch"
    script.write_text(printed)
    number = cluster.sbatch(script, cwd=tmp_path, env=ENV)
    job = Job(cluster, tmp_path / "runs" / f"recipe-{number}", number)
    job.ends()
    assert cluster.job(job.number)["NumNodes"] == "3" and list(cluster.states(job.number)) == [str(job.number)]
    assert metrics(job.root) == metrics(het.root)


# ---- cut and continued


def test_same_losses_after_any_interruption(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """Out of time, requeued by an administrator, preempted, a node lost: one run, bit for bit that of an uncut one.

    Slurm repeats a signal that a lost node did not take a minute later, to the step of the same number of a job that was
    queued again meanwhile: so there may be one attempt more than starts of the job.
    """
    steps = {"num_rollout": 48, "save_interval": 2, "custom_rm_path": "tests.support.slurm.slow", "eval_interval": None}
    steps |= {"eval_prompt_data": None, "eval_label_key": None, "check_weight_update_equal": False} | KEPT
    values = steps | {"custom_rm_path": "tests.support.runs.odd_tokens"}
    (tmp_path / "uncut").mkdir()
    uncut = Run(
        policy(tmp_path / "uncut", task, **values, run_dir=str(tmp_path / "uncut/run")), root=tmp_path / "uncut/run"
    )
    (tmp_path / "cut").mkdir()
    job = submit(
        cluster,
        policy(tmp_path / "cut", task, **steps),
        tmp_path / "cut/run",
        *("--time", "30"),
        settings=("signal_margin=110", "trainer.partition=low", "engine.partition=low"),
    )
    with StatusWatch(job) as watch:
        job.until(lambda: job.training(0))
        job.limit(40)  # Slurm signals that the limit is near: the run saves and queues itself again
        job.until(lambda: set(cluster.states(job.number).values()) == {"PENDING"})
        out = (job.root / f"logs/job-{job.number}.out").read_text()
        assert "time limit is near)" in " ".join(out.split()) and "(1 of 20 requeues)" in " ".join(out.split()), (
            job.logs()
        )
        cluster.run(["scontrol", "update", f"jobid={job.number}", "timelimit=30"])
        job.until(lambda: job.trains_after(0))
        struck = job.attempt()
        cluster.run(["scontrol", "requeue", str(job.number)])
        job.until(lambda: job.trains_after(struck))
        struck = job.attempt()
        cluster.run("kill $(pgrep -x slurmctld); while pgrep -x slurmctld; do sleep 0.1; done; slurmctld")
        nodes = json.loads((job.root / f"attempts/{struck}/plan.json").read_text())
        taken = [place["host"] for place in nodes["trainers"]] + [nodes["engines"][0]["host"]]
        high = cluster.sbatch("-p", "main", f"--nodelist={taken[2]}", "--exclusive", "--wrap", "sleep 3")
        job.until(lambda: job.trains_after(struck))
        cluster.wait_state(high, "COMPLETED", 30)
        struck = job.attempt()
        lost = json.loads((job.root / f"attempts/{struck}/plan.json").read_text())["trainers"][1]["host"]
        cluster.kill_node(lost)
        job.until(lambda: job.trains_after(struck))
        assert re.search(rf"(host|answer from) {lost}\b", error(job.root, struck))
        cluster.boot_node(lost)
        cluster.wait_nodes(("idle", "mixed", "allocated"), 60)
        launchers, struck = json.loads((job.root / "state.json").read_text())["host"], job.attempt()
        cluster.kill_node(launchers, told=True)  # nobody of the run is left to say what became of it
        job.until(lambda: job.trains_after(struck))
        # An answer still on its way may return the node to service after the administrator's word: then Slurm's own reason
        # follows.
        assert re.match(
            rf"launcher-0: host {launchers} was lost \(Slurm.*had it down since.*: (power|Not responding)\)",
            error(job.root, struck),
        )
        (job.root / HURRY).touch()
        job.ends()
    cluster.boot_node(launchers)
    cluster.run(["scontrol", "update", f"nodename={launchers}", "state=resume"], check=False)
    cluster.wait_nodes("idle", 60)
    status, out = uncut.end()
    assert status == 0, out
    assert metrics(job.root) == metrics(uncut.root)
    assert 5 <= job.attempt() <= 8, "one for each interruption; a signal may cost another before its cause is known"
    print(f"seconds from the queue to training: {watch.waits()}; {len(watch.answers)} answers of hpcrl status compared")
    watch.check()


def error(root: Path, attempt: int) -> str:
    """The error of an attempt, as it stands in the run directory."""
    found = json.loads((root / "attempts" / str(attempt) / "error.json").read_text())
    return f"{found['role']}-{found['index']}: {found['message']}"


def test_status_names_the_guilty_host(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """The launcher was on it, and nobody comes after it."""
    path = sft(tmp_path, task, num_rollout=400, save_interval=None)
    job = submit(cluster, path, tmp_path / "run", settings=("requeue=false",))
    job.until(lambda: job.training(0))
    launchers = json.loads((job.root / "state.json").read_text())["host"]
    cluster.kill_node(launchers, told=True)
    cluster.wait_state(job.number, "NODE_FAIL", 60)
    cluster.boot_node(launchers)
    cluster.run(["scontrol", "update", f"nodename={launchers}", "state=resume"], check=False)
    cluster.wait_nodes("idle", 60)
    said = " ".join(hpcrl(cluster, "status", job.root, check=False).stdout.split())
    assert re.search(rf"of its nodes failed: {launchers} \(Slurm.*had it down since [\d:]+: power\)", said), said


# ---- broken


def lines(cluster: Cluster) -> list[str]:
    """The command lines of everything on the nodes."""
    return [" ".join(argv) for found in cluster.all_processes().values() for _, argv in found]


def running(cluster: Cluster, module: str) -> list[int]:
    return [pid for found in cluster.all_processes().values() for pid, argv in found if module in argv]


@pytest.mark.parametrize("what", ["engine", "trainer", pytest.param("rollout", marks=pytest.mark.soak)])
def test_failed_component_ends_only_its_run(cluster: Cluster, tmp_path: Path, task: Path, what: str) -> None:
    """When one component fails, all of its run ends and nothing else is touched."""
    decoy = tmp_path / "vllm"
    decoy.write_text("#!/bin/bash\nexec -a torchrun sleep 600\n")
    decoy.chmod(0o755)
    other = cluster.sbatch("--nodes=4", "--mem=1G", "--wrap", f"{decoy} & srun --overlap --mem=500M {decoy} & wait")
    cluster.wait_state(other, "RUNNING", 30)
    values = {"num_rollout": 400, "save_interval": None}
    path = policy(tmp_path, task, **values) if what == "engine" else sft(tmp_path, task, **values)
    job = submit(cluster, path, tmp_path / "run")
    module = {"engine": "hpcrl.engine.server", "trainer": "hpcrl.trainer.main", "rollout": "hpcrl.rollout.main"}[what]
    if what != "engine":  # which dies while it starts
        job.until(lambda: job.steps() > 1)
    job.until(lambda: bool(running(cluster, module)))
    os.kill(running(cluster, module)[-1], 9)
    job.ends("FAILED", 60)
    said = hpcrl(cluster, "status", job.root).stdout
    assert "failed" in said and what in said and "SIGKILL" in said, said
    job.until(
        lambda: (
            not [
                line for line in lines(cluster) if str(job.root) in line or "hpcrl" in line or f"[{job.number}" in line
            ]
        ),
        20,
    )
    assert set(cluster.states(other).values()) == {"RUNNING"}
    assert lines(cluster).count("torchrun 600") == 5
    cluster.run(["scancel", str(other)])


@pytest.mark.soak
def test_two_runs_on_the_same_nodes(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """Two runs on the same nodes do not disturb each other."""
    nodes = tuple(f"{part}.extra.nodelist={n}" for part, n in (("trainer", "node[1-2]"), ("engine", "node3")))
    jobs = []
    for name in ("a", "b"):
        path = policy(
            tmp_path / name,
            task,
            check_weight_update_equal=False,
            eval_interval=None,
            eval_prompt_data=None,
            eval_label_key=None,
        )
        jobs.append(submit(cluster, path, tmp_path / name / "run", settings=nodes))
    jobs[0].until(lambda: jobs[0].steps() > 0)
    cluster.run(
        ["scancel", "--signal=USR1", "--full", str(jobs[0].number)]
    )  # Slurm's early warning, to every process: nobody dies of it
    for job in jobs:
        job.ends()
    assert metrics(jobs[0].root) == metrics(jobs[1].root) and len(metrics(jobs[0].root)) == 5
    starts = [min(row["time"] for row in rows(job.root)) for job in jobs]
    ends = [max(row["time"] for row in rows(job.root)) for job in jobs]
    plans = [json.loads((job.root / "attempts/0/plan.json").read_text()) for job in jobs]
    assert {p["host"] for p in plans[0]["trainers"]} == {p["host"] for p in plans[1]["trainers"]}
    assert max(starts) < min(ends) + 60  # they ran side by side: neither waited for the other's nodes


# ---- refused


@pytest.mark.parametrize(
    ("words", "settings", "said"),
    [
        ((), ("trainer.partition=nosuch",), "trainer.partition nosuch"),
        ((), ("trainer.gpus_per_node=64",), "64 GPUs"),
        (("--time", "4:30"), ("trainer.partition=small",), "nodes"),
        (("--time", "3:00:00"), ("trainer.partition=small", "engine.partition=small"), "minutes"),
        (("--time", "2"), (), "too short"),
        (("--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"), (), "divided"),
    ],
)
def test_refused_before_submission(
    cluster: Cluster, tmp_path: Path, task: Path, words: tuple[str, ...], settings: tuple[str, ...], said: str
) -> None:
    """What Slurm cannot run is refused before submission."""
    before = cluster.run(["squeue", "-h", "-t", "all"]).stdout
    done = hpcrl(
        cluster,
        "submit",
        policy(tmp_path, task),
        "--run-dir",
        tmp_path / "run",
        *words,
        "--set",
        "trainer.mem=8G",
        "engine.mem=8G",
        *settings,
        check=False,
    )
    [error] = [line for line in done.stderr.splitlines() if not line.startswith("hpcrl: note:")]
    assert done.returncode == 2 and said in error and ";" in error, error  # one line, with a hint
    assert not (tmp_path / "run").exists()
    assert cluster.run(["squeue", "-h", "-t", "all"]).stdout == before


@pytest.mark.parametrize("down", ["node", "partition"])
def test_job_waits_for_down_nodes(cluster: Cluster, tmp_path: Path, task: Path, down: str) -> None:
    """As by plain sbatch; `sbatch --test-only` would refuse it."""
    path = sft(tmp_path, task, actor_num_nodes=4)
    root = tmp_path / "run"
    words = [path, "--run-dir", root, "--set", *MEMORY]
    broken, mended = {
        "node": (["nodename=node2", "state=drain", "reason=fan"], ["nodename=node2", "state=resume"]),
        "partition": (["partitionname=main", "state=down"], ["partitionname=main", "state=up"]),
    }[down]
    cluster.run(["scontrol", "update", *broken])
    try:
        looked = hpcrl(cluster, "doctor", *words, check=False).stdout
        assert "it will wait" in looked and "Slurm refuses" not in looked, looked
        shown = hpcrl(cluster, "submit", *words, "--dry-run").stdout
        assert "# sbatch --test-only says: " in shown
        job = submit(cluster, path, root)
        assert set(cluster.states(job.number).values()) == {"PENDING"}
        assert json.loads(hpcrl(cluster, "status", root, "--json").stdout)["phase"] == "pending"
        cluster.run(["scancel", str(job.number)])
    finally:
        cluster.run(["scontrol", "update", *mended])


def test_sbatch_refusal_in_one_line(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """What sbatch itself refuses is reported in one line and leaves nothing."""
    words = [policy(tmp_path, task), "--run-dir", tmp_path / "run", "--set", *MEMORY, "account=nobody"]
    for more in ([], ["--dry-run"]):
        done = hpcrl(cluster, "submit", *words[:3], *more, *words[3:], check=False)
        [error] = [line for line in done.stderr.splitlines() if not line.startswith("hpcrl: note:")]
        assert done.returncode == 2 and "Slurm refuses this job: " in error and "sacctmgr show assoc" in error, error
        assert not (tmp_path / "run").exists()
    looked = hpcrl(cluster, "doctor", *words, check=False)
    assert looked.returncode == 1 and "job like this run's" in looked.stdout, looked.stdout


def test_unshared_run_directory(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """/var/tmp is each node's own in this job: Slurm's output file is on the shared one, so that somebody can read
    it."""
    path = sft(tmp_path, task)
    printed = hpcrl(
        cluster, "submit", path, "--print", "--set", "trainer.mem=8G", "engine.mem=8G", "launch_timeout=20"
    ).stdout
    script = tmp_path / "job.sbatch"
    script.write_text(
        printed.replace('--run-dir "runs/', '--run-dir "/tmp/runs-').replace(
            "HPCRL_MAX_REQUEUES=20", "HPCRL_MAX_REQUEUES=0"
        )
    )
    number = cluster.sbatch(script, cwd=tmp_path, env=ENV)
    cluster.wait_state(number, "FAILED", 120)
    said = (tmp_path / f"hpcrl-{number}.out").read_text()
    assert "host node2 does not see /tmp/runs-" in said and "do all hosts share" in said
