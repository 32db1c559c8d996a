"""The rollout process's own hooks of the user's: what is called when, with slime's names and meanings.

    every sample          --rollout-sample-hook-path, before its reward
    a rollout's groups    --rollout-sample-filter-path, --rollout-all-samples-process-path
    its numbers           --custom-rollout-log-function-path, --custom-eval-rollout-log-function-path
    what the trainer gets --custom-reward-post-process-path, --custom-convert-samples-to-train-data-path

Invariants: what the hook of a sample raises costs that sample its reward, and nothing else; what another raises is one
error that names its option; whatever they return is checked before anybody relies on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from hpcrl.config.custom_functions import named, said_of, settled, short, trace_of
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import option_text
from hpcrl.errors import HpcrlError
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.sample import BadSample, Sample
from hpcrl.transport.sample_batch import SampleBatch
from hpcrl.utils.sample_parts import TRUNCATED

#: what slime's train data may hold -> whether it must
TRAIN_DATA = dict.fromkeys(("tokens", "response_lengths", "rewards"), True)
TRAIN_DATA |= dict.fromkeys(("loss_masks", "rollout_log_probs", "raw_reward", "truncated", "sample_indices"), False)


class FailedHook(Exception):
    """What a sample's hook has done to it.

    Attributes:
        trace: the traceback of the user's code, "" if it raised nothing.
    """

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.trace = trace


class RolloutHooks:
    """The hooks of a run; those that are not given do nothing.  rollout_id: the rollout that is being made."""

    def __init__(self, options: Options, own: Mapping[str, list[Callable[..., Any]]]) -> None:
        """Create one.

        Args:
            own: of `plugin_points.load_points`.
        """
        self._options = options
        self._args = Arguments(options)
        self._own = own
        self.rollout_id = 0

    def has(self, name: str) -> bool:
        return name in self._own

    @property
    def rollout_function(self) -> Callable[..., Any] | None:
        """What makes a rollout in place of hpcrl's own way."""
        return self._only("rollout_function_path")

    @property
    def eval_function(self) -> Callable[..., Any] | None:
        """What evaluates in place of hpcrl's own way."""
        return self._only("eval_function_path")

    @property
    def data_source(self) -> Callable[..., Any] | None:
        """The class that gives the prompts in place of files."""
        return self._only("data_source_path")

    def _only(self, name: str) -> Callable[..., Any] | None:
        return next(iter(self._own.get(name, ())), None)

    def _shown(self, name: str) -> str:
        return f"{option_text(name)} {getattr(self._options, name)}"

    async def _call(self, name: str, *given: Any, samples: Sequence[Sample] = ()) -> Any:
        """What a hook returns.

        Args:
            samples: that it was given, and may have changed.
        """
        (function,) = self._own[name]
        with named(self._shown(name)):
            found = await settled(function(*given))
        self._check(name, samples)
        return found

    def _check(self, name: str, samples: Sequence[Sample]) -> None:
        for sample in samples:
            try:
                sample.check()
            except BadSample as error:
                shown = f"sample {sample.response_index} of group {sample.group_index}"
                raise HpcrlError(f"{self._shown(name)} {error} ({shown})") from error

    # ---- a sample

    async def before_reward(self, sample: Sample, evaluation: bool) -> None:
        """Let every hook see, change or replace the sample, in order.  FailedHook if one raises or leaves no whole
        sample."""
        paths = self._options.rollout_sample_hook_path
        for path, function in zip(paths, self._own.get("rollout_sample_hook_path", ()), strict=False):
            shown = f"--rollout-sample-hook-path {path}"
            try:
                found = await settled(function(self._args, sample, rollout_id=self.rollout_id, evaluation=evaluation))
            except Exception as error:
                raise FailedHook(f"{shown} raised {said_of(error)}", trace_of(error)) from error
            if found is not None and not isinstance(found, Sample):
                raise FailedHook(f"{shown} returned {short(found)}, a Sample or nothing is wanted")
            if found is not None and found is not sample:
                who = {name: getattr(sample, name) for name in ("group_index", "response_index", "group_size")}
                vars(sample).update(vars(found) | who)
            try:
                sample.check()
            except BadSample as error:
                raise FailedHook(f"{shown} {error}") from error

    # ---- a rollout

    async def filter(self, samples: Sequence[Sample], dropped: Sequence[Sample] = (), source: Any = None) -> None:
        """Let the filter set `remove_sample`, and take those out of the loss; then show everything, what was dropped
        included."""
        if self.has("rollout_sample_filter_path"):
            await self._call("rollout_sample_filter_path", self._args, _groups(samples), samples=samples)
        for sample in samples:
            if sample.remove_sample:
                sample.loss_mask = np.zeros_like(sample.array("loss_mask"))
        if self.has("rollout_all_samples_process_path"):
            every = sorted([*samples, *dropped], key=lambda sample: (sample.group_index, sample.response_index))
            await self._call("rollout_all_samples_process_path", self._args, _groups(every), source, samples=samples)

    async def log(self, samples: list[Sample], metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """The metrics to log.  True from the function leaves out those of rollout/ that were there before it."""
        if not self.has("custom_rollout_log_function_path"):
            return metrics
        before = set(metrics)
        given = (self.rollout_id, self._args, samples, metrics, seconds)
        instead = await self._call("custom_rollout_log_function_path", *given, samples=samples)
        _numbers(metrics, self._shown("custom_rollout_log_function_path"))
        return {
            name: value
            for name, value in metrics.items()
            if not (instead and name in before and name.startswith("rollout/"))
        }

    async def log_evaluation(
        self, rollout_id: int, samples: Mapping[str, list[Sample]], found: dict[str, dict[str, float]]
    ) -> dict[str, Any]:
        """The results to log, by set, of the weights after `rollout_id`.  True from the function leaves of each set
        only how many responses there were."""
        if not self.has("custom_eval_rollout_log_function_path"):
            return found
        data = {
            name: {
                "rewards": [sample.score for sample in some],
                "truncated": [sample.status == TRUNCATED for sample in some],
                "samples": some,
            }
            for name, some in samples.items()
        }
        before = {name: set(row) for name, row in found.items()}
        instead = await self._call("custom_eval_rollout_log_function_path", rollout_id, self._args, data, found)
        for row in found.values():
            _numbers(row, self._shown("custom_eval_rollout_log_function_path"))
        if not instead:
            return found
        return {
            name: {key: value for key, value in row.items() if key not in before.get(name, ()) or key == "n"}
            for name, row in found.items()
        }

    # ---- what the trainer gets

    async def batch(self, samples: list[Sample], metrics: dict[str, float]) -> SampleBatch:
        """The samples as columns, with the rewards that the trainer is to see."""
        rewards = await self._rewards(samples, metrics)
        if rewards is not None:
            samples = [sample.replace(reward=reward) for sample, reward in zip(samples, rewards, strict=True)]
        if not self.has("custom_convert_samples_to_train_data_path"):
            return SampleBatch.from_samples(samples)
        name = "custom_convert_samples_to_train_data_path"
        found = await self._call(name, self._args, samples)
        shown = self._shown(name)
        if isinstance(found, Mapping):
            found = _from_train_data(found, samples, shown)
        if isinstance(found, list) and all(isinstance(sample, Sample) for sample in found):
            self._check(name, found)
            found = SampleBatch.from_samples(found)
        if not isinstance(found, SampleBatch) or len(found) != len(samples):
            count = f" of {len(found)}" if isinstance(found, SampleBatch | list) else ""
            raise HpcrlError(
                f"{shown} returned {type(found).__name__}{count}, train data of {len(samples)} samples is wanted"
            )
        return found

    async def _rewards(self, samples: list[Sample], metrics: dict[str, float]) -> list[float] | None:
        name = "custom_reward_post_process_path"
        if not self.has(name):
            return None
        found = await self._call(name, self._args, samples, samples=samples)
        try:
            raw, processed = ([float(value) for value in part] for part in found)
            if (
                len(raw) != len(samples)
                or len(processed) != len(samples)
                or not all(map(math.isfinite, [*raw, *processed]))
            ):
                raise ValueError
        except (TypeError, ValueError) as error:
            what = f"two lists of {len(samples)} finite numbers are wanted: raw and processed rewards"
            raise HpcrlError(f"{self._shown(name)} returned {short(found)}; {what}") from error
        metrics["rollout/raw_reward"] = sum(raw) / max(len(raw), 1)
        return processed


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples in the order of their groups as a list for each group."""
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]


def _numbers(row: dict[str, Any], shown: str) -> None:
    """Make every value a float.

    Raises:
        HpcrlError: if one is not a finite number.
    """
    for name, value in row.items():
        if value is None:
            continue
        try:
            row[name] = float(value)
        except (TypeError, ValueError):
            row[name] = math.nan
        if not isinstance(name, str) or not math.isfinite(row[name]):
            raise HpcrlError(f"{shown} left metric {name!r} = {short(value)}, which is not a finite number")


def _from_train_data(data: Mapping[str, Any], samples: Sequence[Sample], shown: str) -> list[Sample]:
    """Samples of slime's train data: a list under each name, an entry for each sample, in order."""
    if strange := sorted(set(data) - set(TRAIN_DATA)):
        raise HpcrlError(
            f"{shown} returned {', '.join(map(str, strange))}, which the trainer does not read",
            f"it reads {', '.join(TRAIN_DATA)}",
        )
    if missing := [name for name, must in TRAIN_DATA.items() if must and name not in data]:
        raise HpcrlError(f"{shown} returned no {', '.join(missing)}")
    if wrong := [name for name, part in data.items() if not hasattr(part, "__len__") or len(part) != len(samples)]:
        raise HpcrlError(f"{shown} returned {wrong[0]} of another length than the {len(samples)} samples")
    found = []
    for number, sample in enumerate(samples):
        try:
            size = int(data["response_lengths"][number])
            changes = {
                name: data[theirs][number]
                for theirs, name in (("loss_masks", "loss_mask"), ("rollout_log_probs", "rollout_log_probs"))
                if theirs in data
            }
            found.append(
                sample.replace(
                    **{"loss_mask": None} | changes,
                    tokens=data["tokens"][number],
                    response_length=size,
                    versions=np.full(size, sample.array("versions").min(initial=2**31 - 1), np.int32),
                    reward=float(data["rewards"][number]),
                )
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise HpcrlError(f"{shown} returned train data of sample {number} that cannot be read: {error}") from error
    return found
