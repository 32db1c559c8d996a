"""`slime.utils.types.Sample`: a prompt with its response as slime's functions read and write it.

Invariant: lists that a function keeps a hold of are extended where they are, as slime does.  Columns of tokens become
lists when they are first asked for: a filter that looks at rewards alone makes none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


class SlimeStatus(Enum):
    """How far a sample is."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_ENDS = {"stop": SlimeStatus.COMPLETED, "length": SlimeStatus.TRUNCATED, "abort": SlimeStatus.ABORTED}


class _Counts:
    """Numbers that answers of an engine add up to."""

    def add(self, meta_info: dict[str, Any]) -> None:
        """Count those of one answer."""
        for name, key in self.names().items():
            setattr(self, name, getattr(self, name) + meta_info.get(key, 0))

    @classmethod
    def names(cls) -> dict[str, str]:
        """Field -> its name in an answer."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, int]:
        """The fields by name."""
        return {name: getattr(self, name) for name in self.names()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The counts again."""
        return cls(**{name: data.get(name, 0) for name in cls.names()})


@dataclass
class SpecInfo(_Counts):
    """Drafted tokens.  Engines here count them themselves: these stay 0."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @classmethod
    def names(cls) -> dict[str, str]:
        own = ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct")
        return {name: name for name in own} | {"completion_token_num": "completion_tokens"}

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheInfo(_Counts):
    """Prompt tokens, and those of them that an engine had in its cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @classmethod
    def names(cls) -> dict[str, str]:
        return {"cached_tokens": "cached_tokens", "total_prompt_tokens": "prompt_tokens"}

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


@dataclass
class SlimeSample:
    """One prompt with one response, under slime's names."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: SlimeStatus = SlimeStatus.PENDING
    metadata: dict[Any, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def have_columns(self, **columns: Any) -> None:
        """Let arrays be these fields, as lists that are made when they are asked for."""
        for name in columns:
            del vars(self)[name]
        self._columns = columns

    def __getattr__(self, name: str) -> Any:
        if (column := vars(self).get("_columns", {}).get(name)) is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        setattr(self, name, column.tolist())
        return vars(self)[name]

    def has_list(self, name: str) -> bool:
        """Whether a column was asked for, or set."""
        return name in vars(self)

    def get_reward_value(self, args: Any) -> Any:
        """The reward as a number: of an object that under args.reward_key."""
        return self.reward[args.reward_key] if args.reward_key else self.reward

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are learned from."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

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
        self.status = _ENDS.get(meta_info["finish_reason"]["type"], self.status)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, attributes that a function has set included."""
        told = {name: getattr(self, name).to_dict() for name in ("spec_info", "prefix_cache_info")}
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        more = {name: value for name, value in vars(self).items() if name != "_columns"}
        return {**own, **more, **told, "status": SlimeStatus(self.status).value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> SlimeSample:
        """The sample again."""
        known = {each.name for each in fields(SlimeSample)}
        sample = SlimeSample(**{name: value for name, value in data.items() if name in known})
        sample.status = SlimeStatus(data["status"])
        sample.spec_info = SpecInfo.from_dict(data.get("spec_info", {}))
        sample.prefix_cache_info = PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {}))
        for name, value in data.items():
            if name not in known:
                setattr(sample, name, value)
        return sample


#: slime has them as classes of `Sample`, which as a dataclass would take annotated ones for fields
for _name, _inner in {"Status": SlimeStatus, "SpecInfo": SpecInfo, "PrefixCacheInfo": PrefixCacheInfo}.items():
    setattr(SlimeSample, _name, _inner)
for _name in ("loss_mask", "rollout_log_probs"):  # class attributes of their defaults would be found before a column
    delattr(SlimeSample, _name)
SlimeSample.__name__ = SlimeSample.__qualname__ = "Sample"
