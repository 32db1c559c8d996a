"""What the options of on-policy distillation must say together: pure functions of the resolved options.

Invariant: a teacher that cannot say what is asked of it ends here, before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.options import Options
from hpcrl.config.sections.distillation import DistillationOptions
from hpcrl.errors import UsageError

TYPES = "--opd-type vllm with --opd-teacher-url, or --opd-type megatron with --opd-teacher-load"


def check_distillation(o: Options) -> None:
    """UsageError for the first thing that a teacher lacks or cannot say."""
    if not o.use_opd or o.loss_type not in ("policy_loss", "custom_loss"):
        return
    if o.opd_type is None:
        raise UsageError("--use-opd does not say where the teacher is", f"give {TYPES}")
    if o.opd_type == "megatron":
        if o.opd_teacher_load is None:
            raise UsageError("--opd-type megatron needs the teacher's weights", "give --opd-teacher-load")
        return
    if o.opd_teacher_url is None:
        raise UsageError("--opd-type vllm has nowhere to ask", "give --opd-teacher-url")
    if not o.opd_teacher_url.startswith(("http://", "https://")):
        raise UsageError(f"--opd-teacher-url {o.opd_teacher_url} is no address", "it begins with http:// or https://")
    if o.opd_kl_type != "sampled":
        raise UsageError(
            f"--opd-kl-type {o.opd_kl_type} needs the teacher's whole vocabulary, a server gives the sampled tokens alone",
            "give --opd-type megatron, or leave --opd-kl-type out",
        )
    if o.rollout_temperature != 1.0:
        raise UsageError(
            f"--opd-type vllm gives log-probs at temperature 1, the student samples at --rollout-temperature {o.rollout_temperature:g}",
            "leave the temperature at 1, or give --opd-type megatron",
        )


def inert_in_distillation(o: Options) -> Iterator[tuple[str, str]]:
    """(names, why) of the options of distillation that do nothing in this combination."""
    every = list(DistillationOptions.__annotations__)
    if o.loss_type in ("sft_loss", "dpo_loss"):
        yield " ".join(every), f"--loss-type is {o.loss_type}"
    elif not o.use_opd:
        yield " ".join(every[1:]), "--use-opd is not given"
    elif o.opd_type == "vllm":
        yield "opd_teacher_load opd_teacher_ckpt_step", "--opd-type is vllm"
    elif o.opd_type == "megatron":
        yield "opd_teacher_url opd_teacher_model", "--opd-type is megatron"
