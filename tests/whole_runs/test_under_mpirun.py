"""Whole runs under real mpiruns, Open MPI's and MPICH's, over several hosts; and what goes wrong there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.utils.waiting import Deadline, poll
from tests.support.cluster import Cluster
from tests.support.runs import metrics, policy, sft
from tests.support.slurm import ENV

pytestmark = pytest.mark.cluster
MPIRUN = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.mpich"}
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.getuid() == 0 else {}
UCX = {"UCX_TLS": "tcp,self"}  # MPICH's would take the namespaces of one machine for one host


def environment(cluster: Cluster, kind: str) -> dict[str, str]:
    return {**ENV, **ROOT, **UCX, **cluster.mpirun_env(kind)}


def launch(
    cluster: Cluster,
    kind: str,
    file: Path,
    *words: str | Path,
    check: bool = True,
    timeout: float = 240,
    env: Mapping[str, str] | None = None,
) -> Any:
    """`hpcrl launch` on the head, calling that mpirun; env: on top of what all of them have."""
    command = [sys.executable, "-m", "hpcrl", "launch", "--hostfile", file, "--mpirun", MPIRUN[kind], *words]
    return cluster.run(command, check=check, timeout=timeout, env={**environment(cluster, kind), **(env or {})})


@pytest.fixture(scope="module")
def under_openmpi(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    path = tmp_path_factory.mktemp("openmpi")
    hosts = cluster.hostfile("openmpi", ["node2", "node1", "node3"], path=path / "hosts")
    launch(cluster, "openmpi", hosts, policy(path, task, tensor_model_parallel_size=2), "--run-dir", path / "run")
    return path / "run"


def test_open_mpi_over_three_hosts(under_openmpi: Path) -> None:
    """Open MPI trains on two hosts and samples on a third."""
    assert list(metrics(under_openmpi)) == list(range(5))
    for row in metrics(under_openmpi).values():
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-5
    plan = json.loads((under_openmpi / "attempts/0/plan.json").read_text())
    assert [p["host"] for p in plan["trainers"]] == ["node2", "node1"]  # the order of the hostfile
    assert plan["engines"][0]["host"] == "node3"


def test_mpich_gives_the_same_losses(cluster: Cluster, under_openmpi: Path, tmp_path: Path, task: Path) -> None:
    """MPICH gives the same losses."""
    hosts = cluster.hostfile("mpich", ["node2", "node1", "node3"], path=tmp_path / "hosts")
    launch(
        cluster,
        "mpich",
        hosts,
        policy(tmp_path, task, tensor_model_parallel_size=2),
        "--run-dir",
        tmp_path / "run",
    )
    assert metrics(tmp_path / "run") == metrics(under_openmpi)


def test_started_by_mpirun(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """mpirun ... hpcrl launch, with roles from a file of slime's that no mpirun reads; the run goes on after a stop."""
    ours = tmp_path / "slime.txt"
    ours.write_text("".join(f"{cluster.layout.address(n)} slot=1\n" for n in ("node3", "node1")))
    theirs = cluster.hostfile("openmpi", ["node1", "node3"], path=tmp_path / "hosts")
    path = sft(tmp_path, task, num_rollout=4)
    command = [
        "mpirun.openmpi",
        "-x",
        "PYTHONPATH",
        "-x",
        "OMP_NUM_THREADS",
        "-x",
        "XDG_STATE_HOME",
        "-x",
        "MPI4PY_MPIABI",
        "--hostfile",
        theirs,
        "-np",
        "2",
        "--map-by",
        "ppr:1:node",
        sys.executable,
        "-m",
    ]
    command += ["hpcrl", "launch", path, "--hostfile", ours, "--run-dir", tmp_path / "run"]
    cluster.run(command, node="node2", timeout=120, env=environment(cluster, "openmpi"))
    assert list(metrics(tmp_path / "run")) == list(range(4))
    plan = json.loads((tmp_path / "run/attempts/0/plan.json").read_text())
    assert [p["host"] for p in plan["trainers"]] == [cluster.layout.address("node3"), cluster.layout.address("node1")]
    shown = cluster.run([sys.executable, "-m", "hpcrl", "hostfile", str(ours)], env=ENV)
    assert "slot=" in shown.stderr and "slots=" in shown.stderr  # how to write it for the launcher


