"""Random batches as plain lists of samples, and the views of them that the code under test takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpcrl.algorithms.interface import RolloutBatch, TokenBatch
from hpcrl.config.options import Options


@dataclass
class Sample:
    """One response: its table row and its token columns, float64 arrays of its length."""

    group: int
    reward: float
    baseline: float
    truncated: bool
    mask: np.ndarray
    logprobs: np.ndarray
    old: np.ndarray
    trainer: np.ndarray
    rollout: np.ndarray
    reference: np.ndarray
    values: np.ndarray
    entropy: np.ndarray
    advantages: np.ndarray
    teacher: np.ndarray

    @property
    def length(self) -> int:
        return len(self.mask)

    @property
    def count(self) -> int:
        return int(self.mask.sum())


def random_samples(seed: int, groups: Sequence[int] = (4, 1, 3, 5), spread: float = 0.4) -> list[Sample]:
    """Groups of these sizes: binary and real rewards, one group of equal ones; empty, masked-out and truncated
    responses."""
    rng = np.random.default_rng(seed)
    found = []
    for group, size in enumerate(groups):
        equal = rng.random() < 0.2
        for _ in range(size):
            length = int(rng.choice([0, 1, 2, 5, 9, 16]))
            mask = (rng.random(length) < 0.8).astype(bool)
            if rng.random() < 0.1:
                mask[:] = False
            reward = 0.5 if equal else float(rng.choice([0.0, 1.0, rng.normal()]))
            base = -rng.exponential(1.0, length)
            near = lambda by, base=base, length=length: base + by * rng.normal(size=length)  # noqa: E731
            found.append(
                Sample(
                    group=100 + 7 * group,
                    reward=reward,
                    baseline=float(rng.normal()),
                    truncated=bool(rng.random() < 0.3),
                    mask=mask,
                    logprobs=near(spread),
                    old=near(spread),
                    trainer=near(spread),
                    rollout=near(spread),
                    reference=near(spread),
                    values=rng.normal(size=length),
                    entropy=rng.exponential(1.0, length),
                    advantages=rng.normal() + 0.3 * rng.normal(size=length),
                    teacher=near(spread),
                )
            )
    return found


def columns(samples: Sequence[Sample], name: str) -> torch.Tensor:
    """A column of all samples' tokens, one after another."""
    parts = [getattr(s, name) for s in samples]
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, dtype=torch.float64)


def rollout_batch(samples: Sequence[Sample], own: Sequence[int] | None = None, **more: Any) -> RolloutBatch:
    """What the estimators see on a rank that has the samples `own` (default: all)."""
    own = list(range(len(samples))) if own is None else list(own)
    mine = [samples[i] for i in own]
    values: dict[str, Any] = {
        "reward": torch.tensor([s.reward for s in samples], dtype=torch.float64),
        "group": torch.tensor([s.group for s in samples]),
        "length": torch.tensor([s.length for s in samples]),
        "truncated": torch.tensor([s.truncated for s in samples]),
        "baseline": torch.tensor([s.baseline for s in samples], dtype=torch.float64),
        "own": torch.tensor(own, dtype=torch.int64),
        "mask": columns(mine, "mask").bool(),
        **{name: columns(mine, name) for name in ("old", "reference", "teacher", "values")},
    }
    return RolloutBatch(**(values | more))


def over_ranks(work: Callable[[int, Callable[[torch.Tensor], torch.Tensor]], Any], ranks: int) -> list[Any]:
    """work(rank, total) on as many threads, where total sums over them; autograd goes through it as through one
    graph."""
    barrier, slots = threading.Barrier(ranks), [torch.zeros(0)] * ranks

    def one(rank: int) -> Any:
        def total(values: torch.Tensor) -> torch.Tensor:
            slots[rank] = values
            barrier.wait(20)
            found = sum(slots[1:], slots[0])
            barrier.wait(20)
            return found

        return work(rank, total)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def token_batch(samples: Sequence[Sample], logprobs: torch.Tensor | None = None, **more: Any) -> TokenBatch:
    """The trained tokens of whole samples, weighted per sample; logprobs: of them, to differentiate by."""
    mask = columns(samples, "mask").bool()
    owner = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([s.length for s in samples]))[mask]
    counts = torch.tensor([s.count for s in samples]).clamp(min=1).double()
    names = ("old", "trainer", "rollout", "reference", "entropy", "advantages")
    values: dict[str, Any] = {name: columns(samples, name)[mask] for name in names}
    values |= {
        "logprobs": columns(samples, "logprobs")[mask] if logprobs is None else logprobs,
        "sample": owner,
        "samples": len(samples),
        "weights": (1 / counts)[owner],
        "greedy": torch.zeros(len(owner), dtype=torch.bool),
        "group": torch.tensor([s.group for s in samples]),
        "reward": torch.tensor([s.reward for s in samples], dtype=torch.float64),
    }
    return TokenBatch(**(values | more))


def options(**values: Any) -> Options:
    """Options of an algorithm; unchecked, as the functions under test take them."""
    return Options(**values)
