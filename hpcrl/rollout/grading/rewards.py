"""In a grading process: a reward by its name or path, its call, and numbers out of what it returns.

Invariant: what is wrong with a reward itself (its name, its module, its signature, its self-check) is a UsageError at the
start; what is wrong with one grading is that grading's outcome, with the traceback of the user's code.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from hpcrl.config.options import Options
from hpcrl.config.reward_names import read_words
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.grading.frames import ERROR, TIMEOUT, Outcome
from hpcrl.sample import Sample

LARGEST = 1e30  #: a reward beyond it would overflow float32 in the advantages
TRACE = 6000  #: characters of a traceback that are sent


class NoReward(Exception):
    """What a reward returned is no reward."""


@dataclass(frozen=True)
class Reward:
    """A reward that can be called.  boxed: makes the response of the boxed part of one, None where the whole response counts."""

    word: str
    function: Callable[..., Any]
    waits: bool
    key: str | None = None
    group: bool = False
    boxed: Callable[[str], str] | None = None

    async def __call__(self, options: Options, samples: Sequence[Sample]) -> list[Any]:
        """What it returns for each of the samples; of a --group-rm in one call."""
        if self.group:
            found = await _settled(self.function(options, list(samples)))
            try:
                several = list(found)
            except TypeError:
                raise NoReward(f"returned {_short(found)}, with --group-rm a list of {len(samples)} is wanted") from None
            if isinstance(found, str | Mapping) or len(several) != len(samples):
                raise NoReward(f"returned {_short(found)}, with --group-rm a list of {len(samples)} is wanted")
            return several
        return [await _settled(self.function(options, self._seen(sample))) for sample in samples]

    def _seen(self, sample: Sample) -> Sample:
        """The sample with the response that the reward looks at."""
        if self.boxed is None:
            return sample
        from hpcrl.rollout.answers.boxed import boxed

        content = boxed(sample.response)
        return replace(sample, response="" if content is None else self.boxed(content))


async def _settled(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def load_reward(word: str, options: Options) -> Reward:
    """The reward called `word`.  UsageError names it, and says what is wrong with it."""
    if word == options.custom_rm_path:
        function = _find(word, "--custom-rm-path")
        _check_signature(function, f"--custom-rm-path {word}", "samples" if options.group_rm else "sample")
        return Reward(word, function, _waits(function), group=options.group_rm)
    (item,) = read_words(word)
    if not item.file:
        function = _find(word, "--rm-type")
        _check_signature(function, f"--rm-type {word}", "sample")
        return Reward(word, function, _waits(function))
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
    return Reward(word, module.reward, _waits(module.reward), key=keys[0] if keys else None, boxed=boxed)


def _waits(function: Callable[..., Any]) -> bool:
    """Whether it is async: then one process grades many at once."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(type(function), "__call__", None))  # noqa: B004


def _find(path: str, flag: str) -> Callable[..., Any]:
    shown = f"{flag} {path}"
    module, _, name = path.rpartition(".")
    if not module:
        raise UsageError(f"{shown} is no module.function")
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:  # the user's module, with whatever it does when imported
        if isinstance(error, asyncio.CancelledError):
            raise
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            hint = f"modules are looked for in {os.getcwd()}, where the run was started, and in PYTHONPATH"
            raise UsageError(f"{shown} cannot be imported: {error}", hint) from None
        if isinstance(error, AttributeError) and module in sys.modules and not hasattr(sys.modules[module], name):
            raise UsageError(f"{shown}: {module} has no {name}", f"it has {_functions(sys.modules[module])}") from None
        raise UsageError(f"{shown}: importing {module} raises {type(error).__name__}: {error}{_place(error)}") from error
    if not callable(function):
        raise UsageError(f"{shown} is no function but {_short(function)}")
    return function() if inspect.isclass(function) else function


def _functions(module: ModuleType) -> str:
    found = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    return ", ".join(found[:10]) or "no functions"


def _check_signature(function: Callable[..., Any], shown: str, what: str) -> None:
    """UsageError unless it can be called with the options and a sample."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise UsageError(
            f"{shown} takes ({', '.join(signature.parameters)}): {error}",
            f"declare it: def reward(options, {what}, **kwargs) -> float",
        ) from None


# ---- one grading


async def grade(
    rewards: Sequence[Reward], options: Options, samples: Sequence[Sample], key: str | None, seconds: float
) -> list[Outcome]:
    """The outcomes of all `rewards` on `samples`, one a sample."""
    outcomes = [Outcome(values={}, parts={}) for _ in samples]
    for reward in rewards:
        try:
            async with asyncio.timeout(seconds) as deadline:
                results = await reward(options, samples)
            for outcome, result in zip(outcomes, results, strict=True):
                outcome.values[reward.word] = _number(result, key or reward.key, outcome.parts)
        except BaseException as error:  # whatever the user's function does
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, TimeoutError) and deadline.expired():
                failed = Outcome(failure=TIMEOUT, text=f"reward {reward.word} took more than --reward-timeout {seconds:g} s")
            else:
                failed = _failed(reward.word, error)
            return [failed for _ in samples]
    return outcomes


def _failed(word: str, error: BaseException) -> Outcome:
    if isinstance(error, NoReward):
        return Outcome(failure=ERROR, text=f"reward {word} {error}")
    if isinstance(error, MemoryError):
        return Outcome(failure=ERROR, text=f"reward {word} needs more than --reward-memory-gb", trace=_trace(error))
    said = str(error) if isinstance(error, HpcrlError) else f"raised {type(error).__name__}: {error}"
    return Outcome(failure=ERROR, text=f"reward {word} {said[:500]}{_place(error)}", trace=_trace(error))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-TRACE:]


def _place(error: BaseException) -> str:
    """Where it happened: the innermost line that is not of this project, the standard library or a package."""
    own = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not any(part in f.filename for part in ("/hpcrl/", "/site-packages/", "/lib/python", "<frozen"))
    ]
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name})" if own else ""


def _number(result: Any, key: str | None, parts: dict[str, float]) -> float:
    """The reward in what a function returned; of an object also its other numbers, into `parts`.  NoReward if it is none."""
    if isinstance(result, Mapping):
        if key is None:
            raise NoReward(f"returned an object with {', '.join(map(str, result))}: give --reward-key")
        if key not in result:
            raise NoReward(f"returned an object with {', '.join(map(str, result)) or 'nothing'}, --reward-key {key} is not in it")
        for name, value in result.items():
            if isinstance(value, bool | int | float | np.number) and math.isfinite(value) and abs(value) <= LARGEST:
                parts[str(name)] = float(value)
        result = result[key]
    try:
        if isinstance(result, str | bytes):
            raise TypeError
        value = float(result)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise NoReward(f"returned {_short(result)}, which is no number") from None
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise NoReward(f"returned {value:g}: a reward must be finite, and at most {LARGEST:g}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
