"""One node's part of `hpcrl doctor --nodes`: look around, meet the other nodes, leave one report.

    python -m hpcrl.launch.node_checks.one_node DIR --expect N [--host NAME] [--role R] [--interface I] [--needs vllm]

DIR is made and given a file `token` by the process that starts this one.  Each node writes DIR/HOST.json, waits for
those of all (hpcrl/launch/node_checks/records.py), connects to the first node on the network that all share, leaves a
file DIR/*.done once it has tried, and DIR/HOST.PID.report.  A node that does not see DIR says so in a separate line
(`UNSEEN`): a launcher's output may be cut into pieces of several nodes' lines, so nothing longer is ever read from it.

Invariants: every wait has a deadline and none is an error: what did not come is missing from the report; the port is
bound on the address of that network only; what the other end says has a bounded size.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import socket
import sys
from pathlib import Path

import msgspec
import psutil

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.node_checks.gpu_needs import check_gpu_needs
from hpcrl.launch.node_checks.records import all_records, leave_record, pause
from hpcrl.launch.node_checks.reports import Gpu, NodeReport
from hpcrl.launch.probe import choose, host_report
from hpcrl.run.process import die_with_parent, run_command
from hpcrl.run.rundir import listed, write_atomic
from hpcrl.utils.installed import version
from hpcrl.utils.untrusted_files import read_regular, touch
from hpcrl.utils.waiting import Deadline, poll

PACKAGES = (
    *("hpcrl", "torch", "vllm", "megatron-core", "transformers"),
    # what only GPUs have, and without which a run is slower, or is refused
    *("transformer-engine", "flash-attn", "deep_ep", "apex", "flashinfer-python"),
)
CONNECT = 5.0  #: seconds to connect and be answered
REPORT = ".report"  #: end of the name of a node's report
PORT = "first-port"  #: at which the first node listens
UNSEEN = "hpcrl doctor: {host} does not see its directory"
INFINIBAND = Path("/sys/class/infiniband")
QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits"]


# ---- this node alone


def look_at_node(host: str, role: str, directory: Path) -> NodeReport:
    """All that this node sees by itself; takes no part of a second, except nvidia-smi."""
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


# ---- the other nodes


def meet(mine: NodeReport, directory: Path, expect: int, interface: str | None, seconds: float) -> NodeReport:
    """`mine` with what came of meeting the others, within three times `seconds`."""
    try:
        leave_record(directory, mine.host, 0, mine.base)
    except (HpcrlError, OSError) as error:
        return msgspec.structs.replace(mine, wrote=getattr(error, "what", None) or str(error))
    found = all_records(directory, expect, seconds)
    mine = msgspec.structs.replace(mine, seen=tuple(sorted(found)))
    try:
        chosen = choose({host: found[host].base for host in sorted(found)}, interface) if found else {}
    except UsageError:
        chosen = {}  # the judging process chooses again, and reports it once
    if not chosen:
        return mine
    first = min(found)
    address, others = chosen[first].address, len(found) - 1
    if mine.host == first:
        unreached = listen(address, first, directory, others, seconds)
    else:
        unreached = connect(address, first, directory, Deadline(seconds))
    return msgspec.structs.replace(mine, unreached=unreached)


def listen(address: str, name: str, directory: Path, others: int, seconds: float) -> str:
    """Tell `name` to each of the `others` that connect, until all have tried; why no port could be bound, "" if one
    was."""
    deadline = Deadline(seconds)
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=512) as listener:
            listener.settimeout(pause(others))
            write_atomic(directory / PORT, str(listener.getsockname()[1]).encode(), 0o600)
            while not deadline.over and sum(each.endswith(".done") for each in listed(directory)) < others:
                with contextlib.suppress(OSError):  # no node yet, or one that has gone
                    peer, _ = listener.accept()
                    with peer:
                        peer.sendall(name.encode())
    except (HpcrlError, OSError) as error:
        return f"no port can be bound on {address}: {getattr(error, 'strerror', None) or error}"
    return ""


def connect(address: str, name: str, directory: Path, deadline: Deadline) -> str:
    """Why the node `name`, which listens at this address, was not reached, "" if it was."""
    shown = f"it cannot connect to {name}: {address}"
    try:
        if not poll((directory / PORT).exists, deadline, CONNECT / 5):
            return f"{shown} has no port"
        port = int(read_regular(directory / PORT))
        with socket.create_connection((address, port), timeout=CONNECT) as peer:
            peer.settimeout(CONNECT)
            said = peer.recv(1024).decode(errors="replace")
        return "" if said == name else f"{shown} port {port} is another program's"
    except (OSError, ValueError) as error:
        return f"{shown}: {getattr(error, 'strerror', None) or error}"
    finally:
        with contextlib.suppress(OSError):
            touch(directory / f"{socket.gethostname()}-{os.getpid()}.done")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One node's part of hpcrl doctor.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--expect", type=int, default=1, help="nodes in all")
    parser.add_argument("--host", default=socket.gethostname())
    parser.add_argument("--role", default="")
    parser.add_argument("--interface")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the other nodes")
    parser.add_argument("--needs", help="look at what GPUs need as well: modules and nvcc, with commas")
    parser.add_argument("--cpu", action="store_true", help="whatever GPUs are here, the run uses none")
    args = parser.parse_args(argv)
    die_with_parent()
    mine = look_at_node(args.host, args.role, args.directory)
    if mine.base.sees:
        mine = meet(mine, args.directory, args.expect, args.interface, args.wait)
    if args.needs is not None:
        found = tuple(check_gpu_needs([*filter(None, args.needs.split(","))], not args.cpu))
        mine = msgspec.structs.replace(mine, findings=found)
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
