"""A real Slurm and MPI cluster for tests (tools/cluster): a head and four nodes with eight fake GPUs each.

    @pytest.mark.cluster
    def test_something(cluster, tmp_path):          # tmp_path is on the file system that all nodes share
        job = cluster.sbatch("--nodes=2", script="#!/bin/bash\nsrun hostname\n")
        cluster.wait_state(job, "COMPLETED", 30)

They run under the machine's own Slurm, or with CLUSTER_RELEASE=24.11 under that one (tools/cluster/roots.py).

One cluster serves all tests of a session.  After each test that used it nothing may be left: no job, no process on any
node, every node up; what is found is removed, and the test fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.able import require
from tools.cluster import control, roots
from tools.cluster.layout import HEAD, Layout, read

#: states in which Slurm is done with a job
ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
}


def release() -> str:
    """The release of Slurm that the tests run under: CLUSTER_RELEASE, else the machine's own."""
    return os.environ.get("CLUSTER_RELEASE") or roots.MACHINE


class Cluster:
    """A running cluster, from outside."""

    def __init__(self, shared: Path, *, visible: Sequence[Path] = (), **options: bool | int | str) -> None:
        """Start it in `shared` with the options of tools.cluster.control.start; it ends with this process at the
        latest."""
        self._handle = control.start(shared, visible=visible, **({"release": release()} | options))  # type: ignore[arg-type]
        self.layout: Layout = read(shared)
        self.shared = shared
        self.nodes = self.layout.workers
        self.hosts = self.layout.hosts

    def stop(self) -> None:
        control.end(self._handle)

    # ---- running things

    def run(
        self,
        cmd: Sequence[str | Path] | str,
        node: str = HEAD,
        *,
        check: bool = True,
        timeout: float = 240.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (a string goes through bash) on a node, in the caller's environment plus `env`.

        Raises AssertionError with its output if `check` and it fails, subprocess.TimeoutExpired if it takes too long.
        """
        words = ["bash", "-c", cmd] if isinstance(cmd, str) else [str(word) for word in cmd]
        command = control.entering(self.layout, node, words, str(cwd or self.shared))
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=control.environment(env), input=stdin or ""
        )
        if check and result.returncode:
            raise AssertionError(f"{words} on {node} ended with {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result

    def popen(
        self,
        cmd: Sequence[str | Path],
        node: str = HEAD,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a node; killing the handle kills it there."""
        command = control.entering(self.layout, node, [str(word) for word in cmd], str(cwd or self.shared))
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            env=control.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )

    # ---- Slurm

    def sbatch(self, *arguments: str | Path, script: str | None = None, **more: object) -> int:
        """Submit (a script's text, or whatever the arguments say); the job id.  `more` goes to run."""
        result = self.run(["sbatch", "--parsable", *arguments], stdin=script, **more)  # type: ignore[arg-type]
        return int(result.stdout.split(";")[0])

    def states(self, job: int) -> dict[str, str]:
        """State of each component by squeue, ended ones too: {"1000": ...} or {"1000+0": ..., "1000+1": ...}."""
        result = self.run(["squeue", "-h", "-t", "all", "-o", "%i %T", "-j", str(job)], check=False)
        return dict(line.split() for line in result.stdout.splitlines())  # type: ignore[misc]

    def sacct(self, job: int, form: str = "JobID,State", *, duplicates: bool = False) -> list[tuple[str, ...]]:
        """Rows of sacct; with `duplicates` also those of attempts that were requeued."""
        command = ["sacct", "-n", "-P", "-j", str(job), "-o", form, *(["-D"] if duplicates else [])]
        return [tuple(line.split("|")) for line in self.run(command).stdout.splitlines()]

    def job(self, job: int) -> dict[str, str]:
        """`scontrol show job` as a dict (of the first component)."""
        words = self.run(["scontrol", "-o", "show", "job", str(job)]).stdout.splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_state(self, job: int, states: str | Collection[str], seconds: float) -> dict[str, str]:
        """Until every component is in one of `states`; AssertionError with the last states if they are not in time."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + seconds
        while True:
            now = self.states(job)
            if now and set(now.values()) <= wanted:
                return now
            final = {state for state in now.values() if state in ENDED}
            if time.monotonic() > deadline or (now and final == set(now.values()) and not wanted & final):
                reason = self.run(["scontrol", "-o", "show", "job", str(job)], check=False).stdout
                raise AssertionError(f"job {job} is {now}, not {sorted(wanted)}\n{reason}")
            time.sleep(0.1)

    def wait_nodes(self, states: str | Collection[str] = "idle", seconds: float = 30.0) -> None:
        """Until every node is in one of `states`."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + seconds
        while not set(now := self.node_states()) or not set(now.values()) <= wanted:
            assert time.monotonic() < deadline, f"nodes are {now}, not {sorted(wanted)}"
            time.sleep(0.1)

    def node_states(self) -> dict[str, str]:
        """State of each node by sinfo, e.g. idle, mixed, allocated, down*."""
        return dict(
            line.split() for line in self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"]).stdout.splitlines()
        )

    # ---- breaking things

    def kill_node(self, name: str, *, told: bool = False) -> None:
        """Cut a node's power.  Slurm notices after some 20 s; `told`: an administrator says so at once."""
        control.kill_node(self.layout, name)
        if told:
            self.run(["scontrol", "update", f"nodename={name}", "state=down", "reason=power"])

    def boot_node(self, name: str) -> None:
        control.boot_node(self.layout, name)

    def link(self, name: str, state: str) -> None:
        """Pull ("down") or plug in ("up") the cable of a node.

        Slurm looks for a node that it has declared down once a minute; `restart_slurmd` brings it back at once.
        """
        control.link(self.layout, name, state)

    def kill_slurmd(self, name: str) -> None:
        control.kill_slurmd(self.layout, name)

    def start_slurmd(self, name: str) -> None:
        control.start_slurmd(self.layout, name)

    def restart_slurmd(self, name: str) -> None:
        """Let a node register anew; what runs on it goes on."""
        self.kill_slurmd(name)
        self.start_slurmd(name)

    # ---- what runs

    def processes(self, node: str) -> list[tuple[int, list[str]]]:
        """(pid, argv) of all that runs on a node besides the node itself and its daemons; os.kill takes these pids."""
        return [
            (process.pid, list(process.argv) or [process.name])
            for process in control.foreign_processes(self.layout, node)
        ]

    def all_processes(self) -> dict[str, list[tuple[int, list[str]]]]:
        """processes() of every host that has any; a host without power has none."""
        return {host: found for host in self._powered() if (found := self.processes(host))}

    def _powered(self) -> list[str]:
        powered = []
        for host in self.hosts:
            try:
                control.leader(self.layout, host)
            except control.ClusterError:
                continue
            powered.append(host)
        return powered

    # ---- MPI

    def hostfile(self, dialect: str, nodes: Sequence[str], slots: int = 1, path: Path | None = None) -> Path:
        """A hostfile of the nodes in that order, "openmpi" (node1 slots=2) or "mpich" (node1:2)."""
        line = {"openmpi": "{} slots={}\n", "mpich": "{}:{}\n"}[dialect]
        path = path or self.shared / f"hosts.{dialect}.{'-'.join(nodes)}.{slots}"
        path.write_text("".join(line.format(node, slots) for node in nodes))
        return path

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`; the nodes see it as /etc/ssh/ssh_config, so that there a plain `ssh node1` works."""
        return self.layout.etc / "ssh_config"

    def mpirun_env(self, dialect: str) -> dict[str, str]:
        """Environment in which mpi4py's wheel finds the library of that MPI."""
        if dialect == "openmpi":
            return {"MPI4PY_MPIABI": "openmpi"}
        return {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(self.layout.mpich)}

    # ---- between tests

    def clean(self, seconds: float = 60.0) -> list[str]:
        """Bring the cluster back to where it began.  What was left, one line each; [] if it was clean within
        `seconds`."""
        begun = time.monotonic()
        while left := self._left():
            runs = any(" runs " in line for line in left)  # else Slurm alone is late, which repeats what it has lost
            if time.monotonic() > begun + (seconds if runs else 6 * seconds):
                break
            time.sleep(0.1)
        if left:
            self._remove()
        return left

    def _left(self) -> list[str]:
        left = [f"job {line}" for line in self.run(["squeue", "-h", "-o", "%i %T %j"]).stdout.splitlines()]
        left += [
            f"{host} runs {pid} {' '.join(argv)}" for host, found in self.all_processes().items() for pid, argv in found
        ]
        return left + [f"{name} is {state}" for name, state in self.node_states().items() if state != "idle"]

    def _remove(self) -> None:
        self.run(["scancel", "--full", "--user", str(os.getuid())], check=False)
        powered = self._powered()
        for host in self.nodes:
            if host not in powered:
                self.boot_node(host)
            elif self.node_states().get(host) != "idle":
                self.link(host, "up")
                self.restart_slurmd(host)
        for found in self.all_processes().values():
            for pid, _ in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.run(f"scontrol update nodename={','.join(self.nodes)} state=resume", check=False)
        self.wait_nodes("idle", 60)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of this session; every tmp_path is on its shared file system."""
    require("cluster")
    running = Cluster(tmp_path_factory.mktemp("cluster"), visible=[tmp_path_factory.getbasetemp()])
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def cluster_left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used the cluster: no jobs, no processes, all nodes up."""
    yield
    if "cluster" in request.fixturenames:
        left = request.getfixturevalue("cluster").clean()
        assert not left, "the test left on the cluster:\n" + "\n".join(left)
