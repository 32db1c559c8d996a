"""What is kept of samples beyond what every run keeps, and runs of one side alone."""

from __future__ import annotations

from hpcrl.config.option_fields import Base, opt


class LookOptions(Base):
    """looking and replaying (docs/looking.md)"""

    save_token_data: int | None = opt(
        None, "every N rollouts keep log-probs and advantage of each token, for hpcrl samples --tokens", ge=1
    )
    save_debug_rollout_data: str | None = opt(
        None, "file for the samples of each rollout, to train from again; {rollout_id} stands for its number", "slime"
    )
    load_debug_rollout_data: str | None = opt(
        None, "train from such files instead of sampling; implies --debug-train-only", "slime"
    )
    debug_rollout_only: bool = opt(False, "sample and grade with the weights of --hf-checkpoint; no trainer", "slime")
    debug_train_only: bool = opt(
        False, "train alone, without engines: from --load-debug-rollout-data, or on labels", "slime"
    )
