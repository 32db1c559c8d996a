"""GRPO from prompts to trained weights beside TRL's GRPOTrainer: samples a second, with the same model, data and machine.

    python bench/end_to_end.py [--rounds 3] [--steps 12] [--work quickstart,long] [--loops sync,async] [--trl-python PYTHON]

Two kinds of work: `quickstart`, the quick start's model (0.3 M parameters), sums and batch (32 groups of 8, 16 tokens at most), and `long`, a random
Qwen3 of 9.5 M parameters whose responses end by themselves or after 512 tokens (8 groups of 8, long-tailed).  Ours is `hpcrl run`: a
trainer rank, a rollout process and a vLLM engine; TRL's is one process that generates with transformers.  Each side is a run of --steps steps;
what counts is the median time of a step after the first three.  A round takes every side once; the load of the machine before and after stands
beside.  TRL is of requirements/bench.txt.  Writes bench/results/end_to_end.md; the last line printed is one JSON object of ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

WARM_UP, LIMIT = 3, 1200.0
BIG: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 960,
    "num_hidden_layers": 7,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 64,
}


class Work(NamedTuple):
    """groups of `each` responses of `longest` tokens at most make a step."""

    model: Path
    data: Path
    groups: int
    each: int
    longest: int


def prepare(root: Path, name: str) -> Work:
    """Model and data of a kind of work."""
    made = root / "arithmetic"
    if not made.exists():
        subprocess.run([sys.executable, str(REPO / "examples" / "arithmetic.py"), "--out", str(made)], check=True)
    if name == "quickstart":
        return Work(made / "model", made / "train.jsonl", 32, 8, 16)
    from tests.support.tiny import make_model

    return Work(make_model(root / "big", tied=True, **BIG), made / "train.jsonl", 8, 8, 512)


def ours(root: Path, work: Work, loop: str, steps: int) -> list[float]:
    """Seconds of each step after the first, by the clock of the run's own metrics."""
    values = {
        "hf_checkpoint": str(work.model), "prompt_data": str(work.data), "input_key": "prompt", "label_key": "label",
        "apply_chat_template": True, "rollout_shuffle": True, "rm_type": "math", "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1,
        "bf16": False, "num_rollout": steps, "rollout_batch_size": work.groups, "n_samples_per_prompt": work.each,
        "rollout_max_response_len": work.longest, "rollout_max_context_len": work.longest + 48, "advantage_estimator": "grpo",
        "eps_clip": 0.2, "eps_clip_high": 0.28, "lr": 2e-4, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096,
    }  # fmt: skip
    recipe, run = root / "recipe.toml", root / "run"
    recipe.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    words = ["run", str(recipe), "--run-dir", str(run), *([] if loop == "sync" else ["--loop", loop])]
    done = subprocess.run([sys.executable, "-m", "hpcrl", *words], cwd=REPO, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f"hpcrl ended with {done.returncode}:\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [after - before for before, after in pairwise(row["time"] for row in rows if "train/loss" in row)]


def trl(python: str, work: Work, steps: int) -> list[float]:
    """The same of TRL."""
    told = {"model": str(work.model), "data": str(work.data), "steps": steps, "lr": 2e-4}
    told |= {"groups": work.groups, "each": work.each, "longest": work.longest}
    command = [python, str(REPO / "bench" / "end_to_end_roles" / "trl_side.py"), json.dumps(told)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    if done.returncode:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--work", default="quickstart,long")
    parser.add_argument("--loops", default="sync,async")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    args = parser.parse_args()
    rows, ratios = [], {}
    for name in args.work.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            work = prepare(root, name)
            sides = ["TRL", *args.loops.split(",")]
            found: dict[str, list[float]] = {side: [] for side in sides}
            loads: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(args.rounds):
                for side in sides:
                    before = os.getloadavg()[0]
                    place = root / f"{side}-{number}"
                    place.mkdir()
                    times = trl(args.trl_python, work, args.steps) if side == "TRL" else ours(place, work, side, args.steps)
                    found[side].append(statistics.median(times[WARM_UP - 1 :]))
                    loads[side] += [before, os.getloadavg()[0]]
                    print(f"{name} round {number} {side}: {found[side][-1]:.3f} s a step", file=sys.stderr, flush=True)
            for side in sides:
                median = statistics.median(found[side])
                over = statistics.median(a / b for a, b in zip(found["TRL"], found[side], strict=True))
                shown = f"{min(loads[side]):.1f} to {max(loads[side]):.1f}"
                rows.append((name, side, f"{median:.3f}", f"{work.groups * work.each / median:.0f}", f"{over:.2f}", shown))
                if side != "TRL":
                    ratios[f"{name}_{side}_over_trl"] = round(over, 3)
    head = ("work", "side", "seconds a step", "samples a second", "times TRL's rate", "load of the machine")
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    text = f"{os.cpu_count()} cores, {args.rounds} rounds of {args.steps} steps.\n\n" + "\n".join(lines) + "\n"
    print(text)
    (REPO / "bench" / "results" / "end_to_end.md").write_text(text)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
