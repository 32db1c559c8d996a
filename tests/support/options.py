"""The least options of a run, which tests of single options add to."""

from __future__ import annotations

from typing import Any

#: the least that a GRPO run needs, and a supervised one
GRPO: dict[str, Any] = {
    "hf_checkpoint": "m",
    "prompt_data": "p.jsonl",
    "label_key": "label",
    "num_rollout": 3,
    "rollout_num_gpus": 1,
    "rm_type": "exact",
    "n_samples_per_prompt": 4,
    "actor_num_gpus_per_node": 1,
}
SFT = {k: v for k, v in GRPO.items() if k not in ("rollout_num_gpus", "rm_type", "n_samples_per_prompt")} | {
    "loss_type": "sft_loss"
}
PLACES = {"run": "/run", "prepared": "/run/prepared"}
