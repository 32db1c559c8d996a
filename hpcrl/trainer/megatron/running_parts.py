"""What a trainer's model runs with, in one line of its log: attention, rotary embedding, optimizer, fused kernels, and
which Transformer Engine each host has.

Invariants: what is said was read off the model that was built, not off its settings; making the line of a record is a
pure function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from hostlist import BadHostlist, collect_hostlist

from hpcrl.trainer.megatron.fusions import GRADIENTS, NO_CUDA, PERMUTE, ROPE, ROUTER

if TYPE_CHECKING:
    from torch.distributed import Store

    from hpcrl.plan import Plan
    from hpcrl.trainer.megatron.model import Policy

PACKAGE = "transformer-engine"


@dataclass(frozen=True)
class RunningParts:
    """What runs.

    Attributes:
        device: "CUDA" or "the CPU".
        engine: whether the layers are Transformer Engine's.
        optimizer: its class, with its package.
        experts: whether the model has any.
        grouped, permute, router: whether these of its experts are fused.
        gradients: whose weight gradients are added to the buffer as they are computed.
        off: field of TransformerConfig, or "output layer", -> why it is not fused.
        versions: host -> its Transformer Engine, "" for none.
    """

    device: str
    engine: bool
    attention: str
    rope: bool
    optimizer: str
    experts: bool
    grouped: bool
    permute: bool
    router: bool
    gradients: tuple[str, ...]
    off: Mapping[str, str]
    versions: Mapping[str, str]


# ---- every host's version


def exchange_versions(store: Store, plan: Plan, rank: int) -> dict[str, str]:
    """Host -> its Transformer Engine, "" for none, on rank 0; nothing on the others.

    The first rank of each host says it, and rank 0 waits for those that have not yet, as long as the store does: no
    collective, so that it is known before anything is built.
    """
    host = plan.trainers[rank].host
    if rank == plan.ranks_on(host)[0]:
        store.set(f"{PACKAGE}/{host}", installed())
    if rank:
        return {}
    hosts = plan.trainer_hosts
    said = store.multi_get([f"{PACKAGE}/{host}" for host in hosts])
    return {host: value.decode() for host, value in zip(hosts, said, strict=True)}


def installed() -> str:
    """The version of Transformer Engine here, "" for none."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""


# ---- the record


def running_parts(policy: Policy, versions: Mapping[str, str]) -> RunningParts:
    """What `policy` runs with, which is trained.

    Args:
        versions: as `exchange_versions` gives it.
    """
    config = policy.config
    parts = [part for module in policy.modules for part in module.modules()]
    gradients = []
    if any(getattr(part, "fuse_wgrad_accumulation", False) for part in parts) or any(
        getattr(part, GRADIENTS, False) for module in policy.modules for part in module.decoder.modules()
    ):
        gradients.append("layers")
    if any(getattr(getattr(module, "output_layer", None), GRADIENTS, False) for module in policy.modules):
        gradients.append("output layer")
    return RunningParts(
        device="the CPU" if policy.ranks.device.type == "cpu" else "CUDA",
        engine=config.transformer_impl == "transformer_engine",
        attention=_attention(policy),
        rope=config.apply_rope_fusion,
        optimizer=_optimizer(policy),
        experts=bool(config.num_moe_experts),
        grouped=config.moe_grouped_gemm,
        permute=config.moe_permute_fusion,
        router=config.moe_router_fusion,
        gradients=tuple(gradients),
        off=policy.fusions.off,
        versions=versions,
    )


def _attention(policy: Policy) -> str:
    import torch

    from hpcrl.trainer.megatron.packed_attention import use_flash_attention

    config = policy.config
    if config.transformer_impl == "transformer_engine":
        return f"Transformer Engine's, {config.attention_backend.name}"
    like = torch.empty(0, dtype=config.params_dtype, device=policy.ranks.device)
    flash = policy.ranks.cp_size == 1 and use_flash_attention(like)
    return "flash-attn" if flash else "torch's scaled_dot_product_attention"


def _optimizer(policy: Policy) -> str:
    leaves = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    found = []
    for leaf in leaves:
        if (inner := getattr(leaf, "optimizer", None)) is not None:
            spread = ", distributed" if type(leaf).__name__ == "DistributedOptimizer" else ""
            found.append(f"{type(inner).__module__.partition('.')[0]}'s {type(inner).__name__}{spread}")
    return " and ".join(dict.fromkeys(found)) or "none"  # a stage without parameters to train


# ---- the line


def line(parts: RunningParts) -> str:
    """All of it in one line, for people."""
    said = [
        f"layers {_layers(parts)}",
        f"attention {parts.attention}",
        f"rotary embedding {'fused' if parts.rope else 'of hpcrl' + _why(parts, ROPE)}",
        f"optimizer {parts.optimizer}",
    ]
    if parts.experts:
        said.append(f"grouped GEMM {'on' if parts.grouped else 'off'}")
        said.append(f"permute fusion {'on' if parts.permute else 'off' + _why(parts, PERMUTE)}")
        said.append(f"router fusion {'on' if parts.router else 'off' + _why(parts, ROUTER)}")
    said.append(f"gradient accumulation fusion {_gradients(parts)}")
    return f"runs on {parts.device}: {'; '.join(said)}"


def differing(versions: Mapping[str, str]) -> str:
    """A warning where hosts have different versions, "" where all have the same."""
    if len({*versions.values()}) < 2:
        return ""
    return f"warning: the hosts differ in Transformer Engine: {_on_hosts(versions)}; install one version on all of them"


def _layers(parts: RunningParts) -> str:
    there = any(parts.versions.values())
    if parts.engine:
        return f"Transformer Engine {_on_hosts(parts.versions)}"
    if there:
        return f"Megatron-core's own, instead of Transformer Engine {_on_hosts(parts.versions)}"
    return "Megatron-core's own" + ("" if parts.device == "the CPU" else " (Transformer Engine is not installed)")


def _on_hosts(versions: Mapping[str, str]) -> str:
    """2.20 on all 8 hosts; or the hosts of each version, the one that most have first."""
    hosts: dict[str, list[str]] = {}
    for host, found in versions.items():
        hosts.setdefault(found or "none", []).append(host)
    if len(hosts) == 1:
        (found,) = hosts
        return found if len(versions) == 1 else f"{found} on all {len(versions)} hosts"
    rows = sorted(hosts.items(), key=lambda row: -len(row[1]))
    return ", ".join(f"{found} on {_folded(names)}" for found, names in rows)


def _folded(hosts: list[str]) -> str:
    try:
        return collect_hostlist(hosts)
    except BadHostlist:
        return ",".join(hosts)


def _gradients(parts: RunningParts) -> str:
    if not parts.gradients:
        return f"off{_why(parts, GRADIENTS)}"
    rest = f", not in the output layer{_why(parts, 'output layer')}" if "output layer" in parts.off else ""
    return f"on in the layers{rest}" if rest else f"on in {' and '.join(parts.gradients)}"


def _why(parts: RunningParts, name: str) -> str:
    reason = parts.off.get(name, "")
    return f" ({reason})" if reason and reason != NO_CUDA else ""
