"""Recipes of published models, whose config.json is all that is there of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcrl.config.recipe import load_recipe
from hpcrl.fit.search import FitTarget, Search
from hpcrl.launch.site import load_site
from hpcrl.models.family import find_family
from tests.support.published_models import MODELS

RECIPE = """\
# Eight GPUs, which take turns.
hf_checkpoint = "{model}"      # what the engines serve
prompt_data = "x.jsonl"
label_key = "label"
rm_type = "math"
num_rollout = 100

actor_num_gpus_per_node = 8   # all of a node
colocate = true
rollout_num_gpus_per_engine = 2
tensor_model_parallel_size = 2 # of one node
sequence_parallel = true
rollout_batch_size = 64
n_samples_per_prompt = 8
rollout_max_response_len = 4096
rollout_max_context_len = 5120
use_dynamic_batch_size = true
max_tokens_per_gpu = 9216

[megatron]
recompute_granularity = "full"
recompute_method = "uniform"
recompute_num_layers = 1

[vllm]
gpu_memory_utilization = 0.7
"""


def recipe(folder: Path, name: str = "Qwen3-4B", text: str = RECIPE) -> Path:
    """A recipe of that model in `folder`."""
    model = folder / name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS[name][1]))
    path = folder / "r.toml"
    path.write_text(text.replace("{model}", str(model)))
    return path


def search(path: Path, memory: float = 80.0, node: int = 8, **flags: Any) -> Search:
    """The shapes of it, on nodes of so many GPUs."""
    found = load_recipe(path)
    config = json.loads((Path(found.values["hf_checkpoint"]) / "config.json").read_text())
    site = load_site(None, {"trainer.gpus_per_node": node})
    return Search(found, flags, site, FitTarget(find_family(config, "m"), config, "h100-sxm", memory, node))
