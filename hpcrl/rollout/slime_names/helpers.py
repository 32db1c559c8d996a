"""Small things that functions written for slime import: how they load functions and tokenizers, what filters and
rollouts return, numbers of metrics, and traces (which hpcrl does not record)."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcrl.config.custom_functions import load_object
from hpcrl.rollout.filters.check_reward_nonzero_std import EQUAL
from hpcrl.sample import Sample

THREAD = "slime-coroutines"  #: runs what `run` is given


def load_function(path: str) -> Any:
    """What a dotted path names."""
    return load_object(path, "load_function")


class SingletonMeta(type):
    """Of a class with it there is one object in a process."""

    _made: dict[type, Any] = {}  # noqa: RUF012  (of all classes together)

    def __call__(cls, *given: Any, **by_name: Any) -> Any:
        if cls not in SingletonMeta._made:
            SingletonMeta._made[cls] = super().__call__(*given, **by_name)
        return SingletonMeta._made[cls]


@functools.cache
def load_tokenizer(name_or_path: str, **settings: Any) -> Any:
    """transformers' tokenizer of a model's directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **settings)


def load_processor(name_or_path: str, **settings: Any) -> None:
    """None: models here read text alone."""


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns, in the loop of a thread of its own, so that a running loop may wait for it.

    Raises:
        RuntimeError: within that loop, which would wait for itself.
    """
    loop = _loop()
    if threading.current_thread().name == THREAD:
        coroutine.close()
        raise RuntimeError("slime.utils.async_utils.run within a coroutine that it runs: await it there")
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=THREAD, daemon=True).start()
    return loop


# ---- filters and rollouts


@dataclass
class DynamicFilterOutput:
    """What a dynamic filter says of a group."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(args: Any, samples: list[Sample], **more: Any) -> DynamicFilterOutput:
    """No group whose rewards are all the same, judged as hpcrl's filter of that name does."""
    rewards = np.asarray([sample.get_reward_value(args) for sample in samples], np.float64)
    if rewards.std() > EQUAL:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{round(float(rewards[0]), 1)}")


def pop_first(args: Any, rollout_id: int, buffer: list[Any], count: int) -> list[Any]:
    """slime's buffer filter: the oldest groups, which leave the buffer."""
    taken, buffer[:] = buffer[:count], buffer[count:]
    return taken


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What an evaluation function returns."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


# ---- metrics


def dict_add_prefix(d: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The same with a prefix before each name."""
    return {prefix + name: value for name, value in d.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, largest and least."""
    numbers = np.asarray(values, np.float64)
    found = {"mean": numbers.mean(), "median": np.median(numbers), "max": numbers.max(), "min": numbers.min()}
    return {name: float(value) for name, value in found.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float],
    group_size: int,
    num_groups: int | None = None,
    group_ids: Sequence[Any] | None = None,
) -> dict[str, float]:
    """pass@k for k = 1, 2, 4 ... up to the size of a group, over the groups that have k rewards; 1 is right.

    Args:
        group_ids: which group each reward is of; None: as many in a row as a group has.
    """
    from hpcrl.rollout.evaluation.evaluator import pass_at_k

    ids = [at // group_size for at in range(len(flat_rewards))] if group_ids is None else list(group_ids)
    groups: dict[Any, list[float]] = {}
    for number, reward in zip(ids, flat_rewards, strict=True):
        groups.setdefault(number, []).append(reward)
    found = {}
    for k in (2**power for power in range(group_size.bit_length() if group_size > 1 else 0)):
        rates = [pass_at_k(len(each), each.count(1), k) for each in groups.values() if len(each) >= k]
        if rates:
            found[f"pass@{k}"] = float(np.mean(rates))
    return found


# ---- traces


class _Span:
    """Accepts every call, and keeps nothing."""

    def update(self, *given: Any, **by_name: Any) -> None: ...


@contextmanager
def trace_span(*given: Any, **by_name: Any) -> Iterator[_Span]:
    """Of a stretch of work."""
    yield _Span()


def trace_function(*given: Any, **by_name: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of a function: it stays as it is."""
    return lambda function: function
