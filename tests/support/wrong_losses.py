"""Losses of a user's whose ranks would wait for one another: `--custom-loss-function-path` of planted faults.

Each is right on all ranks but some.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hpcrl.algorithms.interface import Loss, Report


def right(tokens: Any, options: Any) -> Loss:
    """Learn every sample, whatever its reward."""
    total = -(tokens.weights * tokens.logprobs).sum()
    return Loss(total, Report(means={"loss": total.detach().double()}))


def one_rank_asks(tokens: Any, options: Any) -> Loss:
    """A sum over all ranks, that only the first one asks for."""
    found = right(tokens, options)
    if dist.get_rank() == 0:
        dist.all_reduce(found.total.detach().clone())
    return found


def another_order(tokens: Any, options: Any) -> Loss:
    """Two collectives, which odd ranks ask for the other way round."""
    found = right(tokens, options)
    value = found.total.detach().clone()
    calls = [lambda: dist.all_reduce(value), lambda: dist.broadcast(value, 0)]
    for call in calls if dist.get_rank() % 2 else reversed(calls):
        call()
    return found
