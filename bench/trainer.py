"""hpcrl's training step beside bare Megatron-core with the same model, batch and layout, in one run.

    python bench/trainer.py [--rounds 15] [--quick] [--only "one rank,dp2"]

Work: one optimizer step over a batch of packed samples.  Bare is the least that trains with Megatron-core: its GPTModel
(with the attention that takes packed sequences on a CPU, without which it could not run), its DistributedDataParallel,
its schedule and optimizer, and its own cross-entropy, over micro-batches that were packed beforehand and lie ready.
Ours is the step of a run: it takes a share of the queue, packs it, computes the policy loss (or, for sft, the negative
log-likelihood), its metrics, and the checks that end a run.  Both use the same division into micro-batches.  A round
takes each step once, in alternating order.  Other load on the machine can only slow a step down, so one ratio is that
of the fastest steps; the other is the median over rounds of the ratio within one round.  Writes
bench/results/trainer.md; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

import numpy as np  # noqa: E402

from hpcrl.config.options import Options  # noqa: E402
from hpcrl.microbatches import make_schedule  # noqa: E402
from hpcrl.sample import Sample  # noqa: E402
from hpcrl.transport.share_format import SampleBatch, Share  # noqa: E402
from hpcrl.utils.sample_parts import COMPLETED  # noqa: E402

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SAMPLES, LIMIT = 16, 1024
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "dp2": (2, {}),
    "tp2 sp": (2, {TP: 2, "sequence_parallel": True}),
    "pp2": (2, {PP: 2}),
    "one rank sft": (1, {"loss_type": "sft_loss"}),
}
Times = tuple[float, float]  #: seconds on the clock, seconds of the CPU


# ---- the work


def batch(low: int = 16, high: int = 448) -> SampleBatch:
    """Long-tailed samples: prompts of 16 to 64 tokens, responses of `low` to `high` (lognormal around 100 from 16)."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(SAMPLES):
        prompt = int(rng.integers(16, 65))
        response = int(np.clip(low / 16 * rng.lognormal(4.6, 0.8), low, high))
        found.append(
            Sample(
                group_index=number // 8,
                response_index=number % 8,
                tokens=rng.integers(1, MODEL["vocab_size"], prompt + response).astype(np.int32),
                response_length=response,
                loss_mask=np.ones(response, np.uint8),
                rollout_log_probs=np.full(response, -8.0, np.float32),
                versions=np.zeros(response, np.int32),
                reward=float(rng.normal()),
                status=COMPLETED,
            )
        )
    return SampleBatch.from_samples(found)


def share_of(rank: int, ranks: int, data: SampleBatch | None = None) -> Share:
    """What the queue gives one data-parallel rank."""
    data = data or batch()
    schedule = make_schedule(data.rows["length"].tolist(), dp=ranks, max_tokens_per_gpu=LIMIT)
    (own,) = schedule.steps[rank]
    rows = [i for micro in own for i in micro]
    local = iter(range(len(rows)))
    micros = [[[next(local) for _ in micro] for micro in own]]
    of_all = {"step_samples": [SAMPLES], "step_tokens": [int(data.loss_mask.sum())], "table": data.rows}
    return Share(0, 0, data.select(rows), micros, **of_all, own=np.asarray(rows, np.int32))


# ---- on the ranks


