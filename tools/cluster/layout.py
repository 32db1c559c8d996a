"""Where things of one cluster lie and what its hosts are called.

Invariant: everything is derived from DIR and from DIR/.cluster/layout.json, which `start` writes once; so every later
command, and every process inside, sees the same cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

#: the checkout that this program belongs to: processes inside import it from there
REPO = Path(__file__).resolve().parents[2]
ROOTS = Path("/var/cache/hpcrl-cluster")  #: where the programs of other releases are (roots.py)
HEAD = "head"
NETWORK = "10.77.0"
GPUS_PER_NODE = 8
GRACE = 20  #: seconds that a preempted job has to save and end
#: what is private on every node: nothing may travel from node to node through these
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm", "/run")


@dataclass(frozen=True)
class Layout:
    """One cluster: `shared` is DIR; `visible` are further directories that every node sees although they lie below a
    private one.

    bare: nodes without GPUs and without generic resources, of cores with two hardware threads each, which jobs get
    whole; no default partition, and partitions of one node each as well; a TMPDIR of each job and node, which Slurm's
    task prolog makes.
    release: Debian's name of the release whose programs the nodes run (roots.py); "" is the machine's own.
    """

    shared: Path
    nodes: int = 4
    accounting: bool = True
    cgroups: bool = False
    visible: tuple[str, ...] = ()
    bare: bool = False
    release: str = ""

    @property
    def base(self) -> Path:
        """The cluster's own files."""
        return self.shared / ".cluster"

    @property
    def root(self) -> Path:
        """What the nodes see as / of the system's programs."""
        return ROOTS / self.release if self.release else Path("/")

    @property
    def etc(self) -> Path:
        """Seen as /etc/slurm on every node."""
        return self.base / "etc"

    @property
    def log(self) -> Path:
        return self.base / "log"

    @property
    def state(self) -> Path:
        return self.base / "state"

    @property
    def ssh(self) -> Path:
        return self.base / "ssh"

    @property
    def pmix(self) -> Path:
        """PMIx's library and plugins, with the name that Slurm asks for."""
        return self.base / "lib-pmix"

    @property
    def mpich(self) -> Path:
        """For LD_LIBRARY_PATH: MPICH's library under the name of the MPI ABI."""
        return self.base / "lib-mpich"

    @property
    def workers(self) -> list[str]:
        return [f"node{i}" for i in range(1, self.nodes + 1)]

    @property
    def hosts(self) -> list[str]:
        """The head, then the nodes."""
        return [HEAD, *self.workers]

    def address(self, host: str) -> str:
        return f"{NETWORK}.{10 + self.hosts.index(host)}"

    def cgroup(self, controller: str, host: str) -> Path:
        """The cgroup (version 1) of a node, on the machine."""
        return Path("/sys/fs/cgroup") / controller / f"hpcrl-{self.shared.name}-{self.shared.stat().st_ino}-{host}"

    def write(self) -> None:
        """Keep this layout in DIR."""
        self.base.mkdir(parents=True, exist_ok=True)
        (self.base / "layout.json").write_text(json.dumps(dataclasses.asdict(self), default=str))


def read(shared: str | os.PathLike[str]) -> Layout:
    """The layout that `start` wrote.  FileNotFoundError if DIR holds no cluster."""
    values = json.loads((Path(shared).absolute() / ".cluster" / "layout.json").read_text())
    return Layout(**(values | {"shared": Path(values["shared"]), "visible": tuple(values["visible"])}))
