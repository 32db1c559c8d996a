"""What a run costs the machine room as hosts are added: calls on the shared run directory, processes, sruns,
connections.

    python bench/hosts.py [--seconds 20] [--hosts 8,64,512]

One host is real, a process under strace whose system calls that name the shared directory are counted; the other hosts
are what they leave there.  sruns and processes are counted by an srun that notes each call and answers for all of its
hosts.  Measured:

  meeting     calls of one host, and of the batch host for all, from the first card to the last `done`; connections that a host opens
  steady      calls a second of one host with an engine while a run goes on and nothing happens (hpcrl/launch/host.py): its looks into
              the directory, those for engines that are let go, its signs of life
  after       processes and sruns that the batch host starts to find out which hosts answer

Bounds that are checked: at most 1 call a second and host in the steady state; calls and connections of a host in the
meeting grow no faster than the logarithm of the hosts; one srun a component.  Writes bench/results/hosts.md; the last
line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from hpcrl.doctor.node_records import NodeRecord, share_records  # noqa: E402
from hpcrl.doctor.node_reports import peers_of  # noqa: E402
from hpcrl.launch.probe import HostReport, Network  # noqa: E402
from hpcrl.run.rundir import RunDir, write_atomic  # noqa: E402
from hpcrl.slurm.srun import HetGroup, SrunHosts  # noqa: E402

MEET = """
import sys, time
from pathlib import Path
from hpcrl.doctor.node_records import all_records, leave_record
from hpcrl.run.rundir import listed
from hpcrl.doctor.node_records import pause
directory, count = Path(sys.argv[1]), int(sys.argv[2])
leave_record(directory, "n00000", 8)
found = all_records(directory, count, 60)
assert len(found) == count, len(found)
(directory / "n00000.done").touch()
while sum(name.endswith(".done") for name in listed(directory)) < count:
    time.sleep(pause(count))
"""
STEADY = """
import sys, time
from hpcrl.heartbeat import HeartbeatWriter
from hpcrl.launch.engines.restarter import EngineRestarter
from hpcrl.launch.host import BEATS, HOST_BEAT, RunDirPoller
from hpcrl.run.rundir import RunDir
rundir = RunDir(sys.argv[1], 0)
looks, restarter = RunDirPoller(rundir), EngineRestarter(rundir, "n00000", 2, {0: []}, None)
(rundir.here / BEATS).mkdir()
end = time.monotonic() + float(sys.argv[2])
with HeartbeatWriter(rundir.here / BEATS, "n00000", every=HOST_BEAT):
    while time.monotonic() < end:
        looks.end()
        looks.over(at_once=False)
        restarter.restart_ended([])
        time.sleep(0.2)
"""


def calls(program: str, directory: Path, *words: object) -> int:
    """System calls of a Python program that name `directory`."""
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as out:
        command = ["strace", "-f", "-s", "4096", "-e", "trace=file", "-o", out.name]
        command += [sys.executable, "-c", program, str(directory), *map(str, words)]
        subprocess.run(command, check=True, cwd=REPO, timeout=300, stdin=subprocess.DEVNULL)
        return sum(str(directory) in line and " execve(" not in line and "<unfinished" not in line for line in out)


def card(number: int) -> NodeRecord:
    networks = (Network("ib0", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 8, 100_000),)
    return NodeRecord(
        HostReport(f"n{number:05}", f"n{number:05}", networks, True, time.time(), 64, 1 << 38),
        {networks[0].address: 4000},
        8,
    )


def meeting(hosts: int) -> dict[str, float]:
    """Calls of one host among so many; connections that it opens; seconds of the batch host to hand out all cards."""
    import msgspec

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for number in range(1, hosts):
            write_atomic(directory / f"n{number:05}.json", msgspec.json.encode(card(number)))
            (directory / f"n{number:05}.done").touch()
        seconds: list[float] = []

        def share() -> None:
            while not (directory / "n00000.json").exists():
                time.sleep(0.02)
            begun = time.monotonic()
            share_records(directory, hosts, 60)
            seconds.append(time.monotonic() - begun)

        sharing = threading.Thread(target=share)
        sharing.start()
        found = calls(MEET, directory, hosts)
        sharing.join()
        size = (directory / "all.cards").stat().st_size
    names = [f"n{number:05}" for number in range(hosts)]
    return {"calls": found, "connections": len(peers_of(names[0], names)), "share_seconds": seconds[0], "bytes": size}


def steady(seconds: float) -> float:
    """Calls a second of one host, beyond those of its start and end."""

    def made(during: float) -> int:
        with tempfile.TemporaryDirectory() as folder:
            rundir = RunDir.create(Path(folder) / "run")
            rundir.begin()
            return calls(STEADY, rundir.root, during)

    return (made(seconds) - made(0.0)) / seconds


def after(hosts: int) -> dict[str, float]:
    """sruns of two components of so many hosts, all of which answer; seconds."""
    with tempfile.TemporaryDirectory() as folder:
        log, script = Path(folder) / "calls", Path(folder) / "srun"
        script.write_text(
            f'#!/bin/bash\necho "$@" >> {log}\nfor node in $(seq -f "n%05g" $1 $2); do : > "${{@: -1}}/$node"; done\n'
        )
        script.chmod(0o755)
        half = hosts // 2
        parts = [(0, half - 1), (half, hosts - 1)]
        groups = [
            HetGroup(
                tuple(f"n{n:05}" for n in range(first, last + 1)), 8, (str(script), str(first), str(last), "task.sh")
            )
            for first, last in parts
        ]
        backend = SrunHosts(groups)
        backend.answers = Path(folder)
        begun = time.monotonic()
        silent = backend.silent(60)
        assert not silent, silent
        return {"sruns": len(log.read_text().splitlines()), "seconds": time.monotonic() - begun}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the steady state")
    parser.add_argument("--hosts", default="8,64,512")
    args = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("strace is not installed: apt-get install strace")
    counts = [int(word) for word in args.hosts.split(",")]
    found: dict[str, Any] = {"steady_calls_per_second": steady(args.seconds), "hosts": {}}
    for hosts in counts:
        found["hosts"][hosts] = {"meeting": meeting(hosts), "after": after(hosts)}
    rows = [f"| {hosts} | {row['meeting']['calls']} | {row['meeting']['connections']} | {row['meeting']['share_seconds']:.2f} "
            f"| {row['after']['sruns']} | {row['after']['seconds']:.2f} |" for hosts, row in found["hosts"].items()]  # fmt: skip
    text = "\n".join(
        [
            "# What a run costs as hosts are added",
            "",
            "`python bench/hosts.py`: one host real and under strace, the others simulated by what they leave in the "
            "directory.",
            "",
            f"In the steady state a host makes {found['steady_calls_per_second']:.2f} calls a second on the run "
            "directory.",
            "",
            "| hosts | calls of a host, to meet | its connections | s to hand out all cards | sruns to ask all hosts | "
            "s |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    (REPO / "bench" / "results" / "hosts.md").write_text(text)
    print(text)
    assert found["steady_calls_per_second"] <= 1.0
    first, last = (found["hosts"][hosts]["meeting"] for hosts in (counts[0], counts[-1]))
    growth = math.log2(counts[-1]) / math.log2(counts[0])
    assert last["calls"] <= max(growth, 1) * first["calls"] + 20 and last["connections"] <= max(
        15, math.ceil(math.log2(counts[-1]))
    )
    assert all(row["after"]["sruns"] == 2 for row in found["hosts"].values())
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
