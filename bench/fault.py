"""What a fault costs: from the kill of a trainer rank to the next trained step, beside torchrun's own restart; and what
of the work before it is lost.

    python bench/fault.py [--rounds 3] [--faults 6]

Each round, one after another: a GRPO run with one engine loses its rank 0 to SIGKILL, and the time is taken until the
first step that it had not trained before is trained; torchrun and ft_launcher of nvidia-resiliency-ext (--max-restarts
1) run a rank that has imported torch and Megatron-core and made its process group, which is killed likewise, and the
time is taken until the rank that is started in its place is as far.  That package's restart within processes gets over
an exception, not over a process that is gone: one of two ranks raises, and the time is taken until both have made their
process group again.  What ours went into is taken from the run's own timelines.

Then a run with a checkpoint after every 20 steps and a copy in memory after each loses a rank once in 20 steps, at a
moment of the step that is drawn evenly: how long it had trained what it then had to train again, as a share of the time
in which it trained.  Once with steps as short as they are, in which a copy is on its way for as long as a step, and once
with rewards that take a second.  Prints tables (also to bench/results/fault.md) and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from bench.startup import child, free_port  # noqa: E402
from hpcrl.report.timeline.reading import read_stage  # noqa: E402
from hpcrl.report.timeline.spans import READY, STEP  # noqa: E402
from hpcrl.run.attempt_log import ReadyRecord, faults_of, read_attempts  # noqa: E402
from tests.support.runs import KEPT, POLICY, Run, make_task, recipe, role_pid  # noqa: E402

RANK = """
import os, sys
from hpcrl.trainer.megatron import replaced
replaced.install()
import megatron.core.dist_checkpointing, megatron.core.models.gpt, megatron.core.optimizer
import torch.distributed as dist
dist.init_process_group("gloo")
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"{sys.argv[1]}-{life}", "w").write(str(os.getpid()))
while life == "0":
    __import__("time").sleep(0.01)
dist.destroy_process_group()
"""
#: two ranks, of which one raises as soon as it is told; the process group that they make then has another port
INPROCESS = """
import datetime, os, sys, time
from hpcrl.trainer.megatron import replaced
replaced.install()
import megatron.core.dist_checkpointing, megatron.core.models.gpt, megatron.core.optimizer
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
PORT, MARK = int(os.environ["MASTER_PORT"]), sys.argv[1]
STORE = {"port": PORT + 1, "timeout": datetime.timedelta(seconds=60)}

@inprocess.Wrapper(store_kwargs=STORE, health_check=None)
def train(call: inprocess.CallWrapper = None):
    os.environ["MASTER_PORT"] = str(PORT + 2 + call.iteration)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        open(f"{MARK}-{call.iteration}", "w").write(str(time.time()))
    while call.iteration == 0:
        time.sleep(0.01)
        if dist.get_rank() == 1 and os.path.exists(f"{MARK}-raise"):
            open(f"{MARK}-raised", "w").write(str(time.time()))
            raise RuntimeError("a fault")
    dist.destroy_process_group()

train()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
#: restarts of ranks that do nothing yet: how they stand in the table -> their launcher
RESTARTS = {
    "torchrun": TORCHRUN,
    "ft_launcher": [
        *("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--ignore-missing-fault-tol-cfg"),
        *TORCHRUN[2:],
    ],
}
MEET = "meet the other ranks"
EACH = 20  #: steps for each fault
#: rewards at once, and after a second
REWARDS = {"short steps": "tests.support.runs.odd_tokens", "longer steps": "tests.support.slurm.slow"}
#: the parts of ours, in order: name -> what it is
PARTS = {
    "notice": "until the launcher knows",
    "end": "until nothing of the attempt is left but its engine, and the next has begun",
    "start": "a rank's process and what it imports",
    "ready": "the process group, the model, the checkpoint, the rollout process, the engine",
    "step": "weights to the engine, samples, and the steps since the checkpoint once more",
}


def restart(name: str, directory: Path) -> float:
    """Seconds from the kill of a rank until the one in its place has its process group."""
    script, marker = directory / "rank.py", directory / name
    script.write_text(RANK)
    words = [*RESTARTS[name], "--local-addr", "127.0.0.1", "--max-restarts", "1", str(script), str(marker)]
    with child([sys.executable, *words], directory / f"{name}.log", PYTHONPATH=str(REPO), OMP_NUM_THREADS="1"):
        pid = int(appears(Path(f"{marker}-0")))
        begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        appears(Path(f"{marker}-1"))
        return time.monotonic() - begun


def in_process(directory: Path) -> float:
    """Seconds from one rank's exception until both ranks have their process group again."""
    script, marker = directory / "inprocess.py", directory / "inprocess"
    script.write_text(INPROCESS)
    place = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [sys.executable, *TORCHRUN[:2], *place, str(script), str(marker)]
    with child(command, directory / "inprocess.log", PYTHONPATH=str(REPO), OMP_NUM_THREADS="1"):
        appears(Path(f"{marker}-0"))
        Path(f"{marker}-raise").touch()
        again = float(appears(Path(f"{marker}-1")))
        return again - float(appears(Path(f"{marker}-raised")))


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
    given = POLICY | KEPT | {"run_dir": str(root), "num_rollout": 6, "save_interval": 1}
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


