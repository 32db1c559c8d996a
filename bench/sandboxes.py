"""Sandboxes: how soon one is there, what an idle one holds, and what a command in it takes.

    python bench/sandboxes.py [--rounds 30] [--live 200] [--quick]

Every figure is taken in the same run: a box handed out by a pool that has one ready; the same from nothing, the start
of the spawner included; boxes made one after another and all at once, by the second; `true` in a box that is there;
and next to these `run_confined`, which makes a place for one command, `unshare` and bubblewrap where they are
installed, and a bare process.  Where it runs as root and bubblewrap or an Apptainer is here (`make packages`), an
ordinary user's process has each of them run `true`, and make boxes of its kind.  Then --live boxes are kept, and the memory (PSS) of the processes of all of them is
divided by their number.  Writes bench/results/sandboxes.md; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from hpcrl.sandbox import SandboxPool  # noqa: E402
from hpcrl.sandbox.private_root import View  # noqa: E402
from hpcrl.sandbox.run import run_confined  # noqa: E402
from tests.support.boxes import family  # noqa: E402

UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount", "--net", "--ipc", "--uts", "true"]
BUBBLEWRAP = ["bwrap", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"]
BUBBLEWRAP += ["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--unshare-all", "true"]


def medians(rounds: int, **works: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each, done by turns."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - begun)
    return found


async def timed(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


async def use(pool: SandboxPool) -> None:
    """From asking for a box to the first command's end."""
    async with pool.box() as box:
        assert (await box.run(["true"])).ok


