"""What joins the optimizer steps of a share, without a model: which of them are compared with the engine, what their
metrics become, what is refused and what is said of a step that trains nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.algorithms.advantages import compute_advantages
from hpcrl.algorithms.interface import RolloutBatch
from hpcrl.algorithms.loss import DIFFERENCE, compute_loss
from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.trainer.step import train_batch
from hpcrl.trainer.step.prepare import OtherWeights, _responses
from hpcrl.trainer.step.sums import Totals
from hpcrl.trainer.step.train_batch import StepTotals, counting, samples_a_response
from hpcrl.transport.share_format import SampleBatch, Share
from hpcrl.utils.sample_parts import COMPLETED, PENDING, STATUSES
from tests.algorithms.batches import random_samples, token_batch
from tests.support.shares import plain_sample

RANKS: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), cp_rank=0)
STEP = StepTotals("rollout 3, optimizer step 0", 4, 12, comparable=True)


def share_of_steps(tokens: list[int], versions: list[int] | None = None, version: int = 0) -> Share:
    """Two samples of three tokens a step, of which `tokens` are trained."""
    samples = [
        plain_sample(
            group_index=number // 2, response_index=number % 2, versions=np.array(versions or [version] * 3, np.int32)
        )
        for number in range(2 * len(tokens))
    ]
    micro_batches = [[[2 * step], [2 * step + 1]] for step in range(len(tokens))]
    return Share(3, version, SampleBatch.from_samples(samples), micro_batches, [2] * len(tokens), tokens, {})


def run(
    monkeypatch: pytest.MonkeyPatch, share: Share, rows: list[dict[str, float]], version: int | None = None, **more: Any
) -> tuple[dict[str, float], list[StepTotals]]:
    """`train` with these rows as the metrics of its steps, and what each step was told."""
    seen: list[StepTotals] = []

    def step(model: Any, ranks: Any, options: Options, micro: Any, which: StepTotals, *_: Any, **__: Any) -> Any:
        seen.append(which)
        return rows[len(seen) - 1]

    others = more.pop("others", OtherWeights())
    options = Options(**more)
    monkeypatch.setattr(train_batch, "_step", step)
    monkeypatch.setattr(train_batch.packing, "check_batch", lambda *_: None)
    monkeypatch.setattr(train_batch, "prepare", lambda _p, _o, share, *_: (share, [[]] * len(share.step_tokens), {}))
    policy: Any = SimpleNamespace(vocab_size=100, chunks=[], optimizer=None, scheduler=None)
    found = train_batch.train(policy, RANKS, options, share, others, version=version)
    return {name: value for name, value in found.items() if not name.startswith("perf/train_") or "tok" in name}, seen


def test_several_steps_become_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several steps the mean, of tokens the sum, of a maximum the maximum, of a learning rate the last."""
    rows = [
        {"perf/train_tokens": 5.0, "train/loss": 1.0, "train/x_max": 3.0, "train/lr": 0.5, "train/critic-lr": 0.25},
        {"perf/train_tokens": 7.0, "train/loss": 2.0, "train/x_max": 9.0, "train/lr": 0.4, "train/critic-lr": 0.2},
        {"perf/train_tokens": 1.0, "train/loss": 6.0, "train/x_max": 2.0, "train/lr": 0.3, "train/critic-lr": 0.1},
    ]
    rows[1]["train/y"], rows[2]["train/y"] = 2.0, 4.0  # of nothing in the first
    found, seen = run(monkeypatch, share_of_steps([5, 7, 1]), rows)
    assert found == {
        "perf/train_tokens": 13.0,
        "train/loss": 3.0,
        "train/x_max": 9.0,
        "train/lr": 0.3,
        "train/critic-lr": 0.1,
        "train/y": 3.0,
    }
    assert [(step.samples, step.tokens) for step in seen] == [(2, 5), (2, 7), (2, 1)]
    assert [step.where for step in seen] == [f"rollout 3, optimizer step {number}" for number in range(3)]


@pytest.mark.parametrize(
    ("version", "kept", "engine_logprobs", "compared"),
    [
        (None, False, False, [True, True, True]),  # old log-probs are those of the weights that sampled
        (None, False, True, [True, False, False]),  # the trainer's are those of each step
        (4, False, False, [True, True, True]),
        (5, False, False, [False, False, False]),  # another policy sampled
        (5, True, False, [True, True, True]),  # whose weights are kept
        (5, True, True, [True, False, False]),
    ],
)
def test_steps_compared_with_the_engine(
    monkeypatch: pytest.MonkeyPatch, version: int | None, kept: bool, engine_logprobs: bool, compared: list[bool]
) -> None:
    """Engine and trainer must agree where both have the log-probs of one policy: with the engine's as old ones only in
    the first step."""
    others = OtherWeights(old=object()) if kept else OtherWeights()  # type: ignore[arg-type]
    _, seen = run(
        monkeypatch,
        share_of_steps([6, 6, 6], version=4),
        [{}] * 3,
        version,
        others=others,
        use_rollout_logprobs=engine_logprobs,
    )
    assert [step.comparable for step in seen] == compared