def test_a_run_directory_that_is_not_shared(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """The host that does not see it is named before anything is started."""
    hosts = cluster.hostfile("openmpi", ["node1", "node2"], path=tmp_path / "hosts")
    path = policy(tmp_path, task, actor_num_nodes=1, num_rollout=2)
    done = launch(cluster, "openmpi", hosts, path, "--run-dir", "/tmp/apart", check=False)
    try:
        assert done.returncode == 2
        refused(done, "host node2 does not see the run directory", "/tmp/apart/job.json", "--run-dir")
        state = cluster.run("cat /tmp/apart/state.json; ls /tmp/apart/attempts", node="node1", check=False).stdout
        assert json.loads(state.partition("}")[0] + "}")["phase"] == "failed", state
        assert cluster.run("ls /tmp/apart", node="node2", check=False).returncode
    finally:
        cluster.run("rm -rf /tmp/apart", node="node1")


def training(cluster: Cluster, path: Path, task: Path, kind: str) -> subprocess.Popen[str]:
    """`hpcrl launch` of a long run on node1 and node2, which has trained two steps."""
    hosts = cluster.hostfile(kind, ["node1", "node2"], path=path / "hosts")
    recipe_file = sft(path, task, num_rollout=100000, save_interval=None)
    command = [sys.executable, "-m", "hpcrl", "launch", recipe_file, "--hostfile", hosts, "--mpirun", MPIRUN[kind]]
    running = cluster.popen([*command, "--run-dir", path / "run"], env=environment(cluster, kind))
    deadline = time.monotonic() + 120
    while len(metrics(path / "run")) < 2:
        if running.poll() is not None or time.monotonic() > deadline:
            running.kill()
            raise AssertionError(running.communicate(timeout=60)[0])
        time.sleep(0.1)
    return running


def left(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """What still runs of a run on its hosts, once nothing does or so many seconds have passed."""
    deadline = time.monotonic() + seconds
    while True:
        found = {
            node: [argv for _, argv in cluster.processes(node) if any("hpcrl" in word for word in argv)]
            for node in ("node1", "node2")
        }
        if not any(found.values()) or time.monotonic() > deadline:
            return {node: those for node, those in found.items() if those}
        time.sleep(0.2)


both = pytest.mark.parametrize("kind", ["openmpi", "mpich"])


def test_a_rank_that_dies_ends_the_run_on_every_host(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    running = training(cluster, tmp_path, task, "openmpi")
    try:
        [victim] = [pid for pid, argv in cluster.processes("node2") if "hpcrl.trainer.main" in argv]
        os.kill(victim, 9)
        said, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 1
    assert "rank 1 on node2 was killed by SIGKILL" in said
    there = lambda: any(cluster.processes(node) for node in ("node1", "node2"))  # noqa: E731
    assert poll(lambda: not there(), Deadline(15), 0.2), "mpirun's own daemons end a moment after it"


@both
def test_killed_mpirun_leaves_nothing(cluster: Cluster, tmp_path: Path, task: Path, kind: str) -> None:
    """Ten seconds after a SIGKILL of mpirun no host has a process of the run, and the run has failed."""
    running = training(cluster, tmp_path, task, kind)
    try:
        [mpirun] = [child for child in psutil.Process(running.pid).children(True) if MPIRUN[kind] in child.cmdline()[0]]
        mpirun.kill()
        assert not left(cluster, 10)
        said, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 1 and "killed by SIGKILL" in said
    assert json.loads((tmp_path / "run/state.json").read_text())["phase"] == "failed"


@both
def test_silent_host_ends_the_run(cluster: Cluster, tmp_path: Path, task: Path, kind: str) -> None:
    """A host that falls silent ends the run within a minute."""
    running = training(cluster, tmp_path, task, kind)
    try:
        cluster.link("node2", "down")
        assert not left(cluster, 60)
        error = json.loads((tmp_path / "run/attempts/0/error.json").read_text())
        assert "node2" in error["message"]
    finally:
        cluster.link("node2", "up")
        running.kill()
        cluster.restart_slurmd("node2")  # Slurm itself would look for it a minute later
        cluster.wait_nodes("idle", 90)


def test_frozen_mpi_rank_ends_the_run(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """An MPI rank that is stopped ends the run within a minute, with its host's name.  (MPICH may leave that process.)"""
    running = training(cluster, tmp_path, task, "openmpi")
    try:
        [rank] = [pid for pid, argv in cluster.processes("node2") if argv[1:4] == ["-m", "hpcrl", "launch"]]
        os.kill(rank, signal.SIGSTOP)
        assert not left(cluster, 60)
        said, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 1 and "host node2 did not answer for 20 s" in said


# ---- refused within a minute, by one line that names the host


def refused(done: Any, *words: str) -> None:
    errors = [line for line in done.stderr.splitlines() if line.startswith("hpcrl: error:")]
    assert done.returncode and len(errors) == 1 and all(word in errors[0] for word in words), done.stderr + done.stdout


def test_what_is_wrong_with_the_hosts_is_one_line(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    path = sft(tmp_path, task)

    def attempt(text: str, *words: str | Path) -> Any:
        (tmp_path / "h").write_text(text)
        began = time.monotonic()
        done = launch(cluster, "openmpi", tmp_path / "h", path, "--run-dir", tmp_path / "run", *words, check=False)
        assert time.monotonic() - began < 60
        assert not (tmp_path / "run").exists()
        return done

    refused(attempt("node1 slots=1\nnode9 slots=1\n"), "host node9 cannot be reached")
    refused(attempt("node1 slots=1\n", "--actor-num-gpus-per-node", "2"), "4 slots", "the hosts have 1")
    refused(attempt("node1 slots=1\n127.0.0.1 slots=1\n"), "127.0.0.1", "other hosts cannot reach", "address")
    refused(attempt("node1 slots=1\nNODE1 slots=1\n"), ":2:1", "one host")
    cluster.link("node4", "down")
    try:
        refused(attempt("node1 slots=1\nnode4 slots=1\n"), "host node4")
    finally:
        cluster.link("node4", "up")
        cluster.wait_nodes("idle", 90)
    start_up = cluster.layout.etc / "shell_start"  # some wait for a lock there, or for a slow file system
    usual = start_up.read_text()
    try:
        start_up.write_text("sleep 24\n")
        refused(
            attempt("node1 slots=1\nnode3 slots=1\n"),
            "host node1 accepts the connection",
            "~/.bashrc",
            "ssh node1 true",
        )
    finally:
        start_up.write_text(usual)


def test_two_networks_are_for_the_user_to_choose_from(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    hosts = cluster.hostfile("openmpi", ["node1", "node2"], path=tmp_path / "hosts")
    path = sft(tmp_path, task, num_rollout=1)
    for number, node in enumerate(("node1", "node2"), 1):
        cluster.run(
            f"ip link add fast0 type veth peer name fast1 && ip link set fast1 up && ip addr add 192.168.7.{number}/24 "
            "dev fast0 && ip link set fast0 up",
            node=node,
        )
    mpirun = MPIRUN["openmpi"] + " --mca btl_tcp_if_include eth0"
    command = [sys.executable, "-m", "hpcrl", "launch", path, "--hostfile", hosts, "--mpirun", mpirun]
    try:
        done = cluster.run([*command, "--run-dir", tmp_path / "a"], env=environment(cluster, "openmpi"), check=False)
        refused(done, "share 2 networks", "node1", "eth0", "fast0", "--interface")
        cluster.run([*command, "--run-dir", tmp_path / "b", "--interface", "eth"], env=environment(cluster, "openmpi"))
        assert len(metrics(tmp_path / "b")) == 1
    finally:
        for node in ("node1", "node2"):
            cluster.run("ip link del fast0", node=node)


def test_mpirun_is_here() -> None:
    """Both launchers are those of the system: what is tested is real."""
    assert shutil.which("mpirun.openmpi") and shutil.which("mpiexec.mpich")
