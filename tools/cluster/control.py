"""The cluster from outside: start it, run commands on its nodes, break it, stop it.

Invariant: a cluster is found by its directory alone (process 1 of its namespace carries it in argv), so there is no pid
file that could name a stranger; and it never outlives whoever started it without `detach`.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tools.cluster import config, processes, roots
from tools.cluster.layout import PRIVATE, REPO, Layout, read
from tools.cluster.sandbox import DETACH, NAMESPACES, UNSHARE, remove_cgroups

START_SECONDS = 180.0
#: of the caller's environment, what means nothing on a node
FOREIGN = ("TMPDIR", "SLURM_CONF", "HOSTNAME")


class ClusterError(Exception):
    """The cluster cannot do that, in one clear line."""


def outer(layout: Layout) -> int | None:
    """Pid of the cluster's process 1; None if it is not running."""
    return processes.first("tools.cluster.sandbox", str(layout.shared))


def leader(layout: Layout, host: str) -> int:
    """Pid of a node's process 1.  ClusterError if there is no such node or it is off."""
    if host not in layout.hosts:
        raise ClusterError(f"there is no node {host!r}; the nodes are {', '.join(layout.hosts)}")
    pid = processes.first("tools.cluster.node", str(layout.shared), host)
    if pid is None:
        raise ClusterError(
            f"{host} is off: `boot-node {host}` turns it on" if outer(layout) else "the cluster is not running"
        )
    return pid


