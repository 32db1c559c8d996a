"""The batch process of a self-test in a job, and one host's part of the checks that need several.

    python -m hpcrl.doctor.selftest.job DIR            inside an allocation: what `hpcrl selftest --site` submits
    python -m hpcrl.doctor.selftest.job DIR --host NAME       one task a host: the ranks of this host

DIR holds job.json; HPCRL_STEP_0 starts one task on every node, as the rendered script sets it.  With one host all is
done there; with several, first what all ranks do together, then the rest on the first host.

Invariant: the hosts meet through files in DIR, each whole; every wait has a deadline.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from hpcrl.doctor.selftest.registry import Outcome, Results, choose_checks, find_checks
from hpcrl.doctor.selftest.this_host import start, watch
from hpcrl.errors import DeadlineError
from hpcrl.launch.node_checks.records import NodeRecord, all_records, leave_record, share_records
from hpcrl.launch.probe import Network, choose
from hpcrl.plan import Location, socket_names
from hpcrl.run.process import die_with_parent, end_descendants
from hpcrl.utils.untrusted_files import read_json, touch

MEET = 120.0  #: seconds for all hosts to have left their records
LONG = 3600.0  #: seconds for one step; the job's own limit is usually shorter


class SelftestJob(msgspec.Struct, frozen=True):
    """hosts, and ranks on each.

    Attributes:
        only: names of checks, none for all.
        interface: as the site names it.
    """

    hosts: int
    ranks: int
    only: list[str]
    interface: str | None = None


def batch(directory: Path) -> int:
    """All of it, a step after another."""
    job, results = read_job(directory), Results(directory)
    step = shlex.split(os.environ["HPCRL_STEP_0"])
    chosen = choose_checks(job.only, find_checks())
    try:
        together = [name for name, check in chosen.items() if check.runs == "ranks" and name not in results.read()]
        if job.hosts > 1 and together:
            results.clear(together)
            (directory / "hosts").mkdir(exist_ok=True)
            sharing = threading.Thread(target=share_records, args=(directory / "hosts", job.hosts, MEET), daemon=True)
            sharing.start()
            status = _step([*step, "selftest", str(directory)])
            _note_missing(results, together, status)
        only = ["--only", *job.only] if job.only else []
        rest = ["-m", "hpcrl", "selftest", "--resume", str(directory), "--ranks", str(job.ranks), *only]
        _step([*step, "once", os.environ.get("HPCRL_PYTHON", sys.executable), *rest])
    finally:
        end_descendants(5.0)
        touch(directory / "ended")
    return 0


def _step(command: list[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return process.wait(LONG)
    except subprocess.TimeoutExpired:
        process.terminate()
        return process.wait(30)


def _note_missing(results: Results, names: list[str], status: int) -> None:
    """A check in which the ranks ended has failed; those after it as well, since no rank was left to run them."""
    broken = results.interrupted(names)
    for name in [name for name in names if name not in results.read()]:
        why = "a rank ended in it" if name == broken else "the ranks ended before it"
        results.write(name, Outcome("failed", f"{why} (the step's exit status is {status}); see logs/ and job.log"))


def host(directory: Path, name: str) -> int:
    """This host's ranks of the checks that all hosts make together."""
    job, results = read_job(directory), Results(directory)
    chosen = choose_checks(job.only, find_checks())
    names = [each for each, check in chosen.items() if check.runs == "ranks"]
    hosts = directory / "hosts"
    leave_record(hosts, name, job.ranks)
    found = all_records(hosts, job.hosts, MEET)
    if len(found) < job.hosts:
        raise DeadlineError(
            f"{len(found)} of {job.hosts} hosts have reported to {hosts} within {MEET:.0f} s: {sorted(found)}"
        )
    network = choose({each: found[each].base for each in sorted(found)}, job.interface)
    speeds = [each.speed for each in network.values()]
    link = ["--link", str(min(speeds) * 1e6 / 8)] if all(speeds) else []
    command = [sys.executable, "-m", "hpcrl.doctor.selftest.rank", str(directory), *names]
    command += ["--port-file", str(directory / "port"), "--hosts", str(job.hosts), *link]
    why = watch(
        start(command, rank_environments(found, name, network), directory / "logs"),
        names,
        results,
        lambda _: None,
        LONG,
    )
    if why:
        print(f"hpcrl: {name}: {why}", file=sys.stderr)
    return 1 if why else 0


def rank_environments(found: dict[str, NodeRecord], me: str, network: dict[str, Network]) -> list[dict[str, str]]:
    """The variables of each of this host's ranks in one group over the hosts that have any, in the order of their
    names."""
    hosts = [host for host in sorted(found) if found[host].ranks]
    first = sum(found[host].ranks for host in hosts[: hosts.index(me)])
    shared = {
        "WORLD_SIZE": str(sum(found[host].ranks for host in hosts)),
        "MASTER_ADDR": network[hosts[0]].address,
        "MASTER_PORT": "0",
        **{
            name: os.environ.get(name, value)
            for name, value in socket_names(Location(me, (), "", network[me].interface)).items()
        },
    }
    return [shared | {"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(found[me].ranks)]


def read_job(directory: Path) -> SelftestJob:
    return read_json(directory / "job.json", SelftestJob)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The self-test inside a job.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--host")
    args = parser.parse_args(argv)
    if args.host is None:
        return batch(args.directory)
    die_with_parent()
    return host(args.directory, args.host)


if __name__ == "__main__":
    sys.exit(main())
