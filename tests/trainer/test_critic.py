"""PPO with a critic: both steps are those of transformers and autograd, in every layout; where a critic begins."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.trainer.rollout_calls import ShareExchange
from tests.support.ranks import run_ranks
from tests.support.tiny import make_model
from tests.trainer.step.test_invariance import (
    LAYOUTS,
    PACKINGS,
    SAMPLES,
    VOCAB,
    batch,
    options,
    same_everywhere,
    sample,
    shares,
    start,
    transformers_model,
)

pytestmark = pytest.mark.process

PPO = {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.8, "critic_lr": 3e-3}
BIAS = 0.3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), tied=True, vocab_size=VOCAB, seed=1)


def head() -> torch.Tensor:
    """The weights of a value head [1, hidden size] that says something."""
    return 0.1 * torch.randn(1, 64, generator=torch.Generator().manual_seed(5))


# ---- on the ranks


def train_on_rank(opts: Options, times: int = 3) -> list[dict[str, float]]:
    """Metrics of rollouts from the policy's weights and the value head above."""
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic
    from hpcrl.trainer.step import train_batch

    policy = start(opts)
    others = ReferenceAndCritic(policy, policy.ranks, opts, None).of_share(0, 0)
    for module in others.critic.modules:
        if module.post_process:
            module.output_layer.weight.data.copy_(head())
            module.output_layer.bias.data.fill_(BIAS)
    others.critic.optimizer.reload_model_params()
    mine = ShareExchange(policy.ranks).exchange(shares(opts)[policy.ranks.dp_rank])
    found = []
    for rollout in range(times):
        mine.rollout_id = rollout
        found.append(train_batch.train(policy, policy.ranks, opts, mine, others))
    return found


def beginnings_on_rank(opts: Options, directory: Path) -> list[dict[str, torch.Tensor]]:
    """The critic's weights: by default, from a Hugging Face directory, from a policy's checkpoint, and from a
    critic's."""
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.megatron.host_memory import weights
    from hpcrl.trainer.reference_and_critic import Critic

    policy = start(opts.model_copy(update={"critic_load": None}))
    found = []
    ranks, at = policy.ranks, save_load.Position(1, 1, {})
    copy = lambda critic: {name: value.clone() for name, value in weights(critic.model).items()}  # noqa: E731
    found.append(copy(Critic(policy, ranks, opts.model_copy(update={"critic_load": None}), None)))
    found.append(copy(critic := Critic(policy, ranks, opts, None)))
    critic.model.module.output_layer.weight.data.copy_(head())
    save_load.save(policy, ranks, directory, at, "run", lambda _, beside: critic.save(1, beside))
    for path in (directory, directory / "iter_0000001" / "critic"):
        found.append(copy(Critic(policy, ranks, opts.model_copy(update={"critic_load": str(path)}), None)))
    found.append({name: value.clone() for name, value in weights(policy).items()})
    return found


# ---- the reference


@cache
def expected(model: Path) -> dict[str, float]:
    """What the first rollout must say, by transformers and autograd."""
    opts, data = options(model, **PPO), batch()
    policy = transformers_model(model)
    critic = transformers_model(model)
    weight = head()
    bias = torch.tensor([BIAS])
    weight.requires_grad_(), bias.requires_grad_()
    loss = torch.zeros(())
    value_loss = torch.zeros(())
    values_sum = 0.0
    tokens = float(data.loss_mask.sum())
    for i in range(SAMPLES):
        ids, mask, _ = sample(data, i)
        n = len(mask)
        values = critic.model(ids[None]).last_hidden_state[0, -n - 1 : -1] @ weight[0] + bias
        advantages, returns = gae(opts, float(data.rows["reward"][i]), mask, values.detach())
        own = policy(ids[None]).logits[0, -n - 1 : -1].log_softmax(-1).gather(1, ids[-n:, None])[:, 0]
        each = mask / mask.sum().clamp(min=1) / SAMPLES
        loss = loss - (advantages * (own - own.detach()).exp() * each).sum()
        value_loss = value_loss + ((values - returns) ** 2 * each).sum()
        values_sum += float((values.detach() * mask).sum())
    loss.backward()
    value_loss.backward()
    norm = lambda found: float(torch.stack([p.grad.norm() for p in found]).norm())  # noqa: E731
    return {
        "train/loss": float(loss.detach()),
        "train/grad_norm": norm(policy.parameters()),
        "train/critic-value_loss": float(value_loss.detach()),
        "train/critic-grad_norm": norm([*critic.model.parameters(), weight, bias]),
        "rollout/values": values_sum / tokens,
    }


