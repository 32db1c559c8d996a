"""What a run costs the machine room as hosts are added: calls on the shared run directory, processes, sruns,
connections.

    python bench/hosts.py [--seconds 20] [--hosts 8,64,512]

One host is real, a process under strace whose system calls that name the shared directory are counted; the other hosts
are what they leave there.  sruns and processes are counted by an srun that notes each call and answers for all of its
hosts.  Measured:

  meeting     calls of one host, and of the batch host for all, from the first card to the last `done`; connections that a host opens
  steady      calls a second of one host with an engine while a run goes on and nothing happens (hpcrl/launch/host.py): its looks into
              the directory, those for engines that are let go, its signs of life
  waiting     the same of the trainer ranks of a host, eight of them, each the first of its data-parallel rank, which wait for samples
              of a real rollout queue (hpcrl/queue/client.py), in a plan of so many hosts
  ranks       so many ranks meet in a real store (hpcrl/rendezvous): each looks up in two groups as many peers as gloo needs for its
              rings and trees; requests and bytes in all, CPU seconds of the server, seconds to make the keys
  files       what ten attempts on so many hosts, a torchrun and a rank with a timeline on each, leave in the run directory, by kind,
              and how long the launcher's thread takes to pack what the eight before the last two have left
  after       processes and sruns that the batch host starts to find out which hosts answer

Bounds that are checked: at most 1 call a second and host in the steady state, waiting ranks included; requests of the store that
grow as N log N, and under 60 s of one core for 4,096 ranks; calls and connections of a host in the
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

import msgspec  # noqa: E402
import zmq  # noqa: E402

from hpcrl.doctor.node_records import NodeRecord, share_records  # noqa: E402
from hpcrl.doctor.node_reports import peers_of  # noqa: E402
from hpcrl.launch.attempts.old_attempts import tidy  # noqa: E402
from hpcrl.launch.probe import HostReport, Network  # noqa: E402
from hpcrl.plan import Location, Plan  # noqa: E402
from hpcrl.queue.auth import ClientKeys, client_keys, lock_client, make_keys  # noqa: E402
from hpcrl.rendezvous.table import StoreRequest, to_bytes  # noqa: E402
from hpcrl.report.timeline.spans import FOLDER, role_timeline  # noqa: E402
from hpcrl.run.process import raise_file_limit  # noqa: E402
from hpcrl.run.rundir import RunDir, write_atomic, write_unread  # noqa: E402
from hpcrl.slurm.srun import SrunHosts  # noqa: E402
from hpcrl.slurm.steps import HetGroup  # noqa: E402

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

WAITING = """
import sys, threading, time
from hpcrl.queue.client import Late, QueueClient
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import RunDir
rundir, seconds, ranks, size = RunDir(sys.argv[1], 0), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
plan = read_plan(rundir)
def wait(rank):
    client = QueueClient(rundir, plan, rank, size, 60)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            client.fetch(0, 1.0)
        except Late:
            pass
waiting = [threading.Thread(target=wait, args=(rank,)) for rank in range(ranks, 2 * ranks)]
for thread in waiting:
    thread.start()
for thread in waiting:
    thread.join()
