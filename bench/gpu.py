"""On one GPU: tokens/s of sampling beside bare vLLM, and of a training step beside bare Megatron-core; both as ratios.

    python bench/gpu.py [--rounds 5] [--quick]

Sampling: the same random Qwen3 and the same prompts, 8 responses to each, in a run of hpcrl that only samples
(--debug-rollout-only: queue, ledger, grading and its own route to the engine) and in one call of vLLM's LLM.generate
with the same engine settings; shown are sampled tokens per second of the fastest round.  Training: bench/trainer.py's
two steps over a model and samples of a GPU's size, in bf16.  Without a GPU both are small and on the CPU, which shows
that the bench works and nothing of a GPU's speed: the results file is then left alone.  It has run on no GPU yet.
Writes bench/results/gpu.md; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from hpcrl.doctor.selftest.tiny_model import make_model, make_prompts  # noqa: E402
from hpcrl.doctor.selftest.whole_run import gpu_count, recipe_with_engines, run  # noqa: E402
from hpcrl.report.metrics import last_records  # noqa: E402
from hpcrl.run.rundir import RunDir  # noqa: E402

#: about 2 billion parameters
LARGE = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "head_dim": 128,
    "num_hidden_layers": 20,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
}
SAMPLING = {True: {"prompts": 64, "tokens": 1024}, False: {"prompts": 8, "tokens": 64}}  #: with and without a GPU
TRAINING = {
    True: {"model": LARGE, "samples": 64, "limit": 16_384, "lengths": (512, 4096)},
    False: {"model": {"vocab_size": 512, "hidden_size": 64}, "samples": 8, "limit": 512, "lengths": (16, 128)},
}
EACH = 8


# ---- sampling


def sampled_by_hpcrl(directory: Path, model: Path, gpu: bool, rounds: int) -> float:
    """Tokens per second of the fastest rollout of a run that only samples."""
    sizes = SAMPLING[gpu]
    recipe = recipe_with_engines(
        directory,
        "rollouts",
        int(gpu),
        hf_checkpoint=str(model),
        prompt_data=str(make_prompts(directory / "prompts.jsonl", sizes["prompts"])),
        debug_rollout_only=True,
        check_weight_update_equal=False,
        num_rollout=rounds + 1,
        rollout_batch_size=sizes["prompts"],
        n_samples_per_prompt=EACH,
        rollout_max_response_len=sizes["tokens"],
        rollout_max_context_len=sizes["tokens"] + 64,
    )
    root = directory / "rollouts"
    run([str(recipe), "--run-dir", str(root)], directory / "rollouts.log")
    rows = [row for row in last_records(RunDir(root).metrics_file, 10_000) if "perf/rollout_time" in row]
    return max(row["perf/tokens_per_sec"] for row in rows[1:])


BARE = """
import json, sys, time
from vllm import LLM, SamplingParams
told = json.loads(sys.argv[1])
llm = LLM(model=told["model"], seed=1, **told["engine"])
ids = [llm.get_tokenizer().apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in told["prompts"]]
params = SamplingParams(n=told["each"], max_tokens=told["tokens"], temperature=1.0, logprobs=0)
best = 0.0
for _ in range(told["rounds"] + 1):
    begun = time.perf_counter()
    found = llm.generate(ids, params, use_tqdm=False)
    best = max(best, sum(len(o.token_ids) for r in found for o in r.outputs) / (time.perf_counter() - begun))
print("tokens per second", best)
"""


def sampled_by_vllm(directory: Path, model: Path, gpu: bool, rounds: int) -> float:
    """Tokens per second of the fastest of as many calls of LLM.generate."""
    sizes = SAMPLING[gpu]
    prompts = [json.loads(line)["prompt"] for line in (directory / "prompts.jsonl").read_text().splitlines()]
    engine: dict[str, Any] = {"max_model_len": sizes["tokens"] + 64, "dtype": "bfloat16" if gpu else "float32"}
    if not gpu:
        engine |= {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
    told = {"model": str(model), "prompts": prompts, "each": EACH, "tokens": sizes["tokens"], "rounds": rounds}
    answer = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(told | {"engine": engine})],
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    found = [line for line in answer.stdout.splitlines() if line.startswith("tokens per second")]
    return float(found[0].split()[-1])


# ---- training


def trained(model: Path, gpu: bool, rounds: int) -> list[float]:
    """[tokens per second of hpcrl's step, of bare Megatron-core's], the fastest of the rounds; ends as the process
    does."""
    import torch

    from bench import trainer as bench
    from hpcrl.doctor.selftest.rank import device_alone
    from hpcrl.doctor.selftest.trainer_model import alone_options, load
    from hpcrl.trainer.checkpoint.to_torch_dist import alone
    from hpcrl.trainer.step import train_batch

    store = alone()
    device_alone()
    sizes = TRAINING[gpu]
    bench.MODEL = bench.MODEL | sizes["model"]
    bench.SAMPLES, bench.LIMIT = sizes["samples"], sizes["limit"]
    low, high = sizes["lengths"]
    packing = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": sizes["limit"], "calculate_per_token_loss": True}
    options = alone_options(model, gpu, lr=1e-5, max_logprob_diff=1e9, **packing)
    first = load(options)
    policies = [first, load(options, first.ranks)]
    share = bench.share_of(0, 1, bench.batch(low, high))
    steps = [
        lambda: train_batch.train(policies[0], first.ranks, options, share),
        bench.bare_step(policies[1], share),
    ]
    tokens = int(share.batch.rows["length"].sum())
    best = [0.0, 0.0]
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            begun = time.perf_counter()
            steps[which]()
            if gpu:
                torch.cuda.synchronize()
            if number:
                best[which] = max(best[which], tokens / (time.perf_counter() - begun))
    del store
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 rounds; the results file is left alone")
    parser.add_argument("--training", metavar="MODEL", help=argparse.SUPPRESS)  # the part that has the GPU alone
    args = parser.parse_args()
    rounds, gpu = 2 if args.quick else args.rounds, gpu_count() > 0
    if args.training:
        print(json.dumps(trained(Path(args.training), gpu, rounds)))
        return
    lines = ["| | hpcrl, tokens/s | bare, tokens/s | ratio |", "|---|---|---|---|"]
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        sampling = make_model(directory / "sampling", **(LARGE | {"vocab_size": 128} if gpu else {}))
        training = make_model(directory / "training", **TRAINING[gpu]["model"])
        pairs = {
            "sampling, beside vLLM": [
                work(directory, sampling, gpu, rounds) for work in (sampled_by_hpcrl, sampled_by_vllm)
            ]
        }
        part = [sys.executable, __file__, "--training", str(training), "--rounds", str(rounds)]
        answer = subprocess.run(part, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
        pairs["training, beside Megatron-core"] = json.loads(answer.stdout.splitlines()[-1])
    for name, (ours, bare) in pairs.items():
        ratios[name.partition(",")[0]] = round(ours / bare, 3)
        lines.append(f"| {name} | {ours:.0f} | {bare:.0f} | {ours / bare:.2f} |")
    print("\n".join(lines))
    if gpu and not args.quick:
        (REPO / "bench" / "results" / "gpu.md").write_text("\n".join([*lines, ""]))
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
