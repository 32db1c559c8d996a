"""Rewards: what a response is worth.

Every file here that is not named with an underscore is a --rm-type: it has `make(options) -> Grader`.

Invariant: a grade is a finite number; whatever else a reward does (raise, return nan) is an error that names the reward
and the sample, never a zero that nobody notices.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable
from math import isfinite
from typing import Any, Protocol

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.sample import Sample


class Grader(Protocol):
    """Grades responses; as text it is its name."""

    async def __call__(self, sample: Sample) -> float:
        """The reward of a sample whose response and label are set."""

    async def close(self) -> None:
        """End whatever was started for grading."""


class _Custom:
    """An own reward: async (options, sample) -> float."""

    def __init__(self, function: Callable[[Options, Sample], Awaitable[float]], options: Options) -> None:
        self._function, self._options = function, options

    def __str__(self) -> str:
        return str(self._options.custom_rm_path)

    async def __call__(self, sample: Sample) -> float:
        return await self._function(self._options, sample)

    async def close(self) -> None:
        return None


def load_reward(options: Options) -> Grader:
    """The reward that the options choose.  UsageError if none is chosen or --custom-rm-path cannot be used."""
    if options.custom_rm_path:
        return _Custom(_find(options.custom_rm_path), options)
    if options.rm_type is None:
        raise UsageError("no reward is chosen", "give --rm-type or --custom-rm-path")
    return importlib.import_module(f"{__name__}.{options.rm_type}").make(options)


def _find(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    if not module:
        raise UsageError(f"--custom-rm-path {path} is no module.function")
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UsageError(f"--custom-rm-path {path} cannot be imported: {error}", "is its directory in PYTHONPATH?") from error
    except AttributeError as error:
        raise UsageError(f"--custom-rm-path {path}: {module} has no {name}") from error
    except Exception as error:  # the user's module, with whatever it does when imported
        raise UsageError(f"--custom-rm-path {path}: importing {module} raises {type(error).__name__}: {error}") from error
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(type(function), "__call__", None))):  # noqa: B004
        raise UsageError(
            f"--custom-rm-path {path} is no async function", "declare it: async def reward(options, sample) -> float"
        )
    return function


async def grade(grader: Grader, sample: Sample, where: str) -> float:
    """The sample's reward.  HpcrlError names the reward and `where` the prompt stands (file and line) if it is none."""
    name, where = str(grader), f"response {sample.index} of group {sample.group} ({where})"
    try:
        reward = await grader(sample)
    except HpcrlError:
        raise
    except Exception as error:  # the user's function
        raise HpcrlError(f"reward {name} raised {type(error).__name__}: {error} on {where}") from error
    try:
        value = float(reward)
    except (TypeError, ValueError) as error:
        raise HpcrlError(f"reward {name} returned {reward!r}, which is no number, on {where}") from error
    if not isfinite(value):
        raise HpcrlError(f"reward {name} returned {value} on {where}", "a reward must be finite")
    return value
