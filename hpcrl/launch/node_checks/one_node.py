"""One node's part of `hpcrl doctor --nodes`: look around, meet the other nodes, leave one report.

    python -m hpcrl.launch.node_checks.one_node DIR --expect N [--host NAME] [--role R] [--interface I] [--import vllm]

DIR is made and given a file `token` by the process that starts this one.  Each node writes DIR/HOST.json with its
ports, waits for those of all (hpcrl/launch/node_checks/records.py), connects to them (of many, to some: `peers_of`),
tells in DIR/HOST.done that it needs no other node's port any more, and leaves DIR/HOST.PID.report.  A node that does
not see DIR says so in a separate line (`UNSEEN`): a launcher's output may be cut into pieces of several nodes' lines,
so nothing longer is ever read from it.

Invariants: every wait has a deadline and none is an error: what did not come is missing from the report; ports are
bound on the node's own addresses only; what other nodes say is JSON of a bounded size.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import selectors
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

import msgspec
import psutil

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.node_checks.records import NodeRecord, all_records, leave_record, pause
from hpcrl.launch.node_checks.reports import Gpu, NodeReport, Total, peers_of
from hpcrl.launch.probe import Network, choose, host_report
from hpcrl.plan import Location, socket_names
from hpcrl.run.process import PARENT, die_with_parent, run_command
from hpcrl.run.rundir import listed, write_atomic
from hpcrl.utils.check_results import last_line
from hpcrl.utils.deadline import Deadline, poll
from hpcrl.utils.installed import version
from hpcrl.utils.untrusted_files import touch

PACKAGES = (
    *("hpcrl", "torch", "vllm", "megatron-core", "transformers"),
    # what only GPUs have, and without which a run is slower, or is refused
    *("transformer-engine", "flash-attn", "deep_ep", "apex", "flashinfer-python"),
)
CONNECT = 5.0  #: seconds to connect and be answered
REPORT = ".report"  #: end of the name of a node's report
UNSEEN = "hpcrl doctor: {host} does not see its directory"
INFINIBAND = Path("/sys/class/infiniband")
QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits"]


class Greeting(msgspec.Struct, frozen=True):
    """What answers at a port: who it is, and its clock."""

    host: str
    time: float


# ---- this node alone


def look_at_node(host: str, role: str, directory: Path) -> NodeReport:
    """All that this node sees by itself; takes no part of a second, but for nvidia-smi."""
    return NodeReport(
        base=host_report(host, directory / "token"),
        role=role,
        gpus=gpus(),
        devices=len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        locked=locked_memory(),
        shm=psutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        versions={name: found for name in PACKAGES if (found := version(name))},
    )


def locked_memory() -> int | None:
    """Bytes that a process here may lock, where there is InfiniBand (or RoCE), whose drivers lock what they send; None
    for no limit, or no such network."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY or not INFINIBAND.is_dir() else limit


def gpus(command: list[str] = QUERY, seconds: float = 20.0) -> tuple[Gpu, ...] | None:
    """The GPUs that nvidia-smi shows; None if it is not there or does not answer."""
    answer = run_command(command, seconds)
    return parse_gpus(answer.out) if answer.code == 0 else None


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Lines `index, name, MiB in all, MiB free`; a GPU that gives no numbers, as MIG parents do, counts with 0."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and words[0].isdecimal():
            total, free = (int(word) if word.isdecimal() else 0 for word in words[2:])
            found.append(Gpu(int(words[0]), words[1], total, free))
    return tuple(found)


def imports(module: str, seconds: float) -> str:
    """Why a module does not import in a separate process, "" if it does."""
    answer = run_command([sys.executable, "-c", f"import importlib; importlib.import_module({module!r})"], seconds)
    return "" if answer.code == 0 else answer.last_output


# ---- the other nodes


class Ports:
    """A port on every address, each greeting every peer that connects, until closed."""

    def __init__(self, host: str, addresses: list[str]) -> None:
        self.host = host
        self.error = ""
        self.ports: dict[str, int] = {}
        self._poll = selectors.DefaultSelector()
        self._wake, waker = socket.socketpair()
        self._sockets = [self._wake, waker]
        self._poll.register(waker, selectors.EVENT_READ)
        for address in addresses:
            try:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.create_server((address, 0), family=family, backlog=512)
            except OSError as error:
                self.error = f"{address}: {error.strerror}"
                continue
            listener.settimeout(CONNECT)
            self._sockets.append(listener)
            self._poll.register(listener, selectors.EVENT_READ, listener)
            self.ports[address] = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._poll.select():
                if key.data is None:
                    return
                with contextlib.suppress(OSError):
                    peer, _ = key.data.accept()
                    with peer:
                        peer.settimeout(CONNECT)
                        peer.sendall(msgspec.json.encode(Greeting(self.host, time.time())))

    def close(self) -> None:
        self._wake.send(b".")
        self._thread.join(2 * CONNECT)
        for each in self._sockets:
            each.close()


def greet(address: str, port: int, host: str) -> tuple[str, tuple[float, float] | None]:
    """(why `host` was not reached, "" if it was; its clock minus ours and how far that may be off, in seconds)."""
    began = time.time()
    try:
        with socket.create_connection((address, port), timeout=CONNECT) as peer:
            peer.settimeout(CONNECT)
            data = b""
            while (part := peer.recv(4096)) and len(data) < 4096:
                data += part
        found = msgspec.json.decode(data, type=Greeting)
    except OSError as error:
        return f"{address} port {port}: {error.strerror or error}", None
    except msgspec.MsgspecError:
        return f"{address} port {port}: something else answers there", None
    if found.host != host:
        return f"{address} leads to {found.host}: two nodes have one address", None
    ended = time.time()
    return "", (found.time - (began + ended) / 2, (ended - began) / 2)


