"""Megatron's router with Transformer Engine's fused choice of experts chooses as it does without.

There is no build of Transformer Engine for CPUs: what is compared is its documented formula (hpcrl/planning/fake_libraries/te_router.py),
called through Megatron's own code in place of the kernel.  It says that both compute the same, not that the kernel
computes it.  The correction bias of experts is another matter: hpcrl does not fuse the router of a model that has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.planning.fake_libraries import te_router as fused_router
from tests.support import families
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.process

TOKENS = 300
WIDE_GLM = {"n_routed_experts": 160, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
#: name -> family, whether odd, fields of its config.json, options
CASES: dict[str, tuple[str, bool, dict[str, Any], dict[str, Any]]] = {
    "softmax of the chosen": ("qwen3_moe", False, {}, {}),
    "softmax of all": ("qwen3_moe", True, {}, {}),
    "softmax as Qwen3-30B-A3B": ("qwen3_moe", False, {"num_experts": 128, "num_experts_per_tok": 8}, {}),
    "sigmoid": ("glm4_moe", False, {}, {}),
    "sigmoid in groups": ("glm4_moe", True, {}, {}),
    "sigmoid as GLM-4.5": ("glm4_moe", False, WIDE_GLM, {}),
    "sigmoid in groups of many": ("glm4_moe", False, WIDE_GLM | {"n_group": 8, "topk_group": 4}, {}),
    "bf16": ("glm4_moe", False, WIDE_GLM, {"bf16": True}),
    "bf16, softmax": ("qwen3_moe", False, {"num_experts": 128, "num_experts_per_tok": 8}, {"bf16": True}),
    "deterministic": ("glm4_moe", True, {}, {"deterministic_mode": True}),
    "balanced by a loss": ("glm4_moe", False, {}, {"megatron": {"moe_router_load_balancing_type": "seq_aux_loss"}}),
}


@dataclass(frozen=True)
class Choice:
    """What a router makes of tokens: probabilities, which experts are chosen, gradients of its input and its weight."""

    probs: torch.Tensor
    which: torch.Tensor
    of_input: torch.Tensor
    of_weight: torch.Tensor


def choices(opts: Options, bias: float = 0.0, shift: float = 0.0) -> list[tuple[Choice, Choice]]:
    """Of every router without fusion and with it.

    Args:
        bias: the correction bias of all experts.
        shift: is added to all logits.
    """
    from megatron.core.transformer.moe import moe_utils

    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import model

    policy = model.build(opts, parallel_state.initialize(opts))
    routers = [layer.mlp.router for layer in policy.module.decoder.layers if hasattr(layer.mlp, "router")]
    kernel = mock.Mock(side_effect=fused_router.fused_topk_with_score_function)
    names = {name: getattr(fused_router, name) for name in fused_router.NAMES} | {fused_router.NAMES[0]: kernel}
    found = []
    with mock.patch.multiple(moe_utils, HAVE_TE=True, create=True, **names):
        for number, router in enumerate(routers):
            chance = torch.Generator().manual_seed(number)
            experts, hidden = router.weight.shape
            router.weight.data.copy_(torch.randn(experts, hidden, generator=chance) / hidden**0.5)
            if router.expert_bias is not None:
                router.expert_bias.fill_(bias)
            x = torch.randn(TOKENS, 1, hidden, generator=chance).to(policy.config.params_dtype)
            if shift:
                x[..., 0] = 1
                router.weight.data[:, 0] = shift
            weighed = torch.randn(TOKENS, experts, generator=chance)
            pair = []
            for fused in (False, True):
                kernel.reset_mock()
                router.config.moe_router_fusion = fused
                pair.append(_choice(router, x, weighed))
                assert kernel.called is fused
            found.append((pair[0], pair[1]))
    return found


def _choice(router: Any, x: torch.Tensor, weighed: torch.Tensor) -> Choice:
    own = x.clone().requires_grad_()
    router.weight.main_grad.zero_()
    probs, which = router(own)
    (probs * weighed).sum().backward()
    return Choice(probs.detach(), which, own.grad, router.weight.main_grad.clone())


def options(model: Path, fields: dict[str, Any]) -> Options:
    return Options(hf_checkpoint=str(model), actor_num_gpus_per_node=1, lr=1e-3, **{"bf16": False, **fields})


@pytest.mark.parametrize("case", CASES)
def test_the_fused_router_chooses_alike(tmp_path: Path, case: str) -> None:
    """The same experts of all tokens, with the same probabilities and gradients, by every router of each family."""
    kind, odd, fields, more = CASES[case]
    model = families.make(tmp_path, kind, odd, num_hidden_layers=2, **fields)
    (found,) = run_ranks(1, choices, options(model, more))
    assert found
    for plain, fused in found:
        assert torch.equal(plain.which, fused.which) and plain.which.any(1).all()
        for name in ("probs", "of_input", "of_weight"):
            ours, theirs = getattr(plain, name), getattr(fused, name)
            assert ours.abs().max() > 0
            torch.testing.assert_close(theirs, ours)


def test_small_scores_are_lost_in_a_correction_bias(tmp_path: Path) -> None:
    """Why a model with such a bias has Megatron's router: of scores that are to 12 what a rounding error is, the fused
    one's formula leaves nothing."""
    model = families.make(tmp_path, "glm4_moe", num_hidden_layers=2)
    (found,) = run_ranks(1, choices, options(model, {}), 12.0, -18.0)
    assert found
    for plain, fused in found:
        torch.testing.assert_close(plain.probs.sum(1), torch.ones(TOKENS))
        assert not fused.probs.any()
    (found,) = run_ranks(1, choices, options(model, {}), 0.0, -18.0)
    for plain, fused in found:
        torch.testing.assert_close(fused.probs, plain.probs)