def start(
    shared: Path,
    *,
    nodes: int = 4,
    accounting: bool = True,
    cgroups: bool = False,
    visible: Iterable[Path] = (),
    bare: bool = False,
    release: str = roots.MACHINE,
) -> subprocess.Popen[bytes]:
    """Start a cluster in `shared`, anew; returns when all nodes are idle.

    visible: directories below /tmp and the like that every node shall see; those that Python and this program need are
    added.
    bare: as in Layout.
    release: which Slurm, as roots.find understands it.
    The cluster ends when the process that called this does, or its handle's stdin is closed; `detach` lets it live on.
    ClusterError with the end of the log if it does not come up.
    """
    shared = shared.absolute()
    if cgroups and not Path("/sys/fs/cgroup/memory/cgroup.procs").exists():
        raise ClusterError("--cgroups needs cgroup version 1 hierarchies under /sys/fs/cgroup: leave it out here")
    needed = {Path(sys.prefix), Path(sys.base_prefix), REPO, *visible}
    below = tuple(
        str(path) for path in sorted(path.resolve() for path in needed) if any(map(path.is_relative_to, PRIVATE))
    )
    try:
        release = roots.find(release)
    except roots.RootError as error:
        raise ClusterError(str(error)) from None
    if release:
        roots.prepare(release)
    layout = Layout(shared, nodes, accounting, cgroups, below, bare, release)
    if outer(layout) is not None:
        raise ClusterError(f"a cluster is running in {shared} already: `stop` ends it")
    shutil.rmtree(layout.base, ignore_errors=True)
    layout.write()
    config.write(layout)
    user_namespace = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    command = [*UNSHARE, *user_namespace, sys.executable, "-S", "-m", "tools.cluster.sandbox", str(shared)]
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    environment |= {"PATH": f"{environment.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    with open(layout.log / "sandbox.log", "ab") as log:
        handle = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            env=environment | {"PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )
    if not _says_ready(handle):
        end(handle)
        raise ClusterError(f"the cluster in {shared} did not come up:\n{_logs(layout)}")
    return handle


def _says_ready(handle: subprocess.Popen[bytes]) -> bool:
    assert handle.stdout is not None
    with handle.stdout as pipe:
        return bool(select.select([pipe], [], [], START_SECONDS)[0]) and pipe.readline() == b"ready\n"


def _logs(layout: Layout) -> str:
    """The last lines of the logs that say why nothing came up."""
    lines = []
    for name in ("sandbox", *layout.hosts, "slurmctld", "slurmdbd"):
        path = layout.log / f"{name}.log"
        if path.exists():
            lines += [f"{name}: {line}" for line in path.read_text(errors="replace").splitlines()[-8:]]
    return "\n".join(lines)


def detach(handle: subprocess.Popen[bytes]) -> None:
    """Let the cluster live on when this process ends."""
    assert handle.stdin is not None
    handle.stdin.write(DETACH)
    handle.stdin.close()


def end(handle: subprocess.Popen[bytes]) -> None:
    """End a cluster that this process started."""
    assert handle.stdin is not None
    handle.stdin.close()
    try:
        handle.wait(20)
    except subprocess.TimeoutExpired:
        handle.kill()
        handle.wait()


def stop(shared: Path) -> None:
    """End the cluster in a directory; nothing happens if none runs.  ClusterError if it will not end."""
    layout = read(shared)
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        pid = outer(layout)
        if pid is None:
            break
        os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while outer(layout) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
    if outer(layout) is not None:
        raise ClusterError(f"the cluster in {shared} does not end")
    remove_cgroups(layout)


def entering(layout: Layout, host: str, command: Sequence[str], cwd: str | None = None) -> list[str]:
    """The command line that runs `command` on a node; it is killed there if this side of it is killed here."""
    user_namespace = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    enter = ["nsenter", "--target", str(leader(layout, host)), *user_namespace, *NAMESPACES]
    return [*enter, "--", "setpriv", "--pdeathsig", "KILL", "env", "-C", cwd or os.getcwd(), *command]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment as a login on a node would have it; `python` and `hpcrl` are those of this
    interpreter."""
    values = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    values["PATH"] = f"{Path(sys.executable).parent}:{values.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"
    if os.geteuid() == 0:  # Open MPI refuses root unless it is told twice
        values |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return values | dict(extra or {})


def kill_node(layout: Layout, host: str) -> None:
    """Power cut: every process of the node is gone at once; Slurm notices after SlurmdTimeout."""
    pid = leader(layout, host)
    os.kill(pid, signal.SIGKILL)
    _until(lambda: processes.first("tools.cluster.node", str(layout.shared), host) is None, f"{host} does not end")


def boot_node(layout: Layout, host: str) -> None:
    """Power on.  Slurm takes the node back by itself a second or two later."""
    _request(layout, "boot", host)


def link(layout: Layout, host: str, state: str) -> None:
    """Pull (`down`) or plug in (`up`) the network cable of a node."""
    leader(layout, host)
    _request(layout, "link", host, state)


def kill_slurmd(layout: Layout, host: str) -> None:
    """SIGKILL to a node's slurmd alone: its slurmstepds and tasks live on."""
    for process in _slurmd(layout, host):
        os.kill(process.pid, signal.SIGKILL)
    _until(lambda: not _slurmd(layout, host), f"slurmd on {host} does not end")


def start_slurmd(layout: Layout, host: str) -> None:
    """Start slurmd again."""
    if _slurmd(layout, host):
        raise ClusterError(f"slurmd is running on {host}")
    subprocess.run(entering(layout, host, ["slurmd"], "/"), env=environment(), check=True)


def _slurmd(layout: Layout, host: str) -> list[processes.Process]:
    return [process for process in processes.of_namespace(leader(layout, host)) if process.name == "slurmd"]


def foreign_processes(layout: Layout, host: str) -> list[processes.Process]:
    """What runs on a node and is not the node's own; pids as seen from here, so that they can be killed from here."""
    pid = leader(layout, host)
    return [process for process in processes.of_namespace(pid) if not processes.is_own(process, pid)]


def _request(layout: Layout, *words: str) -> None:
    if outer(layout) is None:
        raise ClusterError("the cluster is not running")
    token = uuid.uuid4().hex
    answer = layout.base / f"answer.{token}"
    with open(layout.base / "requests", "w") as pipe:
        pipe.write(" ".join([token, *words]) + "\n")
    _until(answer.exists, f"no answer to {' '.join(words)}")
    text = answer.read_text()
    answer.unlink()
    if text != "ok":
        raise ClusterError(text)


def _until(condition: Callable[[], bool], complaint: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(complaint)
        time.sleep(0.01)
