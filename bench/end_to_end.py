"""GRPO from prompts to trained weights beside TRL's GRPOTrainer: samples a second and time to an accuracy, same model,
data and machine.

    python bench/end_to_end.py [--rounds 3] [--steps 12] [--work quickstart,short,long,learning] [--loops sync,async] [--trl-python PYTHON]

Kinds of work: `quickstart`, the quick start's model (0.3 M parameters), sums and batch (32 groups of 8, 16 tokens at
most); `short` and `long`, a random Qwen3 of 9.5 M parameters whose responses end by themselves or after 100 and 512
tokens (8 groups of 8, long-tailed); and `learning`, the quick start's GRPO from its supervised warm-up, the same
--learning-steps for each side.  Ours is `hpcrl run`: a trainer rank, a rollout process and a vLLM engine; TRL's is one
process that generates with transformers.  TRL has a thread a core, as have our trainer and our engine for the larger
model in `sync`, where they take turns; else they have half of the cores each.

Each side is a run of --steps steps; what counts is the median time of a step after the first three.  In `learning` it
is the seconds from the first step's end until the mean reward of five steps reaches 0.95 of the lower of the two sides'
best.  A round takes every side once; the load of the machine before and after stands beside.  TRL is of
requirements/bench.txt; with 1.16.0, vLLM 0.32 inside TRL cannot take weights on a CPU.  Writes
bench/results/end_to_end.md; the last line printed is one JSON object of ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

WARM_UP = 3
LIMIT = 1200.0
WINDOW = 5
BIG: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 960,
    "num_hidden_layers": 7,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 64,
}
CORES = os.cpu_count() or 1
#: kind of work -> groups of 8 responses a step, longest response in tokens, threads of each of ours in `sync`: more
#: only slow a small model
WORKS = {"quickstart": (32, 16, 1), "short": (8, 100, CORES), "long": (8, 512, CORES), "learning": (32, 16, 1)}
EACH = 8


class Work(NamedTuple):
    """`groups` groups of EACH responses of `longest` tokens at most make a step."""

    model: Path
    data: Path
    groups: int
    longest: int
    threads: int


class Row(NamedTuple):
    """A step: seconds since the first one's end, mean reward, and how long the trainer waited for its samples (ours
    alone)."""

    seconds: float
    reward: float
    waited: float = 0.0


def hpcrl(*words: str | Path, threads: int = 1) -> None:
    command = [sys.executable, "-m", "hpcrl", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=LIMIT, env=environment)
    if done.returncode:
        raise SystemExit(f"hpcrl {words[0]} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def prepare(root: Path, name: str) -> Work:
    """Model and data of a kind of work."""
    made = root / "arithmetic"
    subprocess.run([sys.executable, str(REPO / "examples" / "arithmetic.py"), "--out", str(made)], check=True)
    model = made / "model"
    if name == "learning":
        model = warmed(root)
    elif name != "quickstart":
        from tests.support.tiny import make_model

        model = make_model(root / "big", tied=True, **BIG)
    return Work(model, made / "train.jsonl", *WORKS[name])


def warmed(root: Path) -> Path:
    """The quick start's model after its supervised warm-up, as a Hugging Face directory."""
    shared, warm_up, _ = (REPO / "examples" / "quickstart.toml").read_text().split("[[stage]]\n")
    recipe, run = root / "warm.toml", root / "warm"
    recipe.write_text(shared.replace("{recipe}/", f"{REPO}/examples/") + "[[stage]]\n" + warm_up)
    hpcrl("run", recipe, "--run-dir", run)
    hpcrl("convert", "to-hf", run, "--output-dir", root / "warm-model")
    return root / "warm-model"


