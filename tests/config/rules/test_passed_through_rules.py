"""Settings of Megatron's and vLLM's that contradict each other, or config.json: refused before anything starts, naming
both."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from tests.config.slime.guides import GUIDES, QWEN3
from tests.support.cpu_seconds import slowdown
from tests.support.published_models import MODELS

DENSE = "--actor-num-gpus-per-node 2 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 2 " + QWEN3
MOE = " ".join(GUIDES["Qwen3-30B-A3B"][0])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("Qwen3-4B", "Qwen3-30B-A3B"):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(MODELS[name][1]))
    return root


def submitted(models: Path, base: str, more: str) -> tuple[int, str, float]:
    """(exit status, errors, CPU seconds) of `hpcrl submit --dry-run` with a guide's arguments and some more."""
    site = [
        "--layout",
        "homogeneous",
        "--set",
        "trainer.gpus_per_node=8",
        f"scratch={models}",
    ]  # of the nodes: not looked for here
    said, began = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main(
            ["submit", "--dry-run", *site, "--", *base.replace("/scratch/", f"{models}/").split(), *more.split()]
        )
    return status, said.getvalue(), time.process_time() - began


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.cli.submit.can_submit", lambda: False)


@pytest.mark.parametrize("base", [DENSE, MOE])
def test_the_guides_pass(models: Path, base: str) -> None:
    assert submitted(models, base, "")[0] == 0


@pytest.mark.parametrize(
    ("base", "more", "told"),
    [
        # what does not divide
        (DENSE, "--actor-num-gpus-per-node 3 --tensor-model-parallel-size 3", "--tensor-model-parallel-size 3|32 attention heads"),
        (DENSE, "--rollout-num-gpus-per-engine 3", "--rollout-num-gpus-per-engine 3|32 attention heads"),
        (DENSE, "--rollout-num-gpus-per-engine 4", "--rollout-num-gpus 6|--rollout-num-gpus-per-engine 4"),
        (DENSE, "--actor-num-gpus-per-node 5 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 5", "--pipeline-model-parallel-size 5|36 layers"),
        (DENSE, "--actor-num-gpus-per-node 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 5", "--num-virtual-stages-per-pipeline-rank 5|18 layers"),
        (DENSE, "--actor-num-gpus-per-node 4 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 40", "--decoder-first-pipeline-num-layers 40|36 layers"),
        (DENSE, "--actor-num-gpus-per-node 3 --tensor-model-parallel-size 1 --context-parallel-size 3 --cp-comm-type a2a", "--cp-comm-type a2a with --context-parallel-size 3|32 attention heads"),
        (DENSE, "--cp-comm-type ring", "--cp-comm-type ring: expected one of p2p, all_gather, a2a"),
        (DENSE, "--cp-comm-type a2a+p2p", "--cp-comm-type a2a+p2p cannot be set"),
        (DENSE, "--tp-comm-overlap", "--tp-comm-overlap cannot be set|user buffers"),
        (DENSE, "--overlap-param-gather --num-distributed-optimizer-instances 2", "--overlap-param-gather cannot be set"),
        (MOE, "--expert-model-parallel-size 3", "8 trainer ranks|--expert-model-parallel-size 3"),
        (MOE, "--actor-num-nodes 24 --rollout-num-gpus 192 --rollout-batch-size 48 --expert-model-parallel-size 3", "--expert-model-parallel-size 3|128 experts"),
        (DENSE, "--sglang-dp-size 3", "--rollout-num-gpus-per-engine 2|--vllm-data-parallel-size 3"),
        # what belongs to another model
        (DENSE, "--expert-model-parallel-size 2", "--expert-model-parallel-size 2|no experts"),
        (DENSE, "--moe-grouped-gemm", "--moe-grouped-gemm|no experts"),
        (DENSE, "--sglang-ep-size 2", "--sglang-ep-size|no experts"),
        (DENSE, "--use-rollout-routing-replay", "--use-rollout-routing-replay|no experts"),
        (DENSE, "--num-query-groups 4", "--num-query-groups 4|says 8"),
        (DENSE, "--rollout-max-context-len 50000", "--rollout-max-context-len 50000|40960 positions"),
        # what contradicts
        (DENSE, "--rollout-shuffle --no-rollout-shuffle", "--rollout-shuffle and --no-rollout-shuffle"),
        (DENSE, "--sglang-mem-fraction-static 0.8 --vllm-gpu-memory-utilization 0.7", "--sglang-mem-fraction-static 0.8 and --vllm-gpu-memory-utilization 0.7"),
        (MOE, "--moe-token-dispatcher-type alltoall --moe-enable-deepep", "--moe-enable-deepep|--moe-token-dispatcher-type alltoall"),
        (DENSE, "--recompute-granularity selective", "--recompute-method uniform|--recompute-granularity full"),
        (DENSE, "--use-precision-aware-optimizer --no-use-distributed-optimizer", "--use-precision-aware-optimizer|--no-use-distributed-optimizer"),
        (DENSE, "--optimizer sgd", "--optimizer sgd|--no-use-distributed-optimizer"),
        (DENSE, "--save-interval 20 --save-retain-interval 7", "--save-retain-interval 7|--save-interval 20"),
        (DENSE, "--vllm-enforce-eager --vllm-cudagraph-capture-sizes 1 2", "--vllm-enforce-eager|--vllm-cudagraph-capture-sizes"),
        (DENSE, "--colocate --loop async", "--loop async|--colocate"),
        # what has no effect
        (DENSE, "--overlap-cpu-optimizer-d2h-h2d", "--overlap-cpu-optimizer-d2h-h2d|--optimizer-cpu-offload"),
        (DENSE, "--decoder-first-pipeline-num-layers 4", "--decoder-first-pipeline-num-layers 4|--pipeline-model-parallel-size is 1"),
        # what is out of range
        (DENSE, "--recompute-num-layers 0", "--recompute-num-layers 0"),
        (DENSE, "--hidden-dropout 1.5", "--hidden-dropout 1.5"),
        (DENSE, "--sglang-mem-fraction-static 1.5", "--vllm-gpu-memory-utilization 1.5"),
        (DENSE, "--vllm-max-num-seqs 0", "--vllm-max-num-seqs 0"),
        (DENSE, "--rollout-stop-token-ids -1", "--rollout-stop-token-ids -1"),
        # flags of another engine or trainer
        (DENSE, "--sglang-tp-size 2", "--sglang-tp-size 2|the engines run vLLM"),
        (DENSE, "--vllm-pipeline-parallel-size 2", "--vllm-pipeline-parallel-size 2|--rollout-num-gpus-per-engine"),
        (DENSE, "--train-backend fsdp", "--train-backend fsdp|Megatron-core"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_at_once(models: Path, base: str, more: str, told: str) -> None:
    status, said, seconds = submitted(models, base, more)
    assert status == 2
    for part in told.split("|"):
        assert part in said, said
    assert seconds < slowdown()
