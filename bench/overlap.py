"""How much trainer and engines idle in the three loops, over engines that answer by a recorded trace of long-tailed
responses.

    python bench/overlap.py [--engines 8,64,512] [--steps 10] [--loops sync,async,fully-async] [--tails 64]

The makers of the rollout process, the pacing of the trainer and the count of idle engines are hpcrl's own; engines,
trainer and time are simulated (bench/overlap_roles/): an engine answers 4 requests at once, each as long as
bench/overlap_trace.json says, which bench/overlap_roles/record.py took from a real vLLM, its groups drawn at random; a
batch is six times what the engines can answer at once, in groups of 8, so that the longest response takes 1.3 times as
long as a batch; a weight update pauses the engines for 1 % of the time in which they could make a batch without a gap.
The trainer takes 0.75 or 1.25 times that long for a step, update included: in the one case engines are the bottleneck,
in the other the trainer is.  A second table has smaller batches (--tails: with so many engines), beside which the
longest response is longer: no loop whose staleness is bounded can wait for a response of several batches' time without
waiting.  How long its steps are at least, however many engines there are, is in the last column (`least` has the
proof); and in a second row each the engines foresee which groups will be long, and begin them first.  Simulated time
repeats exactly, so one round is enough, and other load on the machine does not show.

Shown are idle shares: of the trainer, time waiting for data; of the engines, time without any request, and slots
(requests that they could answer) without one, over all steps but the first three and the last three; and the age of the
oldest token that was trained.  Prints a table (also to bench/results/overlap.md) and, as its last line, one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

import numpy as np  # noqa: E402

from bench.overlap_roles.engines import Engines, Trace  # noqa: E402
from bench.overlap_roles.virtual_time import simulate  # noqa: E402
from hpcrl.config.options import Options  # noqa: E402
from hpcrl.rollout.batch_assembly import check_staleness  # noqa: E402
from hpcrl.rollout.generation.generator import GeneratedRollout, RolloutGenerator  # noqa: E402
from hpcrl.rollout.generation.group_store import GroupStore  # noqa: E402
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile  # noqa: E402
from hpcrl.rollout.prompts.prompt_source import PromptSource  # noqa: E402
from hpcrl.run.rundir import RunDir  # noqa: E402
from hpcrl.trainer.loop_schedule import publishes, settles  # noqa: E402

TRACE = REPO / "bench" / "overlap_trace.json"
SLOTS = 4
GROUP = 8
WAVES = 6
UPDATE = 0.01
EDGE = 3
TAILS = (2, 3, 4, 6, 8)  #: of the second table, in place of WAVES
FORESEEN = "fully-async, lengths foreseen"
HEAD = (
    "engines",
    "bottleneck",
    "loop",
    "longest response, batches",
    "trainer idle",
    "engines idle",
    "slots idle",
    "oldest token",
    "step over bottleneck",
    "at least",
)
STALENESS = 2
CASES = {"engines": 0.75, "trainer": 1.25}
LOOPS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"loop": "async"},
    "fully-async": {"loop": "fully-async", "max_staleness": STALENESS},
}


class Shares(NamedTuple):
    """Idle shares of trainer, engines and slots; stale: policy versions; longer: the time of a step over the
    bottleneck's own."""

    trainer: float
    engines: float
    slots: float
    stale: int
    longer: float


class Rollouts:
    """What the rollout process does when the trainer calls (rollout/policy_rollouts.py), without queue and files."""

    def __init__(self, options: Options, engines: Engines, root: Path, total: int) -> None:
        self.options = options
        rundir = RunDir.create(root)
        rundir.begin()
        prompts = tuple(Prompt(i, i, np.asarray([i], np.int32)) for i in range(64))
        self.store = GroupStore(options, PromptSource(PromptFile(Path("p"), prompts, 0, ""), 3, True), rundir)
        self.store._kept = False  # groups on disk are no matter of overlap, and would be most of what this costs
        self.store.restore(0, None)
        look = engines.look if options.never_waits else None
        self.generator = RolloutGenerator(options, self.store, engines, engines.abort, look, total)
        self.made: dict[int, asyncio.Task[GeneratedRollout]] = {}
        self.last: asyncio.Task[GeneratedRollout] | None = None

    async def generate(self, rollout_id: int, version: int, consumed: int) -> None:
        self.generator.publish(version)
        if self.last is not None:
            await asyncio.wait([self.last])
        self.last = self.made[rollout_id] = asyncio.create_task(self._make(rollout_id, version, consumed))

    async def _make(self, rollout_id: int, version: int, consumed: int) -> GeneratedRollout:
        made = await self.generator.make(rollout_id, version, consumed)
        check_staleness(made.rollout.samples(), consumed, self.options.staleness_bound)
        return made

    async def fetch(self, rollout_id: int) -> GeneratedRollout:
        return await self.made.pop(rollout_id)

    async def snapshot(self, rollout_id: int, settle: bool) -> None:
        if settle and self.last is not None:
            await asyncio.wait([self.last])
        self.generator.trainer_is_waiting()
        self.store.train(rollout_id, 0)


