"""How fast Qwen3-0.6B (all weights) and Qwen3-4B (adapters) train on samples of 16k tokens, next to published rates.

An engine on the same GPU samples the last tokens of each.  The weights are random, of the right shapes.  Without a GPU
both models are tiny.  It has run on no GPU yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.doctor.selftest.registry import Check, Number, Outcome
from hpcrl.doctor.selftest.tiny_model import make_model, make_prompts
from hpcrl.doctor.selftest.whole_run import ENGINES, engine_run, gpu_count
from hpcrl.models.files.config_json import read_config
from hpcrl.utils.shipped_files import SHIPPED

SECONDS = 900.0
STEPS = 3
TOKENS = {True: 16_384, False: 256}  #: of a sample, with and without a GPU
SAMPLED = {True: 512, False: 16}  #: of these, by the engine
#: what Qwen3-0.6B has in place of Qwen3-4B's (its config.json)
SMALLER = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
ADAPTER = {"lora_rank": 16, "lora_alpha": 32}
#: tokens a second and MFU that prime-rl has published of its trainer alone, on one H100 with 16384 tokens
#: (github.com/PrimeIntellect-ai/prime-rl, benchmarks/baselines; rows change); it counts operations in its own way
PUBLISHED = {"qwen3_0.6b": (11_896, 0.111), "qwen3_4b_lora": (6_229, 0.217)}
RUNS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "qwen3_0.6b": (SMALLER, {}),
    "qwen3_4b_lora": ({}, ADAPTER),
}


def sizes(name: str) -> dict[str, Any]:
    """config.json of a run's model on a GPU."""
    return {**read_config(SHIPPED / "examples/configs/Qwen3-4B"), **RUNS[name][0], "torch_dtype": "bfloat16"}


def options(name: str, directory: Path, gpu: bool) -> dict[str, Any]:
    """Of a run; the prompts that it reads are made."""
    prompts = TOKENS[gpu] - SAMPLED[gpu] - 3  # three tokens are the chat template's
    settings = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        "prompt_data": str(make_prompts(directory / "long-prompts.jsonl", 16, prompts)),
        "colocate": gpu,
        "num_rollout": STEPS,
        "rollout_batch_size": 2,
        "rollout_max_response_len": SAMPLED[gpu],
        "rollout_max_context_len": TOKENS[gpu],
        "max_tokens_per_gpu": TOKENS[gpu],
        "deterministic_mode": False,
        "check_weight_update_equal": False,
        "max_logprob_diff": 1e9,  # random weights of this depth say nothing of it
        "lr": 1e-5,
        **{f"megatron.{key}": value for key, value in settings.items()},
        **({"hf_checkpoint": str(directory / f"{name}-model"), "vllm.gpu_memory_utilization": 0.7} if gpu else {}),
        **RUNS[name][1],
    }


def work(directory: Path) -> Outcome:
    gpus = gpu_count()
    numbers: dict[str, Number] = {}
    said = []
    for name, (rate, mfu) in PUBLISHED.items():
        if gpus and not (directory / f"{name}-model" / "config.json").exists():
            make_model(directory / f"{name}-model", **sizes(name))
        rows = engine_run(directory, name, gpus, SECONDS, **options(name, directory, gpus > 0))
        if len(rows) != STEPS:
            return Outcome("failed", f"{name}: {len(rows)} of {STEPS} steps were logged", numbers)
        best = max(rows[1:], key=lambda row: row["perf/train_tokens_per_sec_per_gpu"])  # the first compiles
        ours = best["perf/train_tokens_per_sec_per_gpu"]
        numbers |= {f"{name}_tokens_per_second_per_gpu": ours, f"{name}_published": rate, f"{name}_published_mfu": mfu}
        numbers |= {f"{name}_mfu": best["perf/mfu"]} if "perf/mfu" in best else {}
        numbers |= {f"{name}_sampled_tokens_per_second": best["perf/tokens_per_sec"]}
        share = f", MFU {best['perf/mfu']:.1%}" if "perf/mfu" in best else ""
        said.append(f"{name} {ours:.0f} tokens/s/GPU{share} (prime-rl on an H100: {rate}, {mfu:.1%})")
    what = "" if gpus else "tiny models on the CPU, which say nothing of a GPU: "
    return Outcome("passed", what + "; ".join(said), numbers)


CHECK = Check("Qwen3-0.6B and Qwen3-4B train and sample", 98, "launcher", work, ENGINES)