def lost(task: Path, directory: Path, faults: int, reward: str) -> dict[str, float]:
    """What `faults` kills, one in EACH steps, have undone of the steps before them."""
    root = directory / "lost"
    copies = {"save_interval": EACH, "non_persistent_save_interval": 1, "custom_rm_path": reward}
    given = POLICY | KEPT | copies | {"run_dir": str(root), "num_rollout": EACH * (faults + 1)}
    (directory / "recipe").mkdir()
    run = Run(recipe(directory / "recipe", task, **given), root=root)
    chance, kills = random.Random(1), []
    for number in range(1, faults + 1):
        run.until(lambda at=EACH * number - EACH // 2: run.steps() >= at, 600)
        time.sleep(chance.random() * step_time(root))
        rank = role_pid(root, "hpcrl.trainer")
        kills.append(time.time())
        os.kill(rank, signal.SIGKILL)
        run.until(lambda count=number: len(ready(root)) > count, 300)
    status, out = run.end(900)
    if status:
        raise SystemExit(out)
    return undone(root, kills)


def ready(root: Path) -> list[ReadyRecord]:
    """The attempts that have begun to train."""
    return [event for event in read_attempts(root) if isinstance(event, ReadyRecord)]


def step_time(root: Path) -> float:
    """Seconds from one step's end to the next one's, in the median of the last ten."""
    ends = [span.end / 1e6 for track in read_stage(root) if track.name == "trainer-0" for span in track.named(STEP)]
    last = ends[-11:]
    return statistics.median(later - end for end, later in pairwise(last))


def undone(root: Path, kills: list[float]) -> dict[str, float]:
    """Seconds from the end of the last step that was kept to the kill, over all kills, and their share of the time in
    which the run trained."""
    tracks = {track.attempt: track for track in read_stage(root) if track.name == "trainer-0"}
    trained = total = repeated = 0.0
    begun = ready(root)
    if len(begun) != len(kills) + 1:
        raise SystemExit(f"{len(begun)} attempts have trained after {len(kills)} kills")
    for place, at in enumerate(kills):
        spans, kept = tracks[begun[place].attempt].named(STEP), begun[place + 1].step
        since = max([begun[place].time, *(s.end / 1e6 for s in spans if s.more["rollout_id"] < kept)])
        total += at - since
        trained += at - begun[place].time
    trained += max(span.end for span in tracks[begun[-1].attempt].named(STEP)) / 1e6 - begun[-1].time
    repeated = sum(fault.repeated or 0 for fault in faults_of(read_attempts(root)))
    return {
        "undone": total,
        "trained": trained,
        "repeated": repeated,
        "share": total / trained,
        "step": step_time(root),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=6)
    args = parser.parse_args()
    rows: dict[str, list[float]] = {}
    if not (there := find_spec("nvidia_resiliency_ext") is not None):
        print("nvidia-resiliency-ext is not installed (requirements/bench.txt): not compared with", file=sys.stderr)
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            (directory / "task").mkdir()
            task = make_task(directory / "task")
            bare = {name: restart(name, directory) for name in RESTARTS if there or name == "torchrun"}
            bare |= {"in process": in_process(directory)} if there else {}
            found = ours(task, directory)
        for name, seconds in {**found, **bare, "ratio": found["all"] / bare["torchrun"]}.items():
            rows.setdefault(name, []).append(seconds)
        said = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in bare.items())
        print(f"round {number}: {found['all']:.1f} s, {said}", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    table = ["| | seconds | of torchrun's restart |", "|---|---|---|"]
    for name, means in {**PARTS, "all": "from the kill to the next new step"}.items():
        table.append(f"| {name}: {means} | {medians[name]:.1f} | {medians[name] / medians['torchrun']:.2f} |")
    peers = {
        "torchrun": "torchrun's own restart of a rank that does nothing yet",
        "ft_launcher": "the same by ft_launcher (nvidia-resiliency-ext)",
        "in process": "nvidia-resiliency-ext within the processes: an exception, no process is gone",
    }
    for name, what in peers.items() if there else [("torchrun", peers["torchrun"])]:
        table.append(f"| {what} | {medians[name]:.1f} | {medians[name] / medians['torchrun']:.2f} |")
    shares = {}
    table += ["", f"One fault in {EACH} steps, {args.faults} of them, with a copy in memory after each step:", ""]
    table += ["| a step takes | trained | of it undone | whole steps made again |", "|---|---|---|---|"]
    for name, reward in REWARDS.items():
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            (directory / "task").mkdir()
            found = lost(make_task(directory / "task"), directory, args.faults, reward)
        shares[f"undone, {name}"] = found["share"]
        words = f"{found['undone']:.1f} s ({100 * found['share']:.1f} %)"
        table.append(f"| {found['step']:.2f} s | {found['trained']:.1f} s | {words} | {found['repeated']:.0f} |")
    text = "\n".join(table)
    print(text)
    head = f"# What a fault costs\n\nMedians of {args.rounds} rounds, one rank, one engine that continues.\n\n"
    (REPO / "bench/results/fault.md").write_text(f"{head}{text}\n")
    print(json.dumps({name: round(value, 3) for name, value in {**medians, **shares}.items()}))


if __name__ == "__main__":
    main()
