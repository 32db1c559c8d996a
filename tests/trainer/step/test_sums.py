"""Sums over samples whose tokens lie on several ranks, with their gradients; reports of several ranks and
micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.process

TOKENS, SAMPLES = 30, 4


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """values [2, TOKENS] and the sample of each; sample 3 has no token."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, SAMPLES - 1, (TOKENS,), generator=generator)


def of_sums(sums: torch.Tensor, values: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """A loss of each token that depends on its whole sample, as gspo's does."""
    return (sums[0].exp()[sample] * values[1] + sums[1][sample] ** 2).sum()


def sums_on_rank(uneven: bool) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """This rank's part of the loss, the gradient of its tokens, and which tokens those are."""
    from megatron.core import parallel_state as groups

    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.step.sums import sums_over_samples

    ranks = parallel_state.initialize(Options(actor_num_gpus_per_node=2, context_parallel_size=2))
    mine = [i for i in range(TOKENS) if (ranks.cp_rank == 0 if uneven else i % 2 == ranks.cp_rank)]
    values, sample = (part[..., mine] for part in tokens())
    values.requires_grad_()
    sums = sums_over_samples(values, sample, SAMPLES, groups.get_context_parallel_group())
    loss = of_sums(sums, values, sample)
    loss.backward()
    return loss.detach(), values.grad, mine


@pytest.mark.parametrize("uneven", [False, True])
def test_sums_over_ranks_have_whole_gradient(uneven: bool) -> None:
    """Also where one rank has no token at all."""
    from hpcrl.trainer.step.sums import sums_over_samples

    values, sample = tokens()
    values.requires_grad_()
    whole = of_sums(sums_over_samples(values, sample, SAMPLES, None), values, sample)
    whole.backward()
    parts = run_ranks(2, sums_on_rank, uneven)
    torch.testing.assert_close(sum(loss for loss, _, _ in parts), whole.detach())
    for _, gradient, mine in parts:
        torch.testing.assert_close(gradient, values.grad[:, mine])


def totals_on_rank(layout: dict[str, Any], odd: bool = False) -> Any:
    """The totals of two micro-batches on each rank."""
    from hpcrl.algorithms.interface import Report
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.step.sums import total

    ranks = parallel_state.initialize(Options(actor_num_gpus_per_node=4, **layout))
    number = lambda x: torch.tensor(float(x), dtype=torch.float64)  # noqa: E731
    data = 2 * ranks.dp_rank + ranks.cp_rank
    reports = [
        Report(
            {"loss": number(10 * data + i), "b": number(1)},
            {"d": (number(0.5), number(data * i)), "of_none": (number(0), number(0))},
            {"d_max": number(-data - i), "none_max": number(-math.inf)},
        )
        for i in range(2)
    ]
    if odd:
        del reports[1].means["b"]
    found = total(reports if ranks.last_stage else [], 7, ranks)
    return found.means, found.counted, found.maxima, found.tokens, found.metrics(8)


@pytest.mark.parametrize(
    ("layout", "parts"), [({}, [0, 2, 4, 6]), ({"context_parallel_size": 2, "pipeline_model_parallel_size": 2}, [0, 1])]
)
def test_every_rank_has_the_same_totals_by_name(layout: dict[str, Any], parts: list[int]) -> None:
    found = run_ranks(4, totals_on_rank, layout)
    assert all(one == found[0] for one in found)
    means, counted, maxima, count, metrics = found[0]
    assert means == {"loss": sum(20 * data + 1 for data in parts), "b": 2.0 * len(parts)}
    assert counted == {
        "d": (1.0 * len(parts), float(sum(parts))),
        "of_none": (0.0, 0.0),
    }
    assert maxima == {"d_max": 0.0, "none_max": -math.inf}
    assert count == 7 * len(parts)
    assert metrics == {
        "loss": means["loss"] / 8,
        "b": means["b"] / 8,
        "d": counted["d"][0] / counted["d"][1],
        "d_max": 0.0,
    }


def test_reports_of_other_names_are_refused() -> None:
    with pytest.raises(RankError, match="report different names: b"):
        run_ranks(4, totals_on_rank, {}, True)
