"""Process 1 of the outer namespace: `python -m tools.cluster.sandbox DIR`.

It is the switch that the nodes are plugged into and the parent of them all.  Invariant: when it ends, for whatever
reason, the kernel ends every process, interface and mount of the cluster.  It ends when it is told to (SIGTERM) and
when its starter is gone: the starter holds the other end of standard input, and end of file without the word `detach`
is its death.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from tools.cluster import processes
from tools.cluster.layout import GPUS_PER_NODE, Layout, read
from tools.cluster.mounts import bind
from tools.cluster.node import CONTROLLERS, PATIENCE

DETACH = b"detach\n"
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
#: what unshare needs besides; its child is killed if it is
UNSHARE = ("unshare", *NAMESPACES, "--fork", "--kill-child=KILL", "--mount-proc", "--propagation", "private")


class Sandbox:
    """The switch and its nodes."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.requests = _fifo(layout.base / "requests")

    def up(self) -> None:
        """Start everything; returns when all nodes are idle in Slurm."""
        _gpus(self.layout)
        _ip("link set lo up", "link add br0 type bridge forward_delay 0 stp_state 0", "link set br0 up")
        nodes = [self.boot(host) for host in self.layout.hosts]
        deadline = time.monotonic() + 3 * PATIENCE
        while not (self.layout.base / "ready").exists():
            for host, node in zip(self.layout.hosts, nodes, strict=True):
                if node.poll() is not None:
                    sys.exit(f"{host} ended while it started")
            if select.select([0], [], [], 0)[0]:
                sys.exit("the starter is gone")
            if time.monotonic() > deadline:
                sys.exit("the cluster did not come up in time")
            time.sleep(0.02)

    def boot(self, host: str) -> subprocess.Popen[bytes]:
        """Power on: a process in new namespaces, and a cable from it to the switch."""
        if processes.first("tools.cluster.node", str(self.layout.shared), host) is not None:
            raise ValueError(f"{host} is already running")
        python = [sys.executable, "-S", "-m"]
        within = [*python, "tools.cluster.release", str(self.layout.root)] if self.layout.release else []
        command = [*UNSHARE, *within, *python, "tools.cluster.node", str(self.layout.shared), host]
        with open(self.layout.log / f"{host}.log", "ab") as log:
            node = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        _await_namespace(node)
        # the far end of a cable whose node died is still there for a moment
        subprocess.run(["ip", "link", "delete", f"v-{host}"], stderr=subprocess.DEVNULL)
        _ip(f"link add v-{host} type veth peer name eth0 netns {node.pid}", f"link set v-{host} master br0 up")
        return node

    def link(self, host: str, state: str) -> None:
        """Pull the cable of a node, or plug it in again."""
        _ip(f"link set v-{host} {state}")

    def serve(self) -> None:
        """Answer requests and reap the dead until told to end."""
        wake = _wakeups()
        sources = [0, self.requests, wake]
        while True:
            for source in select.select(sources, [], [])[0]:
                if source == 0:
                    if os.read(0, 64) != DETACH:
                        return
                    sources.remove(0)
                elif source == wake:
                    if signal.SIGTERM in os.read(wake, 64):
                        return
                    _reap()
                else:
                    for line in os.read(self.requests, 4096).decode().splitlines():
                        self._answer(*line.split())

    def _answer(self, token: str, command: str, *arguments: str) -> None:
        answer = self.layout.base / f"answer.{token}"
        try:
            {"boot": self.boot, "link": self.link}[command](*arguments)
            text = "ok"
        except (KeyError, TypeError, ValueError, OSError, subprocess.SubprocessError) as error:
            text = f"{command} {' '.join(arguments)}: {error}"
        answer.with_suffix(".new").write_text(text)
        answer.with_suffix(".new").rename(answer)

    def down(self) -> None:
        """End every process and leave no cgroup behind."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
                os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                break
        remove_cgroups(self.layout)


def remove_cgroups(layout: Layout) -> None:
    """Remove the empty cgroups that the nodes left."""
    for host in layout.workers if layout.cgroups else []:
        for controller in CONTROLLERS:
            for directory, _, _ in os.walk(layout.cgroup(controller, host), topdown=False):
                Path(directory).rmdir()


def _fifo(path: Path) -> int:
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    # read and write: the end of one writer is then no end of file
    return os.open(path, os.O_RDWR)


def _gpus(layout: Layout) -> None:
    """Files that Slurm takes for GPUs: it asks only whether they are device files."""
    for index in range(GPUS_PER_NODE):
        path = layout.base / "dev" / f"nvidia{index}"
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(195, index))
        except PermissionError:  # in a user namespace nobody may make a device; a mount of one will do
            path.touch()
            bind("/dev/null", path)


def _ip(*commands: str) -> None:
    """Run `ip` commands in this network namespace.  CalledProcessError with what it said."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands) + "\n", text=True, check=True)


def _await_namespace(node: subprocess.Popen[bytes]) -> None:
    """Until the process has left this network namespace for its own."""
    own = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + PATIENCE
    while os.readlink(f"/proc/{node.pid}/ns/net") == own:
        if node.poll() is not None or time.monotonic() > deadline:
            raise ValueError("unshare made no namespaces")
        time.sleep(0.002)


def _wakeups() -> int:
    """A file descriptor that gives one byte (the number) for each SIGCHLD or SIGTERM."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return reader


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def main(shared: str) -> None:
    """Be process 1 of the cluster in DIR."""
    sandbox = Sandbox(read(shared))
    try:
        sandbox.up()
        os.write(1, b"ready\n")
        os.close(1)
        sandbox.serve()
    finally:
        sandbox.down()


if __name__ == "__main__":
    main(*sys.argv[1:])
