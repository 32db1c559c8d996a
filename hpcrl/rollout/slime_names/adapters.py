"""Rewards, filters and hooks written for slime, called with slime's samples in place of the run's.

Invariants: what such a function changes of a sample (reward, response, loss mask, metadata, status, whether it is
removed), or of a copy that it returns, and of a list is changed of the run's own; what it returns are the run's own
samples and lists again; tokens stay as they are.  A sample that is not graded yet has the reward None.  Functions that
have nothing of slime's are called as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from hpcrl.config.custom_functions import is_async
from hpcrl.config.options import Options
from hpcrl.rollout.slime_names import types
from hpcrl.rollout.slime_names.arguments import SlimeArguments
from hpcrl.rollout.slime_names.conversion import KEPT, attributes_of, reward_of, status_of, to_slime
from hpcrl.rollout.slime_names.speakers import speaks_slime
from hpcrl.sample import Sample

_EDITED = ("reward", "response", "status", "remove_sample")


def adapted(function: Callable[..., Any], options: Options, path: str = "", graded: bool = True) -> Callable[..., Any]:
    """The function, to be called with the run's samples.

    Args:
        path: that names it.
        graded: whether samples that it is given have their rewards.
    """
    if not speaks_slime(function, path):
        return function
    arguments = SlimeArguments(options)
    if is_async(function):

        async def awaited(*given: Any, **by_name: Any) -> Any:
            exchange = _Exchange(options, arguments, _key(options, by_name), graded)
            return exchange.back(await function(*exchange.all(given), **by_name))

        return functools.update_wrapper(awaited, function)

    def called(*given: Any, **by_name: Any) -> Any:
        exchange = _Exchange(options, arguments, _key(options, by_name), graded)
        result = function(*exchange.all(given), **by_name)
        return exchange.later(result) if inspect.isawaitable(result) else exchange.back(result)

    return functools.update_wrapper(called, function)


def _key(options: Options, by_name: Mapping[str, Any]) -> str | None:
    """The key of rewards that are objects, in a call with these keywords."""
    evaluation = by_name.get("evaluation") and options.eval_reward_key
    return evaluation or options.reward_key


class _Exchange:
    """What one call is given, and how it is the run's."""

    def __init__(self, options: Options, arguments: SlimeArguments, key: str | None, graded: bool) -> None:
        self._options = options
        self._arguments = arguments
        self._key = key
        self._graded = graded
        self._made: dict[int, Any] = {}  # id of the run's own -> slime's
        self._own: dict[int, Any] = {}  # id of slime's -> the run's own
        self._samples: list[tuple[types.SlimeSample, Sample, dict[str, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []

    def all(self, given: tuple[Any, ...]) -> list[Any]:
        """Arguments as the function takes them."""
        return [self._out(value) for value in given]

    def _out(self, value: Any) -> Any:
        if isinstance(value, Options):
            return self._arguments
        if not _holds_samples(value):
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, dict):
            return {name: self._out(each) for name, each in value.items()}
        made: Any
        if isinstance(value, Sample):
            made = to_slime(value, self._options, graded=self._graded, key=self._key)
            self._samples.append((made, value, _edited(made)))
        else:
            made = [self._out(each) for each in value]
            if isinstance(value, list):
                self._lists.append((made, value))
        self._made[id(value)], self._own[id(made)] = made, value
        return made

    def back(self, result: Any) -> Any:
        """What the function returned, as the run's; what it changed is changed."""
        for made, own, before in self._samples:
            _write_back(made, own, before, self._key)
        for made, own in self._lists:
            mine = [self._mine(each) for each in made]
            if len(mine) != len(own) or any(a is not b for a, b in zip(mine, own, strict=True)):
                own[:] = mine
        return self._mine(result)

    async def later(self, result: Awaitable[Any]) -> Any:
        """The same of a result that is still to come."""
        return self.back(await result)

    def _mine(self, value: Any) -> Any:
        if id(value) in self._own:
            return self._own[id(value)]
        if type(value) in (list, tuple):
            return type(value)(self._mine(each) for each in value)
        if isinstance(value, types.SlimeSample):  # a copy of one
            for made, own, before in self._samples:
                if (made.group_index, made.index) == (value.group_index, value.index):
                    _write_back(value, own, before, self._key)
                    return own
        return value


def _holds_samples(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_samples(each) for each in value.values())
    return isinstance(value, Sample) or (isinstance(value, list | tuple) and any(map(_holds_samples, value)))


def _edited(made: types.SlimeSample) -> dict[str, Any]:
    """What a function may change, as it is now."""
    found = {name: getattr(made, name) for name in _EDITED}
    reward = dict(made.reward) if isinstance(made.reward, dict) else made.reward
    return found | {"reward": reward, "metadata": dict(made.metadata)}


def _write_back(made: types.SlimeSample, own: Sample, before: dict[str, Any], key: str | None) -> None:
    if made.reward is not before["reward"] and made.reward != before["reward"]:
        own.reward, rewards = reward_of(made.reward, key)
        own.rewards = rewards or own.rewards
    if made.response != before["response"]:
        own.response = made.response
    if made.has_list("loss_mask"):
        mask = [1] * own.response_length if made.loss_mask is None else list(made.loss_mask)
        if mask != own.loss_mask.tolist():
            own.loss_mask = np.asarray(mask, np.uint8)
    if made.status != before["status"]:
        own.status = status_of(made.status)
    own.remove_sample = bool(made.remove_sample)
    kept = attributes_of(made)
    if made.metadata != before["metadata"] or kept != own.metadata.get(KEPT, {}):
        own.metadata = made.metadata | ({KEPT: kept} if kept else {})
