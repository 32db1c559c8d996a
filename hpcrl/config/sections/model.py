"""Which model, and its checkpoints."""

from __future__ import annotations

from hpcrl.config.option_fields import Base, opt


class ModelOptions(Base):
    """model and checkpoints"""

    hf_checkpoint: str | None = opt(
        None, "Hugging Face directory: config, tokenizer, and the weights to start from", "slime"
    )
    spec: list[str] = opt(
        [], "words of slime's --spec; the model is built from config.json, these must name the same", "slime"
    )
    load: str | None = opt(
        None, "checkpoint directory to start from (its weights; also optimizer and position on resume)", "slime"
    )
    ref_load: str | None = opt(
        None,
        "checkpoint or Hugging Face directory of the reference; also to start from where --load is not given or still empty",
        "slime",
    )
    ckpt_step: int | None = opt(None, "step of --load to start from; default: the newest", "slime", ge=0)
    save: str | None = opt(None, "checkpoint directory; default: checkpoints/ in the run directory", "slime")
    save_interval: int | None = opt(None, "save every N rollouts, and always after the last", "slime", ge=1)
    async_save: bool = opt(False, "write checkpoints in the background; the last one is waited for", "slime")
    save_retain_interval: int | None = opt(
        None, "keep checkpoints of every N rollouts and the newest, remove the others", "megatron", ge=1
    )
    save_keep_last: int | None = opt(None, "keep the N newest checkpoints; with --save-retain-interval those too", ge=1)
    bf16: bool = opt(
        True, "train in bfloat16 with fp32 master weights; --no-bf16 trains in fp32 (Megatron's default)", "megatron"
    )
