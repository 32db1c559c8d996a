"""Twice the same training steps in deterministic mode give the same bits of every weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcrl.doctor.selftest import trainer_model
from hpcrl.doctor.selftest.registry import Check, CheckContext, Outcome
from hpcrl.doctor.selftest.tiny_model import make_model

if TYPE_CHECKING:
    import torch

STEPS = 3


def work(place: CheckContext) -> Outcome:
    import torch

    path = make_model(place.directory / "model")
    options = trainer_model.alone_options(
        path, place.device.type == "cuda", deterministic_mode=True, lr=1e-3, clip_grad=1.0, num_rollout=STEPS
    )
    policy = trainer_model.load(options)
    before = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
    first = trained(policy)
    second = trained(trainer_model.load(options, policy.ranks))
    if all(torch.equal(before[name], first[name]) for name in before):
        return Outcome("failed", f"{STEPS} steps changed no weight")
    if other := [name for name in first if not torch.equal(first[name], second[name])]:
        return Outcome(
            "failed", f"{len(other)} of {len(first)} weights differ between two runs of the same steps: {other[0]}"
        )
    return Outcome(
        "passed", f"{STEPS} optimizer steps, twice: all {len(first)} weights the same bits", {"steps": STEPS}
    )


def trained(policy: Any) -> dict[str, torch.Tensor]:
    """The weights after STEPS steps on the same tokens."""
    for _ in range(STEPS):
        trainer_model.backward(policy)
        policy.optimizer.step()
    return {name: p.detach().clone() for name, p in policy.module.named_parameters()}


CHECK = Check("the same steps give the same bits in deterministic mode", 50, "alone", work, ("torch", "megatron.core"))
