"""A sample: a prompt with one response.

Invariants: columns of tokens are numpy arrays, so no per-token Python object exists between engine and trainer unless a
function of the user's asks for one.  They are declared once, in `utils/sample_parts.py`, what else is sent and written
in FIELDS: batches (`transport/share_format.py`) and bytes (`rollout/worker_messages.py`) follow from these two.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from hpcrl.errors import DataError
from hpcrl.utils.sample_parts import COLUMNS, ENDS, PrefixCacheInfo, SampleStatus, SpecInfo

LARGEST = 1e30  #: a reward beyond it would overflow float32 in the advantages
LARGEST_ATTRIBUTE = 2**20  #: bytes


class BadSample(DataError):
    """The user's code has set an invalid value in a sample; the text follows the name of that code."""


class _Late:
    """A field whose value, under its name with a "_" before it, is made when it is first read: a list of an array, or
    what `make` makes of the sample."""

    def __init__(self, make: Callable[[Sample], Any] = lambda sample: None) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, sample: Sample | None, owner: type) -> Any:
        if sample is None:  # dataclass asks for the default
            return None
        value = vars(sample).get(self._slot)
        if value is None:
            value = self._make(sample)
        elif isinstance(value, np.ndarray):
            value = value.tolist()
        else:
            return value
        self.__set__(sample, value)
        return value

    def __set__(self, sample: Sample, value: Any) -> None:
        if value is not None:
            setattr(sample, self._slot, value)
        elif self._slot in vars(sample):
            delattr(sample, self._slot)


class _Reward(_Late):
    """The reward: with a `reward_key` an object of all its parts."""

    def __get__(self, sample: Sample | None, owner: type) -> Any:
        if sample is None:
            return None
        value = vars(sample).get(self._slot)
        if sample.reward_key and isinstance(value, int | float):
            value = vars(sample)[self._slot] = {**sample.rewards, sample.reward_key: value}
        return value


def _distinct_versions(sample: Sample) -> list[str]:
    return [str(version) for version in dict.fromkeys(sample.array("versions").tolist() * sample.has("versions"))]


