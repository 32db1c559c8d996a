"""The rollout queue beside what others use, in one run on one machine.

    python bench/queue.py [--rounds 6] [--quick] [--only ours,zmq]

Work: batches of 256 samples (lognormal 2048 to 8192 tokens; ids, mask, log-probs; ours carries policy versions too),
from one process to another over the loopback interface; the consumer reads every id and mask.  A round measures each
transport once, in fresh processes, in alternating order; a ratio is the median over rounds of the ratio within one
round, so load that comes and goes falls on both sides.  Writes bench/results/queue.md; the last line printed is one
JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[0] = str(REPO)  # in place of this directory, where this very file would hide the standard library's queue

import argparse  # noqa: E402
import importlib.metadata  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

from bench.queue_roles import peers, work  # noqa: E402
from bench.queue_roles.work import Passes  # noqa: E402
from hpcrl.run.process import adopt_orphans, end_descendants  # noqa: E402

BASE = "zmq"
NOTE = """\
MB/s counts ids, mask and log-probs as they lie in memory. hpcrl's queue carries the policy version of every token besides;
it sends versions as runs and the mask as bits. With CURVE every byte is encrypted and decrypted once, whatever protocol
lies above: plain ZeroMQ with CURVE shows what an encrypted queue can reach. Each rate is the median over the rounds, each
ratio that of the rounds' own ratios; CPU is that of both processes together."""


@dataclass(frozen=True)
class Transport:
    """A row of the table: what it is, how many batches a pass takes, whether it runs as a pair, what it needs.

    The passes take about equally long: on a busy machine a short one would run on what the scheduler owes a process
    that has slept, a long one on its fair share.
    """

    name: str
    label: str
    batches: int
    pair: bool = True
    needs: tuple[str, ...] = ()

    def missing(self) -> str:
        absent = [package for package in self.needs if importlib.util.find_spec(package) is None]
        if self.name == "redis" and not absent and peers.redis_server() is None:
            absent = ["redis-server"]
        return ", ".join(absent)


