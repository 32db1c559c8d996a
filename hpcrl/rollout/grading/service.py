"""Grading: samples out to the grading processes, rewards back into them; how many failed, and when those are too many.

Invariants: one bad prompt never ends a run, whatever its share of a small rollout, unless the limit is 0, or more
gradings fail than the rollout has: then its groups would be made again without end;
of a process, async rewards run side by side, and a plain one has it to itself; all gradings of one call
fail, or none; a failed one never counts as a reward.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpcrl.config.options import Options
from hpcrl.config.plugin_names import RewardWord, own_reward, read_words
from hpcrl.errors import CodeError, DataError, HpcrlError, UsageError
from hpcrl.rollout.custom_hooks import FailedHook, RolloutHooks
from hpcrl.rollout.prompts.prompt_files import PromptFile
from hpcrl.rollout.worker_messages import ERROR, LOST, TIMEOUT, GradingOutcome, GradingSetup, GradingTask, send_sample
from hpcrl.rollout.worker_pool import Job, WorkerFailure, WorkerPool, with_retries
from hpcrl.run.role import say
from hpcrl.sample import Sample


@dataclass
class Tally:
    """The failed gradings of one batch.

    Attributes:
        what: the batch, for the error.
        size: gradings of the batch.
        group_size: samples of a group.
        limit: --reward-max-failed.
        prompts: the prompts whose grading has failed in this run, shared by all its tallies.
        counted: what is counted.
    """

    what: str
    size: int
    group_size: int
    limit: float
    prompts: set[str]
    counted: str = "gradings"
    failed: int = 0
    mistakes: int = 0

    def fail(self, prompt: str, text: str, mistake: bool = False) -> None:
        """Count one.

        Args:
            mistake: as in `GradingOutcome`.

        Raises:
            HpcrlError: once they are more than the limit and come from more than one prompt, or more than the batch.
        """
        self.failed += 1
        self.mistakes += mistake
        if len(self.prompts) < 2:
            self.prompts.add(prompt)
        several = len(self.prompts) > 1 or not self.limit or self.failed > self.size
        if several and self.failed > self.limit * self.size:
            raise (CodeError if 2 * self.mistakes > self.failed else HpcrlError)(
                f"{text} ({self.failed} of the {self.size} {self.counted} of {self.what} failed, more than "
                f"--reward-max-failed {self.limit:g})",
                "the rollout's log has the tracebacks",
            )


class Tallies:
    """The failures of a run, counted by batch, and told a few of each kind, so that thousands of them leave a log that
    can be read."""

    KEPT = 8  #: batches
    TOLD = 3  #: of one text
    TEXTS = 100

    def __init__(self, limit: float, counted: str = "gradings") -> None:
        """As of `Tally`."""
        self._limit = limit
        self._counted = counted
        self._prompts: set[str] = set()
        self._tallies: dict[str, Tally] = {}
        self._told: dict[str, int] = {}

    def tally_of(self, what: str, size: int, each: int) -> Tally:
        """The count of a batch of `size` samples in groups of `each`, called `what`."""
        if what not in self._tallies:
            self._tallies = dict(list(self._tallies.items())[-self.KEPT :])
            self._tallies[what] = Tally(what, size, each, self._limit, self._prompts, self._counted)
        return self._tallies[what]

    def say(self, kind: str, text: str, trace: str = "") -> None:
        """Log a failure, unless there were enough of its kind."""
        self._told[kind] = self._told.get(kind, 0) + 1
        if self._told[kind] <= self.TOLD and len(self._told) <= self.TEXTS:
            say(text)
            if trace:
                print(trace, file=sys.stderr, flush=True)


def grading_metrics(samples: Sequence[Sample], dropped: Sequence[Sample] = ()) -> dict[str, float]:
    """reward_timeouts and reward_errors: failed gradings, also of `dropped`; reward/NAME: the mean of each part of
    the reward, if it has several."""
    found = {f"reward_{k}s": float(sum(s.grading == k for s in (*samples, *dropped))) for k in (TIMEOUT, ERROR)}
    for name in sorted({name for sample in samples for name in sample.rewards}):
        found[f"reward/{name}"] = float(np.mean([sample.rewards[name] for sample in samples if name in sample.rewards]))
    return found


SIDE_BY_SIDE = 64  #: gradings by async rewards in one process at once
MEMORY = 2 << 30  #: bytes that one grading may take beyond its process's size at the start


@dataclass
class _Group:
    """The samples of one group that wait for the rest of it."""

    samples: list[Sample] = field(default_factory=list)
    futures: list[asyncio.Future[GradingOutcome]] = field(default_factory=list)


@dataclass(frozen=True)
class GradedBy:
    """What grades a held-out sample.

    Attributes:
        own_types: its metadata may name another reward.
        key: of the reward, where one is an object.
    """

    words: tuple[RewardWord, ...]
    own_types: bool = True
    key: str | None = None


def worker_count() -> int:
    """Processes that grade: the CPUs less one, 8 at most."""
    return max(1, min(8, len(os.sched_getaffinity(0)) - 1))


class Grading:
    """The run's rewards.  Made, it has started its processes; `start` waits for the first of them.

    Attributes:
        pool: its processes.
    """

    def __init__(
        self,
        options: Options,
        files: Iterable[PromptFile] = (),
        more: Iterable[RewardWord] = (),
        hooks: RolloutHooks | None = None,
    ) -> None:
        """Create one.

        Args:
            files: the prompts, whose metadata may name rewards of their own.
            more: rewards of held-out sets.
            hooks: which see each sample before its reward.

        Raises:
            UsageError, DataError: name what is wrong.
        """
        self._hooks = hooks
        self._options = options
        self._words = (own_reward(options.custom_rm_path),) if options.custom_rm_path else read_words(options.rm_type)
        self._more = tuple(more)
        if not self._words and not self._more:
            raise UsageError("no reward is chosen", "give --rm-type or --custom-rm-path")
        self._by_type = dict(_types_in(files, options))
        words = {item.word: item for item in (*self._words, *self._more, *self._by_type.values())}
        self._arrays = any(not item.file for item in words.values())
        setup = GradingSetup(options.model_dump_json().encode(), list(words), MEMORY)
        self.pool = WorkerPool(setup, worker_count(), SIDE_BY_SIDE, f"the process that grades with {' '.join(words)}")
        self._groups: dict[tuple[str, int], _Group] = {}
        self._tallies = Tallies(options.reward_max_failed)

    async def start(self) -> None:
        """Wait until the rewards are loaded.

        Raises:
            UsageError: says what is wrong with them.
        """
        await self.pool.start()

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()

    def __str__(self) -> str:
        return " ".join(dict.fromkeys(item.word for item in (*self._words, *self._more)))

    # ---- for the samplers

    def tally(self, what: str, size: int, each: int) -> Tally:
        """The count of failed gradings of a batch of `size` samples in groups of `each`, called `what`."""
        return self._tallies.tally_of(what, size, each)

    async def grade(self, sample: Sample, where: str, tally: Tally, by: GradedBy | None = None) -> None:
        """Set the sample's reward, or say in it why there is none (then the reward is 0, and nothing is trained).

        Args:
            where: the prompt's file and line.
            by: what grades a held-out set's.

        Raises:
            HpcrlError: once too many gradings of the batch have failed.
        """
        evaluation = by is not None
        by = by or GradedBy(self._words, self._options.custom_rm_path is None, self._options.reward_key)
        sample.reward_key = by.key
        outcome = await self._before(sample, evaluation)
        words = self._words_for(sample, by)
        if (
            self._options.group_rm and words[0].word == self._options.custom_rm_path
        ):  # its group waits for it, whatever became of it
            graded = await self._with_group(sample, tally, by.key)
            outcome = outcome or graded
        elif outcome is None:
            outcome = await self._alone(sample, words, by.key)
        if not outcome.failure:
            total = math.fsum(item.weight * outcome.values[item.word] for item in words)
            sample.reward = total
            sample.rewards = (
                {item.name: outcome.values[item.word] for item in words} if len(words) > 1 else outcome.parts
            )
            return
        text = f"{outcome.text} on response {sample.response_index} of group {sample.group_index} ({where})"
        sample.reward = 0.0
        sample.rewards = {}
        sample.grading = ERROR if outcome.failure == LOST else outcome.failure
        sample.grading_error = outcome.text
        self._tallies.say(outcome.text, f"failed grading: {text}", outcome.trace)
        tally.fail(where, text, outcome.mistake)

    async def _before(self, sample: Sample, evaluation: bool) -> GradingOutcome | None:
        """Have the sample's hooks see it; how it failed, if it did."""
        if self._hooks is None:
            return None
        try:
            await self._hooks.before_reward(sample, evaluation)
        except FailedHook as error:
            return GradingOutcome(failure=ERROR, text=error.text, trace=error.trace, mistake=error.mistake)
        return None

    def _words_for(self, sample: Sample, by: GradedBy) -> tuple[RewardWord, ...]:
        if by.own_types and self._by_type and isinstance(name := sample.metadata.get("rm_type"), str) and name.strip():
            return (self._by_type[name.strip()],)
        return by.words

    async def _alone(self, sample: Sample, words: Iterable[RewardWord], key: str | None) -> GradingOutcome:
        return (await self._submit([sample], [item.word for item in words], key))[0]

    async def _with_group(self, sample: Sample, tally: Tally, reward_key: str | None) -> GradingOutcome:
        """The sample's outcome, once the rest of its group is there and all were graded in one call."""
        key = tally.what, sample.group_index
        group = self._groups.setdefault(key, _Group())
        future: asyncio.Future[GradingOutcome] = asyncio.get_running_loop().create_future()
        group.samples.append(sample)
        group.futures.append(future)
        if len(group.samples) == tally.group_size:
            del self._groups[key]
            order = sorted(range(tally.group_size), key=lambda i: group.samples[i].response_index)
            outcomes = await self._submit(
                [group.samples[i] for i in order], [item.word for item in self._words], reward_key
            )
            for position, outcome in zip(order, outcomes, strict=True):
                if not group.futures[position].done():
                    group.futures[position].set_result(outcome)
        try:
            return await future
        except asyncio.CancelledError:  # the rest of the group may never come
            self._groups.pop(key, None)
            raise

    async def _submit(self, samples: list[Sample], words: list[str], key: str | None) -> list[GradingOutcome]:
        """The outcomes of the samples, one each, in one call."""
        sent = [send_sample(sample, self._arrays) for sample in samples]
        o = self._options

        async def grade(patience: int) -> list[GradingOutcome]:
            shares = self.pool.waits.issuperset(words)
            job = Job(
                request=lambda number: GradingTask(number, words, key, sent),
                seconds=o.reward_timeout * patience,
                late=f"took more than --reward-timeout {o.reward_timeout * patience:g} s",
                shares=shares,
                alone=patience > 1,
                cpu_seconds=math.inf if shares else o.reward_cpu_limit * patience,
            )
            try:
                outcomes: list[GradingOutcome] = (await self.pool.run(job)).outcomes
            except WorkerFailure as error:
                return [GradingOutcome(failure=error.kind, text=f"reward {' '.join(words)} {error.text}")] * len(
                    samples
                )
            if outcomes[0].failure == LOST:
                self._tallies.say(LOST, f"graded again: {outcomes[0].text}")
            return outcomes

        return await with_retries(grade, lambda outcomes: outcomes[0].failure, o.deterministic_mode)


def _types_in(files: Iterable[PromptFile], options: Options) -> Iterable[tuple[str, RewardWord]]:
    """(the rm_type of a prompt's metadata, the reward).

    Raises:
        DataError: names file and line of an unknown one.
    """
    for name, where in ((name, place) for file in files for name, place in file.types.items()):
        shown = f"{where}: metadata rm_type"
        try:
            (word,) = read_words(name)
        except UsageError as error:
            raise DataError(f"{shown}: {error.what.removeprefix('--rm-type ')}", error.hint) from None
        if not word.file:
            raise DataError(
                f"{shown}: {name} is not a reward of hpcrl's", "custom functions are named by options alone"
            )
        if word.file == "remote_rm" and options.rm_url is None:
            raise DataError(f"{shown} is remote_rm, but --rm-url is not given")
        yield name, word
