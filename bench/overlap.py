"""How much trainer and engines idle in the three loops, over engines that answer by a recorded trace of long-tailed responses.

    python bench/overlap.py [--engines 8,64,512] [--steps 12] [--loops sync,async,fully-async]

The makers of the rollout process, the pacing of the trainer and the count of idle engines are hpcrl's own; engines, trainer and time are
simulated (bench/overlap_roles/): an engine answers 8 requests at once, each as long as bench/overlap_trace.json says, which
bench/overlap_roles/record.py took from a real vLLM; a batch is three times what the engines can answer at once, in groups of 8; a weight
update pauses the engines for 1 % of the time in which they could make a batch without a gap.  The trainer takes 0.75 or 1.25 times that
long for a step, update included: in the one case engines are the bottleneck, in the other the trainer is.  Simulated time repeats
exactly, so one round is enough, and other load on the machine does not show.

Shown are idle shares: of the trainer, time waiting for data; of the engines, time without any request, and slots (requests that they could answer)
without one, over all steps but the first three and the last three; and the age of the oldest token that was trained.  Prints a table (also to
bench/results/overlap.md) and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

import numpy as np  # noqa: E402
from hpcrl.rollout.making.stream import Stream  # noqa: E402
from hpcrl.trainer.pace import publishes, settles  # noqa: E402

from bench.overlap_roles.engines import Engines, Trace  # noqa: E402
from bench.overlap_roles.virtual_time import simulate  # noqa: E402
from hpcrl.config.options import Options  # noqa: E402
from hpcrl.rollout.batch_assembly import check_staleness  # noqa: E402
from hpcrl.rollout.making.maker import Made, Maker  # noqa: E402
from hpcrl.rollout.making.shelf import Shelf  # noqa: E402
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile  # noqa: E402
from hpcrl.rollout.prompts.prompt_source import PromptSource  # noqa: E402
from hpcrl.run.rundir import RunDir  # noqa: E402

TRACE = REPO / "bench" / "overlap_trace.json"
SLOTS, GROUP, WAVES, UPDATE, EDGE = 8, 8, 3, 0.01, 3
STALENESS = 2
CASES = {"engines": 0.75, "trainer": 1.25}
LOOPS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"loop": "async"},
    "fully-async": {"loop": "fully-async", "max_staleness": STALENESS},
}


class Shares(NamedTuple):
    """Idle shares of trainer, engines and slots; stale: policy versions; longer: the time of a step over the bottleneck's own."""

    trainer: float
    engines: float
    slots: float
    stale: int
    longer: float


class Rollouts:
    """What the rollout process does when the trainer calls (hpcrl/rollout/main.py), without queue and files."""

    def __init__(self, options: Options, engines: Engines, root: Path, total: int) -> None:
        self.options = options
        rundir = RunDir.create(root)
        rundir.begin()
        prompts = tuple(Prompt(i, i, np.asarray([i], np.int32)) for i in range(64))
        self.shelf = Shelf(options, PromptSource(PromptFile(Path("p"), prompts, 0, ""), 3, True), rundir)
        self.shelf._kept = False  # groups on disk are no matter of overlap, and would be most of what this costs
        self.shelf.restore(0, None)
        self.stream: Stream | None = None
        self.maker: Maker | Stream = Maker(options, self.shelf, engines, engines.abort)
        if options.loop == "fully-async":
            self.maker = self.stream = Stream(options, self.shelf, engines, engines.abort, engines.look, total)
        self.made: dict[int, asyncio.Task[Made]] = {}
        self.last: asyncio.Task[Made] | None = None

    async def generate(self, rollout_id: int, version: int, consumed: int) -> None:
        if self.stream is not None:
            self.stream.publish(version)
        if self.last is not None:
            await asyncio.wait([self.last])
        self.last = self.made[rollout_id] = asyncio.create_task(self._make(rollout_id, version, consumed))

    async def _make(self, rollout_id: int, version: int, consumed: int) -> Made:
        made = await self.maker.make(rollout_id, version, consumed)
        check_staleness(made.rollout.samples(), consumed, self.options.staleness_bound)
        return made

    async def fetch(self, rollout_id: int) -> Made:
        return await self.made.pop(rollout_id)

    async def snapshot(self, rollout_id: int, settle: bool) -> None:
        if settle and self.last is not None:
            await asyncio.wait([self.last])
        if self.stream is not None:
            self.stream.press()
        self.shelf.train(rollout_id, 0)