def least(count: int, waves: int, factor: float, trace: Trace, groups: int = 2000) -> float:
    """The mean time of a step in fully-async, over the time of the bottleneck, is this at least in every schedule that
    begins a batch of groups under each version, drops none, and whose tokens lag STALENESS versions at most, however
    many engines there are.

    Version e is in the engines once step e - 1 is over, at begin(e - 1) + T.  A group that is begun under it and takes
    D must be there when step e + 2 begins, so for each e

        begin(e + 2) >= begin(e - 1) + T + D(e),    D(e): the longest of the groups that are begun under version e

    and summed over all e: mean step >= (T + mean of D(e)) / (STALENESS + 1).  Updates make D(e)
    longer by their pauses: one at least.  T: the trainer's time for a step, in the engines' time for a batch.
    """
    wanted = count * SLOTS * waves // GROUP
    longest = [
        max(trace.longest(e * wanted + n) for n in range(wanted)) / (waves * trace.mean)
        for e in range(-(-groups // wanted) + 20)
    ]
    bottleneck = max(factor, 1 + UPDATE)
    return max(bottleneck, (factor + float(np.mean(longest)) + UPDATE) / (STALENESS + 1)) / bottleneck


async def one_run(
    options: Options, count: int, trace: Trace, factor: float, steps: int, root: Path, foresees: bool
) -> Shares:
    """A run of `steps` steps; factor: the trainer's time over that of the engines."""
    engines = Engines(count, SLOTS, trace, foresees)
    rollouts = Rollouts(options, engines, root, steps)
    loop, ahead = asyncio.get_running_loop(), options.runs_ahead
    batch = options.rollout_batch_size * GROUP * trace.mean / (count * SLOTS)
    pause, step = UPDATE * batch, (factor - UPDATE) * batch
    version = published = 0
    asked = -1
    waits = []
    ends = [0.0]
    oldest = 0

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
        idle.append(engines.loads.measures())
    await rollouts.generator.close()
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


def measure(count: int, waves: int, bottleneck: str, loop: str, trace: Trace, steps: int) -> tuple[Shares, list[str]]:
    """A run, and its row of the table."""
    options = Options(
        rollout_batch_size=count * SLOTS * waves // GROUP,
        n_samples_per_prompt=GROUP,
        rm_type="math",
        use_tis=True,
        **LOOPS["fully-async" if loop == FORESEEN else loop],
    )
    with tempfile.TemporaryDirectory() as scratch:
        run = one_run(options, count, trace, CASES[bottleneck], steps, Path(scratch) / "run", loop == FORESEEN)
        shares = simulate(run)
    longest = max(trace.seconds) / (waves * trace.mean)
    numbers = [f"{100 * share:.1f} %" for share in shares[:3]]
    row = [str(count), bottleneck, loop, f"{longest:.1f}", *numbers, str(shares.stale), f"{shares.longer:.2f}"]
    row.append(f"{least(count, waves, CASES[bottleneck], trace):.2f}" if loop.startswith("fully") else "")
    print(" | ".join(row), file=sys.stderr, flush=True)
    return shares, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="8,64,512")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--tails", type=int, default=64)
    parser.add_argument("--tail-steps", type=int, default=30)
    args = parser.parse_args()
    trace, found = Trace(TRACE), {}
    rows, tails = [], []
    for waves in TAILS if args.tails else ():
        for bottleneck, loop in itertools.product(CASES, ("fully-async", FORESEEN)):
            tails.append(measure(args.tails, waves, bottleneck, loop, trace, args.tail_steps)[1])
    for count in map(int, args.engines.split(",")):
        for bottleneck in CASES:
            for loop in args.loops.split(","):
                shares, row = measure(count, WAVES, bottleneck, loop, trace, args.steps)
                side = shares.engines if bottleneck == "engines" else shares.trainer
                found[f"{loop}_{count}_engines_{bottleneck}_bound"] = round(side, 4)
                rows.append(row)
    about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in trace.about.items())
    text = f"Simulated engines, {args.steps} steps. The trace: {about}.\n\n{table(rows)}"
    if tails:
        text += f"\nThe same with smaller and larger batches, {args.tail_steps} steps:\n\n{table(tails)}"
    print(text)
    (REPO / "bench" / "results" / "overlap.md").write_text(text)
    print(json.dumps(found))


def table(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (HEAD, ["---"] * len(HEAD), *rows))


if __name__ == "__main__":
    main()