TRANSPORTS = (
    Transport("memcpy", "copy in memory, array by array", 96, pair=False),
    Transport("tcp", "raw TCP, a group of 8 a message", 48),
    Transport("zmq", "**plain ZeroMQ PUSH/PULL, a group of 8 a message**", 48),
    Transport("zmq-curve", "plain ZeroMQ PUSH/PULL with CURVE, a group of 8 a message", 24),
    Transport("ours", "**hpcrl queue, requests and answers, CURVE both ways**", 24),
    Transport("redis", "Redis stream, 1 entry a sample, XADD in pipelines of 32, XREAD of 64", 12, needs=("redis",)),
    Transport(
        "ray",
        "**Ray as slime uses it: `ray.put` of torch tensors, 1 object a batch**",
        8,
        pair=False,
        needs=("ray", "torch"),
    ),
    Transport("ray-queue", "`ray.util.queue.Queue`, a group of 8 an entry", 4, pair=False, needs=("ray",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds, a quarter of the batches; the results file is left alone"
    )
    parser.add_argument(
        "--only", default="", help="these transports, separated by commas: " + ", ".join(t.name for t in TRANSPORTS)
    )
    options = parser.parse_args()
    names = set(options.only.split(",")) | {BASE} if options.only else {t.name for t in TRANSPORTS}
    chosen = [t for t in TRANSPORTS if t.name in names]
    adopt_orphans()
    found: dict[str, list[Measured]] = {t.name: [] for t in chosen if not t.missing()}
    for number in range(2 if options.quick else options.rounds):
        order = [t for t in chosen if t.name in found]
        for transport in order if number % 2 == 0 else reversed(order):
            found[transport.name].append(measure(transport, options.quick))
            print(f"round {number + 1}: {transport.name}: {found[transport.name][-1]}", file=sys.stderr, flush=True)
    report(chosen, found, whole=not options.quick and not options.only)


@dataclass(frozen=True)
class Measured:
    """One transport in one round; cpu: microseconds of all its processes a sample, where they can be seen."""

    rate: float
    cpu: float | None


def measure(transport: Transport, quick: bool) -> Measured:
    """Samples a second (the median of three passes) in fresh processes, and what they cost."""
    passes = Passes(1, 3, max(1, transport.batches // 4) if quick else transport.batches)
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as scratch:
        try:
            answers = run(transport, passes, scratch)
        finally:
            end_descendants(2.0)
    samples = passes.batches * work.SAMPLES
    cpu = [a["cpu"] for a in answers]
    each = None if None in cpu else 1e6 * sum(cpu) / (samples * passes.timed)
    return Measured(samples / statistics.median(answers[-1]["seconds"]), each)


def run(transport: Transport, passes: Passes, scratch: str) -> list[dict[str, Any]]:
    """Start the processes of one measurement; what they say, the one that measured last."""
    if not transport.pair:
        return [answer(transport, start(transport, "alone", passes, scratch))]
    left, right = socket.socketpair()
    with left, right:
        both = start(transport, "produce", passes, scratch, left), start(transport, "consume", passes, scratch, right)
    return [answer(transport, process) for process in both]


def start(
    transport: Transport, role: str, passes: Passes, scratch: str, control: socket.socket | None = None
) -> subprocess.Popen[str]:
    fd = control.fileno() if control else -1
    numbers = [str(n) for n in (passes.warm, passes.timed, passes.batches)]
    command = [sys.executable, "-m", "bench.queue_roles.run", transport.name, role, *numbers, scratch, str(fd)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
        "0"  # without this Ray listens on every interface, also with an address given
    )
    # Ray's warnings
    fds = [fd] if control else []
    errors = None if transport.pair else subprocess.DEVNULL
    return subprocess.Popen(command, cwd=REPO, env=env, pass_fds=fds, stdout=subprocess.PIPE, stderr=errors, text=True)


def answer(transport: Transport, process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"{transport.name}: the measurement failed")
    return json.loads(out.splitlines()[-1])


# ---- the table


def ratios(found: dict[str, list[Measured]], over: str, under: str) -> list[float]:
    """rate of `over` / rate of `under`, in each round."""
    return [a.rate / b.rate for a, b in zip(found[over], found[under], strict=True)]


def report(chosen: list[Transport], found: dict[str, list[Measured]], whole: bool) -> None:
    """Print the table and one JSON object; a whole measurement is kept in bench/results/queue.md."""
    kilobytes = statistics.mean(work.bytes_of(batch) for batch in work.batches()) / work.SAMPLES / 1000
    lines = [
        "| transport | samples/s | MB/s | times plain ZeroMQ (min..max) | CPU us/sample |",
        "|---|---|---|---|---|",
    ]
    lines += [row(transport, found, kilobytes) for transport in chosen]
    numbers = {f"{name}_over_zmq": statistics.median(ratios(found, name, BASE)) for name in found if name != BASE}
    for peer in ("zmq-curve", "ray", "ray-queue", "redis"):
        if peer in found and "ours" in found:
            numbers[f"ours_over_{peer}"] = statistics.median(ratios(found, "ours", peer))
    rounds = len(next(iter(found.values())))
    head = f"{kilobytes:.1f} kB a sample, 256 samples a batch, {rounds} rounds, {os.cpu_count()} cores; {versions()}."
    text = f"{__doc__.split(chr(10))[0]}\n\n{head}\n{NOTE}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if whole:
        (REPO / "bench" / "results").mkdir(exist_ok=True)
        (REPO / "bench" / "results" / "queue.md").write_text(text)
    print(json.dumps({name.replace("-", "_"): round(value, 3) for name, value in numbers.items()}))


def row(transport: Transport, found: dict[str, list[Measured]], kilobytes: float) -> str:
    """One transport's line of the table."""
    if absent := transport.missing():
        return f"| {transport.label} | not installed: {absent} | | | |"
    its = found[transport.name]
    rate = statistics.median(m.rate for m in its)
    times = ratios(found, transport.name, BASE)
    cpu = [m.cpu for m in its if m.cpu is not None]
    cells = (
        f"{rate:.0f} | {rate * kilobytes / 1000:.0f} | {statistics.median(times):.3g} "
        f"({min(times):.3g}..{max(times):.3g})"
    )
    return (
        f"| {transport.label} | {cells} | {statistics.median(cpu):.0f} |"
        if cpu
        else f"| {transport.label} | {cells} | - |"
    )


def versions() -> str:
    """What was measured."""
    known = [f"Python {sys.version.split()[0]}"]
    for package in ("pyzmq", "msgspec", "numpy", "torch", "ray", "redis"):
        if importlib.util.find_spec("zmq" if package == "pyzmq" else package):
            known.append(f"{package} {importlib.metadata.version(package)}")
    if path := peers.redis_server():
        known.append(subprocess.run([path, "--version"], capture_output=True, text=True).stdout.split(" sha=")[0])
    return ", ".join(known)


if __name__ == "__main__":
    main()
