"""`squeue` and `sinfo` of the fake Slurm, and how its programs read options.

Invariant: a letter of a format that is not known here is an error.
"""

from __future__ import annotations

import getopt
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from queue_file import CPUS, GPUS, PARTITION, USED, WAITS, compress, fail, locked, moment, schedule, span

NO_JOB = "Invalid job id specified"
Job = dict[str, Any]


def read_options(
    program: str, words: Sequence[str], short: str, long: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """(options by their long names, the other words)."""
    try:
        pairs, rest = getopt.gnu_getopt(list(words), short, long)
    except getopt.GetoptError as error:
        fail(
            program,
            f"unrecognized option '--{error.opt}'\nTry \"{program} --help\" for more information",
            255 if program == "sbatch" else 1,
        )
    names = {name[0]: name.rstrip("=") for name in reversed(long)}
    return {name[2:] if name[:2] == "--" else names[name[1:]]: value for name, value in pairs}, rest


Field = Callable[[Job, dict[str, Any]], object]


def ends(job: Job) -> float | None:
    return job["end"] or (job["start"] and job["start"] + job["limit"])


def passed(job: Job) -> float:
    """Seconds that its last start has run."""
    return (job["end"] or time.time()) - job["start"] if job["start"] else 0.0


def identity(job: Job, part: dict[str, Any]) -> str:
    return f"{job['id']}+{job['parts'].index(part)}" if job["parts"][1:] else job["id"]


def where(job: Job, part: dict[str, Any]) -> str:
    return compress(part["nodes"]) if job["state"] in USED else f"({job['reason']})"


def used_cpus(part: dict[str, Any]) -> int:
    return part["count"] * (CPUS if part["exclusive"] else part["cpus"])


SHORT = {
    "PENDING": "PD",
    "RUNNING": "R",
    "COMPLETING": "CG",
    "COMPLETED": "CD",
    "CANCELLED": "CA",
    "FAILED": "F",
    "TIMEOUT": "TO",
}
FIELDS: dict[str, tuple[str, Field]] = {
    "i": ("JOBID", identity),
    "A": ("JOBID", lambda job, part: part["id"]),
    "T": ("STATE", lambda job, part: job["state"]),
    "t": ("ST", lambda job, part: SHORT[job["state"]]),
    "r": ("REASON", lambda job, part: job["reason"]),
    "V": ("SUBMIT_TIME", lambda job, part: moment(job["submitted"], "N/A")),
    "S": ("START_TIME", lambda job, part: moment(job["start"] or job["begin"] or None, "N/A")),
    "e": ("END_TIME", lambda job, part: moment(ends(job), "N/A")),
    "D": ("NODES", lambda job, part: part["count"]),
    "u": ("USER", lambda job, part: job["user"]),
    "j": ("NAME", lambda job, part: job["name"]),
    "k": ("COMMENT", lambda job, part: job["comment"] or "(null)"),
    "C": ("CPUS", lambda job, part: used_cpus(part)),
    "b": ("TRES_PER_NODE", lambda job, part: f"gres:gpu:{part['gpus']}" if part["gpus"] else "N/A"),
    "L": ("TIME_LEFT", lambda job, part: span(job["limit"] - passed(job))),
    "l": ("TIME_LIMIT", lambda job, part: span(job["limit"])),
    "M": ("TIME", lambda job, part: span(passed(job))),
    "P": ("PARTITION", lambda job, part: part["partition"]),
    "N": ("NODELIST", lambda job, part: compress(part["nodes"])),
    "R": ("NODELIST(REASON)", where),
    "Q": ("PRIORITY", lambda job, part: 0 if job["held"] else 1),
    "h": ("OVER_SUBSCRIBE", lambda job, part: "NO" if part["exclusive"] else "OK"),
}


def squeue(folder: Path, words: list[str]) -> None:
    long = ("noheader", "array", "me", "states=", "jobs=", "format=")
    options, rest = read_options("squeue", words, "", long)
    if rest:
        fail("squeue", f"error: Unrecognized option: {rest[0]}")
    states = options.get("states", ",".join(WAITS))
    wanted = options["jobs"].split(",") if "jobs" in options else None
    form = options.get("format", "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R")
    with locked(folder) as queue:
        schedule(queue)
        jobs = list(queue["jobs"].values())
    if wanted is not None:
        jobs = [job for job in jobs if set(wanted) & {job["id"], *(part["id"] for part in job["parts"])}]
        if not jobs and len(wanted) == 1:
            fail("", f"slurm_load_jobs error: {NO_JOB}")
    if "noheader" not in options:
        print(fill(form, lambda letter: FIELDS[letter][0]))
    for job in jobs:
        if states == "all" or job["state"] in states.split(","):
            for part in job["parts"]:
                print(fill(form, lambda letter, job=job, part=part: str(FIELDS[letter][1](job, part))))


def fill(form: str, value: Callable[[str], str]) -> str:
    """A format of squeue's or sinfo's: %i, %.18i, %18i."""

    def field(found: re.Match[str]) -> str:
        text = value(found[3])
        width = int(found[2] or 0)
        return (text.rjust(width) if found[1] else text.ljust(width))[: width or None]

    return re.sub(r"%(\.?)(\d*)([A-Za-z])", field, form)


def sinfo(folder: Path, words: list[str]) -> None:
    options, _ = read_options("sinfo", words, "", ("noheader", "Node", "partition=", "format="))
    if "noheader" not in options:
        fail("sinfo", "fake Slurm: there is no header", 255)
    with locked(folder) as queue:
        taken = {
            node
            for job in queue["jobs"].values()
            if job["state"] in USED
            for part in job["parts"]
            for node in part["nodes"]
        }
        groups: dict[str, list[str]] = {}
        for node in queue["nodes"]:
            groups.setdefault(node if "Node" in options else "mix" if node in taken else "idle", []).append(node)
    form = options["format"]
    lines = []
    for nodes in groups.values():
        state = "mix" if nodes[0] in taken else "idle"
        values = {
            "D": str(len(nodes)),
            "t": state,
            "c": str(CPUS),
            "G": f"gpu:{GPUS}",
            "m": "64000",
            "N": compress(nodes),
            "P": f"{PARTITION}*",
            "R": PARTITION,
        }
        lines.append(fill(form, values.__getitem__))
    print("\n".join(dict.fromkeys(lines)))