async def one_run(options: Options, count: int, trace: Trace, factor: float, steps: int, root: Path) -> Shares:
    """A run of `steps` steps; factor: the trainer's time over that of the engines."""
    engines = Engines(count, SLOTS, trace)
    rollouts = Rollouts(options, engines, root, steps)
    loop, ahead = asyncio.get_running_loop(), options.runs_ahead
    batch = options.rollout_batch_size * GROUP * trace.mean / (count * SLOTS)
    pause, step = UPDATE * batch, (factor - UPDATE) * batch
    version = published = 0
    asked = -1
    waits, ends, oldest = [], [0.0], 0

    async def generate(rollout_id: int, at: int) -> None:
        nonlocal asked
        if asked < rollout_id < steps:
            await rollouts.generate(rollout_id, published, version + rollout_id - at)
            asked = rollout_id

    idle = []
    for rollout_id in range(steps):
        begun = loop.time()
        await generate(rollout_id, rollout_id)
        made = await rollouts.fetch(rollout_id)
        waited = loop.time() - begun
        oldest = max(oldest, version - min(int(sample.versions.min()) for sample in made.rollout.samples()))
        if ahead:
            await generate(rollout_id + 1, rollout_id)
        await asyncio.sleep(step)
        publishing = publishes(options, rollout_id, False)
        settling = loop.time()
        await rollouts.snapshot(rollout_id, settles(options, publishing))
        waited += loop.time() - settling
        version += 1
        if publishing:
            await engines.update(version, pause)
            published = version
        if ahead:
            pausing = loop.time()
            await generate(rollout_id + 2, rollout_id + 1)
            waited += loop.time() - pausing
        waits.append(waited)
        ends.append(loop.time())
        idle.append(engines.occupancy.measures())
    if rollouts.stream is not None:
        await rollouts.stream.close()
    kept = slice(EDGE, steps - EDGE)
    times = np.diff(ends)[kept]
    weigh = lambda name: float(np.average([row[name] for row in idle][kept], weights=times))  # noqa: E731
    return Shares(
        float(np.sum(waits[kept]) / times.sum()),
        weigh("perf/engine_idle_ratio"),
        1 - weigh("perf/engine_occupancy"),
        oldest,
        float(times.mean() / (max(factor, 1 + UPDATE) * batch)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="8,64,512")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--loops", default=",".join(LOOPS))
    args = parser.parse_args()
    trace = Trace(TRACE)
    rows, found = [], {}
    for count in map(int, args.engines.split(",")):
        for bottleneck, factor in CASES.items():
            for name in args.loops.split(","):
                options = Options(
                    rollout_batch_size=count * SLOTS * WAVES // GROUP,
                    n_samples_per_prompt=GROUP,
                    rm_type="math",
                    use_tis=True,
                    **LOOPS[name],
                )
                with tempfile.TemporaryDirectory() as scratch:
                    run = one_run(options, count, trace, factor, args.steps, Path(scratch) / "run")
                    shares = simulate(run)
                side = shares.slots if bottleneck == "engines" else shares.trainer
                found[f"{name}_{count}_engines_{bottleneck}_bound"] = round(side, 4)
                numbers = [f"{100 * share:.1f} %" for share in shares[:3]]
                rows.append([str(count), bottleneck, name, *numbers, str(shares.stale), f"{shares.longer:.2f}"])
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    text = table(rows, trace, args.steps)
    print(text)
    (REPO / "bench" / "results" / "overlap.md").write_text(text)
    print(json.dumps(found))


def table(rows: list[list[str]], trace: Trace, steps: int) -> str:
    about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in trace.about.items())
    head = ["engines", "bottleneck", "loop", "trainer idle", "engines idle", "slots idle", "oldest token", "step over bottleneck"]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return f"Simulated engines, {steps} steps. The trace: {about}.\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