def meet(
    mine: NodeReport, directory: Path, expect: int, interface: str | None, seconds: float, ranks: int = 0
) -> NodeReport:
    """`mine` with what came of meeting the others, within twice `seconds`.

    Args:
        ranks: to take part in an all-reduce.
    """
    addresses = [network.address for network in mine.base.networks] or ["127.0.0.1"]
    if (expect == 1 or interface == "lo") and "127.0.0.1" not in addresses:
        addresses.append("127.0.0.1")
    ports = Ports(mine.host, addresses)
    mine = msgspec.structs.replace(mine, port="" if ports.ports else ports.error, ranks=ranks)
    try:
        try:
            leave_record(directory, mine.host, ranks, mine.base, ports.ports)
        except (HpcrlError, OSError) as error:
            return msgspec.structs.replace(mine, wrote=getattr(error, "what", None) or str(error))
        found = all_records(directory, expect, seconds)
        tried, offsets = connect(found, mine.host, interface)
        with contextlib.suppress(OSError):
            touch(directory / f"{mine.host}.done")
        # the others may still be about to connect to us; who wrote no card needs no port
        done = lambda: sum(name.endswith(".done") for name in listed(directory)) >= len(found)  # noqa: E731
        poll(done, Deadline(seconds), pause(expect))
    finally:
        ports.close()
    mine = msgspec.structs.replace(mine, seen=tuple(sorted(found)), tried=tried, offsets=offsets)
    if ranks and len(found) >= expect and len(tried) >= len(peers_of(mine.host, found)) and not any(tried.values()):
        total, broken = add_up(found, mine.host, interface, directory)
        mine = msgspec.structs.replace(mine, total=total, broken=broken)
    return mine


def connect(found: dict[str, NodeRecord], me: str, interface: str | None) -> tuple[dict[str, str], dict[str, Any]]:
    """(host -> why it was not reached, host -> clock) of `peers_of` us, or of ourselves if alone, on the network of
    all."""
    try:
        chosen = choose({host: found[host].base for host in sorted(found)}, interface)
    except UsageError:
        return {}, {}  # the judging process chooses again, and reports it once
    tried, offsets = {}, {}
    for host in peers_of(me, found) or [me]:
        address = chosen[host].address
        if (port := found[host].ports.get(address)) is None:
            tried[host] = f"it has no port on {address}"
            continue
        tried[host], offset = greet(address, port, host)
        if offset and host != me:
            offsets[host] = offset
    return tried, offsets


# ---- an all-reduce


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


def add_up(
    found: dict[str, NodeRecord], me: str, interface: str | None, directory: Path, seconds: float = 300.0
) -> tuple[Total | None, str]:
    """(what rank 0 measured, if it is here; why our ranks failed): one all-reduce over the ranks of all nodes."""
    try:
        chosen = choose({host: found[host].base for host in sorted(found)}, interface)
    except UsageError:
        return None, ""  # as in `connect`
    command = [
        sys.executable,
        "-m",
        "hpcrl.trainer.start.network_speed",
        "--port-file",
        str(directory / "port"),
        "--deadline",
        "120",
    ]
    ranks = []
    for variables in rank_environments(found, me, chosen):
        environment = os.environ | variables | {PARENT: str(os.getpid())}
        ranks.append(Popen(command, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True))
    deadline = Deadline(seconds)
    with ThreadPoolExecutor(len(ranks)) as pool:  # each rank's output is read as it comes, or it would block
        texts = list(pool.map(lambda rank: _output(rank, deadline), ranks))
    broken = [last_line(err) for rank, (_, err) in zip(ranks, texts, strict=True) if rank.returncode]
    if broken or me != next(host for host in sorted(found) if found[host].ranks):
        return None, broken[0] if broken else ""
    try:
        return msgspec.json.decode(last_line(texts[0][0]), type=Total), ""
    except msgspec.MsgspecError:
        return None, f"rank 0 printed no result: {last_line(texts[0][0])}"


def _output(process: Popen[str], deadline: Deadline) -> tuple[str, str]:
    """stdout and stderr of a process of ours, which is killed if it does not end in time."""
    try:
        return process.communicate(timeout=max(deadline.left, 0.1))
    except TimeoutExpired:
        process.kill()
        return process.communicate()[0], "it did not end in time"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One node's part of hpcrl doctor.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--expect", type=int, default=1, help="nodes in all")
    parser.add_argument("--host", default=socket.gethostname())
    parser.add_argument("--role", default="")
    parser.add_argument("--interface")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the other nodes")
    parser.add_argument("--ranks", type=int, default=0, help="ranks here, for an all-reduce (one where no GPU is)")
    parser.add_argument("--import", dest="modules", action="append", default=[], help="a module to try to import")
    parser.add_argument("--import-deadline", type=float, default=300.0)
    args = parser.parse_args(argv)
    die_with_parent()
    mine = look_at_node(args.host, args.role, args.directory)
    if mine.base.sees:
        ranks = args.ranks if mine.gpus else min(args.ranks, 1)
        mine = meet(mine, args.directory, args.expect, args.interface, args.wait, ranks)
    mine = msgspec.structs.replace(mine, imports={name: imports(name, args.import_deadline) for name in args.modules})
    if not mine.base.sees:
        print(UNSEEN.format(host=args.host), flush=True)
        return 0
    try:
        write_atomic(args.directory / f"{args.host}.{os.getpid()}{REPORT}", msgspec.json.encode(mine), 0o600)
    except (HpcrlError, OSError) as error:
        print(UNSEEN.format(host=args.host), f"or cannot write to it: {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
