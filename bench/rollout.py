"""What a sample costs beside its computing: in the rollout process, with simulated engines, and in a real engine's
server.

    python bench/rollout.py [--rounds 5] [--groups 500] [--long 100000] [--only simulated|real]

Simulated engines (bench/rollout_roles/simulated.py, a process of its own) answer at once; 1,000 samples in groups of 8
are kept in flight.  Shown is the processor time of this process for each sample: `EngineClient.complete` over our own
route, the same with the group in the ledger and in the bank (a file that is flushed to the disk, and removed later),
and raw aiohttp, which posts the same request to vLLM's route and reads the bytes of the answer without looking at them.  Then our own route and the bank with 8 to 1,024 engines, and the memory of
this process over --long groups of 2.

The real engine is vLLM with the tests' tiny model.  Shown is the processor time of its server process (not of the
engine core, which computes) for each sample: over our route, and of the engine's client alone, to which the same is
given from within the server.  Rounds are interleaved; figures are medians over the rounds, ratios medians of the
rounds' ratios; the least of the rounds is nearest to what a machine without neighbours would show.  Prints tables (also
to bench/results/rollout.md and rollout_server.md) and, as its last line, one JSON object of the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from hpcrl.config.options import Options  # noqa: E402
from hpcrl.plan import Location, Plan  # noqa: E402
from hpcrl.rollout.engines.completion import Sampling  # noqa: E402
from hpcrl.rollout.engines.engine_client import EngineClient  # noqa: E402
from hpcrl.rollout.engines.engine_pool import EnginePool  # noqa: E402
from hpcrl.rollout.ledger.bank import Bank  # noqa: E402
from hpcrl.rollout.ledger.group_progress import GroupProgress  # noqa: E402
from hpcrl.rollout.ledger.ledger import Ledger  # noqa: E402
from hpcrl.rollout.prompts.prompt_files import Prompt  # noqa: E402
from hpcrl.rollout.prompts.prompt_source import Group  # noqa: E402
from hpcrl.run.peers import EnginePeer, publish  # noqa: E402
from hpcrl.run.rundir import RunDir  # noqa: E402
from hpcrl.transport.auth import make_keys  # noqa: E402

EACH, IN_FLIGHT = 8, 1000
BATCH = 64  #: groups that the trainer learns from at once
KEPT = "our route, ledger and bank"
FLEETS = (8, 64, 1024)
Ways = dict[str, list[float]]
Job = Callable[[], Awaitable[None]]


@contextlib.contextmanager
def simulated(count: int, tokens: int) -> Iterator[list[int]]:
    """Ports of `count` simulated engines."""
    command = [sys.executable, "-m", "bench.rollout_roles.simulated", str(count), str(tokens)]
    process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)


@contextlib.asynccontextmanager
async def generator(root: Path, ports: list[int]) -> AsyncIterator[EngineClient]:
    """What the rollout process has, for engines on these ports."""
    rundir = RunDir.create(root)
    rundir.make_attempt()
    make_keys(rundir, 1)
    for index, port in enumerate(ports):
        publish(rundir, EnginePeer(host="127.0.0.1", port=port, model_len=65536), index)
    place = Location("localhost", (0,))
    pool = EnginePool(
        rundir, Plan("bench", 0, (place,), tuple(place for _ in ports), Location("localhost", ())), Options()
    )
    try:
        await pool.connect()
        yield EngineClient(pool, 128)
    finally:
        await pool.close()


async def closed_loop(groups: int, in_flight: int, one: Callable[[int], Awaitable[None]]) -> None:
    """`groups` calls of `one`, so many at a time that `in_flight` samples are in flight."""
    numbers = iter(range(groups))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(worker() for _ in range(max(1, in_flight // EACH))))


def complete(found: EngineClient, tokens: int, prompt: int = 64, each: int = EACH) -> Callable[[int], Awaitable[None]]:
    """A group, as the samplers ask for it."""
    how = Sampling(temperature=1.0, max_tokens=tokens, stop=(), stop_token_ids=(1,), min_tokens=tokens)

    async def one(number: int) -> None:
        ids = np.full(prompt, 5 + number % 90, np.int32)
        asked = [found.complete(ids, how, number * each + index, 0) for index in range(each)]
        for completion in await asyncio.gather(*asked):
            assert len(completion.tokens) == tokens

    return one


def kept(found: EngineClient, folder: Path, tokens: int, prompt: int = 64) -> Callable[[int], Awaitable[None]]:
    """A group from its issue until the trainer has learned from it: asked for, in the ledger, and on disk until a batch
    later."""
    how = Sampling(temperature=1.0, max_tokens=tokens, stop=(), stop_token_ids=(1,), min_tokens=tokens)
    ledger = Ledger()
    bank = Bank(folder)
    batch = list[int]()
    text = "x" * (3 * tokens)

    async def one(_: int) -> None:
        ids = np.full(prompt, 5 + ledger.following % 90, np.int32)
        asked = Prompt("x" * prompt, ids, label="42")
        group = Group(ledger.following, asked)
        ledger.issue(group.number)
        parts = [found.complete(ids, how, group.number * EACH + index, 0) for index in range(EACH)]
        completions = await asyncio.gather(*parts)
        samples = {i: [completion.sample(group.number, i, asked, text)] for i, completion in enumerate(completions)}
        await bank.keep(GroupProgress(group, samples))
        ledger.finish(group.number)
        batch.append(group.number)
        if len(batch) == BATCH:
            learned, batch[:] = batch[:], []
            ledger.train(0)
            await asyncio.to_thread(bank.remove, learned)

    return one


def raw(
    session: aiohttp.ClientSession, ports: list[int], tokens: int, prompt: int = 64
) -> Callable[[int], Awaitable[None]]:
    """The same requests by aiohttp alone, one a sample; nothing is decoded."""
    how = Sampling(temperature=1.0, max_tokens=tokens, stop=(), stop_token_ids=(1,)).params(tokens)

    async def post(number: int) -> None:
        body = {
            "token_ids": [5 + number % 90] * prompt,
            "sampling_params": how | {"seed": number},
            "request_id": str(number),
        }
        url = f"http://127.0.0.1:{ports[number % len(ports)]}/inference/v1/generate"
        async with session.post(
            url, data=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
        ) as answer:
            await answer.read()

    async def one(number: int) -> None:
        await asyncio.gather(*(post(number * EACH + index) for index in range(EACH)))

    return one


async def seconds(groups: int, one: Callable[[int], Awaitable[None]]) -> float:
    """Processor time of this process for each sample."""
    begun = time.process_time()
    await closed_loop(groups, IN_FLIGHT, one)
    return (time.process_time() - begun) / (groups * EACH)


async def beside_aiohttp(root: Path, rounds: int, groups: int, tokens: int) -> Ways:
    """Processor seconds a sample, 8 engines."""
    ways: Ways = {"raw aiohttp": [], "our route": [], KEPT: []}
    with simulated(8, tokens) as ports:
        async with (
            generator(root / f"own-{tokens}", ports) as own,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            jobs = {
                "raw aiohttp": raw(session, ports, tokens),
                "our route": complete(own, tokens),
                KEPT: kept(own, root / f"bank-{tokens}", tokens),
            }
            for one in jobs.values():
                await closed_loop(IN_FLIGHT // EACH, IN_FLIGHT, one)
            for _ in range(rounds):
                for name, one in jobs.items():
                    ways[name].append(await seconds(groups, one))
    return ways


async def over_fleets(root: Path, rounds: int, groups: int, tokens: int) -> Ways:
    """Processor seconds a sample over our route and into the bank, by the number of engines."""
    ways: Ways = {str(count): [] for count in FLEETS}
    for round_ in range(rounds):
        for count in FLEETS:
            with simulated(count, tokens) as ports:
                async with generator(root / f"fleet-{count}-{round_}", ports) as found:
                    one = kept(found, root / f"bank-{count}-{round_}", tokens)
                    await closed_loop(
                        count + 250, IN_FLIGHT, one
                    )  # every connection is there, as in a run that is busy
                    ways[str(count)].append(await seconds(groups, one))
    return ways


async def memory(root: Path, groups: int, tokens: int) -> dict[int, float]:
    """MiB of this process after a tenth, a half and all of `groups`."""
    found, process = {}, psutil.Process()
    with simulated(8, tokens) as ports:
        async with generator(root / "long", ports) as own:
            done = 0
            for part in (groups // 10, groups // 2, groups):
                await closed_loop(part - done, IN_FLIGHT, complete(own, tokens, each=2))
                done = part
                found[part] = process.memory_info().rss / 2**20
    return found


# ---- a real engine


async def real(root: Path, rounds: int) -> dict[str, Ways]:
    """Processor seconds a sample of a real engine's server, by load and way."""
    from hpcrl.engine.membership.http import request_json
    from tests.support.engines import Engines
    from tests.support.tiny import make_model

    engines = Engines(
        root / "run",
        make_model(root / "model", tied=True),
        module="bench.rollout_roles.engine",
        deterministic_mode=False,
    )
    found: dict[str, Ways] = {}
    try:
        await asyncio.to_thread(engines.wait)
        request_json(
            engines.address(), "POST", "/update_weight_version", 60, {"new_version": "0"}
        )  # as after the first update
        server = psutil.Process(psutil.Process(engines.processes[0].pid).children()[0].pid)
        for tokens in (8, 64):
            found[f"{tokens} tokens"] = await _real(engines, server, rounds, tokens)
    finally:
        engines.stop()
    return found