def test_older_tokens_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tokens of the policy that is compared are fresh; None where all are."""
    _, (step,) = run(monkeypatch, share_of_steps([6], [3, 4, 4], version=4), [{}], version=4)
    assert step.fresh is not None and step.fresh.tolist() == [False, True, True] * 2
    _, (step,) = run(monkeypatch, share_of_steps([6], [4, 4, 4], version=4), [{}], version=4)
    assert step.fresh is None


def test_a_critic_takes_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy none while only the critic learns; its metrics are the critic's then."""
    critic: Any = OtherWeights(critic=object())  # type: ignore[arg-type]
    rows = [{"train/loss": 1.0}, {"train/critic-value_loss": 2.0}]
    found, seen = run(monkeypatch, share_of_steps([6]), rows, others=critic)
    assert found == {"train/loss": 1.0, "train/critic-value_loss": 2.0}
    assert [step.where.endswith("of the critic") for step in seen] == [False, True]
    _, seen = run(
        monkeypatch, share_of_steps([6, 6]), rows, others=critic, advantage_estimator="ppo", num_critic_only_steps=4
    )
    assert [step.where.endswith("of the critic") for step in seen] == [True, True]


def test_a_step_without_tokens_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A log line names rollout and steps, on rank 0, and a metric counts them; nothing where all have tokens."""
    found, _ = run(monkeypatch, share_of_steps([0, 6, 0]), [{"train/loss": 0.0}] * 3)
    assert found["train/steps_without_tokens"] == 2.0
    said = capsys.readouterr().err
    assert "rollout 3" in said and "step 0, 2" in said and said.count("\n") == 1
    found, _ = run(monkeypatch, share_of_steps([6, 6]), [{"train/loss": 0.0}] * 2)
    assert "train/steps_without_tokens" not in found and not capsys.readouterr().err
    monkeypatch.setattr(RANKS, "rank", 1)
    found, _ = run(monkeypatch, share_of_steps([0]), [{"train/loss": 0.0}])
    assert found["train/steps_without_tokens"] == 1.0 and not capsys.readouterr().err


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_response_counts_once_in_each_step(steps: list[list[int]]) -> None:
    """A response of several samples has as much weight as one of one sample: weights times samples by responses."""
    parts = [count for step in steps for count in step]
    batch = SampleBatch.from_samples(
        [plain_sample(group_index=5, response_index=i) for i, count in enumerate(parts) for _ in range(count)]
    )
    share = Share(0, 0, batch, [[[0]]] * len(steps), [sum(step) for step in steps], [1] * len(steps), {})
    assert samples_a_response(share) == [sum(step) / len(step) for step in steps]


def test_weights_of_a_response_of_several_samples() -> None:
    """Weights are multiplied by the samples a response where the loss is divided by samples, and not where by tokens."""
    weights = torch.tensor([1.0, 0.5])
    step = replace(STEP, spread=1.5)
    assert counting(weights, Options(), step).tolist() == [1.5, 0.75]
    assert counting(weights, Options(calculate_per_token_loss=True), step).tolist() == [1.0, 0.5]
    assert counting(weights, Options(), STEP) is weights


@pytest.mark.parametrize("per_token", [False, True])
def test_metrics_are_divided_as_the_loss(per_token: bool) -> None:
    """By the step's samples, or by its trained tokens; other means by their own counts; maxima by nothing."""
    totals = Totals(
        {"loss": 6.0}, {DIFFERENCE: (5e-4, 5.0), "none": (0.0, 0.0)}, {"y_max": 5.0, "z_max": -math.inf}, 12
    )
    found = train_batch._metrics(totals, Options(calculate_per_token_loss=per_token), STEP)
    assert found == pytest.approx({"loss": 0.5 if per_token else 1.5, DIFFERENCE: 1e-4, "y_max": 5.0})


