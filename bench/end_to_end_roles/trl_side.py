"""TRL's GRPOTrainer, as end_to_end.py measures it: a process of its own, which writes when each step ended.

    python bench/end_to_end_roles/trl_side.py '{"model": ..., "data": ..., "steps": ..., "groups": ..., "each": ..., "longest": ..., "lr": ...}'

With "rank" and "alpha" PEFT's adapter is trained in the place of the weights.  Generation is TRL's own, by transformers in the process that trains.  The last line printed is a JSON list, of every
step: seconds since the first one's end, and the mean reward.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from typing import Any

ENDS: list[float] = []
REWARDS: list[float] = []


def right(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """1 where the last boxed number is the label."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    found = [re.findall(r"\\boxed\{([^}]*)\}", text) for text in texts]
    return [float(bool(boxed) and boxed[-1] == wanted) for boxed, wanted in zip(found, label, strict=True)]


def main() -> None:
    work = json.loads(sys.argv[1])
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class TimeLimitWatcher(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ENDS.append(time.monotonic())

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "reward" in logs:
                REWARDS.append(float(logs["reward"]))

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=work["groups"] * work["each"],
            num_generations=work["each"],
            max_completion_length=work["longest"],
            max_steps=work["steps"],
            learning_rate=work["lr"],
            lr_scheduler_type="constant",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = load_dataset("json", data_files=work["data"], split="train", cache_dir=scratch)
        adapter = None
        if "rank" in work:
            from peft import LoraConfig

            adapter = LoraConfig(r=work["rank"], lora_alpha=work["alpha"], target_modules="all-linear")
        trainer = GRPOTrainer(
            model=work["model"],
            reward_funcs=right,
            args=config,
            train_dataset=data,
            callbacks=[TimeLimitWatcher()],
            peft_config=adapter,
        )
        trainer.train()
    print(json.dumps([(end - ENDS[0], reward) for end, reward in zip(ENDS, REWARDS, strict=True)]))


if __name__ == "__main__":
    main()