"""
QUEUE = """
import asyncio, sys
from hpcrl.plan import Plan
from hpcrl.queue.server import QueueServer
from hpcrl.run.peers import RolloutPeer, publish
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import RunDir
async def main():
    rundir = RunDir(sys.argv[1], 0)
    plan = read_plan(rundir)
    here = Plan(plan.run_id, plan.attempt, plan.trainers[:1], (), plan.rollout)  # else it refuses an address of this host alone
    server = QueueServer(rundir, here, int(sys.argv[2]), {})
    await server.start()
    print("up", flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
STORE = """
import sys, threading, time
from hpcrl.rendezvous.server import StoreServer
from hpcrl.run.process import raise_file_limit
from hpcrl.queue.auth import server_keys
from hpcrl.run.rundir import RunDir
raise_file_limit()
server = StoreServer("127.0.0.1", server_keys(RunDir(sys.argv[1], 0), "ranks"))
begun = time.process_time()
print(server.port, flush=True)
sys.stdin.read()
print(time.process_time() - begun, flush=True)
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
        size = (directory / "all.records").stat().st_size
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


def plan_of(hosts: int, ranks: int) -> Plan:
    """Trainers alone, on hosts with as many slots."""
    places = [Location(f"n{n:05}", (slot,), "127.0.0.1", "ib0") for n in range(hosts) for slot in range(ranks)]
    return Plan("0" * 32, 0, tuple(places), (), Location("n00000", (), "127.0.0.1", "ib0"))


def waiting(seconds: float, hosts: int, ranks: int) -> float:
    """Calls a second of the ranks of one host that wait for samples, each in its own data-parallel rank."""

    def made(during: float) -> int:
        with tempfile.TemporaryDirectory() as folder:
            rundir = RunDir.create(Path(folder) / "run")
            rundir.begin()
            write_atomic(rundir.plan_file, msgspec.json.encode(plan_of(hosts, ranks)))
            make_keys(rundir, 2 * ranks)
            words = [sys.executable, "-c", QUEUE, str(rundir.root), str(2 * ranks)]
            with subprocess.Popen(words, cwd=REPO, stdout=subprocess.PIPE) as server:
                assert server.stdout is not None and server.stdout.readline()
                found = calls(WAITING, rundir.root, during, ranks, 2 * ranks)
                server.kill()
            return found

    return (made(seconds + 2) - made(2.0)) / seconds


class SimulatedRank:
    """A rank's end of the store: two groups, in each its own address set, and those of its peers looked up."""

    def __init__(self, rank: int, ranks: int, port: int, keys: ClientKeys, context: zmq.Context) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        lock_client(self.socket, keys)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        peers = [(rank + (1 << step)) % ranks for step in range(math.ceil(math.log2(ranks)))]
        self.todo = []
        for group in "ab":
            self.todo.append(("set", [f"{group}/{rank}"], [bytes(154)]))
            for peer in peers:
                self.todo += [("wait", [f"{group}/{peer}"], []), ("get", [f"{group}/{peer}"], [])]
        self.done = 0

    def ask(self) -> bool:
        """Send the next request; False if there is none left."""
        if self.done == len(self.todo):
            return False
        verb, names, values = self.todo[self.done]
        self.done += 1
        self.socket.send(to_bytes(StoreRequest(self.done, verb, names, values)))
        return True


def ranks_meet(ranks: int) -> dict[str, float]:
    """Requests and bytes of so many ranks that meet in a store, and CPU seconds of its server."""
    with tempfile.TemporaryDirectory() as folder:
        rundir = RunDir.create(Path(folder) / "run")
        rundir.begin()
        begun = time.monotonic()
        make_keys(rundir, ranks)
        keys_seconds = time.monotonic() - begun
        words = [sys.executable, "-c", STORE, str(rundir.root)]
        with subprocess.Popen(words, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None and server.stdin is not None
            port = int(server.stdout.readline())
            begun = time.monotonic()
            requests, size = _meet(ranks, port, client_keys(rundir, 0, "ranks"))
            seconds = time.monotonic() - begun
            server.stdin.close()
            cpu = float(server.stdout.readline())
    return {"requests": requests, "bytes": size, "cpu": cpu, "seconds": seconds, "keys": keys_seconds}


def _meet(ranks: int, port: int, keys: ClientKeys) -> tuple[int, int]:
    """(requests, bytes of the answers) until every rank has asked for all that it needs."""
    context = zmq.Context()
    context.max_sockets = 2 * ranks + 64
    poller, found = zmq.Poller(), {}
    for rank in range(ranks):
        one = SimulatedRank(rank, ranks, port, keys, context)
        found[one.socket] = one
        poller.register(one.socket, zmq.POLLIN)
    left = sum(one.ask() for one in found.values())
    size, end = 0, time.monotonic() + 600
    while left and time.monotonic() < end:
        for socket, _ in poller.poll(1000):
            size += len(socket.recv())
            left -= not found[socket].ask()
    assert not left, f"{left} ranks did not meet"
    context.destroy(0)
    return sum(len(one.todo) for one in found.values()), size


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


ATTEMPTS = 10
LINES = 200  #: of a role's log
#: kind of file -> its places in a run directory
KINDS = {
    "reports of hosts at the start": ("attempts/*/hosts/*", "attempts/*/doctor/*"),
    "logs": ("logs/attempt-*/*", "logs/attempt-*.tar.gz"),
    "timelines": (f"{FOLDER}/attempt-*/*", f"{FOLDER}/attempt-*.jsonl"),
    "what roles published": ("attempts/*/peers/*",),
    "plans, hosts, errors": ("attempts/*/*.json",),
}


def leave_attempt(rundir: RunDir, hosts: int, ranks: int) -> None:
    """What the processes of an attempt write: reports, plan, logs, timelines, and the first addresses."""
    rundir.begin()
    doctor = rundir.here / "doctor"
    doctor.mkdir()
    plan = plan_of(hosts, ranks)
    write_unread(rundir.plan_file, msgspec.json.encode(plan))
    write_unread(rundir.here / "hosts.json", b"[]")
    write_unread(rundir.here / "error.json", b"{}")
    for name in ("store-0", "trainer-0", "rollout-0"):
        write_unread(rundir.here / "peers" / f"{name}.json", b"{}")
    for number, host in enumerate(plan.hosts):
        record = msgspec.json.encode(card(number))
        for path in (rundir.here / "hosts" / f"{host}.json", doctor / f"{host}.json", doctor / f"{host}.1.report"):
            write_unread(path, record)
        write_unread(doctor / f"{host}.done", b"")
        write_unread(
            rundir.logs / f"trainer-{number * ranks}.log", b"10:33:33 step 7: loss 0.1234, reward 0.5\n" * LINES
        )
        for role, index in (("host", 0), ("trainer", number * ranks)):
            timeline = role_timeline(rundir, role, index, host)
            for step in range(LINES):
                timeline.mark("ready", rollout_id=step)
            timeline.close()


def files(hosts: int, ranks: int) -> dict[str, Any]:
    """Files and MiB of each kind after ATTEMPTS attempts, with nothing packed and with what is; seconds to pack it."""

    def count() -> dict[str, list[float]]:
        found = {
            kind: [path for glob in globs for path in root.glob(glob) if path.is_file()]
            for kind, globs in KINDS.items()
        }
        return {kind: [len(paths), sum(path.stat().st_size for path in paths) / 2**20] for kind, paths in found.items()}

    with tempfile.TemporaryDirectory() as folder:
        root = RunDir.create(Path(folder) / "run").root
        for number in range(ATTEMPTS):
            leave_attempt(RunDir(root, number), hosts, ranks)
        plain, begun = count(), time.monotonic()
        tidy(RunDir(root, ATTEMPTS - 1))
        return {"plain": plain, "seconds": time.monotonic() - begun, "kept": count()}


def table_of_files(hosts: int, found: dict[str, Any]) -> list[str]:
    """The part of the page about files."""
    rows = [
        f"| {kind} | {n:,} | {size:.1f} | {found['kept'][kind][0]:,} | {found['kept'][kind][1]:.1f} |"
        for kind, (n, size) in found["plain"].items()
    ]
    total = [sum(row[0] for row in found[which].values()) for which in ("plain", "kept")]
    return [
        f"Files of {ATTEMPTS} attempts of trainers on {hosts} hosts (a log, two timelines and four reports a host and attempt; a log of "
        f"{LINES} lines): as they were written, and with what each start packs and removes, which takes a thread of the "
        f"launcher {found['seconds']:.1f} s for all of it. Each further attempt adds {found['kept']['plans, hosts, errors'][0] // ATTEMPTS + 2}. Besides, the samples of a step "
        "are two files, and an attempt's ledger is one.",
        "",
        "| kind | files written | MiB | files kept | MiB |",
        "|---|---|---|---|---|",
        *rows,
        f"| all | {total[0]:,} | | {total[1]:,} | |",
        "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the steady state")
    parser.add_argument("--hosts", default="8,64,512")
    parser.add_argument("--ranks", type=int, default=8, help="of a host")
    args = parser.parse_args()
    raise_file_limit()
    if shutil.which("strace") is None:
        sys.exit("strace is not installed: apt-get install strace")
    counts = [int(word) for word in args.hosts.split(",")]
    found: dict[str, Any] = {"steady_calls_per_second": steady(args.seconds), "hosts": {}}
    found["waiting_calls_per_second"] = waiting(4 * args.seconds, counts[-1], args.ranks)
    for hosts in counts:
        found["hosts"][hosts] = {
            "meeting": meeting(hosts),
            "after": after(hosts),
            "ranks": ranks_meet(hosts * args.ranks),
        }
    found["files"] = files(counts[-1], args.ranks)
    rows = [f"| {hosts} | {row['meeting']['calls']} | {row['meeting']['connections']} | {row['meeting']['share_seconds']:.2f} "
            f"| {row['after']['sruns']} | {row['after']['seconds']:.2f} |" for hosts, row in found["hosts"].items()]  # fmt: skip
    meetings = []
    for hosts, row in found["hosts"].items():
        n, met = hosts * args.ranks, row["ranks"]
        meetings.append(
            f"| {n:,} | {met['requests']:,} | {met['requests'] / n / math.log2(n):.1f} | {4 * n * n:,} | {met['bytes'] / 1e6:.1f} "
            f"| {met['cpu']:.1f} | {met['seconds']:.1f} | {met['keys']:.2f} |"
        )
    text = "\n".join(
        [
            "# What a run costs as hosts are added",
            "",
            "`python bench/hosts.py`: one host real and under strace, the others simulated by what they leave in the "
            "directory.",
            "",
            f"In the steady state a host makes {found['steady_calls_per_second']:.2f} calls a second on the run "
            f"directory; its {args.ranks} trainer ranks, all waiting for samples, {found['waiting_calls_per_second']:.2f} "
            "more.",
            "",
            "| hosts | calls of a host, to meet | its connections | s to hand out all cards | sruns to ask all hosts | "
            "s |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "Ranks that meet, each in two groups of all, looking up the peers that rings and trees need; a group that "
            "connects every rank to every other, as torch has it by default, asks the store 2 N^2 times.",
            "",
            "| ranks | requests of the store | per N log2 N | with 2 N^2 a group | MB of answers | CPU s of the store | "
            "s in all | s for the keys |",
            "|---|---|---|---|---|---|---|---|",
            *meetings,
            "",
            *table_of_files(counts[-1], found["files"]),
        ]
    )
    (REPO / "bench" / "results" / "hosts.md").write_text(text)
    print(text)
    assert found["steady_calls_per_second"] + found["waiting_calls_per_second"] <= 1.0
    for hosts, row in found["hosts"].items():
        n = hosts * args.ranks
        assert row["ranks"]["requests"] <= 6 * n * math.log2(n) and row["ranks"]["cpu"] < 60 * max(1, n / 4096)
    kept = sum(row[0] for row in found["files"]["kept"].values())
    assert kept <= 12 * counts[-1] + 8 * ATTEMPTS
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
