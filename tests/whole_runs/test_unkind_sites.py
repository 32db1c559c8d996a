"""Runs on a cluster that is as unkind as real sites are (tests/support/unkind.py); tests/soak/test_unkind_sites.py has
more."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.runs import REPO, SubmittedRun, sft
from tests.support.slurm import ENV, Job, hpcrl
from tests.support.torn_srun import install
from tests.support.unkind import BARE, HOSTILE, bare, careless_site, command, trains  # noqa: F401

pytestmark = pytest.mark.cluster


def test_the_cluster_is_as_unkind_as_it_says(bare: Cluster, tmp_path: Path) -> None:  # noqa: F811
    """No line of several nodes' output is whole, each node has a TMPDIR of its own, and a job gets whole cores."""
    line = json.dumps(["x" * 700])
    words = f"for i in 1 2 3; do echo '{line}'; done; echo $TMPDIR > {tmp_path}/$SLURMD_NODENAME; test -d $TMPDIR"
    job = ["srun", "--partition=cpu", "--nodes=3", "--ntasks-per-node=1", "--unbuffered", "bash", "-c", words]
    torn = bare.run(job, env={"PATH": f"{install(tmp_path / 'bin')}:/usr/bin:/bin"}).stdout
    assert len(torn.replace("\n", "")) == 9 * len(line) and torn.count(line) < 9, "lines are torn, and nothing is lost"
    assert len({(tmp_path / node).read_text() for node in bare.nodes}) == 3
    number = bare.sbatch("--partition=cpu", "--cpus-per-task=1", script="#!/bin/bash\n")
    bare.wait_state(number, "COMPLETED", 30)  # one that waits shows what was asked for
    assert bare.job(number)["NumCPUs"] == "2"


def test_missing_default_partition(
    bare: Cluster,  # noqa: F811
    tmp_path: Path,
    task: Path,
) -> None:
    """Without a default partition, the hint comes before the queue."""
    done = hpcrl(bare, "submit", sft(tmp_path, task), "--run-dir", tmp_path / "run", "--set", *BARE, check=False)
    assert done.returncode == 2 and "partition" in done.stderr and not (tmp_path / "run").exists(), done.stderr
    words = ["submit", sft(tmp_path, task), "--run-dir", tmp_path / "run", "--set", *BARE, "trainer.partition=one1"]
    done = hpcrl(bare, *words, check=False)
    said = "trainer.partition one1: 2 nodes with 2 CPUs asked for; 1 of its 1 nodes have that"
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_whatever_a_site_does_the_run_trains(bare: Cluster, tmp_path: Path, task: Path) -> None:  # noqa: F811
    """Submitted from inside another job, whose size, memory and ranks are not the new one's; Slurm hands no variable
    on, the set-up reads what is not set and ends badly, home is read-only, TMPDIR differs by node, srun tears the lines
    of its tasks."""
    words = shlex.join(command(sft(tmp_path, task, num_rollout=3), tmp_path / "run"))
    exports = " ".join(f"{name}={value}" for name, value in {**HOSTILE, "HPCRL_SITE": careless_site(tmp_path)}.items())
    outer = f"#!/bin/bash\ncd {REPO}\nexport PMIX_RANK=0 PMI_RANK=0 {exports}\n{words} > {tmp_path}/said 2>&1\n"
    number = bare.sbatch("--partition=cpu", "--nodes=1", "--mem-per-cpu=100", "--exclusive", script=outer)
    bare.wait_state(number, {"COMPLETED", "FAILED"}, 240)
    said = (tmp_path / "said").read_text()
    found = re.search(r"^job (\d+)", said, re.MULTILINE)  # behind notes
    assert found, said
    job = Job(bare, tmp_path / "run", int(found[1]))
    trains(job, 3)
    script = (job.root / "job.sbatch").read_text()
    assert "--gpus" not in script and "--gres" not in script and "--hint=nomultithread" in script


def guides_command() -> list[str]:
    """What docs/slurm.md says to type for the quick start, less --dry-run."""
    page = (REPO / "docs" / "slurm.md").read_text()
    block = next(
        part for part in page.split("\n\n") if "submit examples/quickstart.toml" in part and "--dry-run" in part
    )
    words = shlex.split(block.replace("\\\n", " "))
    assert words[:2] == ["hpcrl", "submit"]
    return [
        sys.executable,
        "-m",
        *(str(REPO / word) if word.startswith("examples/") else word for word in words if word != "--dry-run"),
    ]


def test_the_quick_start_runs_as_the_guide_has_it(bare: Cluster, tmp_path: Path) -> None:  # noqa: F811
    """With a profile that names the partition, as the guide says; two rollouts a stage, the whole of it is a
    campaign."""
    (tmp_path / "mine.toml").write_text('[trainer]\npartition = "cpu"\n[engine]\npartition = "cpu"\n')
    told = ENV | {"HPCRL_SITE": str(tmp_path / "mine.toml")}
    shown = bare.run([*guides_command(), "--dry-run"], env=told, cwd=tmp_path).stdout
    assert "#SBATCH --partition=cpu" in shown and "--gpus" not in shown and not (tmp_path / "runs").exists()
    shorter = ["--sft.num-rollout", "2", "--grpo.num-rollout", "2"]
    said = bare.run([*guides_command(), *shorter], env=told, cwd=tmp_path).stdout
    job = Job(bare, Path(re.search(r"run directory: (\S+)", said)[1]), int(re.match(r"job (\d+)", said)[1]))
    job.ends(seconds=480)
    grpo = SubmittedRun(job.root / "grpo")
    assert grpo.steps() == 2 and SubmittedRun(job.root / "sft").steps() == 2, job.logs()
    plan = json.loads((grpo.root / "attempts/0/plan.json").read_text())
    assert len({place["host"] for place in (*plan["trainers"], *plan["engines"])}) == 3
