"""The nodes' part of `hpcrl doctor`: a step on every component, what the nodes say, and what it means.

    python -m hpcrl.launch.node_checks.all_nodes DIR          inside an allocation: what `hpcrl doctor --nodes` submits

DIR holds job.json (a `Job`); HPCRL_STEP_0, HPCRL_STEP_1, ... are the commands that start one task on every node of a
component, as the rendered script sets them.  The findings go to stdout and to DIR/findings.json.

Invariant: every step is ended by us, by its process id, before we end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

import msgspec

from hpcrl.launch.node_checks.one_node import REPORT, UNSEEN
from hpcrl.launch.node_checks.records import share_records
from hpcrl.launch.node_checks.reports import NodeReport, judge_reports
from hpcrl.launch.probe import HostReport
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.peers import PublishedRecords
from hpcrl.run.process import end_descendants
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.check_results import Finding, failed, last_line
from hpcrl.utils.untrusted_files import read_json, touch
from hpcrl.utils.waiting import Deadline

LATE_FILES = 75.0  #: seconds to wait for the files of nodes that have ended well: more than any cache of absence keeps
SECONDS = 900.0  #: for all of it, with imports of torch and vLLM from a slow file system


class NodeStep(msgspec.Struct, frozen=True):
    """One component: its role ("trainer", "engine", "rollout"), how many nodes, and slots on each.

    Attributes:
        gpus: that a node must have for them, None for as many.
        command: starts one task on each of its nodes, with the arguments of hpcrl.launch.node_checks.one_node.
        needs: what a node must have (gpu_needs.py), None not to look.
        memory: bytes of host memory that a node needs.
    """

    role: str
    nodes: int
    slots: int
    command: list[str] = []
    gpus: int | None = None
    needs: list[str] | None = None
    memory: float = 0.0


class NodesJob(msgspec.Struct, frozen=True):
    """What there is to look at.

    Attributes:
        gpus: whether a slot is a GPU.
        echoes: how the lines begin in which whatever starts the tasks only repeats that one has failed.
    """

    steps: list[NodeStep]
    interface: str | None = None
    gpus: bool = True
    echoes: tuple[str, ...] = ()
    seconds: float = 60.0


def examine(job: NodesJob, directory: Path, seconds: float = SECONDS) -> list[Finding]:
    """Run doctor_node on every node of every step at once, and judge what they say.

    Args:
        directory: new, on the run's file system; it gets the token and the nodes' files.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    touch(directory / "token")
    expected, began = sum(step.nodes for step in job.steps), time.time()
    running = [_start(step, job, directory, expected) for step in job.steps]
    deadline = Deadline(seconds)
    over = lambda: all(process.poll() is not None for process in running)  # noqa: E731
    sharing = threading.Thread(
        target=share_records, args=(directory, expected, min(job.seconds, seconds), over), daemon=True
    )
    sharing.start()
    with ThreadPoolExecutor(len(running)) as pool:
        texts = list(pool.map(lambda process: _output(process, deadline), running))
    ended = time.time()
    findings = []
    unseen = {host for out, _ in texts for host in without_directory(out)}
    fine = not any(process.returncode for process in running)
    reports = gather(directory, expected - len(unseen), Deadline(LATE_FILES if fine else 0.0))
    for step, process, (out, err) in zip(job.steps, running, texts, strict=True):
        count = sum(report.role == step.role for report in reports)
        if process.returncode or (count < step.nodes and not unseen):
            how = how_it_ended(process.returncode) if process.returncode else f"brought {count} of {step.nodes} reports"
            findings.append(
                Finding(
                    "fail",
                    "",
                    f"the step on the {step.role} nodes {how}: {_telling(err or out, job.echoes)}",
                    "see above",
                )
            )
    reports += [NodeReport(HostReport(host, host, (), False, began, 0, 0)) for host in sorted(unseen)]
    wanted = {step.role: step.slots if step.gpus is None else step.gpus for step in job.steps} if job.gpus else {}
    memory = {step.role: step.memory for step in job.steps}
    return [*judge_reports(reports, wanted, job.interface, (began, ended), expected, memory), *findings]


def _telling(text: str, echoes: tuple[str, ...]) -> str:
    """The first line that says why: not one of the echoes, if there is another."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(echoes)), last_line(text))


def without_directory(text: str) -> list[str]:
    """The hosts that say so among the lines of a step's output."""
    before, after = UNSEEN.split("{host}")
    return [
        line.removeprefix(before).partition(after)[0]
        for line in text.splitlines()
        if line.startswith(before) and after in line
    ]


def gather(directory: Path, expected: int, deadline: Deadline) -> list[NodeReport]:
    """The reports in the directory, in the order of their files' names; waits until the deadline for `expected` of
    them.

    A network file system may show what another host has written a minute late.  A file that is not a report is left
    out.
    """
    found = PublishedRecords(directory, NodeReport, REPORT).wait(expected, deadline, 0.5)
    return [found[name] for name in sorted(found)]


def _start(step: NodeStep, job: NodesJob, directory: Path, expected: int) -> Popen[str]:
    words = [str(directory), f"--expect={expected}", f"--role={step.role}", f"--wait={job.seconds:g}"]
    if job.interface:
        words.append(f"--interface={job.interface}")
    if step.needs is not None:
        words += [f"--needs={','.join(step.needs)}", *(["--cpu"] if step.gpus == 0 else [])]
    return Popen([*step.command, *words], stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, errors="replace")


def _output(process: Popen[str], deadline: Deadline) -> tuple[str, str]:
    """stdout and stderr, after killing it if it does not end in time."""
    try:
        return process.communicate(timeout=max(deadline.left, 0.1))
    except TimeoutExpired:
        process.terminate()  # which ends the step
    try:
        out, err = process.communicate(timeout=20)
    except TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return out, f"{err}\nno end in time"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Look at the nodes of this allocation.")
    parser.add_argument("directory", type=Path)
    args = parser.parse_args(argv)
    job = read_json(args.directory / "job.json", NodesJob)
    steps = [
        msgspec.structs.replace(step, command=[*shlex.split(os.environ[f"HPCRL_STEP_{number}"]), "doctor"])
        for number, step in enumerate(job.steps)
    ]
    try:
        findings = examine(msgspec.structs.replace(job, steps=steps), args.directory / "nodes")
    finally:
        end_descendants(5.0)
    show(findings)
    write_atomic(args.directory / "findings.json", msgspec.json.encode(findings))
    return 1 if failed(findings) else 0


def show(findings: Sequence[Finding]) -> None:
    """One line each, at once."""
    for finding in findings:
        print(finding.line(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