@dataclass(repr=False)
class Sample:
    """One prompt with one response, under slime's names.

    Functions of the user's read columns as lists, which they may edit and extend where they are; a run's own code
    reads them by `array`, and no list is made.

    Attributes:
        group_index: numbers the prompt over the whole run.
        index: numbers the sample over the whole run.
        tokens: int32 [prompt + response].
        loss_mask: uint8 [response]; None: all 1.
        rollout_log_probs: float32 [response], log-probabilities of the sampled tokens under the policy that sampled
            them, at the sampling temperature.
        reward: None until it is graded; a number, or with --reward-key an object that has it under that key.
        weight_versions: the different ones of `versions`.
        remove_sample: it is out of the loss; its reward counts in its group.
        prompt, label, metadata: of the prompt file.
        versions: int32 [response], the policy version that each token was sampled under.
        response_index: numbers the response within its group, from 0; a group has `group_size` of them.
        baseline: the reward of the greedy response to the same prompt, NaN where none was asked for.
        rewards: the parts of the reward by name, where it has several.
        reward_key: that of a reward that is an object.
        grading: "" or how it failed, "timeout" or "error" (then the reward is 0; in a rollout it trains nothing and
            counts in no group).
        grading_error: the reason.
        teacher_error: "" or why a teacher gave no log-probs (they are the sample's own).
        transcript: of several turns, or of a sandbox: what `hpcrl.rollout.samplers.transcript` makes.
    """

    group_index: int = 0
    index: Any = _Late(lambda sample: sample.group_index * sample.group_size + sample.response_index)
    rollout_id: Any = _Late()
    prompt: Any = ""
    tokens: Any = _Late(lambda sample: [])
    multimodal_inputs: Any = _Late()
    multimodal_train_inputs: Any = _Late()
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = _Reward()
    loss_mask: Any = _Late()
    weight_versions: Any = _Late(_distinct_versions)
    rollout_log_probs: Any = _Late()
    rollout_routed_experts: Any = _Late()
    rollout_top_p_token_ids: Any = _Late()
    rollout_top_p_token_offsets: Any = _Late()
    remove_sample: bool = False
    teacher_log_probs: Any = _Late()
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[Any, Any] = field(default_factory=dict)
    generate_function_path: Any = _Late()
    custom_rm_path: Any = _Late()
    train_metadata: Any = _Late()
    session_id: Any = _Late(lambda sample: f"{sample.group_index}-{sample.response_index}")
    non_generation_time: Any = _Late(lambda sample: 0.0)
    spec_info: Any = _Late(lambda sample: SpecInfo())
    prefix_cache_info: Any = _Late(lambda sample: PrefixCacheInfo())
    versions: Any = _Late()
    response_index: int = 0
    group_size: int = 1
    baseline: float = math.nan
    rewards: dict[str, float] = field(default_factory=dict)
    reward_key: str | None = None
    grading: str = ""
    grading_error: str = ""
    teacher_error: str = ""
    transcript: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        names = ("group_index", "response_index", "status", "response_length")
        return f"Sample({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    # ---- of the run's own code

    def has(self, name: str) -> bool:
        """Whether a column is set."""
        return f"_{name}" in vars(self)

    def array(self, name: str) -> np.ndarray:
        """A column as an array; of one that is not set, 1 (loss_mask) or 0 for each token of the response."""
        value = vars(self).get(f"_{name}")
        if value is None:
            shape = self.response_length if name != "tokens" else 0
            return np.full(shape, name == "loss_mask", COLUMNS[name].dtype)
        return value if isinstance(value, np.ndarray) else np.asarray(value, COLUMNS[name].dtype)

    def columns(self) -> dict[str, np.ndarray]:
        """The columns that it has, by name, in the order of COLUMNS."""
        return {name: self.array(name) for name, kind in COLUMNS.items() if self.has(name) or not kind.optional}

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.array("tokens")) - self.response_length

    @property
    def score(self) -> float:
        """The reward as a number; 0 where there is none."""
        value = vars(self).get("_reward", 0.0)
        return value[self.reward_key] if isinstance(value, dict) else value

    @property
    def graded(self) -> bool:
        """Whether it has a reward."""
        return self.has("reward")

    def replace(self, **changes: Any) -> Sample:
        """A copy with other values, and with what functions have set besides the fields."""
        found = copy.copy(self)
        for name, value in (dict.fromkeys(("index", "session_id", "weight_versions")) | changes).items():
            setattr(found, name, value)
        return found

    def attributes(self) -> dict[str, Any]:
        """What a function has set besides the FIELDS and columns, as far as it is plain data."""
        found = {}
        for slot in vars(self).keys() - _KNOWN:
            name, value = slot.removeprefix("_") if slot in _PASSIVE else slot, vars(self)[slot]
            if name.startswith("_") or (slot in _PASSIVE and not value):
                continue
            try:
                data = msgspec.msgpack.encode(value)
            except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
                continue
            if len(data) <= LARGEST_ATTRIBUTE:
                found[name] = msgspec.msgpack.decode(data)
        return found

    def check(self) -> None:
        """Make arrays of lists, and refuse what is no sample: called when code of the user's has had it.

        Raises:
            BadSample: says what was set.
        """
        try:
            status = SampleStatus(self.status)
        except ValueError:
            raise BadSample(f"set the status {self.status!r}: it is {', '.join(SampleStatus)}") from None
        self.status = SampleStatus.COMPLETED if status is SampleStatus.FAILED else status
        if not isinstance(self.metadata, dict):
            raise BadSample("set metadata that is not a dict")
        self.response = str(self.response).encode(errors="replace").decode()
        self.remove_sample = bool(self.remove_sample)
        self.fold_reward()
        self._check_columns()

    def fold_reward(self) -> None:
        """Have the number of a reward that is an object, and its other numbers in `rewards`.

        Raises:
            BadSample: if it is no reward.
        """
        value = vars(self).get("_reward")
        rewards = self.rewards
        if isinstance(value, dict):
            rewards = {name: part for name, part in value.items() if isinstance(part, int | float)}
            if self.reward_key not in value:
                lacks = f"{self.reward_key!r} is not in it" if self.reward_key else "give --reward-key"
                raise BadSample(f"set the reward to an object with {', '.join(map(str, value))}: {lacks}")
            value = value[self.reward_key]
        try:
            self.rewards = {str(name): float(part) for name, part in rewards.items() if math.isfinite(float(part))}
        except (AttributeError, TypeError, ValueError):
            raise BadSample("set rewards to something other than a dict of numbers") from None
        if value is None:
            return
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise BadSample(f"set the reward to {value!r:.100}, which is not a number") from None
        if not math.isfinite(number) or abs(number) > LARGEST:
            raise BadSample(f"set the reward to {number:g}: it must be finite, and at most {LARGEST:g}")
        self.reward = number

    def _check_columns(self) -> None:
        count = self.response_length
        tokens = self._whole("tokens", np.int64, 0, 2**31)
        if not isinstance(count, int | np.integer) or not 0 <= count <= len(tokens):
            raise BadSample(
                f"set response_length to {count!r}, of {len(tokens)} tokens of prompt and response together"
            )
        self.response_length = int(count)
        self._whole("loss_mask", np.int64, 0, 2)
        self._whole("versions", np.int64, 0, 2**31)
        self._whole("rollout_log_probs", np.float64)
        self._whole("teacher_log_probs", np.float64)
        for name in COLUMNS:
            size = len(tokens) if COLUMNS[name].counted_by == "length" else count
            if self.has(name) and len(self.array(name)) != size:
                raise BadSample(f"set {len(self.array(name))} {name} for a response of {count} tokens")

    def _whole(self, name: str, kind: type, least: float = -math.inf, end: float = math.inf) -> np.ndarray:
        """The column as an array of its own type, which it stays; its numbers are finite, from `least` and below
        `end`."""
        if not self.has(name):
            return self.array(name)
        value = vars(self)[f"_{name}"]
        try:
            found = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, kind)
        except (TypeError, ValueError, OverflowError):
            found = np.zeros((0, 0))
        if found.ndim != 1:
            raise BadSample(f"set {name} to something other than a list of numbers")
        if not ((found >= least) & (found < end) & (found > -math.inf)).all():
            wanted = f"whole numbers from {least} to {end - 1}" if end < math.inf else "finite numbers"
            raise BadSample(f"set {name} to other numbers than {wanted}")
        found = vars(self)[f"_{name}"] = found.astype(COLUMNS[name].dtype, copy=False)
        return found

    # ---- slime's

    def get_reward_value(self, args: Any) -> Any:
        """The reward as a number: of an object that under args.reward_key."""
        return self.reward[args.reward_key] if args.reward_key else self.reward

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are learned from."""
        mask = vars(self).get("_loss_mask")
        return self.response_length if mask is None else int(sum(mask))

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Iterable[Any] | None = None,
        log_probs: Iterable[Any] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Tokens behind the response: sampled ones with their log-probs, or (not `trainable`) those of a tool.

        Raises:
            ValueError: if log-probs are missing, too many, or given for tokens of a tool.
        """
        new = [int(token) for token in ([] if tokens is None else tokens)]
        given = None if log_probs is None else [float(value) for value in log_probs]
        if given is not None and len(given) != len(new):
            raise ValueError(f"{len(given)} log_probs for {len(new)} tokens")
        if new and trainable == (given is None):
            raise ValueError(
                "sampled tokens come with their log_probs" if trainable else "tokens of a tool have no log_probs"
            )
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens += new
        self.loss_mask += [int(trainable)] * len(new)
        self.rollout_log_probs += given or [0.0] * len(new)
        self.response_length += len(new)
        self.response += text or ""
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(args, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """What an answer's meta_info says: counts, the weights' version, how it ended."""
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = ENDS.get(meta_info["finish_reason"]["type"], self.status)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, attributes that a function has set included."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        more = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        told = {name: own[name].to_dict() for name in ("spec_info", "prefix_cache_info")}
        return {**own, **more, **told, "status": SampleStatus(self.status).value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """The sample again."""
        sample = Sample()
        for name, value in data.items():
            setattr(sample, name, value)
        sample.status = SampleStatus(data["status"])
        sample.spec_info = SpecInfo.from_dict(data.get("spec_info", {}))
        sample.prefix_cache_info = PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {}))
        return sample


