"""`sbatch`, `scontrol` and `scancel` of the fake Slurm; `squeue` and `sinfo` are in `listing`.

    python programs.py NAME FOLDER WORDS...

Invariant: each is over at once; what takes time is done by the keepers of the jobs (`keeper.py`).
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from listing import NO_JOB, Job, ends, passed, read_options, sinfo, squeue, used_cpus
from queue_file import (
    CPUS,
    GPUS,
    PARTITION,
    USED,
    WAITS,
    compress,
    expand,
    fail,
    fits_ever,
    gpus_of,
    limit_of,
    locked,
    moment,
    schedule,
    span,
)

VERSION = "slurm-wlm 22.05.8"
DONE = "Job/step already completing or completed"


# ---- sbatch

OF_JOB = (
    "parsable", "test-only", "version", "hold", "requeue", "no-requeue", "job-name=", "comment=", "dependency=", "kill-on-invalid-dep=",
    "time=", "output=", "open-mode=", "signal=",
)  # fmt: skip
OF_PART = (
    "no-kill", "exclusive", "account=", "qos=", "reservation=", "partition=", "constraint=", "mem=", "nodes=", "ntasks-per-node=",
    "cpus-per-task=", "gpus-per-node=", "gres=", "exclude=",
)  # fmt: skip


def sbatch(folder: Path, words: list[str]) -> None:
    given, rest = read_options("sbatch", words, "", (*OF_JOB, *OF_PART))
    if "version" in given:
        print(VERSION)
        return
    text = Path(rest[0]).read_text() if rest else sys.stdin.read()
    if not text.startswith("#!"):
        fail("sbatch", "error: This does not look like a batch script.")
    groups = directives(text)
    groups[0] |= given
    options = {name: value for group in reversed(groups) for name, value in group.items()}
    parts = [component(group) for group in groups]
    for part in parts:
        if part["partition"] != PARTITION:
            fail(
                "",
                f"sbatch: error: invalid partition specified: {part['partition']}\nsbatch: error: Batch job submission failed: Invalid partition name specified",
            )
    with locked(folder) as queue:
        if not fits_ever(queue, parts):
            fail("sbatch", "error: Batch job submission failed: Requested node configuration is not available")
        number = str(queue["last"] + 1)
        if "test-only" in given:
            now = time.strftime("%Y-%m-%dT%H:%M:%S")
            nodes = compress(queue["nodes"][: sum(part["count"] for part in parts)])
            cpus = sum(part["cpus"] * part["count"] for part in parts)
            fail(
                "sbatch",
                f"Job {number} to start at {now} using {cpus} processors on nodes {nodes} in partition {PARTITION}",
                0,
            )
        for offset, part in enumerate(parts):
            part["id"] = str(queue["last"] + 1 + offset)
        queue["last"] += len(parts)
        job = new_job(number, options, parts, Path(rest[0]).name if rest else "sbatch")
        queue["jobs"][number] = job
        schedule(queue)
    spool = folder / f"job{number}"
    spool.mkdir()
    (spool / "slurm_script").write_text(text)
    (spool / "slurm_script").chmod(0o700)
    (spool / "environment").write_text(json.dumps(dict(os.environ)))
    command = [sys.executable, "-ESs", str(Path(__file__).with_name("keeper.py")), str(folder), number]
    null = subprocess.DEVNULL
    with (spool / "keeper.log").open("w") as log:
        keeper = subprocess.Popen(command, stdin=null, stdout=null, stderr=log, start_new_session=True, cwd="/")
    with locked(folder) as queue:
        queue["jobs"][number]["keeper"] = keeper.pid
    print(number if "parsable" in given else f"Submitted batch job {number}")


def directives(text: str) -> list[dict[str, str]]:
    """The options in a script, for each component."""
    found: list[dict[str, str]] = [{}]
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        words = shlex.split(line.removeprefix("#SBATCH "), comments=True) if line.startswith("#SBATCH ") else []
        if words == ["hetjob"]:
            found.append({})
        elif words:
            found[-1] |= read_options("sbatch", words, "", (*OF_JOB, *OF_PART) if len(found) == 1 else OF_PART)[0]
    return found


def component(options: dict[str, str]) -> dict[str, Any]:
    tasks, cpus = int(options.get("ntasks-per-node", 1)), int(options.get("cpus-per-task", 1))
    return {
        "count": int(options.get("nodes", 1)), "cpus": tasks * cpus, "gpus": gpus_of(options), "exclusive": "exclusive" in options,
        "partition": options.get("partition", PARTITION), "excluded": expand(options.get("exclude", "")), "nodes": [],
    }  # fmt: skip


def new_job(number: str, options: dict[str, str], parts: list[dict[str, Any]], name: str) -> Job:
    warning = re.fullmatch(r"B:USR1@(\d+)", options.get("signal", "B:USR1@0"))
    if not warning:
        fail("sbatch", f"fake Slurm: --signal={options['signal']} is not known here", 255)
    kind, *others = options.get("dependency", "").split(":")
    if kind not in ("", "afterany", "afterok"):
        fail("sbatch", f"fake Slurm: --dependency={kind} is not known here", 255)
    output = re.sub(r"%(.)", lambda found: {"j": number, "%": "%"}[found[1]], options.get("output", "slurm-%j.out"))
    return {
        "id": number, "parts": parts, "name": options.get("job-name", name), "comment": options.get("comment", ""), "user": getpass.getuser(),
        "output": os.path.abspath(output), "append": options.get("open-mode") == "append", "cwd": os.getcwd(), "keeper": 0,
        "limit": limit_of(options.get("time", "60")), "signal": int(signal.SIGUSR1), "margin": int(warning[1]), "signals": [],
        "requeues": "no-requeue" not in options, "restarts": 0, "held": "hold" in options, "begin": 0.0, "after": [[kind, other] for other in others],
        "kill_on_invalid": options.get("kill-on-invalid-dep") == "yes", "excluded": [], "state": "PENDING", "reason": "None",
        "submitted": time.time(), "start": None, "end": None, "wish": "", "exit": 0, "steps": 0,
    }  # fmt: skip


# ---- scontrol


def scontrol(folder: Path, words: list[str]) -> None:
    options, rest = read_options("scontrol", words, "o", ("oneliner",))
    verb, *rest = rest or [""]
    with locked(folder) as queue:
        schedule(queue)
        if verb == "show" and rest:
            show(queue, rest[0], rest[1:], " " if "oneliner" in options else "\n   ")
        elif verb in ("requeue", "hold", "release") and len(rest) == 1:
            {"requeue": requeue, "hold": hold, "release": hold}[verb](find(queue, rest[0], verb), verb)
        elif verb == "update" and rest:
            update(queue, dict(word.split("=", 1) for word in rest))
        elif verb == "ping":
            print(f"Slurmctld(primary) at {os.uname().nodename} is UP")
        else:
            fail("", f"invalid keyword: {verb}")


def find(queue: dict[str, Any], number: str, verb: str) -> Job:
    if number not in queue["jobs"]:
        more = f"\nslurm_suspend error: {NO_JOB}" if verb in ("hold", "release") else ""
        fail("", f"slurm_load_jobs error: {NO_JOB}" if verb == "show" else f"{NO_JOB} for job {number}{more}")
    return queue["jobs"][number]


def requeue(job: Job, _: str) -> None:
    if job["state"] == "PENDING" or job["wish"] == "REQUEUE":
        fail("", f"Job is pending execution for job {job['id']}")
    if job["state"] == "COMPLETING":
        fail("", f"{DONE} for job {job['id']}")
    if not job["requeues"] or job["state"] != "RUNNING":
        fail("", f"Requested operation is presently disabled for job {job['id']}")
    job.update(wish="REQUEUE", state="COMPLETING", restarts=job["restarts"] + 1)


def hold(job: Job, verb: str) -> None:
    if job["state"] not in WAITS:
        fail("", f"Job has already finished for job {job['id']}\nslurm_suspend error: Job has already finished")
    job["held"] = verb == "hold"


def update(queue: dict[str, Any], values: dict[str, str]) -> None:
    job = find(queue, values.pop("jobid", ""), "update")
    for name, value in values.items():
        if name == "timelimit":
            job["limit"] = limit_of(value)
        elif name == "comment":
            job["comment"] = value
        elif name == "excnodelist":
            job["excluded"] = expand(value)
        else:
            fail("", f"Update of this parameter is not supported: {name}={value}\nRequest aborted")


def show(queue: dict[str, Any], what: str, names: list[str], between: str) -> None:
    nodes = queue["nodes"]
    if what == "job":
        for job in [find(queue, names[0], "show")] if names else queue["jobs"].values():
            for part in job["parts"]:
                print(between.join(f"{name}={value}" for name, value in record(job, part).items()))
    elif what == "partition":
        if names and names != [PARTITION]:
            fail("", f"Partition {names[0]} not found")
        values = f"Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes={compress(nodes)} OverSubscribe=NO State=UP TotalCPUs={CPUS * len(nodes)} TotalNodes={len(nodes)}"
        print(f"PartitionName={PARTITION} {values}".replace(" ", between))
    elif what == "node":
        for node in expand(names[0]) if names else nodes:
            print(
                f"NodeName={node} CPUTot={CPUS} Gres=gpu:{GPUS} Version=22.05.8 State=IDLE Partitions={PARTITION}".replace(
                    " ", between
                )
            )
    elif what == "config":
        print("ClusterName             = fake\nPrivateData             = none\nSLURM_VERSION           = 22.05.8")
    else:
        fail("", f"invalid entity:{what} for keyword:show")


def record(job: Job, part: dict[str, Any]) -> dict[str, object]:
    """What `scontrol show job` says."""
    found: dict[str, object] = {"JobId": part["id"]}
    if job["parts"][1:]:
        found |= {"HetJobId": job["id"], "HetJobOffset": job["parts"].index(part)}
    code, end = os.waitstatus_to_exitcode(job["exit"]), moment(ends(job), "Unknown")
    found |= {
        "JobName": job["name"], "UserId": f"{job['user']}({os.getuid()})", "Priority": 0 if job["held"] else 1, "JobState": job["state"],
        "Reason": job["reason"], "Requeue": int(job["requeues"]), "Restarts": job["restarts"], "BatchFlag": 1,
        "ExitCode": f"{code}:0" if code >= 0 else f"0:{-code}", "RunTime": span(passed(job), True), "TimeLimit": span(job["limit"], True),
        "SubmitTime": moment(job["submitted"], "Unknown"), "StartTime": moment(job["start"] or job["begin"] or None, "Unknown"), "EndTime": end,
        "PreemptTime": "None", "Partition": part["partition"], "ExcNodeList": compress([*job["excluded"], *part["excluded"]]) or "(null)",
        "NodeList": compress(part["nodes"]),
    }  # fmt: skip
    if part["nodes"]:
        found["BatchHost"] = part["nodes"][0]
    found |= {
        "NumNodes": part["count"],
        "NumCPUs": used_cpus(part),
        "OverSubscribe": "NO" if part["exclusive"] else "OK",
    }
    return found | {"WorkDir": job["cwd"], "Comment": job["comment"], "StdErr": job["output"], "StdOut": job["output"]}


# ---- scancel, and what is not here


def scancel(folder: Path, words: list[str]) -> None:
    options, numbers = read_options("scancel", words, "", ("batch", "signal="))
    with locked(folder) as queue:
        for number in numbers:
            job = queue["jobs"].get(number)
            if job is None:
                continue  # without a word
            if "signal" in options:
                if "batch" not in options:
                    fail("scancel", "fake Slurm: --signal goes to the batch script, with --batch")
                job["signals"].append(int(getattr(signal, f"SIG{options['signal'].removeprefix('SIG')}")))
            elif job["state"] == "PENDING":
                job.update(state="CANCELLED", start=time.time(), end=time.time())
            elif job["state"] in USED:
                job.update(wish="CANCELLED", state="COMPLETING")


def main(name: str, folder: Path, words: list[str]) -> None:
    if name == "sacct":
        fail("", "Slurm accounting storage is disabled")
    if name == "sacctmgr":
        fail(
            "",
            "You are not running a supported accounting_storage plugin\nOnly 'accounting_storage/slurmdbd' is supported.",
        )
    {"sbatch": sbatch, "squeue": squeue, "scontrol": scontrol, "scancel": scancel, "sinfo": sinfo}[name](folder, words)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