async def of_boxes(rounds: int) -> dict[str, list[float]]:
    """Seconds of what a pool does."""
    found: dict[str, list[float]] = {"warm": [], "warm and true": [], "true": [], "made": [], "from nothing": []}
    for _ in range(max(3, rounds // 5)):
        async with SandboxPool(warm=0) as pool:
            found["from nothing"].append(await timed(use(pool)))
    async with SandboxPool(warm=1) as pool:
        async with pool.box() as box:
            found["true"] = [await timed(box.run(["true"])) for _ in range(rounds)]
        for _ in range(rounds):
            await settled(pool)
            begun = time.perf_counter()
            async with pool.box() as box:
                found["warm"].append(time.perf_counter() - begun)
                await box.run(["true"])
                found["warm and true"].append(time.perf_counter() - begun)
    async with SandboxPool(warm=0) as pool:
        await use(pool)
        found["made"] = [await timed(use(pool)) for _ in range(rounds)]
    return found


async def settled(pool: SandboxPool) -> None:
    """Wait until the pool has nothing to make, and what was used is gone."""
    while not pool.counts().warm or pool.counts().making:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


async def by_the_second(count: int) -> float:
    """Boxes a second, each made, used for one command and ended, eight callers at a time."""
    async with SandboxPool(warm=4, most=8) as pool:
        await use(pool)
        return count / await timed(asyncio.gather(*(use(pool) for _ in range(count))))


async def live(count: int) -> tuple[float, float]:
    """(bytes of an idle box, their processes' PSS by their number; seconds until all were there)."""
    async with SandboxPool(warm=0, most=count) as pool, AsyncExitStack() as stack:
        begun = time.perf_counter()
        boxes = await asyncio.gather(*(stack.enter_async_context(pool.box()) for _ in range(count)))
        seconds = time.perf_counter() - begun
        assert all(done.ok for done in await asyncio.gather(*(box.run(["true"]) for box in boxes)))
        await asyncio.sleep(1.0)
        assert pool._spawner is not None
        return (pss_of_family(pool._spawner.pid) / count), seconds


def pss_of_family(first: int) -> float:
    """Proportional bytes of a process and all that descend from it."""
    total = 0
    for pid in family(first):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def others(rounds: int) -> dict[str, list[float]]:
    """Seconds of `true` elsewhere."""
    works: dict[str, Callable[[], object]] = {
        "bare": lambda: subprocess.run(["true"], check=True),
        "run_confined": lambda: run_confined(["/bin/true"], View(), {}, 30.0),
    }
    for name, words in (("unshare", UNSHARE), ("bubblewrap", BUBBLEWRAP)):
        if shutil.which(words[0]) and subprocess.run(words, capture_output=True, check=False).returncode == 0:
            works[name] = lambda words=words: subprocess.run(words, check=True)
    return medians(rounds, **works)


#: as a user: `true` bare and by the program itself, boxes of its kind; then some are kept until a line is read
KIND = """
import asyncio, json, os, subprocess, sys, time
package, kind, told = sys.argv[1:4]
rounds, count, words = json.loads(told)
sys.path.insert(0, package)
os.environ.update(PYTHONPATH=package, TMPDIR=os.path.dirname(package) + "/tmp")
from hpcrl.sandbox import SandboxPool
from hpcrl.sandbox.kinds.choose import prepare
words = [prepare(kind).system if word == "SYSTEM" else word for word in words]

async def use(pool):
    async with pool.box() as box:
        assert (await box.run(["true"])).ok

async def main():
    found = {"bare": [], "plain": [], "warm and true": [], "made": []}
    async with SandboxPool(warm=0, kind=kind) as none, SandboxPool(warm=1, kind=kind) as some:
        await use(none), await use(some)
        for _ in range(rounds):
            for name, command in (("bare", ["true"]), ("plain", words)):
                begun = time.perf_counter()
                subprocess.run(command, check=True)
                found[name].append(time.perf_counter() - begun)
            while not some.counts().warm or some.counts().making:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            for name, pool in (("warm and true", some), ("made", none)):
                begun = time.perf_counter()
                await use(pool)
                found[name].append(time.perf_counter() - begun)
    async with SandboxPool(warm=0, most=count, kind=kind) as pool:
        await pool.prepare(count)
        await asyncio.sleep(1.0)
        print(json.dumps([found, pool._spawner.pid]), flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""
APPTAINER = ["apptainer", "--silent", "exec", "--contain", "--no-home", "--bind", "/usr:/usr:ro", "SYSTEM", "true"]


def of_kinds(rounds: int, count: int) -> list[str]:
    """The table's rows of boxes that other programs make."""
    from tests.sandbox.test_attacks import readable_directory
    from tests.support.other_kinds import user_of

    lines = []
    for kind, words in (("bubblewrap", BUBBLEWRAP), ("apptainer", APPTAINER)):
        try:
            user = user_of(kind)
        except BaseException as error:  # noqa: BLE001  (pytest's own for what is skipped)
            print(f"without {kind}: {error}", file=sys.stderr)
            continue
        with readable_directory() as folder:
            (folder / "tmp").mkdir()
            (folder / "tmp").chmod(0o1777)
            made = user.start(KIND, str(folder / "package"), kind, json.dumps([rounds, count, words]))
            said = made.stdout.readline()
            if not said.startswith("["):
                raise SystemExit(said + made.communicate(timeout=60)[0])
            found, pid = json.loads(said)
            idle = pss_of_family(pid) / count
            made.communicate("\n", timeout=60)
        middle = {name: statistics.median(values) for name, values in found.items()}
        names = {
            "plain": f"`true` by {' '.join(words[:1])} itself, as a user",
            "warm and true": f"a box of the kind {kind} that was made ahead, with `true` in it",
            "made": f"one that was not, with `true` in it; idle {idle / 1e6:.1f} MB, of {count}",
        }
        for name, told in names.items():
            row = [1000 * value for value in (middle[name], min(found[name]), max(found[name]))]
            ratio = middle[name] / middle["bare"]
            lines.append(f"| {told} | {row[0]:.1f} ({row[1]:.1f}..{row[2]:.1f}) | {ratio:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--live", type=int, default=200)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    rounds, count = (5, 20) if given.quick else (given.rounds, given.live)
    load = os.getloadavg()[0]
    times = others(rounds) | asyncio.run(of_boxes(rounds))
    rate = asyncio.run(by_the_second(20 if given.quick else 200))
    memory, seconds = asyncio.run(live(count))
    middle = {name: statistics.median(values) for name, values in times.items()}
    lines = [
        f"Sandboxes: {os.cpu_count()} cores, load {load:.1f} before and {os.getloadavg()[0]:.1f} after, {rounds} rounds; "
        "milliseconds, medians (least..most).",
        "",
        "| | ms | by a bare process |",
        "|---|---|---|",
    ]
    for name, told in NAMES.items():
        if name in times:
            row = [1000 * value for value in (middle[name], min(times[name]), max(times[name]))]
            lines.append(
                f"| {told} | {row[0]:.1f} ({row[1]:.1f}..{row[2]:.1f}) | {middle[name] / middle['bare']:.1f} |"
            )
    lines += of_kinds(rounds, 4 if given.quick else 20)
    lines += [
        "",
        f"Boxes made, used for one command and ended: {rate:.0f} a second. {count} at once were there after "
        f"{seconds:.1f} s; each held {memory / 1e6:.2f} MB (PSS of all their processes and of the spawner, by {count}).",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if not given.quick:
        (REPO / "bench" / "results" / "sandboxes.md").write_text(text)
    ratios = {f"{name} by bare": round(value / middle["bare"], 2) for name, value in middle.items() if name != "bare"}
    more = {"warm_ms": round(1000 * middle["warm"], 2), "boxes_a_second": round(rate, 1)}
    print(json.dumps(ratios | more | {"idle_mb": round(memory / 1e6, 3), "live": count}))


NAMES = {
    "bare": "`true` as a bare process",
    "unshare": "`true` under `unshare`, its namespaces alone",
    "bubblewrap": "`true` under bubblewrap",
    "run_confined": "`true` by `run_confined`",
    "true": "`true` in a box that is there",
    "warm": "a box that was made ahead",
    "warm and true": "the same, with `true` in it",
    "made": "a box that was not, with `true` in it",
    "from nothing": "the same, with the start of the spawner",
}

if __name__ == "__main__":
    main()