def bare_step(policy: Any, share: Share) -> Callable[[], None]:
    """One training step of nothing but Megatron-core."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from hpcrl.trainer.megatron.packed_attention import boundaries

    split = policy.ranks.tp_size if policy.config.sequence_parallel else 1

    def pack(rows: list[int]) -> tuple[Any, ...]:
        tokens = []
        labels = []
        weights = []
        bounds = [0]
        for row in rows:
            ids = torch.from_numpy(
                share.batch.tokens[slice(*share.batch.token_offsets[row : row + 2])].astype(np.int64)
            )
            response = int(share.batch.rows["response_length"][row])
            mask = torch.zeros(len(ids))
            mask[len(ids) - response - 1 : -1] = float(share.batch.rows["reward"][row])
            tokens.append(ids)
            labels.append(torch.cat([ids[1:], ids.new_zeros(1)]))
            weights.append(mask)
            bounds.append(bounds[-1] + len(ids))
        pad = -bounds[-1] % split
        bounds[-1] += pad
        ids, targets, mask = (torch.cat([*parts, parts[0].new_zeros(pad)])[None] for parts in (tokens, labels, weights))
        ends = torch.tensor(bounds, dtype=torch.int32)
        longest = int((ends[1:] - ends[:-1]).max())
        ids, targets, mask, ends = (each.to(policy.ranks.device) for each in (ids, targets, mask, ends))
        return ids, torch.zeros_like(ids), targets, mask, boundaries(ends, tuple(bounds), longest)

    packed = [pack(rows) for rows in share.micro_batches[0]]

    def forward(batches: Iterator[tuple[Any, ...]], model: Any) -> tuple[Any, Callable[..., Any]]:
        ids, positions, targets, weights, params = next(batches)

        def loss(losses: Any) -> tuple[Any, Any, dict[str, Any]]:
            total = (losses * weights).sum()
            return total, (weights != 0).sum().int(), {"loss": total.detach()}

        return model(ids, positions, None, labels=targets, packed_seq_params=params), loss

    def step() -> None:
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        policy.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(packed),
            model=list(policy.chunks),
            num_microbatches=len(packed),
            seq_length=LIMIT,
            micro_batch_size=1,
            forward_only=False,
        )
        policy.optimizer.step()
        policy.scheduler.step(increment=1)

    return step


def measure_on_rank(options: Options, rounds: int) -> list[tuple[Times, Times]]:
    """(ours, bare) of each round, after one that does not count."""
    import torch.distributed as dist

    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import hf_weights, model
    from hpcrl.trainer.step import train_batch

    ranks = parallel_state.initialize(options)
    policies = [model.build(options, ranks) for _ in range(2)]
    for policy in policies:
        hf_weights.load_hf(policy, str(options.hf_checkpoint))
    share = share_of(ranks.dp_rank, ranks.dp_size)
    steps = [lambda: train_batch.train(policies[0], ranks, options, share), bare_step(policies[1], share)]
    found: list[tuple[Times, Times]] = []
    for number in range(-1, rounds):
        times: dict[int, Times] = {}
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            begun = time.perf_counter(), time.process_time()
            steps[which]()
            cpu = time.process_time() - begun[1]
            dist.barrier()
            times[which] = time.perf_counter() - begun[0], cpu
        if number >= 0:
            found.append((times[0], times[1]))
    return found


# ---- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="2 rounds; the results file is left alone")
    parser.add_argument("--only", default=",".join(LAYOUTS), help="layouts, with commas")
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    only = {name.strip() for name in args.only.split(",")}
    if unknown := only - {*LAYOUTS}:
        parser.error(f"no such layout: {', '.join(sorted(unknown))}")
    chosen = [name for name in LAYOUTS if name in only]

    from tests.support.ranks import run_ranks
    from tests.support.tiny import make_model

    tokens = int(batch().rows["length"].sum())
    lines, ratios = [], {}
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", tied=False, **MODEL)
        for name in chosen:
            n, fields = LAYOUTS[name]
            common = {"hf_checkpoint": str(model), "bf16": False, "lr": 1e-5, "max_logprob_diff": 1e9}
            packing = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": LIMIT, "calculate_per_token_loss": True}
            options = Options(actor_num_gpus_per_node=n, **common, **packing, **fields)
            every = run_ranks(n, measure_on_rank, options, rounds, timeout=900.0)
            line, ratios[name] = row(name, tokens, every)
            print(line, flush=True)
            lines.append(line)
    parameters = f"{MODEL['num_hidden_layers']} layers of {MODEL['hidden_size']}, vocabulary {MODEL['vocab_size']}"
    text = "\n".join(
        [
            f"One training step: Qwen3 of {parameters}, fp32, {SAMPLES} samples of {tokens} tokens, micro-batches of "
            f"up to {LIMIT}, {rounds} rounds, {os.cpu_count()} cores.",
            "",
            "Tokens/s of the fastest step of each, and their ratio, ours over bare; the median over the rounds of the "
            "ratio within",
            "one round; the same of CPU time of all ranks.",
            "",
            "| layout | hpcrl, tokens/s | bare Megatron-core, tokens/s | ratio | median ratio (min..max) | of CPU time |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )
    print(text)
    if not args.quick:
        (REPO / "bench" / "results" / "trainer.md").write_text(text)
    print(json.dumps(ratios))


def row(name: str, tokens: int, every: list[list[tuple[Times, Times]]]) -> tuple[str, dict[str, float]]:
    """A line of the table, and its ratios; every: of each rank, of each round, (ours, bare)."""
    clock = [(ours[0], bare[0]) for ours, bare in every[0]]
    cpu = [tuple(sum(times[i][1] for times in ranks) for i in (0, 1)) for ranks in zip(*every, strict=True)]
    ratios, cpu_ratios = ([bare / ours for ours, bare in pairs] for pairs in (clock, cpu))
    mine, peer = (tokens / min(pair[i] for pair in clock) for i in (0, 1))
    found = {"fastest": mine / peer, "median": statistics.median(ratios), "cpu": statistics.median(cpu_ratios)}
    found = {key: round(value, 3) for key, value in found.items()}
    spread = f"{found['median']} ({min(ratios):.2f}..{max(ratios):.2f})"
    return f"| {name} | {mine:.0f} | {peer:.0f} | {found['fastest']} | {spread} | {found['cpu']} |", found


if __name__ == "__main__":
    from bench.trainer import main as run  # under its own name, so that ranks can import what they are to do

    run()
