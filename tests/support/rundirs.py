"""Help for tests that look at runs: run directories as launcher and trainer leave them, and Slurm commands that answer
from a file."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

NOW = 1_700_000_000.0  #: a unix time, long past
HERE = socket.gethostname()


def put(path: Path, value: Any) -> Path:
    """Write JSON, making the directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def make(root: Path, stages: tuple[str, ...] = ("",), **state: Any) -> Path:
    """A run directory whose stages have begun; `state` (if any) is the launcher's word, written at NOW unless it says
    else."""
    put(root / "recipe.json", {"path": "x.toml", "overrides": {}, "identity": f"id-{root.name}"})
    names = "".join(f'[[stage]]\nname = "{name}"\n' for name in stages if name)
    (root / "recipe.toml").write_text(f'name = "x"\n{names}')
    for number, name in enumerate(stages):
        options = put(root / name / "options.json", {"num_rollout": 10, "eval_interval": None, "lr": 1e-5})
        os.utime(options, (NOW - 1000 + number, NOW - 1000 + number))
        (root / name / "attempts").mkdir(exist_ok=True)
    if state:
        put(
            root / "state.json",
            {"phase": "running", "time": NOW, "host": "node7", "pid": 1, "stage": stages[-1]} | state,
        )
    return root


def begin(stage: Path, attempt: int = 0, start: int | None = 0, total: int = 10, **peer: Any) -> Path:
    """An attempt of a stage: its plan over two hosts, and (unless start is None) the trainer's word that it is up."""
    place = lambda host: {"host": host, "slots": [0]}  # noqa: E731
    plan = {
        "run_id": "r",
        "attempt": attempt,
        "trainers": [place("node1"), place("node1"), place("node2")],
        "engines": [place("node3")],
        "rollout": place("node3"),
    }
    here = stage / "attempts" / str(attempt)
    put(here / "plan.json", plan)
    if start is not None:
        put(here / "peers" / "trainer-0.json", {"start": start, "total": total, "pid": 1} | peer)
    return here


def log(stage: Path, *rows: dict[str, Any]) -> None:
    """Add records to metrics.jsonl."""
    with (stage / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def steps(count: int, first: int = 0, each: float = 2.0, until: float = NOW, **more: Any) -> list[dict[str, Any]]:
    """Records of training steps that took `each` seconds, the last of which ended at `until`."""
    return [
        {
            "rollout_id": first + i,
            "time": until - each * (count - 1 - i),
            "rollout/reward": 0.5,
            "train/loss": 0.1,
            "perf/step_time": each,
            "perf/tokens_per_sec": 1000.0,
            "staleness/max": 1.0,
        }
        | more
        for i in range(count)
    ]


def submitted(root: Path, job_id: str, at: float = NOW - 500) -> Path:
    """The run was submitted to Slurm."""
    return put(
        root / "job.json",
        {"scheduler": "slurm", "job_id": job_id, "submit_host": "login1", "submitted": at, "script": None},
    )


class FakeSlurm:
    """Commands in a directory for PATH: each prints a file, exits with a status, and notes how it was called."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory
        directory.mkdir()

    def command(self, name: str, output: str = "", status: int = 0, error: str = "", before: str = "") -> None:
        (self.bin / f"{name}.txt").write_text(output)
        script = self.bin / name
        script.write_text(
            f'#!/bin/sh\necho "$@" >> "{self.bin}/{name}.calls"\nenv > "{self.bin}/{name}.env"\n{before}\n'
            f'cat "{self.bin}/{name}.txt"\n'
            f'[ -z "{error}" ] || echo "{error}" >&2\nexit {status}\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def calls(self, name: str) -> list[str]:
        path = self.bin / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


def row(job: str, state: str = "RUNNING", reason: str = "None", raw: str = "", **fields: Any) -> str:
    """One line of squeue, in the order of hpcrl.launch.slurm.squeue.FIELDS.  raw: the number of a task of an array."""
    values = {"submit": int(NOW - 500), "start": int(NOW - 400), "end": int(NOW + 3600), "nodes": 2, "user": "me"}
    values |= {"name": "x-hpcrl", "comment": "(null)"} | fields
    return "\x1f".join(map(str, (job, raw or job, state, reason, *values.values()))) + "\n"
