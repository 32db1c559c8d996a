"""What a fault costs: from the kill of a trainer rank to the next trained step, beside torchrun's own restart.

    python bench/fault.py [--rounds 3]

Each round, one after another: a GRPO run with one engine loses its rank 0 to SIGKILL, and the time is taken until the
first step that it had not trained before is trained; torchrun (--max-restarts 1) runs a rank that has imported torch and
Megatron-core and made its process group, which is killed likewise, and the time is taken until the rank that torchrun
starts in its place is as far.  What ours went into is taken from the run's own timelines.  Prints a table (also to
bench/results/fault.md) and, as its last line, one JSON object of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from bench.startup import child  # noqa: E402
from hpcrl.report.timeline.reading import read_stage  # noqa: E402
from hpcrl.report.timeline.spans import READY, STEP  # noqa: E402
from hpcrl.run.attempt_log import read_attempts  # noqa: E402
from tests.support.runs import KEPT, NO_AGENT, POLICY, Run, make_task, recipe, role_pid  # noqa: E402

RANK = """
import os, sys
from hpcrl.trainer.megatron import cpu_shim
cpu_shim.install()
import megatron.core.dist_checkpointing, megatron.core.models.gpt, megatron.core.optimizer
import torch.distributed as dist
dist.init_process_group("gloo")
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"{sys.argv[1]}-{life}", "w").write(str(os.getpid()))
while life == "0":
    __import__("time").sleep(0.01)
dist.destroy_process_group()
"""
MEET = "meet the other ranks"
#: the parts of ours, in order: name -> what it is
PARTS = {
    "notice": "until the launcher knows",
    "end": "until nothing of the attempt is left but its engine, and the next has begun",
    "start": "a rank's process and what it imports",
    "ready": "the process group, the model, the checkpoint, the rollout process, the engine",
    "step": "weights to the engine, samples, and the steps since the checkpoint once more",
}


def torchrun(directory: Path) -> float:
    """Seconds from the kill of a rank until the one in its place has its process group."""
    script, marker = directory / "rank.py", directory / "up"
    script.write_text(RANK)
    for life in (0, 1):
        marker.with_name(f"up-{life}").unlink(missing_ok=True)
    words = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "1", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(script), str(marker)]
    with child(command, directory / "torchrun.log", PYTHONPATH=str(REPO), OMP_NUM_THREADS="1"):
        pid = int(appears(directory / "up-0"))
        begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        appears(directory / "up-1")
        return time.monotonic() - begun


def appears(path: Path) -> str:
    """What is in a file, once there is something."""
    begun = time.monotonic()
    while not (path.exists() and (text := path.read_text())):
        if time.monotonic() - begun > 300:
            raise SystemExit(f"{path} did not come")
        time.sleep(0.01)
    return text


def ours(task: Path, directory: Path) -> dict[str, float]:
    """Seconds of a fault, in all and by part."""
    root = directory / "run"
    given = POLICY | NO_AGENT | KEPT | {"run_dir": str(root), "num_rollout": 6, "save_interval": 1}
    run = Run(recipe(directory, task, **given), root=root)
    run.until(lambda: run.steps() >= 3, 300)
    rank = role_pid(root, "hpcrl.trainer")
    steps, at = run.steps(), time.time()
    os.kill(rank, signal.SIGKILL)
    run.until(lambda: run.steps() > steps, 300)
    status, out = run.end()
    if status:
        raise SystemExit(out)
    return parts(root, at, steps)


def parts(root: Path, at: float, steps: int) -> dict[str, float]:
    """What the time since `at` (unix time) went into, until a step after `steps` was trained."""
    rank = next(track for track in read_stage(root) if track.name == "trainer-0" and track.attempt == 1)
    noticed = next(event.time for event in read_attempts(root) if event.attempt == 0 and event.time > at)
    begun = (root / "attempts" / "0" / "again").stat().st_mtime
    started = min(span.begin for span in rank.named(MEET)) / 1e6
    ready = min(span.end for span in rank.named(READY)) / 1e6
    trained = min(s.end / 1e6 for s in rank.named(STEP) if s.more["rollout_id"] >= steps)
    edges = [at, noticed, begun, started, ready, trained]
    found = {name: after - before for name, before, after in zip(PARTS, edges, edges[1:], strict=False)}
    return found | {"all": trained - at}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows: dict[str, list[float]] = {}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            (directory / "task").mkdir()
            task = make_task(directory / "task")
            bare = torchrun(directory)
            found = ours(task, directory)
        for name, seconds in {**found, "torchrun": bare, "ratio": found["all"] / bare}.items():
            rows.setdefault(name, []).append(seconds)
        print(f"round {number}: {found['all']:.1f} s, torchrun {bare:.1f} s", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    table = ["| | seconds | of torchrun's restart |", "|---|---|---|"]
    for name, means in {**PARTS, "all": "from the kill to the next new step"}.items():
        table.append(f"| {name}: {means} | {medians[name]:.1f} | {medians[name] / medians['torchrun']:.2f} |")
    table.append(f"| torchrun's own restart of a rank that does nothing yet | {medians['torchrun']:.1f} | 1 |")
    text = "\n".join(table)
    print(text)
    head = f"# What a fault costs\n\nMedians of {args.rounds} rounds, one rank, one engine that continues.\n\n"
    (REPO / "bench/results/fault.md").write_text(f"{head}{text}\n")
    print(json.dumps({name: round(value, 3) for name, value in medians.items()}))


if __name__ == "__main__":
    main()
