"""How fast a rollout was trained on: tokens a second, and the share of what the GPUs are rated for.

Invariants: the operations are those that `hpcrl plan` estimates with (`hpcrl.speed.flops`), of the passes that were
made; on a CPU and on a GPU that is not in `hpcrl.speed.cards` no share is logged.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.queue.share_format import Share
from hpcrl.speed.cards import Card, of_device
from hpcrl.speed.flops import model_flops, pairs
from hpcrl.trainer.megatron.model import Policy


def card_of(device: torch.device) -> Card | None:
    """What this rank's GPU is rated for, if that is known."""
    return of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def operations(policy: Policy, options: Options, share: Share, trained: bool) -> float:
    """Of all passes over the whole rollout, on all ranks.

    Args:
        trained: whether the policy made optimizer steps, and not a critic alone.
    """
    lengths = share.table["length"].tolist()
    work = float(sum(lengths)), pairs(lengths), float(sum(share.step_tokens))
    model = model_flops(policy.family, policy.hf_config)
    wanted = needs(options)
    passes = wanted.reference + wanted.old_logprobs + wanted.teacher_model + wanted.critic  # forward alone
    trains = trained + wanted.critic
    return passes * model.forward(*work) + trains * model.training(*work)


def reached(
    policy: Policy, options: Options, share: Share, seconds: float, trained: bool, card: Card | None
) -> dict[str, float]:
    """Metrics of training on `share`.

    Args:
        seconds: that it took, passes for log-probs included.
        card: of each rank; None: no MFU.
    """
    found = {"perf/train_tokens_per_sec": float(share.table["length"].sum()) / max(seconds, 1e-9)}
    if card is not None and options.bf16:
        rated = card.tflops * 1e12 * dist.get_world_size() * max(seconds, 1e-9)
        found["perf/mfu"] = operations(policy, options, share, trained) / rated
    return found
