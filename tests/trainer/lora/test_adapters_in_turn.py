"""Adapters that take turns in one model: each is trained as in a run of its own, bit for bit, whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.memory.training import fullest_rank
from hpcrl.model_files.config_json import read_config
from hpcrl.models.family import find_family
from tests.support.ranks import run_ranks
from tests.support.tiny import make_family, make_model
from tests.trainer.lora.test_lora_training import begun, options, trained
from tests.trainer.step.test_invariance import VOCAB

pytestmark = pytest.mark.process

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "tp2 sp ep2 etp2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    ),
}
DECAY = {"lr_decay_style": "linear", "lr_decay_iters": 8, "lr_warmup_iters": 2, "num_rollout": 8}
#: what each of three has of its own
OWN: tuple[dict[str, Any], ...] = (
    {"seed": 1, "lora_dropout": 0.2},
    {"seed": 2, "lr": 1e-2, "lora_alpha": 3, "weight_decay": 0.0, **DECAY},
    {"seed": 3, "lr": 1e-3, "min_lr": 1e-4, "lora_dropout": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1},
)
STEPS = 3


def values_of(policy: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for module in policy.modules for p in module.parameters() if p.requires_grad]


def in_turn(every: Sequence[Options], order: Sequence[int], directory: Path) -> list[tuple[list[float], list[Any]]]:
    """Adapters of one model, a step of each whose slot is next: what each has logged, and its last values."""
    from hpcrl.trainer.checkpoint.resume import restore
    from hpcrl.trainer.lora.adapter_states import AdapterStates
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic

    policy, _, _ = begun(every[0], directory)
    policy.base.digest = ""
    states = AdapterStates(policy)
    loops = []
    for slot, opts in enumerate(every):
        own = states.add(opts)
        _, _, source = restore(own, own.ranks, opts, directory / str(slot), "run")
        loops.append((own, ReferenceAndCritic(own, own.ranks, opts, None, source), opts))
    logged: list[list[float]] = [[] for _ in every]
    for slot in order:
        states.enter(slot)
        logged[slot] += stepped(*loops[slot])
    found = []
    for slot in range(len(every)):
        with states.shown(slot):
            shown = values_of(policy)
        states.enter(slot)
        assert all(map(torch.equal, shown, values_of(policy)))
        found.append((logged[slot], shown))
    found.append(([held_bytes(states)], []))
    return found


def stepped(policy: Any, others: Any, opts: Options) -> list[float]:
    """Loss, gradient norm and learning rate of a step."""
    rate = policy.optimizer.param_groups[0]["lr"]
    (metrics,) = trained(policy, others, opts, 1)
    return [metrics["train/loss"], metrics["train/grad_norm"], rate]


def alone(opts: Options, steps: int, directory: Path) -> tuple[list[float], list[Any]]:
    """The same of a run that trains one adapter."""
    from hpcrl.trainer.parallel_state import seed_rank

    policy, others, _ = begun(opts, directory)
    seed_rank(opts.seed, policy.ranks)
    return sum((stepped(policy, others, opts) for _ in range(steps)), start=list[float]()), values_of(policy)


def held_bytes(states: Any) -> float:
    """What adapters have while another is in the model."""
    kept = [*states._states, states._fresh]
    tensors = [tensor for state in kept for tensor in (*state.values, *state.masters)]
    away = [state.moments for slot, state in enumerate(states._states) if slot != states._now]
    tensors += [t for all_of in away for of in all_of for m in of.values() for t in m.values() if t.numel() > 1]
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


@pytest.mark.parametrize(
    "layout",
    ["tp2 sp", *(pytest.param(name, marks=pytest.mark.soak) for name in LAYOUTS if name != "tp2 sp")],
)
def test_an_adapter_is_trained_as_if_alone(layout: str, tmp_path: Path) -> None:
    n, fields = LAYOUTS[layout]
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": VOCAB}
    if "ep2" in layout:
        model = make_family(tmp_path / "model", "qwen3_moe", **small | {"moe_intermediate_size": 16})
    else:
        model = make_model(tmp_path / "model", tied=True, **small)
    every = [options(model, n, **fields | {"adam_eps": 1e-8} | own) for own in OWN]
    together = run_ranks(n, in_turn, every, [0, 1, 2] * STEPS, tmp_path)
    for slot, opts in enumerate(every):
        for ours, (logged, values) in zip(together, run_ranks(n, alone, opts, STEPS, tmp_path), strict=True):
            assert ours[slot][0] == logged
            assert all(map(torch.equal, ours[slot][1], values))
    if "ep2" not in layout:  # engines cannot hold several next to experts, so nothing is planned
        several = every[0].model_copy(update={"adapter": {"a": {}, "b": {}, "c": {}}})
        config = read_config(model)
        planned = fullest_rank(several, find_family(config, model), config).gpu["other adapters"]
        assert max(rank[-1][0][0] for rank in together) == pytest.approx(planned, rel=0.02)
    rates = [log[2::3] for log, _ in together[0][:-1]]
    assert rates[0] == [3e-3] * STEPS and rates[1] == pytest.approx([0.0, 5e-3, 1e-2]) and rates[2] == [1e-3] * STEPS
