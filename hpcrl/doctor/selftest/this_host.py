"""The self-test on this host: its ranks started and watched, one kind of check after another.

Invariant: a check that ends its process, or does not end, is a failed check; those after it are made by new processes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

import psutil

from hpcrl.doctor.selftest.registry import Check, Outcome, Results, try_check
from hpcrl.doctor.selftest.whole_run import gpu_count
from hpcrl.report.file_tail import end_of_text
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.gpu_environment import without_gpus
from hpcrl.run.process import PARENT, end_processes
from hpcrl.utils.check_results import last_line
from hpcrl.utils.untrusted_files import open_append
from hpcrl.utils.waiting import Deadline

LONG = 600.0  #: seconds for the checks that one set of processes makes
CPU_RANKS = 2  #: where there is no GPU
LOCAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def run_here(chosen: Mapping[str, Check], results: Results, ranks: int, told: Callable[[str], None]) -> None:
    """Every check that has no result yet.

    Without a GPU, for which they would have to take turns, the whole runs are in parallel with the other checks.

    Args:
        ranks: processes in the group.
        told: called with each name that gets a result.
    """
    rest = {name: check for name, check in chosen.items() if name not in results.read()}
    results.clear(list(rest))
    gpus, gone = gpu_count(), threading.Event()
    pool = ThreadPoolExecutor(1)
    try:
        runs = None if gpus else pool.submit(_runs, rest, results, told, gone)
        _processes([name for name, check in rest.items() if check.runs == "ranks"], results, ranks, told, apart=False)
        _processes([name for name, check in rest.items() if check.runs == "alone"], results, 0, told, apart=gpus > 0)
        if runs is None:
            _runs(rest, results, told, gone)
        else:
            runs.result()
    finally:
        gone.set()
        pool.shutdown(wait=False)


def _runs(chosen: Mapping[str, Check], results: Results, told: Callable[[str], None], gone: threading.Event) -> None:
    """The checks that start whole runs.

    Args:
        gone: nothing waits any more, and what comes of a run that was ended is no result.
    """
    for name in [name for name, check in chosen.items() if check.runs == "launcher"]:
        outcome = try_check(chosen[name], _folder(results))
        if gone.is_set():
            return
        results.write(name, outcome)
        told(name)


def _processes(rest: Sequence[str], results: Results, ranks: int, told: Callable[[str], None], apart: bool) -> None:
    """The checks `rest` in processes, starting again with the next where one ended.

    Args:
        ranks: processes in the group, 0: one alone.
        apart: a new process for each.
    """
    while rest:
        why = _one_set(rest[:1] if apart else rest, results, ranks, told)
        broken = results.interrupted(rest) or (rest[0] if why else None)
        if broken and broken not in results.read():
            results.write(broken, Outcome("failed", why or "its process ended without a word"))
            told(broken)
        rest = [name for name in rest if name not in results.read()]


def _folder(results: Results) -> Path:
    folder = results.directory / "work" / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _one_set(names: Sequence[str], results: Results, ranks: int, told: Callable[[str], None]) -> str:
    """Start the processes, 0 ranks: one alone; why they ended badly, "" if they did not."""
    port = results.directory / f"port-{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "hpcrl.doctor.selftest.rank", str(results.directory), *names]
    command += ["--port-file", str(port)] if ranks else ["--alone"]
    environments = [LOCAL | {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(ranks)} for r in range(ranks)] or [
        {}
    ]
    return watch(start(command, environments, results.directory / "logs"), names, results, told)


def start(command: list[str], environments: Sequence[Mapping[str, str]], logs: Path) -> list[tuple[Popen[bytes], Path]]:
    """A process for each environment (in addition to ours), and its log."""
    found = []
    for variables in environments:
        log = logs / f"rank-{variables.get('RANK', 'alone')}.log"
        with open_append(log) as out:
            env = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(variables) | {PARENT: str(os.getpid())} | without_gpus()
            found.append((Popen(command, env=env, stdin=DEVNULL, stdout=out, stderr=STDOUT), log))
    return found


def watch(
    started: Sequence[tuple[Popen[bytes], Path]],
    names: Sequence[str],
    results: Results,
    told: Callable[[str], None],
    seconds: float = LONG,
) -> str:
    """Wait for all of them, telling of each result as it comes; why the first that failed did, "" if none."""
    deadline = Deadline(seconds)
    why = ""
    seen = {*results.read()}
    try:
        while not why:
            over = all(process.poll() is not None for process, _ in started)
            for name in [name for name in results.read() if name in names and name not in seen]:
                seen.add(name)
                told(name)
            if bad := next(((process, log) for process, log in started if process.poll()), None):
                said = last_line(end_of_text(bad[1]))
                why = f"its process {how_it_ended(bad[0].returncode)}: {said}; see {bad[1]}"
            elif deadline.over:
                why = f"it did not end within {seconds:.0f} s; see {started[0][1]}"
            if over:
                break
            time.sleep(0.1)
    finally:
        end_processes([psutil.Process(p.pid) for p, _ in started if p.poll() is None], 5.0)
    return why
