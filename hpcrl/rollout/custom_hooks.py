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
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import msgspec
import numpy as np

from hpcrl.config.custom_functions import named, said_of, settled, short, trace_of
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import option_text
from hpcrl.errors import HpcrlError, is_mistake
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.sample import BadSample, Sample
from hpcrl.transport.share_format import SampleBatch
from hpcrl.utils.sample_parts import COMPLETED, TRUNCATED

T = TypeVar("T")
_MUST = {"tokens", "response_lengths", "rewards"}  #: of slime's train data
_MAY = {"loss_masks", "rollout_log_probs", "raw_reward", "truncated", "sample_indices"}
_WANTED = (
    f"a list for each sample of {', '.join(sorted(_MUST))} is wanted; besides them the trainer reads "
    f"{', '.join(sorted(_MAY))}"
)


# ---- calls of functions of the user's, and the kinds of what they return


async def call_hook(
    name: str, function: Callable[..., Any], *given: Any, samples: Iterable[Sample] = (), **by_name: Any
) -> Any:
    """What a function, async or plain, returns.

    Args:
        name: the option and the function.
        samples: that the function was given and may have changed.

    Raises:
        HpcrlError: begins with the name.
    """
    with named(name):
        found = await settled(function(*given, **by_name))
    check_samples(name, samples)
    return found


def check_samples(name: str, samples: Iterable[Any]) -> None:
    """Have the samples whole that a function has returned or was given.

    Raises:
        HpcrlError: says what the function has set.
    """
    for sample in samples:
        if not isinstance(sample, Sample):
            raise HpcrlError(f"{name} returned {short(sample)}, expected a sample")
        try:
            sample.check()
        except BadSample as error:
            where = f"sample {sample.response_index} of group {sample.group_index}"
            raise HpcrlError(f"{name} {error} ({where})") from error


def is_finished(sample: Sample) -> bool:
    """Whether it may be trained on, or counted: it has ended and has a reward."""
    return sample.status in (COMPLETED, TRUNCATED) and sample.graded and sample.response_length > 0


def expect(name: str, value: Any, wanted: str, read: Callable[[Any], T]) -> T:
    """What a function returned, as `read` reads it.

    Raises:
        HpcrlError: says what a value must be, where `read` raises.
    """
    try:
        return read(value)
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise HpcrlError(f"{name} returned {short(value)}; {wanted}{f': {error}' if str(error) else ''}") from error


def floats(values: Iterable[Any]) -> list[float]:
    """Finite numbers."""
    found = [float(value) for value in values]
    if not all(map(math.isfinite, found)):
        raise ValueError
    return found


def read_metrics(name: str, values: Any, prefix: str = "") -> dict[str, Any]:
    """Numbers by name, each with this prefix once; None stays.

    Raises:
        HpcrlError: if they are something else.
    """

    items = expect(name, values, "names with finite numbers are expected", lambda row: list(row.items()))
    found: dict[str, Any] = {}
    for key, value in items:
        read = lambda value: None if value is None else floats([value])[0]  # noqa: E731
        number = expect(f"{name}, metric {key!r},", value, "a finite number is wanted", read)
        found[f"{prefix}{str(key).removeprefix(prefix)}"] = number
    return found


def plain_json(name: str, value: Any) -> Any:
    """What JSON makes of a value.

    Raises:
        HpcrlError: if it makes nothing of it.
    """
    return expect(name, value, "JSON is wanted", lambda found: msgspec.json.decode(msgspec.json.encode(found)))


# ---- the hooks of a run


class FailedHook(Exception):
    """What a sample's hook has done to it.

    Attributes:
        trace: the traceback of the user's code, "" if it raised nothing.
        mistake: as in `GradingOutcome`.
    """

    def __init__(self, text: str, trace: str = "", mistake: bool = True) -> None:
        super().__init__(text)
        self.text = text
        self.trace = trace
        self.mistake = mistake


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

    def only(self, name: str) -> Callable[..., Any] | None:
        """The function, or class, of an option that takes one, if it is given."""
        return next(iter(self._own.get(name, ())), None)

    def _shown(self, name: str) -> str:
        return f"{option_text(name)} {getattr(self._options, name)}"

    async def _call(self, name: str, *given: Any, samples: Sequence[Sample] = ()) -> Any:
        (function,) = self._own[name]
        return await call_hook(self._shown(name), function, *given, samples=samples)

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
                raise FailedHook(f"{shown} raised {said_of(error)}", trace_of(error), is_mistake(error)) from error
            if found is not None and not isinstance(found, Sample):
                raise FailedHook(f"{shown} returned {short(found)}, a Sample or nothing is wanted")
            if found is not None and found is not sample:
                who = {name: getattr(sample, name) for name in ("group_index", "response_index", "group_size")}
                sample.__dict__ = vars(found) | who
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
        found = read_metrics(self._shown("custom_rollout_log_function_path"), metrics)
        return {
            name: value
            for name, value in found.items()
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
        shown = self._shown("custom_eval_rollout_log_function_path")
        found = {name: read_metrics(shown, row) for name, row in found.items()}
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
            found = expect(shown, found, _WANTED, lambda data: _from_train_data(data, samples))
        if not isinstance(found, list) or len(found) != len(samples):
            count = f" of {len(found)}" if isinstance(found, list) else ""
            raise HpcrlError(
                f"{shown} returned {type(found).__name__}{count}, expected train data of {len(samples)} samples"
            )
        check_samples(shown, found)
        return SampleBatch.from_samples(found)

    async def _rewards(self, samples: list[Sample], metrics: dict[str, float]) -> list[float] | None:
        name = "custom_reward_post_process_path"
        if not self.has(name):
            return None
        found = await self._call(name, self._args, samples, samples=samples)

        def read(parts: Any) -> tuple[list[float], list[float]]:
            raw, processed = map(floats, parts)
            if not len(raw) == len(processed) == len(samples):
                raise ValueError
            return raw, processed

        what = f"two lists of {len(samples)} finite numbers are wanted: raw and processed rewards"
        raw, processed = expect(self._shown(name), found, what, read)
        metrics["rollout/raw_reward"] = sum(raw) / max(len(raw), 1)
        return processed


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples in the order of their groups as a list for each group."""
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]


def _from_train_data(data: Mapping[str, Any], samples: Sequence[Sample]) -> list[Sample]:
    """Samples of slime's train data: a list under each name, an entry for each sample, in order.

    Raises:
        ValueError, TypeError: if it is something else.
    """
    if wrong := (_MUST - set(data)) | (set(data) - _MUST - _MAY):
        raise ValueError(", ".join(map(str, wrong)))
    if wrong := {name for name, part in data.items() if len(part) != len(samples)}:
        raise ValueError(f"{', '.join(wrong)} of another length than {len(samples)}")
    rows = (dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True))
    return [
        sample.replace(
            tokens=row["tokens"],
            response_length=row["response_lengths"],
            loss_mask=row.get("loss_masks"),
            rollout_log_probs=row.get("rollout_log_probs", sample.array("rollout_log_probs")),
            versions=np.full(int(row["response_lengths"]), min(sample.versions, default=0)),
            reward=float(row["rewards"]),
        )
        for sample, row in zip(samples, rows, strict=True)
    ]
