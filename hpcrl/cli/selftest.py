"""`hpcrl selftest`: the checks that the tests make, on the user's own hardware, before it is trusted with a run.

Here, or with --site in a job of one node or several (hpcrl/doctor/selftest/job.py).  Invariant: one table, with a
reason for all that was not checked; nothing outlives it but its directory, which says what is known.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.cli.awaited_job import run_job, short_script
from hpcrl.config.flags import parse_flags
from hpcrl.config.value_types import Kind
from hpcrl.doctor.selftest.first_hour import checks_of, groups, kernel_lines
from hpcrl.doctor.selftest.job import SelftestJob
from hpcrl.doctor.selftest.registry import Check, Results, choose_checks, find_checks, report, table
from hpcrl.doctor.selftest.this_host import CPU_RANKS, run_here
from hpcrl.doctor.selftest.whole_run import gpu_count
from hpcrl.errors import UsageError
from hpcrl.launch.allocation_request import AllocationRequest, Component
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.site_file import FLAGS, from_flags
from hpcrl.run.process import adopt_orphans, end_descendants
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.waiting import Deadline

USAGE = """\
usage: hpcrl selftest [--first-hour | --only NAME ...] [--dir DIR] [--json FILE]
       hpcrl selftest --resume DIR              make the checks that DIR has no results of
       hpcrl selftest --site SITE [--hosts N]   the same in a job, over N of the site's trainer nodes (1)
       hpcrl selftest --list                    list the checks and their meaning

Checks devices, the network between them, the trainer's numbers, updates of a real engine, a save and a resume, on the
GPUs of this machine, or on the CPU. One line each: passed, failed, or skipped with the reason. The exit status is 1 if
any failed.

  --first-hour       the checks to make first on new GPUs, half an hour on one and an hour on eight
  --only NAME ...    these checks alone
  --dir DIR          directory for results, logs and small runs (default: selftest-TIME)
  --json FILE        a second copy of DIR/report.json (versions, numbers, seconds), to attach to an issue
  --ranks N          processes in the group (default: one a GPU, or 2 where there is none)
  --site SITE, --time, --set KEY=VALUE ...     as for hpcrl submit
  --wait SECONDS     limit of the job from submission to its end (default: 3600; 9000 with --first-hour)