def gae(opts: Options, reward: float, mask: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of a response, from its last trained token to its first."""
    advantages = torch.zeros(len(mask))
    following = 0.0
    value = 0.0
    last = int(mask.nonzero().max()) if mask.any() else -1
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = (reward if t == last else 0.0) + opts.gamma * value - float(values[t])
            following = delta + opts.gamma * opts.lambd * following
            advantages[t], value = following, float(values[t])
    return advantages, advantages + values * mask


# ---- tests


@pytest.mark.parametrize("layout", ["one rank", "tp2", "tp2 sp", "pp2", "cp2", "dp2", "dp2 pp2"])
def test_both_steps_are_those_of_transformers(model: Path, layout: str) -> None:
    """The next rollouts too, with values that have moved: as on one rank."""
    n, fields = LAYOUTS.get(layout, (1, {}))
    found = same_everywhere(run_ranks(n, train_on_rank, options(model, n, **PPO, **fields, **PACKINGS["64 tokens"])))
    for name, value in expected(model).items():
        assert found[0][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    for row, one in zip(found[1:], on_one_rank(model)[1:], strict=True):
        for name in expected(model):
            assert row[name] == pytest.approx(one[name], rel=5e-5, abs=1e-6), name
    assert found[2]["train/critic-value_loss"] < found[0]["train/critic-value_loss"], "it learns"


@cache
def on_one_rank(model: Path) -> list[dict[str, float]]:
    return run_ranks(1, train_on_rank, options(model, **PPO, **PACKINGS["three each"]))[0]


def test_the_critic_alone_first(model: Path) -> None:
    """The policy stays where it is, and then takes the steps of a critic that has learned."""
    (found,) = run_ranks(1, train_on_rank, options(model, **PPO, **PACKINGS["64 tokens"], num_critic_only_steps=2))
    one = on_one_rank(model)
    assert not any(name.startswith("train/") and "critic-" not in name for row in found[:2] for name in row)
    assert found[0]["train/critic-grad_norm"] == pytest.approx(one[0]["train/critic-grad_norm"], rel=1e-5)
    assert found[2]["train/train_rollout_logprob_abs_diff"] == pytest.approx(
        one[0]["train/train_rollout_logprob_abs_diff"], rel=1e-5
    )
    assert found[2]["train/lr"] != found[2]["train/critic-lr"]


def test_where_a_critic_begins(tmp_path: Path, model: Path, other: Path) -> None:
    opts = options(model, **PPO, critic_load=str(other))
    default, hf, of_policy, of_critic, policy = run_ranks(1, beginnings_on_rank, opts, tmp_path)[0]
    backbone = [name for name in policy if "output_layer" not in name]
    assert set(default) - set(backbone) == {"0.output_layer.weight", "0.output_layer.bias"}
    for name in backbone:
        assert torch.equal(default[name], policy[name]) and torch.equal(of_policy[name], policy[name]), name
        assert torch.equal(of_critic[name], hf[name])
    embedding = "0.embedding.word_embeddings.weight"
    assert not torch.equal(hf[embedding], policy[embedding])
    assert not default["0.output_layer.weight"].any() and not of_policy["0.output_layer.weight"].any()
    assert torch.equal(of_critic["0.output_layer.weight"], head())


def test_same_steps_whatever_the_packing(model: Path) -> None:
    for packing in ("one sample each", "all in one"):
        (found,) = run_ranks(1, train_on_rank, options(model, **PPO, **PACKINGS[packing]), 1)
        for name, value in expected(model).items():
            assert found[0][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_a_critic_has_its_own_rate() -> None:
    from hpcrl.trainer.reference_and_critic import critic_options

    own = critic_options(Options(lr=1e-3, lr_warmup_iters=5, min_lr=1e-4, critic_lr=1e-5, critic_lr_warmup_iters=2))
    assert (own.lr, own.lr_warmup_iters, own.min_lr) == (1e-5, 2, 1e-5)
    assert critic_options(Options(lr=1e-3)).lr == 1e-3
