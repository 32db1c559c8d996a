"""Records how long responses take of a real engine, for overlap.py.

    python bench/overlap_roles/record.py [--samples 640] [--in-flight 64] [--model DIRECTORY]

vLLM with the tests' tiny model (or the one in --model) answers groups of 8 samples at temperature 1, so many at a time
that --in-flight are in flight: as soon as a group is done, the next is asked for, as a rollout process does that never
waits.  A response ends with the model's own end-of-sequence token, or after 768 tokens.  Of each, the number of its
tokens and the seconds until it was there are kept, in the order in which they were asked for, in
bench/overlap_trace.json.  The first 10 % fill the engine and are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(REPO)

import numpy as np  # noqa: E402

from hpcrl.engines.http import ask  # noqa: E402
from hpcrl.rollout.engines.engine_client import EngineClient  # noqa: E402
from hpcrl.rollout.engines.engine_pool import EnginePool  # noqa: E402
from hpcrl.rollout.engines.sampling import Sampling  # noqa: E402
from tests.support.engines import Engines  # noqa: E402
from tests.support.tiny import make_model  # noqa: E402

EACH, LONGEST = 8, 768
TRACE = REPO / "bench" / "overlap_trace.json"


async def responses(generator: EngineClient, groups: int, in_flight: int) -> list[tuple[int, float]]:
    """(tokens, seconds) of each response, group after group."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(groups)]
    numbers = iter(range(groups))
    how = Sampling(temperature=1.0, max_tokens=LONGEST, stop=(), stop_token_ids=(1,))

    async def one(number: int, index: int, prompt: np.ndarray) -> tuple[int, float]:
        begun = time.monotonic()
        completion = await generator.complete(prompt, how, number * EACH + index, 0)
        return len(completion.tokens), time.monotonic() - begun

    async def worker() -> None:
        for number in numbers:
            prompt = np.random.default_rng(number).integers(6, 96, 24).astype(np.int32)
            found[number] = await asyncio.gather(*(one(number, index, prompt) for index in range(EACH)))

    await asyncio.gather(*(worker() for _ in range(in_flight // EACH)))
    return [response for group in found for response in group]


async def record(root: Path, model: Path, groups: int, in_flight: int) -> tuple[list[tuple[int, float]], str]:
    engines = Engines(root / "run", model, deterministic_mode=False)
    try:
        await asyncio.to_thread(engines.wait)
        ask(engines.address(), "POST", "/update_weight_version", 60, {"new_version": "0"})
        version = ask(engines.address(), "GET", "/version", 60)["version"]
        pool = EnginePool(engines.rundir, engines.plan, engines.options)
        try:
            await pool.connect()
            return await responses(EngineClient(pool, 128), groups, in_flight), version
        finally:
            await pool.close()
    finally:
        engines.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = args.model or make_model(root / "model", tied=True)
        groups = -(-args.samples // EACH)
        found, version = asyncio.run(record(root, model, groups + groups // 10, args.in_flight))
    kept = found[EACH * (groups // 10) :]
    tokens = np.asarray([n for n, _ in kept])
    seconds = np.asarray([s for _, s in kept])
    about = {
        "engine": f"vLLM {version}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "model": "the tests' tiny model" if args.model is None else args.model.name,
        "in_flight": args.in_flight,
        "group": EACH,
        "mean_seconds": round(float(seconds.mean()), 4),
        "longest_over_mean": round(float(seconds.max() / seconds.mean()), 2),
        "p50_p90_p99_tokens": [float(q) for q in np.percentile(tokens, [50, 90, 99])],
    }
    rows = {"tokens": tokens.tolist(), "seconds": [round(float(s), 4) for s in seconds]}
    TRACE.write_text(json.dumps(about | rows) + "\n")
    print(json.dumps(about))


if __name__ == "__main__":
    main()
