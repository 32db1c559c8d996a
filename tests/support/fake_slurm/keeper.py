"""The keeper of one job: slurmctld and slurmd for it.

    python keeper.py FOLDER NUMBER

Invariant: all processes of the job are its descendants, whatever they do; when it ends, none of them is left.  The
tasks of a step are its own children, and not those of `srun`, which lends them its output: whoever kills an `srun`
leaves the tasks alone, as with Slurm.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from queue_file import AGAIN, CPUS, KILL_WAIT, compress, locked, schedule

TICK = 0.1  #: seconds
LONGEST = 3600.0  #: seconds that a job may wait: tests that are killed leave no keeper for ever
PR_SET_CHILD_SUBREAPER = 36


class Step:
    """A step: its `srun` at the other end of a connection, and its tasks by process id."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(10)
        text, self.files, *_ = socket.recv_fds(connection, 1 << 16, 2)
        while not text.endswith(b"\n"):
            text += connection.recv(1 << 16)
        self.asked: dict[str, Any] = json.loads(text)
        self.tasks: dict[int, int] = {}
        self.groups: set[int] = set()

    def start(self) -> None:
        for task in self.asked["tasks"]:
            try:
                pid = spawn(self.asked["argv"], self.asked["cwd"], task["env"], self.files)
            except OSError as error:
                name = self.asked["argv"][0]
                os.write(self.files[1], f"slurmstepd: error: execve(): {name}: {error.strerror}\n".encode())
                self.tell(task["rank"], 2 << 8)
            else:
                self.tasks[pid] = task["rank"]
                self.groups.add(pid)
        if not self.tasks:
            self.close()

    def tell(self, rank: int, status: int) -> None:
        with contextlib.suppress(OSError):  # srun may be gone
            self.connection.sendall(f"{rank} {status}\n".encode())

    def ended(self, pid: int, status: int) -> None:
        """One of its tasks has ended; after the last one, what they have left is ended."""
        self.tell(self.tasks.pop(pid), status)
        if not self.tasks:
            kill([p for p, (_, session) in table().items() if session in self.groups], signal.SIGKILL)
            self.close()

    def close(self) -> None:
        """srun has its answers."""
        self.connection.close()
        for file in self.files:
            os.close(file)

    def signal(self, number: int, job: str) -> None:
        """`srun` wants its tasks to end."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        step = f"{job}.{self.asked['step']}"
        line = f"slurmstepd: error: *** STEP {step} ON {self.asked['nodes'][0]} CANCELLED AT {now} ***\n"
        os.write(self.files[1], line.encode())
        kill(below(*self.tasks), number)


def spawn(argv: list[str], cwd: str, env: dict[str, str], files: list[int]) -> int:
    """Start a process in a session of its own; `waitpid` of all children notices its end."""
    started = subprocess.Popen(
        argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1], start_new_session=True
    )
    started.returncode = 0  # not to be waited for by the object
    return started.pid


def table() -> dict[int, tuple[int, int]]:
    """Process id -> (that of the parent, that of the session) of all that run."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if words[0] != b"Z":
            found[int(name)] = (int(words[1]), int(words[3]))
    return found