def ours(root: Path, work: Work, loop: str, steps: int, **more: Any) -> list[Row]:
    """By the clock of the run's own metrics, which are in root/run afterwards.

    Args:
        more: options of the run.
    """
    threads = work.threads if loop == "sync" else max(1, CORES // 2)
    values = {
        "hf_checkpoint": str(work.model), "prompt_data": str(work.data), "input_key": "prompt", "label_key": "label",
        "apply_chat_template": True, "rollout_shuffle": True, "rm_type": "math", "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1,
        "bf16": False, "num_rollout": steps, "rollout_batch_size": work.groups, "n_samples_per_prompt": EACH,
        "rollout_max_response_len": work.longest, "rollout_max_context_len": work.longest + 48, "advantage_estimator": "grpo",
        "eps_clip": 0.2, "eps_clip_high": 0.28, "lr": 2e-4, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096,
        **more,
    }  # fmt: skip
    recipe, run = root / "recipe.toml", root / "run"
    recipe.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    hpcrl("run", recipe, "--run-dir", run, *([] if loop == "sync" else ["--loop", loop]), threads=threads)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train/loss" in row]
    return [Row(row["time"] - rows[0]["time"], row["rollout/reward"], row["perf/rollout_wait_time"]) for row in rows]


def trl(python: str, work: Work, steps: int, **more: Any) -> list[Row]:
    """The same of TRL; `more`: of trl_side.py's work."""
    told: dict[str, Any] = {"model": str(work.model), "data": str(work.data), "steps": steps, "lr": 2e-4}
    told |= {"groups": work.groups, "each": EACH, "longest": work.longest, **more}
    command = [python, str(REPO / "bench" / "end_to_end_roles" / "trl_side.py"), json.dumps(told)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    if done.returncode:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return [Row(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def step_time(rows: list[Row]) -> float:
    return statistics.median(after.seconds - before.seconds for before, after in pairwise(rows[WARM_UP - 1 :]))


def best(rows: list[Row]) -> float:
    return max(statistics.mean(row.reward for row in rows[end - WINDOW : end]) for end in range(WINDOW, len(rows) + 1))


def until(rows: list[Row], target: float) -> float:
    """Seconds until the mean reward of WINDOW steps is `target`."""
    ends = range(WINDOW, len(rows) + 1)
    return next(
        rows[end - 1].seconds
        for end in ends
        if statistics.mean(row.reward for row in rows[end - WINDOW : end]) >= target
    )


def measure(args: argparse.Namespace, root: Path, name: str) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Rows of the table and ratios of one kind of work."""
    work = prepare(root, name)
    learning = name == "learning"
    steps, rounds = (args.learning_steps, args.learning_rounds) if learning else (args.steps, args.rounds)
    sides = ["TRL", *args.loops.split(",")]
    found: dict[str, list[list[Row]]] = {side: [] for side in sides}
    loads: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            before = os.getloadavg()[0]
            place = root / f"{side}-{number}"
            place.mkdir()
            run = trl(args.trl_python, work, steps) if side == "TRL" else ours(place, work, side, steps)
            found[side].append(run)
            loads[side] += [before, os.getloadavg()[0]]
            print(
                f"{name} round {number} {side}: {step_time(run):.3f} s a step, best {best(run):.3f}",
                file=sys.stderr,
                flush=True,
            )
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float] = {}
    for side in sides:
        times = [step_time(run) for run in found[side]]
        median = statistics.median(times)
        waited = statistics.median(row.waited for run in found[side] for row in run[WARM_UP:])
        rates = statistics.median(step_time(a) / b for a, b in zip(found["TRL"], times, strict=True))
        shown = [
            f"{median:.3f}",
            "" if side == "TRL" else f"{waited:.3f}",
            f"{work.groups * EACH / median:.0f}",
            f"{rates:.2f}",
        ]
        if learning:
            pairs = [(a, b, 0.95 * min(best(a), best(b))) for a, b in zip(found["TRL"], found[side], strict=True)]
            sooner = statistics.median(until(a, target) / until(b, target) for a, b, target in pairs)
            level = statistics.median(t for *_, t in pairs)
            took = statistics.median(until(b, t) for _, b, t in pairs)
            shown.append(f"{took:.0f} s to {level:.2f}, {sooner:.2f}")
            if side != "TRL":
                ratios[f"{name}_{side}_sooner_than_trl"] = round(sooner, 3)
        else:
            shown.append("")
        if side != "TRL":
            ratios[f"{name}_{side}_over_trl"] = round(rates, 3)
        rows.append((name, side, *shown, f"{min(loads[side]):.1f} to {max(loads[side]):.1f}"))
    return rows, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rounds", type=int, default=3)
    parser.add_argument("--learning-steps", type=int, default=60)
    parser.add_argument("--work", default=",".join(WORKS))
    parser.add_argument("--loops", default="sync,async")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    args = parser.parse_args()
    run_all(args, measure, write)


def run_all(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Path, str], tuple[list[tuple[str, ...]], dict[str, float]]],
    write: Callable[[argparse.Namespace, list[tuple[str, ...]]], None],
) -> None:
    """Measure each kind of work of --work; the table so far is written after each, the ratios are printed at the end."""
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float] = {}
    for name in args.work.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            more, some = measure(args, Path(scratch), name)
        rows += more
        ratios |= some
        write(args, rows)  # what was measured stays, whatever becomes of the next kind
    print(json.dumps(ratios))


def write(args: argparse.Namespace, rows: list[tuple[str, ...]]) -> None:
    """The table so far, printed and in bench/results/."""
    head = ("work", "side", "seconds a step", "of them waiting for samples", "samples a second", "times TRL's rate")
    head += ("time to accuracy, times sooner than TRL", "load of the machine")
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    told = f"{args.rounds} rounds of {args.steps} steps; `learning`: {args.learning_rounds} of {args.learning_steps}"
    text = f"{CORES} cores, {told}.\n\n" + "\n".join(lines) + "\n"
    print(text)
    (REPO / "bench" / "results" / "end_to_end.md").write_text(text)


if __name__ == "__main__":
    main()
