"""The trainer's logits and gradients against those of transformers in float32, on the same tokens and weights.

In bf16 the bound is what bf16 costs transformers itself, times MARGIN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.doctor.selftest import trainer_model
from hpcrl.doctor.selftest.registry import Check, CheckContext, Outcome
from hpcrl.doctor.selftest.tiny_model import make_model

if TYPE_CHECKING:
    from pathlib import Path

    import torch

MARGIN = 3.0
EXACT = {"logits": 1e-5, "gradients": 1e-5}  #: relative errors in float32


def reference(path: Path, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits [t, vocabulary], gradients by name) of transformers on the CPU, computed in `dtype`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    rows = []
    for ids, weights in zip(trainer_model.sequences(), trainer_model.loss_weights(), strict=True):
        found = model(ids[None]).logits[0].float()
        rows.append(found.detach())
        (found * weights).sum().backward()
    return torch.cat(rows), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of the expected values."""
    return float((found - wanted).norm() / wanted.norm())


def work(place: CheckContext) -> Outcome:
    import torch

    gpu = place.device.type == "cuda"
    path = make_model(place.directory / "model")
    policy = trainer_model.load(trainer_model.alone_options(path, gpu, megatron={"use_distributed_optimizer": False}))
    rows = trainer_model.logits(policy)
    grads = trainer_model.gradients(policy)
    wanted_rows, wanted_grads = reference(path, torch.float32)
    if grads.keys() != wanted_grads.keys():
        return Outcome("failed", f"other parameters: {', '.join(sorted(grads.keys() ^ wanted_grads.keys())[:3])}")
    joined = lambda found: torch.cat([found[name].flatten() for name in wanted_grads])  # noqa: E731
    errors = {"logits": apart(rows, wanted_rows), "gradients": apart(joined(grads), joined(wanted_grads))}
    bounds = EXACT
    if gpu:
        their_rows, their_grads = reference(path, torch.bfloat16)
        theirs = {
            "logits": apart(their_rows, wanted_rows),
            "gradients": apart(joined(their_grads), joined(wanted_grads)),
        }
        bounds = {name: MARGIN * error + 2**-9 for name, error in theirs.items()}
    numbers = {f"{name}_relative_error": error for name, error in errors.items()}
    numbers |= {f"{name}_bound": bound for name, bound in bounds.items()}
    shown = ", ".join(f"{name} {errors[name]:.1e} off (at most {bounds[name]:.1e})" for name in errors)
    right = all(errors[name] <= bounds[name] for name in errors)
    return Outcome("passed" if right else "failed", f"{'bf16' if gpu else 'fp32'}: {shown}", numbers)


CHECK = Check(
    "the trainer's logits and gradients are those of transformers",
    40,
    "alone",
    work,
    ("torch", "megatron.core", "transformers"),
)
