"""Small things that functions written for slime import: how they load functions and tokenizers, what filters and
rollouts return, and traces, of which there are none here."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcrl.config.custom_functions import load_object
from hpcrl.rollout.filters.check_reward_nonzero_std import EQUAL


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
    """What a coroutine returns, in a loop of its own.

    Raises:
        RuntimeError: within a running loop, where it is to be awaited.
    """
    return asyncio.run(coroutine)


# ---- filters and rollouts


@dataclass
class DynamicFilterOutput:
    """What a dynamic filter says of a group."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(args: Any, samples: list[Any], **more: Any) -> DynamicFilterOutput:
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


# ---- traces


class _Span:
    """Takes what it is told, and keeps none of it."""

    def update(self, *given: Any, **by_name: Any) -> None: ...


@contextmanager
def trace_span(*given: Any, **by_name: Any) -> Iterator[_Span]:
    """Of a stretch of work."""
    yield _Span()


def trace_function(*given: Any, **by_name: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of a function: it stays as it is."""
    return lambda function: function