#: slime has them as classes of `Sample`, which as a dataclass would take annotated ones for fields
for _name, _inner in {"Status": SampleStatus, "SpecInfo": SpecInfo, "PrefixCacheInfo": PrefixCacheInfo}.items():
    setattr(Sample, _name, _inner)

#: what a sample has besides its columns, and is sent and written -> its type
FIELDS: dict[str, Any] = {
    "group_index": int,
    "response_index": int,
    "group_size": int,
    "response_length": int,
    "status": SampleStatus,
    "prompt": Any,
    "response": str,
    "label": Any,
    "metadata": dict,  # of a user's function, whose keys may be numbers
    "reward": float | None,
    "rewards": dict[str, float],
    "reward_key": str | None,
    "baseline": float,
    "grading": str,
    "grading_error": str,
    "teacher_error": str,
    "remove_sample": bool,
    "transcript": dict[str, Any],
}
#: of slime's fields that nothing here reads, those that are kept where a function sets them
_PASSIVE = {f"_{name}" for name in ("rollout_id", "multimodal_inputs", "multimodal_train_inputs", "train_metadata")}
_PASSIVE |= {"_generate_function_path", "_custom_rm_path", "_non_generation_time"}
_KNOWN = {*FIELDS, *(f"_{each.name}" for each in dataclasses.fields(Sample))} - _PASSIVE
