"""What the next attempt uses less of after an out-of-memory error."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import UNEXPECTED
from hpcrl.launch.attempts.smaller_settings import next_smaller
from hpcrl.run.rundir import AttemptFailure

TORCH = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
CACHE = "engine 0 on a: its vLLM server ended with exit code 1; ValueError: No available memory for the cache blocks."
SHARE = "engine 0 on a: Free memory on device cuda:0 is less than desired GPU memory utilization (0.9, 71 GiB)"
PACKED = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 8192, "rollout_max_response_len": 5000}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def steps(role: str, message: str, count: int, kind: str = "", **values: Any) -> list[str]:
    """What is lowered one after another, as long as there is something."""
    options, found, done = Options(**({"oom_retries": 9} | values)), [], []
    failure = AttemptFailure(role, 0, message, 0.0, kind)
    while len(done) < count and (smaller := next_smaller(options, failure, done)):
        options = options.model_copy(update=smaller.update)
        assert smaller.engines is (smaller.update.keys() == {"vllm"})
        done.append(smaller.setting)
        found.append(smaller.text)
    return found


def test_the_ladder_of_a_trainer() -> None:
    """What was lowered least often comes next; the longest sample still fits, and a piece has enough rows."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert steps("trainer", TORCH, 9, UNEXPECTED, **PACKED, context_parallel_size=2) == [
        "--log-probs-chunk-size 4096",
        "--max-tokens-per-gpu 4096 instead of 8192",
        full,
        "--log-probs-chunk-size 2048 instead of 4096",
        "--max-tokens-per-gpu 2500 instead of 4096",
        "--log-probs-chunk-size 1024 instead of 2048",
    ]
    assert steps("trainer", TORCH, 9, log_probs_chunk_size=512, micro_batch_size=5) == [
        "--micro-batch-size 2 instead of 5",
        full,
        "--micro-batch-size 1 instead of 2",
    ]
    packed = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 96, "megatron": FULL}
    assert steps("trainer", TORCH, 9, **packed) == []
    labels = steps("trainer", TORCH, 2, **packed, loss_type="sft_loss")
    assert labels == ["--max-tokens-per-gpu 48 instead of 96", "--max-tokens-per-gpu 24 instead of 48"]


def test_recomputing_all_leaves_the_rest() -> None:
    """Settings of what else is computed again go, others of Megatron's stay."""
    given = {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "swiglu": True}
    smaller = next_smaller(Options(megatron=given), AttemptFailure("trainer", 0, TORCH, 0.0), [])
    assert smaller is not None and smaller.update == {"megatron": {"swiglu": True} | FULL}


def test_the_ladder_of_an_engine() -> None:
    """A share without room for a cache is not made smaller, and one has no effect where the cache has a size."""
    both = ["--vllm-gpu-memory-utilization 0.85 instead of 0.9", "--vllm-max-num-seqs 128"]
    given = {"vllm": {"gpu_memory_utilization": 0.9}}
    assert steps("engine", SHARE, 2, **given) == both
    assert steps("engine-0-node", TORCH, 2, **given) == both
    assert steps("trainer", f"engine 0 on a: {TORCH} (noticed during the update)", 2, "PeerError", **given) == both
    assert steps("engine", TORCH, 9, vllm={"gpu_memory_utilization": 0.1, "max_num_seqs": 1}) == []
    assert steps("engine", SHARE.replace("(0.9", "(0.8"), 1) == ["--vllm-gpu-memory-utilization 0.75 instead of 0.8"]
    few = ["--vllm-max-num-seqs 4 instead of 8", "--vllm-max-num-seqs 2 instead of 4"]
    assert steps("engine", CACHE, 2, vllm={"max_num_seqs": 8}) == few
    assert steps("engine", TORCH, 2, vllm={"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 30}) == few


@pytest.mark.parametrize(
    ("role", "message", "options"),
    [
        ("trainer", "the kernel killed 1 process: out of memory", {}),
        ("rollout", TORCH, {}),
        ("launcher", TORCH, {}),
        ("trainer", TORCH, {"oom_retries": 0}),
        ("trainer", TORCH, {"attempts": 1}),
    ],
)
def test_other_failures_lower_nothing(role: str, message: str, options: dict[str, Any]) -> None:
    given = Options(**PACKED | options)
    assert next_smaller(given, AttemptFailure(role, 0, message, 0.0), []) is None


def test_retries_are_counted() -> None:
    failure = AttemptFailure("trainer", 0, TORCH, 0.0)
    assert next_smaller(Options(**PACKED), failure, ["x", "x"]) is not None
    assert next_smaller(Options(**PACKED), failure, ["x", "x", "x"]) is None
    assert next_smaller(Options(**PACKED), None, []) is None