def test_what_was_not_graded_has_no_response() -> None:
    """A group of wrong answers, one of which was not graded, teaches nothing, where a reward of 0 would be the best."""
    samples = [plain_sample(response_index=i, reward=-1.0, status=COMPLETED) for i in range(4)]
    table = SampleBatch.from_samples(samples).rows
    assert _responses(table, RANKS.device) is None
    table["status"][2] = STATUSES.index(PENDING)
    table["reward"][2] = 0.0
    response = _responses(table, RANKS.device)
    assert response is not None and response.tolist() == [0, 1, -1, 3]
    size = table["response_length"]
    batch = RolloutBatch(
        reward=torch.tensor(table["reward"]),
        group=torch.tensor(table["group_index"]),
        length=torch.tensor(size.astype(np.int64)),
        truncated=torch.zeros(4, dtype=torch.bool),
        own=torch.arange(4),
        mask=torch.tensor(np.repeat(np.arange(4) != 2, size)),
        response=response,
    )
    assert not compute_advantages(batch, Options()).advantages.any()
    assert compute_advantages(replace(batch, response=None), Options()).advantages.any(), "else this is less than 1"


@pytest.mark.parametrize("name", ["loss", "value_loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(HpcrlError, match="rollout 3, optimizer step 0: the .*loss is (nan|inf)"):
        train_batch._metrics(Totals({name: value}, {}, {}, 12), Options(), STEP)


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"bf16": False}, 1e-3),
        ({"bf16": True}, 0.1),
        ({"max_logprob_diff": 0.02}, 0.02),
        ({"max_logprob_diff": 0.02, "bf16": True}, 0.02),
        ({"load_debug_rollout_data": "x", "max_logprob_diff": 0.02}, 0.02),
        ({"load_debug_rollout_data": "x"}, math.inf),
        ({"lora_rank": 4, "lora_dropout": 0.1}, math.inf),
        ({"lora_rank": 4, "lora_dropout": 0.1, "max_logprob_diff": 0.02}, 0.02),
        ({"megatron": {"hidden_dropout": 0.1}}, math.inf),
    ],
    ids=str,
)
def test_log_probs_may_differ_up_to_the_bound(options: dict[str, Any], bound: float) -> None:
    """The mean difference over tokens may reach the bound; beyond it, or where it is NaN, the step is refused."""
    reaching = 1.0 if bound == math.inf else bound
    totals = Totals({"loss": 0.0}, {DIFFERENCE: (reaching * 2, 2.0)}, {}, 16)
    assert train_batch._metrics(totals, Options(**options), STEP)[DIFFERENCE] == pytest.approx(reaching)
    for difference in ([] if bound == math.inf else [bound * 1.01]) + [math.nan]:
        with pytest.raises(HpcrlError, match="--max-logprob-diff"):
            train_batch._metrics(replace_means(totals, difference * 2), Options(**options), STEP)


def replace_means(totals: Totals, value: float) -> Totals:
    return Totals(totals.means, {DIFFERENCE: (value, 2.0)}, totals.maxima, totals.tokens)


def test_a_few_fresh_tokens_end_a_run() -> None:
    """The bound holds of the tokens that are compared, however few they are, and not where there are none."""
    tokens = token_batch(random_samples(0, groups=(8, 8)))
    assert tokens.trainer is not None
    fresh = torch.arange(len(tokens.sample)) % 10 == 0
    away = tokens.trainer + 0.657 * torch.where(torch.arange(len(fresh)) % 20 == 0, 1.0, -1.0)
    for some, rollout, ends in ((fresh, away, True), (~fresh, tokens.trainer, False), (fresh & False, away, False)):
        found = compute_loss(replace(tokens, fresh=some, rollout=rollout), Options()).report
        pairs = {name: (float(total), float(count)) for name, (total, count) in found.counted.items()}
        totals = Totals({}, pairs, {name: float(value) for name, value in found.maxima.items()}, 12)
        if ends:
            with pytest.raises(HpcrlError, match="differ by 0.657"):
                train_batch._metrics(totals, Options(), STEP)
        else:
            metrics = train_batch._metrics(totals, Options(), STEP)
            assert (DIFFERENCE in metrics, f"{DIFFERENCE}_max" in metrics) == (bool(some.any()),) * 2


@pytest.mark.parametrize(("cp_rank", "per_token", "count"), [(0, False, 3), (1, False, 0), (0, True, 5), (1, True, 5)])
def test_what_a_micro_batch_counts(cp_rank: int, per_token: bool, count: int) -> None:
    """Its samples once, on the first context-parallel rank; or the tokens of each rank."""
    model: Any = SimpleNamespace(ranks=SimpleNamespace(cp_rank=cp_rank, device=torch.device("cpu")))
    packed: Any = SimpleNamespace(rows=torch.zeros(5), samples=3)
    found: Any = SimpleNamespace(total=torch.tensor(2.0), report=None)
    total, counted, _ = train_batch._counted(model, Options(calculate_per_token_loss=per_token), packed, found)
    assert (float(total), int(counted)) == (2.0, count)
