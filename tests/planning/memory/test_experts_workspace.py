"""What vLLM's experts need for rows of all data-parallel parts, and how many tokens a pass has then.

The sizes were computed from the sources of vLLM 0.32 (workspace_shapes) and FlashInfer 0.7 (getWorkspaceDeviceBufferSizes
of its CUTLASS experts), for GLM-4.5-355B in FP8 blocks on 32 GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.slime.arguments import translate
from hpcrl.models.family import find_family
from hpcrl.planning.formulas.engine_memory import batched_tokens, engine_terms, workspace_bytes
from hpcrl.planning.formulas.training_memory import GIB
from tests.support.published_models import MODELS

EXAMPLES = Path(__file__).parents[3] / "examples"
BF16 = MODELS["GLM-4.5"][1]
FP8 = {**BF16, "quantization_config": {"quant_method": "fp8"}}
#: tokens of one part -> GiB with FlashInfer's kernels, and with DeepGEMM's
READ = {8192: (49.5, 36.3), 2048: (12.4, 9.1), 1024: (6.2, 4.5), 512: (3.1, 2.3)}


def spread(parts: int = 32, **vllm: Any) -> Options:
    settings = {"data_parallel_size": parts, "enable_expert_parallel": True, "gpu_memory_utilization": 0.7}
    return Options(hf_checkpoint="m", rollout_num_gpus=32, rollout_num_gpus_per_engine=32, vllm=settings | vllm)


@pytest.mark.parametrize("tokens", READ)
def test_workspace_of_each_kernel(tokens: int) -> None:
    options = spread(max_num_batched_tokens=tokens)
    found = workspace_bytes(options, find_family(FP8, ""), FP8)
    flashinfer, deep_gemm = READ[tokens]
    assert found["FlashInfer"] / GIB == pytest.approx(flashinfer, rel=0.1)
    assert found["DeepGEMM"] / GIB == pytest.approx(deep_gemm, rel=0.1)


def test_workspace_of_cut_experts_in_bf16() -> None:
    """Four parts that cut every expert into 32: also they compute the rows of all."""
    options = spread(4, enable_expert_parallel=False)
    (found,) = workspace_bytes(options, find_family(BF16, ""), BF16).values()
    assert found / GIB == pytest.approx(5.6, rel=0.1)
    assert not workspace_bytes(spread(1), find_family(BF16, ""), BF16)


def test_workspace_is_taken_from_the_cache() -> None:
    """What vLLM's own number of tokens would need leaves no cache on a GPU of 80 GB; that of the recipe does."""
    family = find_family(FP8, "")
    own = engine_terms(spread(max_num_batched_tokens=8192), family, FP8, 79.1 * GIB)
    assert own.gpu["KV cache"] < 0
    (options,) = resolve_stages(load_recipe(EXAMPLES / "glm-4.5-355b-64gpu.toml"), {}, {"run": "r", "prepared": "p"})
    terms = engine_terms(options, family, FP8, 79.1 * GIB)
    assert terms.gpu["experts' workspace"] / GIB == pytest.approx(3.1, rel=0.1)
    assert terms.gpu["weights"] / GIB == pytest.approx(27.1, rel=0.01)  # of vLLM's own parameters (hpcrl rehearse)
    assert terms.cached_tokens // options.engine_data_parallel_size > options.rollout_max_context_len


@pytest.mark.parametrize(
    ("parts", "vllm", "tokens"),
    [
        (32, {}, 512),
        (8, {}, 1024),
        (1, {}, 8192),
        (8, {"enable_expert_parallel": False}, 8192),
        (8, {"max_num_batched_tokens": 2048}, 2048),
        (32, {"max_num_seqs": 600}, 600),
        (32, {"all2all_backend": "deepep_low_latency"}, 256),
    ],
)
def test_tokens_of_one_pass(parts: int, vllm: dict[str, Any], tokens: int) -> None:
    assert batched_tokens(spread(parts, **vllm)) == tokens


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ("--sglang-dp-size 4", 32768),
        ("", 131072),
        ("--sglang-dp-size 4 --sglang-ep-size 4 --sglang-moe-a2a-backend deepep", None),
        ("--sglang-dp-size 4 --sglang-ep-size 4 --sglang-moe-a2a-backend deepep --sglang-deepep-mode normal", 32768),
    ],
)
def test_imported_tokens_of_one_pass(more: str, tokens: int | None) -> None:
    """SGLang divides its chunk by the parts; of the low-latency kernels vLLM has a number of its own."""
    given = f"--rollout-num-gpus-per-engine 4 --sglang-chunked-prefill-size 131072 {more}"
    assert translate(given.split()).values.get("vllm", {}).get("max_num_batched_tokens") == tokens
