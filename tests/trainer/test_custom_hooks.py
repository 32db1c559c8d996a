"""The trainer's hooks on real ranks: called where they should be; loss masks that lose tokens make the loss of what is
left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_points
from hpcrl.errors import HpcrlError
from hpcrl.trainer.rollout_calls import ShareExchange
from tests.support.ranks import run_ranks
from tests.trainer.step.test_invariance import batch, model, options, others_of, shares, start

pytestmark = pytest.mark.process
__all__ = ["model"]
HERE = "tests.trainer.test_custom_hooks"
CALLS: list[str] = []


def begun(options: Any) -> None:
    CALLS.append("init")


def passes(options: Any, model: list[Any], store_prefix: str) -> None:
    CALLS.append(f"{store_prefix or 'policy'} {len(model)}")


def steps(options: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any) -> None:
    CALLS.append(f"step {rollout_id} {step_id} {optimizer.param_groups[0]['lr']}")


def every_third(options: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Leaves the first of three tokens, and nothing of long responses."""
    assert rollout_data["log_probs"][0].shape == rollout_data["rollout_log_probs"][0].shape
    for mask, length in zip(rollout_data["loss_masks"], rollout_data["response_lengths"], strict=True):
        keep = torch.arange(length) % 3 == 0
        mask *= keep & (length < 30)


def gains(options: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["loss_masks"] = [torch.ones_like(mask) for mask in rollout_data["loss_masks"]]


def forgets(options: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del rollout_data["loss_masks"]


def raises(options: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    raise KeyError("mine")


def of_mine(
    options: Any, config: Any, build: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None
) -> Any:
    """Another class, whose norms stay as they were."""
    made = build()
    made.__class__ = type("Mine", (type(made),), {})
    CALLS.append(f"{pre_process} {post_process} {vp_stage} {config.num_layers}")
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("norm" not in name)
    return made


def renames(
    options: Any, config: Any, build: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None
) -> Any:
    made = build()
    made.extra = torch.nn.Linear(2, 2)
    return made


def makes_none(
    options: Any, config: Any, build: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None
) -> Any:
    return config


def provide_on_rank(every: list[Options]) -> list[Any]:
    """A step with a model of an own function: the names of the parameters that it has changed."""
    from hpcrl.trainer.step import train_batch

    found: list[Any] = []
    ranks = None
    for opts in every:
        CALLS.clear()
        try:
            policy = start(opts, ranks)
        except HpcrlError as error:
            found.append(str(error))
            ranks = ranks or policy.ranks
            continue
        ranks = policy.ranks
        before = {name: value.clone() for name, value in policy.module.named_parameters()}
        mine = ShareExchange(ranks).exchange(shares(opts, batch())[ranks.dp_rank])
        train_batch.train(policy, ranks, opts, mine, others_of(policy, opts))
        moved = [name for name, value in policy.module.named_parameters() if not torch.equal(value, before[name])]
        found.append((type(policy.module).__name__, moved, list(CALLS)))
    return found


def train_on_rank(every: list[Options], masked: bool = False) -> list[tuple[dict[str, float], list[str]]]:
    from hpcrl.trainer.custom_hooks import TrainerHooks
    from hpcrl.trainer.step import train_batch

    data = batch()
    if masked:
        bounds = data.response_offsets
        keep = np.concatenate([(np.arange(n) % 3 == 0) & (n < 30) for n in np.diff(bounds)])
        data = replace(data, loss_mask=data.loss_mask * keep.astype(np.uint8))
    found, ranks = [], None
    for opts in every:
        CALLS.clear()
        hooks = TrainerHooks(opts, load_points(opts, "trainer"))
        hooks.initialized()
        policy = start(opts, ranks)
        ranks = policy.ranks
        mine = ShareExchange(ranks).exchange(shares(opts, data)[ranks.dp_rank])
        try:
            metrics = train_batch.train(policy, ranks, opts, mine, others_of(policy, opts), hooks=hooks)
        except HpcrlError as error:
            metrics = {str(error): 0.0}
        found.append((metrics, list(CALLS)))
    return found


def test_each_is_called_in_its_place(model: Path) -> None:
    more = {
        "custom_megatron_init_path": f"{HERE}.begun",
        "custom_megatron_before_log_prob_hook_path": f"{HERE}.passes",
        "custom_megatron_before_train_step_hook_path": f"{HERE}.steps",
        "use_kl_loss": True,
        "ref_load": str(model),
        "num_steps_per_rollout": 2,
    }
    ((_, calls),) = run_ranks(1, train_on_rank, [options(model, **more)])[0]
    assert calls == ["init", "ref_ 1", "policy 1", "step 0 0 0.001", "step 0 1 0.001"]


def test_masks_that_lose_tokens(model: Path) -> None:
    """In several layouts, the loss of a batch that came with such masks; what else a hook does to masks is an error."""
    more: dict[str, Any] = {"rollout_data_postprocess_path": f"{HERE}.every_third", "entropy_coef": 0.01}
    plain = {"num_steps_per_rollout": 2, "entropy_coef": 0.01}  # so that old log-probs are computed there too
    ((wanted, _),) = run_ranks(1, train_on_rank, [options(model, **plain)], True)[0]
    for n, layout in ((1, {}), (4, {"context_parallel_size": 2})):
        ((found, _),) = run_ranks(n, train_on_rank, [options(model, n, **more, num_steps_per_rollout=2, **layout)])[0]
        for name in ("train/loss", "train/grad_norm", "train/entropy_loss", "rollout/log_probs", "perf/train_tokens"):
            assert found[name] == pytest.approx(wanted[name], rel=2e-5, abs=1e-7), name
    wrong = [options(model, rollout_data_postprocess_path=f"{HERE}.{name}") for name in ("gains", "forgets", "raises")]
    errors = [next(iter(metrics)) for metrics, _ in run_ranks(1, train_on_rank, wrong)[0]]
    flag = f"--rollout-data-postprocess-path {HERE}"
    assert errors[0].startswith(f"{flag}.gains trains on tokens that were masked")
    assert errors[1].startswith(f"{flag}.forgets left loss_masks None")
    assert errors[2].startswith(f"{flag}.raises raised KeyError: 'mine' (test_custom_hooks.py:")


def test_custom_model_is_trained(model: Path) -> None:
    """A model of a custom function is trained as it says."""
    every = [
        options(model, custom_model_provider_path=f"{HERE}.{name}") for name in ("of_mine", "renames", "makes_none")
    ]
    (name, moved, calls), extra, none = run_ranks(1, provide_on_rank, every)[0]
    assert name == "Mine" and moved and not any("norm" in one for one in moved)
    assert len(calls) == 1 and calls[0].startswith("True True None")
    assert "has no rule for extra.bias, extra.weight" in extra
    assert f"--custom-model-provider-path {HERE}.makes_none returned" in none and "a GPTModel is expected" in none