async def _real(engines: Any, server: psutil.Process, rounds: int, tokens: int) -> Ways:
    ways: Ways = {"the engine's client alone": [], "our route": []}
    pool = EnginePool(engines.rundir, engines.plan, engines.options)
    try:
        await pool.connect()
        (engine,) = pool.engines
        found = EngineClient(pool, 128)
        groups, size = (64, 24) if tokens == 8 else (32, 24)

        async def own() -> None:
            body = msgspec.json.encode([groups, EACH, size, tokens])
            async with pool.session.post(engine.at("/bench/own"), data=body, headers=engine.head) as answer:
                assert answer.status == 200, await answer.text()

        async def ours() -> None:
            await closed_loop(groups, groups * EACH, complete(found, tokens, size))

        jobs = {"the engine's client alone": own, "our route": ours}
        for round_ in range(rounds + 1):
            for name, job in jobs.items():
                before = sum(server.cpu_times()[:2])
                await job()
                if round_:  # the first warms up
                    ways[name].append((sum(server.cpu_times()[:2]) - before) / (groups * EACH))
    finally:
        await pool.close()
    return ways


# ---- what is shown


def ratio(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    columns = len(rows[0])
    return f"{head}\n|{'---|' * columns}\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def micro(values: list[float]) -> str:
    return f"{1e6 * statistics.median(values):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--only", choices=["simulated", "real"])
    args = parser.parse_args()
    gc.freeze()  # as the rollout process does once it has read its inputs
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        lines: dict[str, float] = {}
        if args.only != "real":
            lines |= simulated_part(root, args)
        if args.only != "simulated":
            lines |= real_part(asyncio.run(real(root, args.rounds)), args.rounds)
    print(json.dumps(lines))


