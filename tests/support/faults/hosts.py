"""Runs over the hosts of the test cluster: as a job of Slurm's, and under mpirun.

Invariant: what is left is looked for on every host that has power, in its own /tmp and /dev/shm, against what was there
before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import slurm
from tests.support.cluster import ENDED, Cluster
from tests.support.faults.beds import Bed, Process
from tests.support.runs import recipe
from tools.cluster import control
from tools.cluster.layout import HEAD

PLACES = ("tmp", "dev/shm")
#: what Slurm, ssh and MPI keep on a host between jobs, and caches of what was compiled there
THEIRS = re.compile(r"^(hpcrl$|hpcrl-cache-|torchinductor_|ompi\.|openmpi-sessions|prte|pmix|slurm|munge|\.)")

COMMAND = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.mpich"}


class HostsBed(Bed):
    """On the nodes of a cluster."""

    look = 0.25
    again = False  # it is refused, or starts nothing on the other hosts

    def __init__(self, cluster: Cluster, task: Path, shape: Mapping[str, Any]) -> None:
        self.cluster = cluster
        self.task = task
        self.shape = shape
        self.before = {name: self._listed(name) for name in cluster.hosts}

    def _listed(self, host: str) -> set[str]:
        try:
            root = Path(f"/proc/{control.leader(self.cluster.layout, host)}/root")
            return {f"{place}/{name}" for place in PLACES for name in os.listdir(root / place)}
        except (OSError, control.ClusterError):
            return set()  # without power, as its tmpfs is

    def left(self) -> list[str]:
        """What killed processes have left goes when a host is used again: only the last attempt's hosts are looked
        at."""
        try:
            plan = json.loads((self.root / "attempts" / str(self.attempt) / "plan.json").read_text())
        except (OSError, ValueError):
            return []
        used = {HEAD, *(place["host"] for place in plan["trainers"]), plan["rollout"]["host"]}
        found = {(host, name) for host in used for name in self._listed(host) - self.before[host]}
        return [f"{host}: {name}" for host, name in sorted(found) if not THEIRS.match(name.rpartition("/")[2])]

    def processes(self) -> list[Process]:
        found = self.cluster.all_processes()
        return [Process(host, pid, argv) for host, some in found.items() for pid, argv in some]

    def begin(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.root = folder / "run"
        self._begin(recipe(folder, self.task, **dict(self.shape)))

    @abstractmethod
    def _begin(self, file: Path) -> None: ...

    def hosts_at_work(self) -> list[str]:
        """The nodes on which processes of the run live."""
        return sorted({process.host for process in self.find("hpcrl.launch.host")})


class SlurmBed(HostsBed):
    """`hpcrl submit` and `hpcrl resume`.  words, settings: further ones of the former."""

    job = 0

    def __init__(
        self, cluster: Cluster, task: Path, shape: Mapping[str, Any], *words: str, settings: tuple[str, ...] = ()
    ) -> None:
        super().__init__(cluster, task, shape)
        self.words = words
        self.settings = settings

    def _begin(self, file: Path) -> None:
        self.heard = 0
        words = ("--time", "60", *self.words)
        self.job = slurm.submit(self.cluster, file, self.root, *words, settings=self.settings).number

    def go_on(self) -> None:
        self.heard = len(self._output())
        self.job = int(re.match(r"job (\d+)", slurm.hpcrl(self.cluster, "resume", self.root).stdout)[1])

    def at_work(self) -> bool:
        states = set(self.cluster.states(self.job).values())
        return bool(states - ENDED)

    def _output(self) -> str:
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.root.glob("logs/*.out"), key=os.path.getmtime)
        )

    def said(self) -> str:
        return " ".join(self._output()[self.heard :].split())

    def close(self) -> None:
        self.cluster.run(["scancel", str(self.job)], check=False)
        self.cluster.clean()


class MpirunBed(HostsBed):
    """`hpcrl launch` over two nodes.  kind: of mpirun, openmpi or mpich."""

    process: subprocess.Popen[bytes] | None = None

    def __init__(self, cluster: Cluster, task: Path, shape: Mapping[str, Any], kind: str) -> None:
        super().__init__(cluster, task, shape)
        self.kind = kind

    def _begin(self, file: Path) -> None:
        self.hosts = self.cluster.hostfile(self.kind, ["node1", "node2"], path=self.folder / "hosts")
        self._start(str(file), "--run-dir", str(self.root))

    def go_on(self) -> None:
        self._start("--resume", str(self.root))

    def _start(self, *words: str) -> None:
        self.close_process()
        more = ["--hostfile", str(self.hosts), "--mpirun", COMMAND[self.kind]]
        command = [sys.executable, "-m", "hpcrl", "launch", *words, *more]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.getuid() == 0 else {}
        told = {**slurm.ENV, **root, "UCX_TLS": "tcp,self", **self.cluster.mpirun_env(self.kind)}
        self.output = self.folder / "said"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                control.entering(self.cluster.layout, HEAD, command, str(self.folder)),
                env=control.environment(told),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def at_work(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def close_process(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)

    def close(self) -> None:
        self.close_process()
        self.cluster.clean()
