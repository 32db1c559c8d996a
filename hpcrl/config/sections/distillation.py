"""The options of on-policy distillation: a teacher says how likely the student's own tokens are.

Invariant: names and meanings are slime's and vime's where they have them.
"""

from __future__ import annotations

from typing import Literal

from hpcrl.config.option_fields import Base, opt


class DistillationOptions(Base):
    """on-policy distillation (docs/algorithms.md)"""

    use_opd: bool = opt(False, "learn from a teacher what it says of the tokens that were sampled", "slime")
    opd_type: Literal["vllm", "megatron"] | None = opt(
        None,
        "where the teacher is: a server at --opd-teacher-url, or the weights of --opd-teacher-load on the trainer's ranks",
        "vime",
    )
    opd_kl_coef: float = opt(1.0, "weight of the KL to the teacher; 0 measures it only", "slime", ge=0)
    opd_kl_type: Literal["sampled", "reverse", "forward"] = opt(
        "sampled",
        "sampled: the reverse KL of each sampled token is taken off its advantage; reverse, forward: the KL over the whole "
        "vocabulary is a term of the loss (megatron alone)",
    )
    opd_teacher_load: str | None = opt(
        None, "teacher of --hf-checkpoint's architecture: a checkpoint or a Hugging Face directory", "slime"
    )
    opd_teacher_ckpt_step: int | None = opt(
        None, "step of --opd-teacher-load to read; default: the newest", "slime", ge=0
    )
    opd_teacher_url: str | None = opt(
        None, "address of a vLLM server whose tokenizer is the student's; its key is taken from HPCRL_OPD_TEACHER_KEY"
    )
    opd_teacher_model: str | None = opt(None, "name of the model there; default: the one that it serves", "vime")
