"""`srun` of the fake Slurm, inside a job: one step, whose tasks the job's keeper starts.

Invariant: it ends when its tasks have ended, with the highest of their exit statuses.
"""

from __future__ import annotations

import getopt
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from queue_file import compress, expand, fail, gpus_of, locked

OPTIONS = (
    "unbuffered", "overlap", "no-kill", "input=", "kill-on-bad-exit=", "wait=", "cpu-bind=", "export=", "mpi=", "het-group=", "nodes=",
    "ntasks=", "ntasks-per-node=", "cpus-per-task=", "gpus-per-node=", "gres=", "nodelist=",
)  # fmt: skip
#: what is understood of an option that has but one meaning here
FIXED = {"input": "none", "export": "ALL", "wait": "0", "cpu-bind": "none", "mpi": "none"}


def parse(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """(options, the command)."""
    try:
        pairs, command = getopt.getopt(words, "", OPTIONS)
    except getopt.GetoptError as error:
        fail("srun", f"unrecognized option '--{error.opt}'\nTry \"srun --help\" for more information", 255)
    options = {name[2:]: value for name, value in pairs}
    for name, value in FIXED.items():
        if options.get(name, value) != value:
            fail("srun", f"fake Slurm: --{name}={options[name]} is not known here", 255)
    return options, command


def place(part: dict[str, Any], options: dict[str, str]) -> list[str]:
    """The node of each task."""
    nodes = part["nodes"]
    if "nodelist" in options:
        wanted = expand(options["nodelist"])
        if not set(wanted) <= set(nodes):
            fail("srun", "error: Unable to create step for job: Requested node configuration is not available")
        nodes = [node for node in nodes if node in wanted]
    count = int(options.get("nodes", len(nodes)))
    if count > len(nodes) or gpus_of(options) > part["gpus"]:
        fail("srun", "error: Unable to create step for job: Requested node configuration is not available")
    nodes = nodes[:count]
    tasks = int(options.get("ntasks", int(options.get("ntasks-per-node", 1)) * count))
    each = -(-tasks // count)
    return [nodes[rank // each] for rank in range(tasks)]


def environment(rank: int, places: list[str], step: int) -> dict[str, str]:
    """What a task has beside the environment of `srun`."""
    nodes = list(dict.fromkeys(places))
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(places[:rank].count(places[rank])), "SLURM_NODEID": str(nodes.index(places[rank])),
        "SLURMD_NODENAME": places[rank], "SLURM_STEP_ID": str(step), "SLURM_STEPID": str(step), "SLURM_STEP_NODELIST": compress(nodes),
        "SLURM_STEP_NUM_NODES": str(len(nodes)), "SLURM_STEP_NUM_TASKS": str(len(places)), "SLURM_NTASKS": str(len(places)),
        "SLURM_NPROCS": str(len(places)),
    }  # fmt: skip


def main(folder: Path, words: list[str]) -> int:
    options, command = parse(words)
    if "SLURM_JOB_ID" not in os.environ:
        fail("srun", "fake Slurm: there are steps inside of jobs alone")
    number = os.environ["SLURM_JOB_ID"]
    with locked(folder) as queue:
        job = queue["jobs"][number]
        part = job["parts"][int(options.get("het-group", 0))]
        places = place(part, options)
        step = job["steps"]
        job["steps"] += 1
    kill_all = options.get("kill-on-bad-exit") == "1"
    tasks = [{"rank": r, "env": {**os.environ, **environment(r, places, step)}} for r in range(len(places))]
    asked = {"argv": command, "cwd": os.getcwd(), "step": step, "nodes": places, "tasks": tasks}
    keeper = socket.socket(socket.AF_UNIX)
    directory = os.open(folder / f"job{number}", os.O_RDONLY)
    try:
        keeper.connect(f"/proc/self/fd/{directory}/steps")
        text = json.dumps(asked).encode() + b"\n"
        keeper.sendall(text[socket.send_fds(keeper, [text], [1, 2]) :])
    except OSError:
        fail("srun", f"error: Unable to create step for job {number}: Job/step already completing or completed")

    def abort(_: int, __: FrameType | None) -> None:
        print(
            "srun: forcing job termination\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
            file=sys.stderr,
            flush=True,
        )
        keeper.sendall(b"9\n")

    for wanted in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(wanted, abort)
    worst, left = 0, len(places)
    with keeper.makefile("r") as lines:
        for line in lines:
            if line == "ending\n":
                fail("srun", f"error: Unable to create step for job {number}: Job/step already completing or completed")
            rank, status = map(int, line.split())
            left -= 1
            code = os.waitstatus_to_exitcode(status)
            worst = max(worst, code if code >= 0 else 128 - code)
            if code:
                how = f"Exited with exit code {code}" if code > 0 else signal.strsignal(-code)
                print(f"srun: error: {places[rank]}: task {rank}: {how}", file=sys.stderr, flush=True)
            if code and kill_all:
                kill_all = False
                print(
                    f"srun: launch/slurm: _step_signal: Terminating StepId={number}.{step}", file=sys.stderr, flush=True
                )
                if left:
                    keeper.sendall(b"15\n")
    return worst


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2]), sys.argv[3:]))
