"""The shipped recipes for GPUs at a small size: each with its own flags and layout, a sixteenth as wide, two layers a
pipeline stage, and a batch of a few short samples.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.transport.share_format import SampleBatch
from tests.support.published_models import MODELS
from tests.support.shares import plain_sample

EXAMPLES = Path(__file__).parents[2] / "examples"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
#: recipe -> its model
RECIPES = {
    "glm-4.5-355b-64gpu": "GLM-4.5",
    "glm-4.5-355b-lora-16gpu": "GLM-4.5",
    "glm-4.5-355b-64gpu-bf16": "GLM-4.5",
    "glm-z1-9b-8gpu": "GLM-4-9B-0414",
    "glm-z1-9b-8gpu-colocated": "GLM-4-9B-0414",
    "qwen3-30b-a3b-lora-4gpu": "Qwen3-30B-A3B",
    "qwen3-4b-8gpu": "Qwen3-4B",
    "qwen3-4b-8gpu-async": "Qwen3-4B",
    "qwen3-4b-8gpu-colocated": "Qwen3-4B",
}
IN_FP8 = ("glm-4.5-355b-64gpu", "glm-4.5-355b-lora-16gpu")  #: whose --hf-checkpoint is
NARROWER = 16
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "vocab_size")
SHORTER = 16
SAMPLES_A_MICRO_BATCH = 4
MICRO_BATCHES = 2  #: of an optimizer step, on each data-parallel rank


def small_recipe(name: str, directory: Path) -> tuple[Options, SampleBatch]:
    """Options of a shipped recipe, and a batch for it; the small model's config.json is written to `directory`."""
    (options,) = resolve_stages(load_recipe(EXAMPLES / f"{name}.toml"), {}, {})
    config = small_config(name, options)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tokens = options.max_tokens_per_gpu // SHORTER * options.context_parallel_size
    ranks = options.tensor_model_parallel_size * options.pipeline_model_parallel_size * options.context_parallel_size
    samples = options.world_size // ranks * options.num_steps_per_rollout * MICRO_BATCHES * SAMPLES_A_MICRO_BATCH
    fields = {
        "hf_checkpoint": str(directory),
        "max_tokens_per_gpu": options.max_tokens_per_gpu // SHORTER,
        "rollout_batch_size": samples // options.n_samples_per_prompt,
    }
    length = tokens // SAMPLES_A_MICRO_BATCH
    batch = [
        plain_sample(
            length // 3,
            length - length // 3,
            group_index=number // options.n_samples_per_prompt,
            response_index=number % options.n_samples_per_prompt,
            reward=float(number % 3),
            tokens=np.arange(length, dtype=np.int32) % config["vocab_size"],
        )
        for number in range(samples)
    ]
    return options.model_copy(update=fields), SampleBatch.from_samples(batch)


def small_config(name: str, options: Options) -> dict[str, Any]:
    """config.json of the recipe's model, smaller."""
    config = dict(MODELS[RECIPES[name]][1])
    config |= {width: config[width] // NARROWER for width in WIDTHS if width in config}
    config["num_hidden_layers"] = 2 * options.pipeline_model_parallel_size
    if name in IN_FP8:
        config["quantization_config"] = FP8
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    return config