def below(*roots: int) -> list[int]:
    """These processes and all that they have started."""
    parents = {pid: parent for pid, (parent, _) in table().items()}
    found = [pid for pid in roots if pid in parents]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def kill(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Keeper:
    """What a job's keeper knows of it beside the queue."""

    def __init__(self, folder: Path, number: str) -> None:
        self.folder = folder
        self.number = number
        self.spool = folder / f"job{number}"
        self.steps: list[Step] = []
        self.batch = 0
        self.status = 0  #: of the batch script, as waitpid has it
        self.warned = 0.0

    def keep(self) -> None:
        """Bring the job to its end, over as many starts as that takes."""
        last = time.monotonic() + LONGEST
        while (job := self._begin()) is not None and time.monotonic() < last:
            if job["parts"][0]["nodes"]:
                self._run(job)
            else:
                time.sleep(TICK)

    def _begin(self) -> dict[str, Any] | None:
        """The job, which has nodes if it is its turn; None if it has ended."""
        with locked(self.folder) as queue:
            job = queue["jobs"][self.number]
            places = schedule(queue).get(self.number)
            if places is not None:
                now = time.time()
                job.update(state="RUNNING", reason="None", start=now, end=None, wish="", signals=[], exit=0, steps=0)
                for part, nodes in zip(job["parts"], places, strict=True):
                    part["nodes"] = nodes
            return job if job["state"] in ("PENDING", "RUNNING") else None

    def _run(self, job: dict[str, Any]) -> None:
        """One start of the job."""
        listener = socket.socket(socket.AF_UNIX)
        directory = os.open(self.spool, os.O_RDONLY)
        (self.spool / "steps").unlink(missing_ok=True)
        listener.bind(f"/proc/self/fd/{directory}/steps")  # a socket's own path may have 107 bytes
        listener.listen(64)
        output = os.open(
            job["output"], os.O_WRONLY | os.O_CREAT | (os.O_APPEND if job["append"] else os.O_TRUNC), 0o666
        )
        self.steps, self.warned = [], 0.0
        self.batch = spawn([str(self.spool / "slurm_script")], job["cwd"], self._environment(job), [output, output])
        deadline: float | None = None
        while True:
            self._serve(listener, deadline is not None)
            over = self._reap()
            with locked(self.folder) as queue:
                job = queue["jobs"][self.number]
                self._look(job, over)
            if (job["wish"] or over) and deadline is None:
                deadline = time.monotonic() + KILL_WAIT
                self._say_why(job, output)
                kill(below(os.getpid())[1:], signal.SIGCONT)
                kill(below(os.getpid())[1:], signal.SIGTERM)
            left = below(os.getpid())[1:]
            if over and not left:
                break
            if deadline is not None and time.monotonic() > deadline:
                kill(left, signal.SIGKILL)
        listener.close()
        os.close(directory)
        os.close(output)
        self._end()

    def _serve(self, listener: socket.socket, ending: bool) -> None:
        """What the sruns of the job ask, for TICK seconds at most."""
        open_steps = {step.connection: step for step in self.steps if step.tasks}
        ready, _, _ = select.select([listener, *(c for c in open_steps if c.fileno() >= 0)], [], [], TICK)
        for connection in ready:
            if connection is listener:
                step = Step(listener.accept()[0])
                if ending:
                    step.connection.sendall(b"ending\n")
                    step.close()
                    continue
                self.steps.append(step)
                step.start()
            elif words := connection.recv(100).split():
                open_steps[connection].signal(int(words[0]), self.number)
            else:
                connection.close()  # srun is gone, its tasks are not

    def _reap(self) -> bool:
        """Take note of what has ended; whether the batch script has."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid == self.batch:
                self.batch, self.status = 0, status
            for step in self.steps:
                if pid in step.tasks:
                    step.ended(pid, status)
        return not self.batch

    def _look(self, job: dict[str, Any], over: bool) -> None:
        """What others want of the job, and its time."""
        ends = job["start"] + job["limit"]
        if job["margin"] and time.time() > ends - job["margin"] and self.warned != ends:
            self.warned = ends
            job["signals"].append(job["signal"])
        for number in job["signals"] if self.batch else ():
            kill([self.batch], number)
        job["signals"] = []
        if not job["wish"] and not over and time.time() > ends:
            job["wish"] = "TIMEOUT"
        if (job["wish"] or over) and job["state"] == "RUNNING":
            job["state"] = "COMPLETING"

    def _say_why(self, job: dict[str, Any], output: int) -> None:
        why = {"TIMEOUT": " DUE TO TIME LIMIT", "REQUEUE": " DUE TO JOB REQUEUE"}.get(job["wish"], "")
        if job["wish"]:
            what = f"JOB {self.number} ON {job['parts'][0]['nodes'][0]}"
            now = time.strftime("%Y-%m-%dT%H:%M:%S")
            os.write(output, f"slurmstepd: error: *** {what} CANCELLED AT {now}{why} ***\n".encode())

    def _end(self) -> None:
        with locked(self.folder) as queue:
            job = queue["jobs"][self.number]
            now = time.time()
            if job["wish"] == "REQUEUE":
                job.update(state="PENDING", submitted=now, begin=now + AGAIN, start=None, wish="", reason="BeginTime")
                for part in job["parts"]:
                    part["nodes"] = []
                return
            ended = ("COMPLETED", "None") if not self.status else ("FAILED", "NonZeroExitCode")
            state, reason = (job["wish"], job["reason"]) if job["wish"] else ended
            job.update(state=state, reason="TimeLimit" if state == "TIMEOUT" else reason, end=now, exit=self.status)

    def _environment(self, job: dict[str, Any]) -> dict[str, str]:
        """The batch script's: that of sbatch, and what Slurm says of the job."""
        first = job["parts"][0]
        found = json.loads((self.spool / "environment").read_text())
        found |= {
            "ENVIRONMENT": "BATCH", "SLURM_CLUSTER_NAME": "fake", "SLURM_JOB_NAME": job["name"], "SLURM_JOB_PARTITION": first["partition"],
            "SLURM_JOB_ID": self.number, "SLURM_JOBID": self.number, "SLURM_JOB_USER": job["user"], "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_SUBMIT_DIR": job["cwd"], "SLURM_SUBMIT_HOST": os.uname().nodename, "SLURMD_NODENAME": first["nodes"][0],
            "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "0", **describe(first),
        }  # fmt: skip
        if job["restarts"]:
            found["SLURM_RESTART_COUNT"] = str(job["restarts"])
        if job["parts"][1:]:
            found["SLURM_HET_SIZE"] = str(len(job["parts"]))
            for index, part in enumerate(job["parts"]):
                of_part = {"SLURM_JOB_ID": part["id"]} | describe(part)
                found |= {f"{name}_HET_GROUP_{index}": value for name, value in of_part.items()}
        return found


def describe(part: dict[str, Any]) -> dict[str, str]:
    """The variables of a component's nodes."""
    count, nodes = len(part["nodes"]), compress(part["nodes"])
    cpus = CPUS if part["exclusive"] else part["cpus"]
    return {
        "SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes, "SLURM_JOB_NUM_NODES": str(count), "SLURM_NNODES": str(count),
        "SLURM_CPUS_ON_NODE": str(cpus), "SLURM_JOB_CPUS_PER_NODE": f"{cpus}(x{count})" if count > 1 else str(cpus),
    }  # fmt: skip


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    Keeper(Path(sys.argv[1]), sys.argv[2]).keep()
