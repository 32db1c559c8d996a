"""The filters of a run: built-ins by name, the user's own by dotted path, called so that none can end the run by
chance.

Invariants: a dynamic filter that fails on a group costs that group, dropped for `filter_error`, and ends the run only
when most groups of a rollout cost it; a buffer filter that fails is replaced by the front of the buffer, this once;
each failure is in the log.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hpcrl.config.custom_functions import said_of, settled, short, trace_of
from hpcrl.config.options import Options
from hpcrl.config.plugin_names import is_path
from hpcrl.config.plugin_points import load_own, option_text
from hpcrl.errors import CodeError, HpcrlError, is_mistake
from hpcrl.rollout.filters.verdict import Verdict, read_verdict
from hpcrl.rollout.ledger.group_progress import GroupProgress
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.run.role import say
from hpcrl.sample import Sample

ERROR = "filter_error"
FEW = 2  #: groups of a rollout whose filter may fail, whatever share of them they are
SAID = 3  #: failures that are logged with their traceback


def _load(options: Options, name: str, function: str) -> Callable[..., Any]:
    value = getattr(options, name)
    if is_path(value):
        return load_own(name, value)
    return getattr(importlib.import_module(f"hpcrl.rollout.filters.{value}"), function)


class DynamicFilter:
    """--dynamic-sampling-filter-path."""

    def __init__(self, options: Options) -> None:
        """Raise UsageError for a custom one that cannot be used."""
        self._args = Arguments(options)
        self._shown = f"{option_text('dynamic_sampling_filter_path')} {options.dynamic_sampling_filter_path}"
        self._keep = _load(options, "dynamic_sampling_filter_path", "keep")
        self._rollout = -1
        self._judged = 0
        self._failed = 0
        self._said = 0

    async def judge(self, rollout_id: int, number: int, samples: Sequence[Sample]) -> Verdict:
        """What it says of a finished group.

        Raises:
            HpcrlError: once it has failed on most groups of a rollout.
        """
        if rollout_id != self._rollout:
            self._rollout = rollout_id
            self._judged = 0
            self._failed = 0
        self._judged += 1
        try:
            verdict = read_verdict(await settled(self._keep(self._args, list(samples))))
            for sample in samples:
                sample.check()
            return verdict
        except Exception as error:
            self._failed += 1
            text = said_of(error)
            if self._failed > FEW and self._failed > self._judged / 2:
                raise (CodeError if is_mistake(error) else HpcrlError)(
                    f"{self._shown} failed: {text}; on {self._failed} of the {self._judged} groups of rollout "
                    f"{rollout_id}",
                    "its traceback is in the log",
                ) from error
            self._said += 1
            if self._said <= SAID:
                say(f"group {number} is dropped: {self._shown} failed: {text}")
                print(trace_of(error), file=sys.stderr, flush=True)
            return Verdict(False, ERROR)


class BufferFilter:
    """--buffer-filter-path."""

    def __init__(self, options: Options) -> None:
        """Raise UsageError for a custom one that cannot be used."""
        self._args = Arguments(options)
        self._shown = f"{option_text('buffer_filter_path')} {options.buffer_filter_path}"
        self._choose = _load(options, "buffer_filter_path", "choose")
        self.failed = 0

    async def choose(
        self, rollout_id: int, waiting: Sequence[GroupProgress], count: int
    ) -> tuple[list[GroupProgress], list[GroupProgress]]:
        """(at most `count` groups to continue with, groups to drop: those that it took out of the list and did not
        return)."""
        samples = [progress.all_samples() for progress in waiting]
        progress_of = {id(group): progress for group, progress in zip(samples, waiting, strict=True)}
        buffer = list(samples)
        try:
            returned = await settled(self._choose(self._args, rollout_id, buffer, count))
            if not isinstance(returned, list | tuple) or any(id(group) not in progress_of for group in returned):
                raise TypeError(f"returned {short(returned)}, which is not a list of groups of the buffer")
            left = {id(group) for group in buffer}
            if not left <= progress_of.keys() or len({id(group) for group in returned}) < len(returned):
                raise TypeError("put a group into the buffer, or returned one twice")
            for sample in (sample for group in returned for sample in group):
                sample.check()
        except Exception as error:  # noqa: BLE001  (the user's code)
            self.failed += 1
            if self.failed <= SAID:
                say(f"the groups at the front of the buffer are taken: {self._shown} failed: {said_of(error)}")
                print(trace_of(error), file=sys.stderr, flush=True)
            return list(waiting[:count]), []
        chosen = {id(group) for group in returned}
        taken = [progress_of[id(group)] for group in returned[:count]]
        return taken, [progress for key, progress in progress_of.items() if key not in left and key not in chosen]
