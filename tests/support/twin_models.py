"""Tiny models for the twins of scripts, in the form in which each family is published, and rollouts for a twin without
engines.

    make, layers = MODELS_OF["kimi_k2"]
    make(directory, num_hidden_layers=layers) -> directory

Invariant: of a model that is cut into two pipeline stages, each stage has a layer with experts if the family has any.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import COMPLETED
from tests.support.mtp_models import make_glm, make_mimo
from tests.support.tiny import make_family, with_images


def made_up(rollout_id: int, groups: int, each: int, most: int) -> list[Sample]:
    """What a rollout could have given: `groups` of `each` samples of at most so many tokens, random, with random
    log-probs; every other one is right."""
    rng = np.random.default_rng(rollout_id)
    found = []
    for group in range(rollout_id * groups, (rollout_id + 1) * groups):
        for index in range(each):
            size = int(rng.integers(1, most + 1))
            found.append(
                Sample(
                    group_index=group,
                    response_index=index,
                    tokens=rng.integers(6, 100, 5 + size).astype(np.int32),
                    response_length=size,
                    loss_mask=np.ones(size, np.uint8),
                    rollout_log_probs=rng.normal(-2, 1, size).astype(np.float32),
                    versions=np.full(size, rollout_id, np.int32),
                    reward=float(index % 2),
                    status=COMPLETED,
                )
            )
    return found


def make_kimi(directory: Path, **more: Any) -> Path:
    """Save a random Kimi-K2, which is a DeepSeek-V3 under another name; returns its directory."""
    config = make_family(directory, "deepseek_v3", rope_parameters=YARN, **more) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "kimi_k2"}))
    return directory


def make_qwen(directory: Path, family: str, **more: Any) -> Path:
    """Save a random Qwen3.5 as published, with a part for images; returns its directory."""
    return with_images(make_family(directory.with_name(f"{directory.name}-text"), f"{family}_text", **more), directory)


#: as published, but of what the tiny model's context is stretched from
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
#: family, or one with other settings -> (what makes its model, layers): every stage of a pipeline has one with experts, without which Megatron's
#: optimizer on CPUs saves nothing
MODELS_OF: dict[str, tuple[Callable[..., Path], int]] = {
    "glm4_moe": (partial(make_family, name="glm4_moe"), 4),
    "qwen3_next": (partial(make_family, name="qwen3_next"), 4),
    "mimo": (partial(make_mimo, hidden_size=128), 2),
    "deepseek_v3-yarn": (partial(make_family, name="deepseek_v3", rope_parameters=YARN), 3),
    "kimi_k2": (make_kimi, 3),
    "glm4_moe_lite": (partial(make_glm, family="glm4_moe_lite"), 3),
    "qwen3_5": (partial(make_qwen, family="qwen3_5"), 3),
    "qwen3_5_moe": (partial(make_qwen, family="qwen3_5_moe"), 2),
}
