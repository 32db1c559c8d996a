"""Rewards to advantages next to slime's own functions: groups, GAE, whitening, through the translation of the flags.

recorded/advantages.json has slime's for each case (`SLIME_CHECKOUT=DIR python -m tests.config.slime.test_advantage_numbers`
writes it); where SLIME_CHECKOUT names a checkout, its functions are run here.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.advantages import compute_advantages
from hpcrl.config.options import AlgorithmOptions, OffPolicyOptions, Options
from hpcrl.config.slime.arguments import translate
from tests.algorithms.batches import Sample, random_samples, rollout_batch
from tests.config.slime.slime_functions import PPO, functions, method, one_rank, slime_arguments

FILE = Path(__file__).parent / "recorded" / "advantages.json"
CHECKOUT = os.environ.get("SLIME_CHECKOUT", "")
GROUPS, WHITEN = "slime/ray/rollout.py", "slime/utils/distributed_utils.py"
SOURCES = {
    GROUPS: "RolloutManager._post_process_rewards",
    PPO: "compute_approx_kl get_grpo_returns get_reinforce_plus_plus_returns "
    "get_reinforce_plus_plus_baseline_advantages get_advantages_and_returns",
    WHITEN: "distributed_masked_whiten",
}
EACH, PROMPTS, SEEDS = 4, 3, (3, 4, 5)
_BASELINE = "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages"
CASES = (
    *(f"--advantage-estimator {name}" for name in ("grpo", "gspo", "cispo")),
    "--advantage-estimator grpo --disable-grpo-std-normalization",
    "--advantage-estimator grpo --disable-rewards-normalization",
    _BASELINE,
    f"{_BASELINE} --disable-rewards-normalization --kl-coef 0.2 --kl-loss-type k2",
    "--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.9 --kl-coef 0.1",
    "--advantage-estimator ppo --gamma 0.97 --lambd 0.9 --kl-coef 0.05 --kl-loss-type k3",
    "--advantage-estimator ppo",
    "--advantage-estimator ppo --gamma 0.9 --lambd 0.5 --normalize-advantages",
)


def samples_of(case: str, seed: int) -> list[Sample]:
    """Groups of one size; whole masks where a step is discounted, which masked tokens are none of here."""
    found = random_samples(seed, groups=(EACH,) * PROMPTS)
    for sample in found:
        if not sample.length:
            sample.mask = np.ones(1, bool)
            for name in ("old", "reference", "teacher", "values"):
                setattr(sample, name, np.full(1, 0.25))
        if "baseline" not in case:
            sample.mask[:] = True
        sample.mask[-1] = True
    return found


def options_of(case: str) -> Options:
    """What the translation makes of the flags."""
    found = translate(["--ref-load", "/m", *case.split()])
    assert not found.wrong, found.wrong
    names = {*AlgorithmOptions.model_fields, *OffPolicyOptions.model_fields}
    return Options(**{name: value for name, value in found.values.items() if name in names})


def ours(case: str, seed: int) -> tuple[list[float], list[float]]:
    """(advantages, a critic's returns) of the trained tokens, one sample after another."""
    batch = rollout_batch(samples_of(case, seed))
    found = compute_advantages(batch, options_of(case))
    returns = [] if found.returns is None else found.returns[batch.mask].tolist()
    return found.advantages[batch.mask].tolist(), returns


def arguments(case: str) -> Namespace:
    """What slime's parser makes of the flags."""
    found = slime_arguments(case, None)
    given = vars(found)
    for flag in ("rewards_normalization", "grpo_std_normalization"):
        given[flag] = not given.pop(f"disable_{flag}", False)
    return Namespace(**given, n_samples_per_prompt=EACH, rollout_batch_size=PROMPTS, reward_key=None)


def slimes(checkout: Path, case: str, seed: int) -> tuple[list[float], list[float]]:
    """As `ours`, of slime's functions, called as its trainer calls them."""
    args, samples = arguments(case), samples_of(case, seed)
    alone = SimpleNamespace(all_reduce=lambda *_, **__: None)
    ppo = functions(checkout, PPO, {})
    whiten = functions(checkout, WHITEN, {"dist": alone})["distributed_masked_whiten"]
    process = method(checkout, GROUPS, "RolloutManager", "_post_process_rewards", {})
    manager = SimpleNamespace(args=args, custom_reward_post_process_func=None)
    graded = [SimpleNamespace(get_reward_value=lambda _, reward=sample.reward: reward) for sample in samples]
    rewards = [float(value) for value in process(manager, graded)[1]]
    old, reference, values = (
        [torch.from_numpy(getattr(sample, name)).float() for sample in samples]
        for name in ("old", "reference", "values")
    )
    kl = [
        ppo["compute_approx_kl"](a, b, kl_loss_type=args.kl_loss_type) if args.kl_coef else torch.zeros_like(a)
        for a, b in zip(old, reference, strict=True)
    ]
    masks = [torch.from_numpy(sample.mask).float() for sample in samples]
    with one_rank():
        advantages, returns = estimated(ppo, args, rewards, kl, masks, values)
    if getattr(args, "normalize_advantages", False):
        whole = whiten(torch.cat(advantages), torch.cat(masks), shift_mean=True)
        advantages = list(whole.split([len(mask) for mask in masks]))
    trained = torch.cat(masks).bool()
    return torch.cat(advantages)[trained].tolist(), torch.cat(returns)[trained].tolist() if returns else []


def estimated(
    ppo: dict[str, Any],
    args: Namespace,
    rewards: list[float],
    kl: list[Tensor],
    masks: list[Tensor],
    values: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns) by the estimator, before whitening."""
    lengths, coef = [len(mask) for mask in masks], float(args.kl_coef)
    gamma, lambd = float(args.gamma), float(args.lambd)
    if args.advantage_estimator == "ppo":
        tokens = [-coef * each for each in kl]
        for reward, each in zip(rewards, tokens, strict=True):
            each[-1] += reward
        return ppo["get_advantages_and_returns_batch"](lengths, lengths, values, tokens, gamma, lambd, chunked=False)
    told = torch.tensor(rewards)
    if args.advantage_estimator == "reinforce_plus_plus":
        return ppo["get_reinforce_plus_plus_returns"](told, kl, masks, lengths, lengths, coef, gamma), []
    if args.advantage_estimator == "reinforce_plus_plus_baseline":
        return ppo["get_reinforce_plus_plus_baseline_advantages"](told, kl, masks, coef), []
    return ppo["get_grpo_returns"](told, kl), []


def compare(case: str, seed: int, theirs: Sequence[Sequence[float]]) -> None:
    """To what float32 leaves of slime's numbers, which subtracts squares where it whitens."""
    for mine, other in zip(ours(case, seed), theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_the_recorded_ones(case: str) -> None:
    recorded = json.loads(FILE.read_text())
    assert set(recorded["cases"]) == set(CASES) and recorded["from"]["functions"] == SOURCES
    for seed, theirs in zip(SEEDS, recorded["cases"][case], strict=True):
        compare(case, seed, theirs)


@pytest.mark.skipif(not CHECKOUT, reason="SLIME_CHECKOUT names no checkout of slime's")
@pytest.mark.parametrize("case", CASES)
def test_advantages_are_slimes(case: str) -> None:
    """Its own functions, run here."""
    for seed in range(6):
        compare(case, seed, slimes(Path(CHECKOUT), case, seed))


def main() -> None:
    """Record slime's advantages."""
    short = lambda pair: [[float(f"{value:.7g}") for value in part] for part in pair]  # noqa: E731
    cases = {case: [short(slimes(Path(CHECKOUT), case, seed)) for seed in SEEDS] for case in CASES}
    rows = ",\n".join(f" {json.dumps(case)}: {json.dumps(found)}" for case, found in cases.items())
    commit = "stored versions of 2026, whitening 358c7184, groups as at 66600304138; not provably 624b824a"
    head = json.dumps({"commit": commit, "functions": SOURCES, "seeds": SEEDS})
    FILE.write_text(f'{{"from": {head},\n"cases": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    main()
