"""How fast a rollout was trained on: tokens a second, and a GPU, and the share of what the GPUs are rated for.

Invariants: the operations are those of the passes that were made (`hpcrl.planning.formulas.flops`); on a CPU and on a
GPU that is not in `hpcrl.planning.formulas.gpu_specs` no share is logged.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.planning.formulas.flops import model_flops, pairs
from hpcrl.planning.formulas.gpu_specs import Card, of_device
from hpcrl.trainer.megatron.model import Policy
from hpcrl.transport.share_format import Share


def device_name(device: torch.device) -> str:
    """What the driver calls this rank's GPU, "" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def card_of(device: torch.device) -> Card | None:
    """What this rank's GPU is rated for, if that is known."""
    return of_device(device_name(device))


def operations(policy: Policy, options: Options, share: Share, trained: bool) -> float:
    """Of all passes over the whole rollout, on all ranks.

    Args:
        trained: whether the policy made optimizer steps, and not a critic alone.
    """
    lengths = share.table["length"].tolist()
    work = float(sum(lengths)), pairs(lengths), float(sum(share.step_tokens))
    model = model_flops(policy.family, policy.hf_config, lora=policy.lora)
    wanted = needs(options)
    passes = wanted.reference + wanted.old_logprobs + wanted.teacher_model + wanted.critic  # forward alone
    steps = model_flops(
        policy.family, policy.hf_config, options.trained_heads, policy.lora
    )  # only they go through those layers
    return passes * model.forward(*work) + trained * steps.training(*work) + wanted.critic * model.training(*work)


def reached(
    policy: Policy, options: Options, share: Share, seconds: float, trained: bool, card: Card | None
) -> dict[str, float]:
    """Metrics of training on `share`.

    Args:
        seconds: that it took, passes for log-probs included.
        card: of each rank; None: no MFU.
    """
    rate = float(share.table["length"].sum()) / max(seconds, 1e-9)
    found = {"perf/train_tokens_per_sec": rate, "perf/train_tokens_per_sec_per_gpu": rate / dist.get_world_size()}
    if card is not None and options.bf16:
        rated = card.tflops * 1e12 * dist.get_world_size() * max(seconds, 1e-9)
        found["perf/mfu"] = operations(policy, options, share, trained) / rated
    return found


def of_step(options: Options, share: Share, seconds: float, waited: float) -> dict[str, float]:
    """Metrics of a whole step; among them tokens of its rollout, prompts included, a second and a GPU, of trainer and
    engines.

    Args:
        seconds: that it took, waiting and the weight update included; with --colocate that comes afterwards.
        waited: of these, those in which the trainer waited for data.
    """
    trainer, engines = options.world_size, options.sampling_gpus
    gpus = max(trainer, engines) if options.colocate else trainer + engines
    return {
        "perf/step_time": seconds,
        "perf/train_wait_time": waited,
        "perf/wait_time_ratio": waited / seconds,
        "perf/step_tokens_per_sec_per_gpu": float(share.table["length"].sum()) / max(seconds, 1e-9) / gpus,
    }
