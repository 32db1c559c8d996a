"""What copies in memory cost: the same training steps with a copy after each and without, in one run, by turns.

    python bench/copies.py [--rounds 6] [--quick]

Two ranks on two hosts (directories of this one's memory), data-parallel, the model of bench/trainer.py.  A round takes
BLOCK rollouts with a copy of each, as a run does with --non-persistent-save-interval 1, and as many without, in
alternating order, each until nothing is under way; the ratio is the median over the rounds of with by without.  A
rollout has `steps` optimizer steps, of the same batch: how much is computed for each byte that is copied.  Then the
memory of all ranks' processes (PSS) and of the copies' files is sampled while the same goes on: the peak with copies
less that without, beside what `hpcrl plan` counts.  Writes bench/results/copies.md; the last line printed is one JSON
object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

import psutil  # noqa: E402

from bench.trainer import LIMIT, MODEL, batch, share_of  # noqa: E402
from hpcrl.config.options import Options  # noqa: E402

HOSTS = ["a", "b"]
BLOCK = 4  #: rollouts of a round, with copies and without
STEPS = (1, 4)  #: optimizer steps of a rollout
SHARED = Path("/dev/shm")


# ---- on the ranks


def measure_on_rank(options: Options, folder: Path, rounds: int, steps: int) -> list[tuple[float, float, float]]:
    """(seconds with copies, without, of the former those in which training waited for them) of each round."""
    import torch.distributed as dist

    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint.memory_copies import CopyOrigin, MemoryCopies
    from hpcrl.trainer.checkpoint.save_load import Position
    from hpcrl.trainer.megatron import hf_weights, model
    from hpcrl.trainer.step import train_batch

    ranks = parallel_state.initialize(options)
    policy = model.build(options, ranks)
    hf_weights.load_hf(policy, str(options.hf_checkpoint))
    share = share_of(ranks.dp_rank, ranks.dp_size)
    here = folder / HOSTS[ranks.rank]
    copies = MemoryCopies(policy, ranks, here, HOSTS, CopyOrigin("bench", 0), 10, 1)
    done = 0

    def block(copied: bool) -> float:
        nonlocal done
        if ranks.rank == 0:
            (folder / "phase").write_text("with" if copied else "without")
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(BLOCK):
            done += 1
            copies.look()
            for _ in range(steps):
                train_batch.train(policy, ranks, options, share)
            copies.look()
            copies.settle(done)
            if copied:
                copies.begin_if_due(Position(done, done, {}))
        copies.finish()
        dist.barrier()
        return time.perf_counter() - begun

    found = []
    for number in range(-1, rounds):
        copies.spent()
        times = {which: block(which) for which in ((True, False) if number % 2 else (False, True))}
        if number >= 0:
            found.append((times[True], times[False], copies.spent()["perf/memory_copy_time"]))
    return found


# ---- memory


@contextlib.contextmanager
def sampled(folder: Path) -> Iterator[dict[str, float]]:
    """The greatest bytes of each phase, of all processes below this one and of the files in `folder`."""
    most: dict[str, float] = {}
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.05):
            with contextlib.suppress(OSError, psutil.Error):
                phase = (folder / "phase").read_text()
                most[phase] = max(most.get(phase, 0.0), _processes() + _files(folder))
                most["files"] = max(most.get("files", 0.0), _files(folder))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join(60)


def _processes() -> float:
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, ValueError, IndexError):
            rollup = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
            total += 1024 * int(rollup.partition("\nPss:")[2].split()[0])
    return float(total)


def _files(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return float(total)


def planned(options: Options) -> float:
    """Bytes that `hpcrl plan` counts for the copies of all ranks."""
    from hpcrl.memory.host import copies_bytes
    from hpcrl.memory.parameters import Layout, whole_model
    from hpcrl.model_files.config_json import read_config
    from hpcrl.models.family import find_family

    given = options.model_copy(
        update={"non_persistent_save_interval": 1, "actor_num_nodes": 2, "actor_num_gpus_per_node": 1}
    )
    config = read_config(str(options.hf_checkpoint))
    layout = Layout.of(given, MODEL["num_hidden_layers"])
    return 2 * copies_bytes(given, whole_model(find_family(config, str(options.hf_checkpoint)), config), layout)


# ---- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="1 round; the results file is left alone")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds

    from tests.support.ranks import run_ranks
    from tests.support.tiny import make_model

    tokens = int(batch().rows["length"].sum())
    lines, found = [], {}
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir=SHARED) as memory:
        model = make_model(Path(directory) / "model", tied=False, **MODEL)
        given: dict[str, Any] = {"hf_checkpoint": str(model), "bf16": False, "lr": 1e-5, "max_logprob_diff": 1e9}
        given |= {"use_dynamic_batch_size": True, "max_tokens_per_gpu": LIMIT, "calculate_per_token_loss": True}
        options = Options(actor_num_gpus_per_node=2, **given)
        folder = Path(memory)
        for steps in STEPS:
            rows = run_ranks(2, measure_on_rank, options, folder, rounds, steps, timeout=1800.0)[0]
            ratios = [copied / plain for copied, plain, _ in rows]
            waited = statistics.median(spent / copied for copied, _, spent in rows)
            step = statistics.median(plain for _, plain, _ in rows) / BLOCK
            found[f"{steps} steps"] = round(statistics.median(ratios), 3)
            spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
            lines.append(
                f"| {steps} | {steps * tokens} | {step:.1f} | {found[f'{steps} steps']} ({spread}) | {waited:.3f} |"
            )
        with sampled(folder) as most:
            run_ranks(2, measure_on_rank, options, folder, 1, 1, timeout=900.0)
        counted = planned(options)
    taken = most["with"] - most["without"]
    found |= {"memory": round(taken / counted, 3), "files": round(most["files"] / counted, 3)}
    text = "\n".join(
        [
            f"Copies in memory after every rollout: two ranks, Qwen3 of {MODEL['num_hidden_layers']} layers of "
            f"{MODEL['hidden_size']}, fp32, {os.cpu_count()} cores, {rounds} rounds.",
            "",
            "| optimizer steps of a rollout | tokens | seconds without | with, by without | share that training waited |",
            "|---|---|---|---|---|",
            *lines,
            "",
            f"Memory at most: {taken / 1e6:.0f} MB more with copies than without, of which files {most['files'] / 1e6:.0f} "
            f"MB; `hpcrl plan` counts {counted / 1e6:.0f} MB.",
            "",
        ]
    )
    print(text)
    if not args.quick:
        (REPO / "bench" / "results" / "copies.md").write_text(text)
    print(json.dumps(found))


if __name__ == "__main__":
    from bench.copies import main as run  # under its own name, so that ranks can import what they are to do

    run()
