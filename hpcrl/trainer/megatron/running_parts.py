"""What a trainer's model runs with, in one line of its log: attention, rotary embedding, optimizer, fused kernels, and
which Transformer Engine each host has.

Invariants: what is said was read off the model that was built, not off its settings; making the line of a record is a
pure function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hostlist import BadHostlist, collect_hostlist

from hpcrl.trainer.megatron.fusions import GRADIENTS, NO_CUDA, PERMUTE, ROPE, ROUTER
from hpcrl.utils.installed import version

if TYPE_CHECKING:
    from torch.distributed import Store

    from hpcrl.plan import Plan
    from hpcrl.trainer.megatron.model import Policy

PACKAGE = "transformer-engine"


# ---- every host's version


def exchange_versions(store: Store, plan: Plan, rank: int) -> dict[str, str]:
    """Host -> its Transformer Engine, "" for none, on rank 0; nothing on the others.

    The first rank of each host says it, and rank 0 waits for those that have not yet, as long as the store does: no
    collective, so that it is known before anything is built.
    """
    host = plan.trainers[rank].host
    if rank == plan.ranks_on(host)[0]:
        store.set(f"{PACKAGE}/{host}", version(PACKAGE) or "")
    if rank:
        return {}
    hosts = plan.trainer_hosts
    said = store.multi_get([f"{PACKAGE}/{host}" for host in hosts])
    return {host: value.decode() for host, value in zip(hosts, said, strict=True)}


# ---- the line


def line(policy: Policy, versions: Mapping[str, str]) -> str:
    """What `policy` runs with, which is trained, in one line, for people.

    Args:
        versions: as `exchange_versions` gives it.
    """
    config, off = policy.config, policy.fusions.off
    device = "the CPU" if policy.ranks.device.type == "cpu" else "CUDA"
    said = [
        f"layers {_layers(config.transformer_impl == 'transformer_engine', device, versions)}",
        f"attention {_attention(policy)}",
        f"rotary embedding {'fused' if config.apply_rope_fusion else 'of hpcrl' + _why(off, ROPE)}",
        f"optimizer {_optimizer(policy)}",
    ]
    if config.num_moe_experts:
        said.append(f"grouped GEMM {'on' if config.moe_grouped_gemm else 'off'}")
        said.append(f"permute fusion {'on' if config.moe_permute_fusion else 'off' + _why(off, PERMUTE)}")
        said.append(f"router fusion {'on' if config.moe_router_fusion else 'off' + _why(off, ROUTER)}")
    said.append(f"gradient accumulation fusion {_gradients(policy)}")
    return f"runs on {device}: {'; '.join(said)}"


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


def differing(versions: Mapping[str, str]) -> str:
    """A warning where hosts have different versions, "" where all have the same."""
    if len({*versions.values()}) < 2:
        return ""
    return f"warning: the hosts differ in Transformer Engine: {_on_hosts(versions)}; install one version on all of them"


def _layers(engine: bool, device: str, versions: Mapping[str, str]) -> str:
    if engine:
        return f"Transformer Engine {_on_hosts(versions)}"
    if any(versions.values()):
        return f"Megatron-core's own, instead of Transformer Engine {_on_hosts(versions)}"
    return "Megatron-core's own" + ("" if device == "the CPU" else " (Transformer Engine is not installed)")


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


def _gradients(policy: Policy) -> str:
    """Whose weight gradients are added to the buffer as they are computed."""
    off = policy.fusions.off
    found = []
    if any(
        getattr(part, "fuse_wgrad_accumulation", False) for module in policy.modules for part in module.modules()
    ) or any(getattr(part, GRADIENTS, False) for module in policy.modules for part in module.decoder.modules()):
        found.append("layers")
    if any(getattr(getattr(module, "output_layer", None), GRADIENTS, False) for module in policy.modules):
        found.append("output layer")
    if not found:
        return f"off{_why(off, GRADIENTS)}"
    rest = f", not in the output layer{_why(off, 'output layer')}" if "output layer" in off else ""
    return f"on in the layers{rest}" if rest else f"on in {' and '.join(found)}"


def _why(off: Mapping[str, str], name: str) -> str:
    reason = off.get(name, "")
    return f" ({reason})" if reason and reason != NO_CUDA else ""
