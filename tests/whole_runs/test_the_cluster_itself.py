"""The test cluster itself: what the tests on it rely on."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.children import read_line
from tests.support.cluster import Cluster
from tools.cluster import processes
from tools.cluster.config import START_FILE, START_FILES
from tools.cluster.layout import GRACE, REPO
from tools.cluster.roots import version

pytestmark = pytest.mark.cluster

LOOK = """
import json, os, socket, sys
print(json.dumps({"host": socket.gethostname(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "tmp": os.listdir("/tmp"),
                  "shm": os.listdir("/dev/shm"), "interfaces": sorted(os.listdir("/sys/class/net")), "python": sys.executable}))
"""

#: Open MPI wants MPI_Finalize; in Debian's MPICH 4.0.2 it hangs now and then over TCP (UCX waits for peers that have
#: left), and a rank that takes its time to end without it is now and then hung up on because another of its host was
#: quicker
HELLO = """
import os, socket
import mpi4py
mpi4py.rc.finalize = os.environ.get("MPI4PY_MPIABI") != "mpich"
from mpi4py import MPI
world = MPI.COMM_WORLD
names = world.gather(socket.gethostname())
world.Barrier()
if world.rank == 0:
    print(MPI.Get_library_version().split()[0], *names, flush=True)
world.Barrier()
if not mpi4py.rc.finalize:
    os._exit(0)
"""


def test_every_node_is_a_host_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("touch /tmp/mine /dev/shm/mine", "node2")
    (tmp_path / "look.py").write_text(LOOK)
    # one step, one task a node: the shared file is seen by all, /tmp by none of the others
    steps = cluster.run(
        [
            "srun",
            "--nodes=4",
            "--gpus-per-node=8",
            "--gpus-per-task=8",
            "--ntasks-per-node=1",
            sys.executable,
            tmp_path / "look.py",
        ]
    )
    seen = {entry["host"]: entry for entry in map(json.loads, steps.stdout.splitlines())}
    assert sorted(seen) == cluster.nodes == ["node1", "node2", "node3", "node4"]
    for host, entry in seen.items():
        assert entry["gpus"] == "0,1,2,3,4,5,6,7"
        assert [("mine" in entry[place]) for place in ("tmp", "shm")] == [host == "node2"] * 2
        assert entry["interfaces"] == ["eth0", "lo"] or os.geteuid() != 0
        assert entry["python"] == sys.executable
    addresses = {cluster.run(["ip", "-4", "-brief", "address", "show", "eth0"], node).stdout for node in cluster.hosts}
    assert len(addresses) == len(cluster.hosts)
    cluster.run("rm /tmp/mine /dev/shm/mine", "node2")


def test_all_that_a_node_runs_is_of_the_release(cluster: Cluster) -> None:
    """Every node has the Slurm of the root that it was started with, not the machine's."""
    suite = cluster.layout.release
    if not suite:
        pytest.skip("the machine's own release")
    for node in cluster.hosts:
        assert cluster.run(["slurmd", "-V"], node).stdout.split()[-1] == version(suite)
        assert suite in cluster.run("cat /etc/debian_version /etc/os-release", node).stdout
    assert cluster.run(["srun", "-N4", "slurmd", "-V"]).stdout.split()[1::2] == [version(suite)] * 4


def test_heterogeneous_job_and_accounting(cluster: Cluster, tmp_path: Path) -> None:
    """A heterogeneous job starts, and accounting knows it."""
    script = f"""#!/bin/bash
#SBATCH --partition=train --nodes=2 --gpus-per-node=4 --output={tmp_path}/out
#SBATCH hetjob
#SBATCH --partition=rollout --nodes=1 --gpus-per-node=2
srun --het-group=0 hostname &
srun --het-group=1 bash -c 'hostname; echo $CUDA_VISIBLE_DEVICES' &
wait
"""
    job = cluster.sbatch(script=script)
    cluster.wait_state(job, "COMPLETED", 60)
    assert sorted((tmp_path / "out").read_text().split()) == ["0,1", "node1", "node2", "node3"]
    deadline = time.monotonic() + 60
    while {(f"{job}+0", "COMPLETED"), (f"{job}+1", "COMPLETED")} - set(cluster.sacct(job)):
        assert time.monotonic() < deadline, cluster.sacct(job)
        time.sleep(0.2)


def test_impossible_job_is_refused_or_pends(cluster: Cluster, tmp_path: Path) -> None:
    """As where EnforcePartLimits is not set, which is Slurm's default.

    The older Slurm knows at once why a job waits, the newer when it first tries to start it; and the newer `--test-only`
    takes more nodes than a partition allows.
    """
    for option, limit in (("-t30", "PartitionTimeLimit"), ("-N2", "PartitionNodeLimit")):
        job = cluster.sbatch("-p", "small", option, "-o", tmp_path / "log", "--wrap", "true")
        deadline = time.monotonic() + 20
        while (reason := cluster.job(job)["Reason"]) not in {"PartitionConfig", limit}:
            assert time.monotonic() < deadline, reason
            time.sleep(0.1)
        cluster.run(["scancel", str(job)])
    for arguments in (["-p", "none"], ["--gpus-per-node=9"], ["-A", "nobody"]):
        result = cluster.run(["sbatch", "--test-only", *arguments, "--wrap", "true"], check=False)
        assert result.returncode != 0, (arguments, result.stdout)


def test_the_stronger_job_pushes_out_the_weaker(cluster: Cluster, tmp_path: Path) -> None:
    """By its partition, and by its QOS: on two nodes each, at the same time."""
    script = '#!/bin/bash\n[ -n "$SLURM_RESTART_COUNT" ] || exec sleep 600\n'
    alone = ["--exclusive", "-o", tmp_path / "log-%j"]
    kinds = [
        ("node[1-2]", "node1", ["-p", "low"], ["-p", "main"]),
        ("node[3-4]", "node3", ["--qos=low"], ["--qos=high"]),
    ]
    pushed = [cluster.sbatch("--requeue", "-w", nodes, *alone, *weak, script=script) for nodes, _, weak, _ in kinds]
    for job in pushed:
        cluster.wait_state(job, "RUNNING", 10)
    for job in [cluster.sbatch("-w", node, *alone, *strong, "--wrap", "true") for _, node, _, strong in kinds]:
        cluster.wait_state(job, "COMPLETED", GRACE + 20)  # the weaker has its grace time, and takes no notice of it
    for job in pushed:
        cluster.wait_state(job, "COMPLETED", 40)
        assert cluster.job(job)["Restarts"] == "1"


def test_after_a_power_cut_the_job_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    script = '#!/bin/bash\n[ -n "$SLURM_RESTART_COUNT" ] && exec hostname\nsrun --overlap sleep 600\n'
    job = cluster.sbatch("--requeue", "-w", "node4", "-o", tmp_path / "log", script=script)
    cluster.wait_state(job, "RUNNING", 10)
    deadline = time.monotonic() + 10
    while not any("sleep" in argv for _, argv in cluster.processes("node4")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster.kill_node("node4")
    assert "node4" not in cluster.all_processes()
    # Slurm finds out by itself
    deadline = time.monotonic() + 60
    while not cluster.node_states()["node4"].startswith("down"):
        assert time.monotonic() < deadline, cluster.node_states()
        time.sleep(0.5)
    assert ("NODE_FAIL") in {state for _, state in cluster.sacct(job, duplicates=True)}
    cluster.boot_node("node4")
    cluster.wait_state(job, "COMPLETED", 40)
    assert (tmp_path / "log").read_text().split()[-1] == "node4"


def test_pulled_cable(cluster: Cluster) -> None:
    """A pulled cable cuts off a host and nothing else."""
    knock = "timeout 1 bash -c 'echo > /dev/tcp/node3/22'"
    cluster.run(knock)
    cluster.link("node3", "down")
    assert cluster.run(knock, check=False).returncode != 0
    assert cluster.run(knock, "node3").returncode == 0
    cluster.link("node3", "up")
    cluster.run(knock)


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_mpirun_reaches_the_nodes_over_ssh(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    hosts = cluster.hostfile(mpi, ["node3", "node1", "node2"], 2)
    # of the environment, Open MPI hands on to other hosts what it is told to
    openmpi = ["mpirun.openmpi", "-x", "MPI4PY_MPIABI", "--hostfile", hosts]
    launch = {"openmpi": openmpi, "mpich": ["mpiexec.mpich", "-f", hosts]}[mpi]
    result = cluster.run(
        [*launch, "-n", "5", sys.executable, tmp_path / "hello.py"], env=cluster.mpirun_env(mpi), timeout=40
    )
    name = {"openmpi": "Open", "mpich": "MPICH"}[mpi]
    assert result.stdout.split() == [name, "node3", "node3", "node1", "node1", "node2"]


def test_shells_skip_the_users_files(cluster: Cluster) -> None:
    """They may take long, and write into his home what a node that loses its power leaves there half done (pyenv's lock
    is one)."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    there = [home / name for name in START_FILES if (home / name).is_file()]
    seen = cluster.run(["ssh", "node1", "cat", *there]).stdout
    assert seen == START_FILE * len(there) and not any(path.read_text() == START_FILE for path in there)


def test_what_a_test_leaves_is_found_and_removed(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("setsid sleep 601 </dev/null >/dev/null 2>&1 &", "node1")
    cluster.sbatch("--begin=now+1hour", "-o", tmp_path / "log", "--wrap", "true")
    left = cluster.clean(seconds=1)
    assert any("sleep 601" in line for line in left) and any("PENDING" in line for line in left)
    assert cluster.clean() == []


def test_nothing_outlives_its_starter(cluster: Cluster, tmp_path: Path) -> None:
    """A second cluster beside the first; its starter is killed without a chance to clean up, once up and once half
    up."""
    code = "import sys, time; from pathlib import Path; from tools.cluster import control\n"
    code += "control.start(Path(sys.argv[1]), nodes=1, accounting=False); print('up', flush=True); time.sleep(600)"
    for wait_until_up in (True, False):
        starter = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=REPO, stdout=subprocess.PIPE, text=True)
        assert starter.stdout is not None
        if wait_until_up:
            assert read_line(starter, 240) == "up\n"
        deadline = time.monotonic() + 20
        while (first := processes.first("tools.cluster.sandbox", str(tmp_path))) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        namespace = os.readlink(f"/proc/{first}/ns/net")
        starter.send_signal(signal.SIGKILL)
        starter.wait(60)
        while any(str(tmp_path) in " ".join(process.argv) for process in processes.everything()):
            assert time.monotonic() < deadline + 10, "something is left"
            time.sleep(0.02)
        assert namespace not in {_net(process.pid) for process in processes.everything()}
        starter.stdout.close()
    assert str(tmp_path) + "/.cluster" not in Path("/proc/self/mounts").read_text()
    assert set(cluster.node_states().values()) == {"idle"}


def _net(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