def show(name: str, parts: list[str]) -> None:
    text = "\n".join(parts)
    print(text)
    (REPO / "bench" / "results" / name).write_text(text)


def simulated_part(root: Path, args: argparse.Namespace) -> dict[str, float]:
    """The rollout process: its tables, and the ratios."""
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float] = {}
    for tokens in (8, 256):
        ways = asyncio.run(beside_aiohttp(root, args.rounds, args.groups, tokens))
        raws = ways["raw aiohttp"]
        rows += [
            (str(tokens), name, micro(v), f"{1e6 * min(v):.0f}", f"{ratio(v, raws):.2f}") for name, v in ways.items()
        ]
        ratios[f"ours_over_aiohttp_{tokens}_tokens"] = round(ratio(ways["our route"], ways["raw aiohttp"]), 3)
        ratios[f"kept_over_aiohttp_{tokens}_tokens"] = round(ratio(ways[KEPT], ways["raw aiohttp"]), 3)
        ratios[f"us_a_sample_{tokens}_tokens"] = round(1e6 * statistics.median(ways[KEPT]), 1)
    head = (
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f}, {args.rounds} rounds of {args.groups} groups "
        f"of {EACH}, {IN_FLIGHT} samples in flight"
    )
    parts = [f"The cost of a sample in the rollout process: {head}.\n"]
    parts.append(table("| tokens | way | processor time a sample, us | least of the rounds | over raw aiohttp |", rows))
    fleets = asyncio.run(over_fleets(root, args.rounds, args.groups, 8))
    rows = [(name, micro(v), f"{1e6 * min(v):.0f}", f"{ratio(v, fleets['8']):.2f}") for name, v in fleets.items()]
    parts.append(table("| engines | processor time a sample, us | least of the rounds | over 8 engines |", rows))
    ratios["1024_engines_over_8"] = round(ratio(fleets["1024"], fleets["8"]), 3)
    if args.long:
        used = asyncio.run(memory(root, args.long, 8))
        parts.append(
            table("| groups done | MiB of the rollout process |", [(str(n), f"{m:.1f}") for n, m in used.items()])
        )
        first, *_, last = used.values()
        ratios["memory_all_over_a_tenth"] = round(last / first, 3)
    show("rollout.md", parts)
    return ratios


def real_part(found: dict[str, Ways], rounds: int) -> dict[str, float]:
    """A real engine's server: its table, and the microseconds beyond the engine's client."""
    rows: list[tuple[str, ...]] = []
    beyond: dict[str, float] = {}
    for load, ways in found.items():
        own = ways["the engine's client alone"]
        for name, values in ways.items():
            more = 1e6 * statistics.median(a - b for a, b in zip(values, own, strict=True))
            rows.append((load, name, micro(values), "" if values is own else f"{more:.0f}"))
            if values is not own:
                beyond[f"us_beyond_{'ours' if name == 'our route' else 'vllm'}_{load.split()[0]}_tokens"] = round(more)
    parts = [
        f"The cost of a sample in the server of a real engine (vLLM, tiny model), its core not counted: {rounds} "
        "rounds.\n"
    ]
    parts.append(table("| load | way | processor time a sample, us | beyond the engine's client, us |", rows))
    show("rollout_server.md", parts)
    return beyond


if __name__ == "__main__":
    main()