After an interruption, --resume DIR continues; to repeat a check of DIR: rm DIR/results/NAME.json."""
OWN = {
    **FLAGS,
    "first-hour": Kind("bool"),
    "only": Kind("str", many=True),
    "dir": Kind("str"),
    "resume": Kind("str"),
    "json": Kind("str"),
    "hosts": Kind("int", bounds=">= 1"),
    "ranks": Kind("int", bounds=">= 1"),
    "wait": Kind("float", bounds="> 0"),
    "list": Kind("bool"),
}
WAIT = {False: 3600.0, True: 9000.0}  #: without and with --first-hour
LIMIT = {False: "30:00", True: "90:00"}


def selftest(argv: Sequence[str]) -> int:
    """The command; its exit status."""
    options, own, words = parse_flags(argv, OWN, only=())
    if words or options:
        extra = words[0] if words else f"--{next(iter(options)).replace('_', '-')}"
        raise UsageError(f"{extra} has no effect on a self-test", "see hpcrl selftest --help")
    every = find_checks()
    if own.get("list"):
        print("\n".join(f"{name:16} {check.title}" for name, check in every.items()))
        return 0
    if "resume" in own and "dir" in own:
        raise UsageError("--dir and --resume exclude each other", "leave --dir out")
    if own.get("first-hour") and "only" in own:
        raise UsageError("--first-hour and --only exclude each other", "leave one of them out")
    if "site" not in own and (given := [name for name in ("hosts", "wait", "time", "layout", "set") if name in own]):
        raise UsageError(f"--{given[0]} has no effect without --site", "name the cluster's profile")
    site = from_flags(own) if "site" in own else None
    if own.get("first-hour"):
        gpus = gpu_count() if site is None else site.trainer.gpus_per_node or 0
        own["only"] = checks_of(gpus)
        print(f"hpcrl: {gpus} GPUs: {', '.join(groups(gpus))}")
    chosen = choose_checks(own.get("only", []), every)
    results = Results(_directory(own))
    try:
        if site is not None:
            _in_a_job(site, own, results)
        else:
            _here(chosen, results, own.get("ranks") or gpu_count() or CPU_RANKS)
    except KeyboardInterrupt:
        print(f"hpcrl: interrupted; hpcrl selftest --resume {results.directory} continues", file=sys.stderr)
        return 130
    return _tell(chosen, results, own.get("json"))


def _directory(own: dict[str, Any]) -> Path:
    """Raise UsageError for a --resume that is none, and a --dir that is full."""
    if "resume" in own:
        found = Path(own["resume"]).absolute()
        if not (found / "results").is_dir():
            raise UsageError(f"--resume {found}: there is no self-test in it", "name the directory that one printed")
        return found
    found = Path(own.get("dir") or time.strftime("selftest-%Y%m%d-%H%M%S", time.gmtime())).absolute()
    if found.exists() and any(found.iterdir()):
        raise UsageError(
            f"--dir {found} is not empty", f"continue with hpcrl selftest --resume {found}, or name another"
        )
    return found


def _here(chosen: dict[str, Check], results: Results, ranks: int) -> None:
    adopt_orphans()
    found = results.read()
    print(
        "\n".join(f"hpcrl: {name} is known already" for name in chosen if name in found)
        or f"hpcrl: in {results.directory}"
    )
    try:
        run_here(chosen, results, ranks, lambda name: print(_line(chosen, results, name), flush=True))
    finally:
        end_descendants(5.0)


def _line(chosen: dict[str, Check], results: Results, name: str) -> str:
    return table({name: chosen[name]}, results.read()).splitlines()[0]


def _tell(chosen: dict[str, Check], results: Results, file: str | None) -> int:
    found = {name: outcome for name, outcome in results.read().items() if name in chosen}
    hosts = results.hosts() or [socket.gethostname()]
    text = report(find_checks(), results.read(), hosts, kernel_lines(results.directory))
    write_atomic(results.directory / "report.json", text)
    if file:
        Path(file).write_bytes(text)
    print(f"\n{table(chosen, found)}\nreport: {file or results.directory / 'report.json'}")
    return 1 if len(found) < len(chosen) or any(outcome.result == "failed" for outcome in found.values()) else 0


# ---- in a job


def _in_a_job(site: SiteProfile, own: dict[str, Any], results: Results) -> None:
    """Submit it, wait for its end, telling of results as they come."""
    hosts = own.get("hosts", 1)
    directory = results.directory
    wish = site.trainer
    slots = wish.gpus_per_node if wish.gpus_per_node is not None else own.get("ranks", 1)
    ranks = own.get("ranks") or slots or CPU_RANKS
    request = AllocationRequest("homogeneous", (Component("trainer", hosts, slots, wish.cpus_per_node),), margin=60)
    todo = SelftestJob(hosts, ranks, own.get("only", []), site.interface)
    write_atomic(directory / "job.json", msgspec.json.encode(todo))
    seen: set[str] = set()
    every = find_checks()

    def ended() -> bool | None:
        os.listdir(directory)  # absence may be cached; a listing is not
        for name in sorted(results.read().keys() - seen, key=lambda name: every[name].turn):
            seen.add(name)
            print(_line(every, results, name), flush=True)
        return (directory / "ended").exists() or None

    long = own.get("first-hour", False)
    once = site.model_copy(update={"time": own.get("time", LIMIT[long]), "requeue": False})
    title, module = f"hpcrl selftest over {hosts} nodes", "hpcrl.doctor.selftest.job"
    script = short_script("selftest", title, module, directory, once, request)
    run_job(script, directory, ended, Deadline(own.get("wait", WAIT[long])), f"makes the checks, in {directory}")
