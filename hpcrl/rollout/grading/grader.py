"""What a worker process does that grades: loads the rewards, then grades what it is sent.

Invariants: what is wrong with a reward itself (its name, its module, its signature, its self-check) is a UsageError at
the start; what is wrong with one grading is that grading's outcome, with the traceback of the user's code; after its
start the process cannot take more than a bounded amount of memory.  A plain function has the process to itself, async
ones run side by side.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpcrl.config.custom_functions import is_async, place_of, settled, short, trace_of
from hpcrl.config.options import Options
from hpcrl.config.plugin_names import read_words
from hpcrl.config.plugin_points import load_own
from hpcrl.errors import HpcrlError, UsageError, is_mistake
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.rollout.worker_messages import (
    ERROR,
    GradingOutcome,
    GradingReply,
    GradingSetup,
    GradingTask,
    failure_of,
    frame,
    unpack,
)
from hpcrl.sample import LARGEST, Sample
from hpcrl.utils.untrusted_files import read_system


class NoReward(Exception):
    """What a reward returned is not a reward."""


@dataclass(frozen=True)
class Reward:
    """A reward that can be called.

    Attributes:
        boxed: makes the response of the boxed part of one, None where the whole response counts.
    """

    word: str
    function: Callable[..., Any]
    waits: bool
    key: str | None = None
    group: bool = False
    boxed: Callable[[str], str] | None = None

    def call(self, args: Arguments, samples: Sequence[Sample]) -> list[Any]:
        """What it returns for each of the samples, of a group for all; an async one is called in `results`."""
        given = [list(samples)] if self.group else [self._seen(sample) for sample in samples]
        return [partial(self.function, args, one) if self.waits else self.function(args, one) for one in given]

    async def results(self, called: list[Any], count: int) -> list[Any]:
        """What it says of each of `count` samples.

        Args:
            called: what `call` has returned.
        """
        found = [await settled(one() if self.waits else one) for one in called]
        if not self.group:
            return found
        (one,) = found
        several = list(one) if isinstance(one, Iterable) and not isinstance(one, str | Mapping) else []
        if len(several) != count:
            raise NoReward(f"returned {short(one)}, with --group-rm a list of {count} is wanted")
        return several

    def _seen(self, sample: Sample) -> Sample:
        """The sample with the response that the reward looks at."""
        if self.boxed is None:
            return sample
        from hpcrl.rollout.answers.labels import boxed

        content = boxed(sample.response)
        return sample.replace(response="" if content is None else self.boxed(content))


def load_reward(word: str, options: Options) -> Reward:
    """The reward called `word`.

    Raises:
        UsageError: names it, and says what is wrong with it.
    """
    if word == options.custom_rm_path:
        function = load_own("custom_rm_path", word)
        return Reward(word, function, is_async(function), group=options.group_rm)
    (item,) = read_words(word)
    if not item.file:
        function = load_own("rm_type", word)
        return Reward(word, function, is_async(function))
    module = importlib.import_module(f"hpcrl.rollout.rewards.{item.file}")
    if hasattr(module, "check"):
        try:
            module.check()
        except ImportError as error:
            raise UsageError(
                f"--rm-type {word} needs the Python package {error.name}", "install it where the rollout process runs"
            ) from error
    keys = getattr(module, "KEYS", ())
    boxed = getattr(module, "boxed", str) if item.boxed else None
    return Reward(word, module.reward, is_async(module.reward), key=keys[0] if keys else None, boxed=boxed)


# ---- one grading


def call(rewards: Sequence[Reward], args: Arguments, samples: Sequence[Sample]) -> list[list[Any] | BaseException]:
    """What each of the rewards returns (`Reward.call`), or raises, which is the last."""
    called: list[list[Any] | BaseException] = []
    for reward in rewards:
        try:
            called.append(reward.call(args, samples))
        except BaseException as error:  # noqa: BLE001  (whatever the user's function does)
            return [*called, error]
    return called


async def grade(
    rewards: Sequence[Reward], called: Sequence[list[Any] | BaseException], count: int, key: str | None
) -> list[GradingOutcome]:
    """The outcomes of all `rewards` on `count` samples, one a sample.

    Args:
        called: what `call` has returned.
    """
    outcomes = [GradingOutcome(values={}, parts={}) for _ in range(count)]
    for reward, returned in zip(rewards, called, strict=False):
        try:
            if isinstance(returned, BaseException):
                raise returned
            results = await reward.results(returned, count)
            for outcome, result in zip(outcomes, results, strict=True):
                outcome.values[reward.word] = _number(result, key or reward.key, outcome.parts)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  (whatever the user's function does)
            failed = _failed(reward.word, error)
            return [failed for _ in range(count)]
    return outcomes


def _failed(word: str, error: BaseException) -> GradingOutcome:
    if isinstance(error, NoReward):
        return GradingOutcome(failure=ERROR, text=f"reward {word} {error}", mistake=True)
    if isinstance(error, MemoryError):
        return GradingOutcome(
            failure=ERROR, text=f"reward {word} needs more memory than a grading may take", trace=trace_of(error)
        )
    said = str(error) if isinstance(error, HpcrlError) else f"raised {type(error).__name__}: {error}"
    text = f"reward {word} {said[:500]}{place_of(error)}"
    return GradingOutcome(failure=failure_of(error), text=text, trace=trace_of(error), mistake=is_mistake(error))


def _number(result: Any, key: str | None, parts: dict[str, float]) -> float:
    """The reward in what a function returned; of an object also its other numbers, into `parts`.  NoReward if it is
    none."""
    if isinstance(result, Mapping):
        if key is None:
            raise NoReward(f"returned an object with {', '.join(map(str, result))}: give --reward-key")
        if key not in result:
            raise NoReward(
                f"returned an object with {', '.join(map(str, result)) or 'nothing'}, --reward-key {key} is not in it"
            )
        for name, value in result.items():
            if isinstance(value, bool | int | float | np.number) and math.isfinite(value) and abs(value) <= LARGEST:
                parts[str(name)] = float(value)
        result = result[key]
    try:
        if isinstance(result, str | bytes):
            raise TypeError
        value = float(result)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise NoReward(f"returned {short(result)}, which is not a number") from None
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise NoReward(f"returned {value:g}: a reward must be finite, and at most {LARGEST:g}")
    return value


# ---- the process


class Grader:
    """The rewards of a process.  waits: those that are async."""

    def __init__(self, setup: GradingSetup) -> None:
        """UsageError, or whatever a user's module raises."""
        options = Options.model_validate_json(setup.options)
        self._args = Arguments(options)
        self._rewards = {word: load_reward(word, options) for word in setup.words}
        self.waits = [word for word, reward in self._rewards.items() if reward.waits]
        _bound_memory(setup.memory)

    def shares(self, task: GradingTask) -> bool:
        return all(self._rewards[word].waits for word in task.words)

    def call(self, task: GradingTask) -> list[list[Any] | BaseException]:
        return call(self._of(task), self._args, [unpack(sent) for sent in task.samples])

    async def answer(self, task: GradingTask, called: list[list[Any] | BaseException]) -> bytes:
        return frame(GradingReply(task.id, await grade(self._of(task), called, len(task.samples), task.key)))

    def _of(self, task: GradingTask) -> list[Reward]:
        return [self._rewards[word] for word in task.words]


def _bound_memory(more: int) -> None:
    """No more than `more` bytes of data beyond what there is now; then an allocation fails with MemoryError (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    lines = read_system("/proc/self/status").splitlines()
    now = next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
