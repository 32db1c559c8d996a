"""Grading: samples out to the grading processes, rewards back into them.

Invariants: the event loop is never blocked; gradings that share a process run side by side, of others the first runs
and the rest wait in their order; no grading takes more than its limits, and what a process was working on when it had
to be killed is either charged to the one grading that it ran, or graded again, each alone; one whose sandbox is lost
is done again; in deterministic mode a grading that fails is repeated alone with four times the limits before it
counts, so that load cannot change a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

from hpcrl.config.options import Options
from hpcrl.config.plugin_names import RewardWord, declared, own_reward, read_words
from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.custom_hooks import FailedHook, RolloutHooks
from hpcrl.rollout.grading.tally import Tallies, Tally
from hpcrl.rollout.prompts.prompt_files import PromptFile
from hpcrl.rollout.worker_messages import (
    ERROR,
    LOST,
    TIMEOUT,
    TRIES,
    GradingOutcome,
    GradingReply,
    GradingSetup,
    GradingTask,
    WorkerLoaded,
    send_sample,
)
from hpcrl.rollout.worker_pool import PooledJob, ProcessPool, WorkerProcess
from hpcrl.sample import Sample


@dataclass(kw_only=True, eq=False)
class GradingJob(PooledJob):
    """A grading on its way.

    Attributes:
        shares: it may run concurrently with others in one process.
        attempt: how often it failed.
        lost: how often its sandbox was lost.
        cpu: the process's CPU seconds when it began.
    """

    task: GradingTask
    shares: bool
    attempt: int = 0
    lost: int = 0
    cpu: float = 0.0


class GradingProcess(WorkerProcess[GradingJob]):
    """A process that grades."""

    def __init__(self, setup: GradingSetup) -> None:
        super().__init__(setup)
        self.base = 0  # bytes resident at its start
        self._seen = psutil.Process(self.pid)

    async def open(self) -> WorkerLoaded:
        found = await super().open()
        with contextlib.suppress(psutil.Error):
            self.base = self._seen.memory_info().rss
        return found

    def add(self, number: int, job: GradingJob) -> None:
        super().add(number, job)
        if job.shares or len(self.jobs) == 1:
            self._start_job(job)

    def finish(self, number: int) -> GradingJob:
        """The job that has been answered; the next in the queue begins."""
        job = super().finish(number)
        if not job.shares and self.jobs:
            self._start_job(next(iter(self.jobs.values())))
        return job

    def _start_job(self, job: GradingJob) -> None:
        job.waited = 0.0
        job.cpu = self.cpu_seconds()

    def running(self) -> list[GradingJob]:
        """All of those that share, the first of the others, which are done in order."""
        jobs = list(self.jobs.values())
        return jobs if jobs and jobs[0].shares else jobs[:1]

    def takes(self, job: GradingJob) -> bool:
        """Next to others that share, behind others that do not, or alone."""
        if not self.jobs:
            return True
        first = next(iter(self.jobs.values()))
        if job.alone or first.alone or job.shares != first.shares:
            return False
        return len(self.jobs) < (SIDE_BY_SIDE if job.shares else QUEUE)

    def cpu_seconds(self) -> float:
        """CPU time that it has used, its threads included (clock_getcpuclockid(3))."""
        with contextlib.suppress(OSError):
            return time.clock_gettime((~self.pid << 3) | 2)
        return 0.0

    def memory(self) -> int:
        """Bytes resident beyond those at its start."""
        try:
            return self._seen.memory_info().rss - self.base
        except psutil.Error:
            return 0


SIDE_BY_SIDE = 64  #: gradings by async rewards in one process at once
QUEUE = 8  #: gradings by plain rewards that one process is given, so that it never waits for the next
PATIENCE = 2.0  #: seconds that a process has to report a time-out itself
MEMORY = 2 << 30  #: bytes that one grading may take beyond its process's size at the start
MORE = 4  #: times the limits, for a grading that is repeated


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


class Grading(ProcessPool[GradingProcess, GradingJob]):
    """The run's rewards.  Made, it has started its processes; `start` waits for the first of them."""

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
        confined = all(item.file and declared(item.file)["CONFINED"] for item in words.values())
        self._setup = GradingSetup(options.model_dump_json().encode(), list(words), MEMORY, confined)
        self._unconfined = ""  # said once
        what = f"the process that grades with {' '.join(words)}"
        super().__init__(lambda: GradingProcess(self._setup), worker_count(), GradingReply, what)
        self._waits: frozenset[str] = frozenset()
        self._groups: dict[tuple[str, int], _Group] = {}
        self._tallies = Tallies(options.reward_max_failed)

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
        tally.fail(where, text)

    async def _before(self, sample: Sample, evaluation: bool) -> GradingOutcome | None:
        """Have the sample's hooks see it; how it failed, if it did."""
        if self._hooks is None:
            return None
        try:
            await self._hooks.before_reward(sample, evaluation)
        except FailedHook as error:
            return GradingOutcome(failure=ERROR, text=error.text, trace=error.trace)
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
        sent = [send_sample(sample, self._arrays) for sample in samples]
        task = GradingTask(0, words, key, self._options.reward_timeout, sent)
        future: asyncio.Future[list[GradingOutcome]] = asyncio.get_running_loop().create_future()
        return await self.submit(GradingJob(future=future, task=task, shares=self._waits.issuperset(words)))

    # ---- the processes

    def _opened(self, process: GradingProcess, loaded: WorkerLoaded) -> None:
        self._waits = frozenset(loaded.waits)
        if loaded.unconfined and not self._unconfined:
            self._unconfined = loaded.unconfined
            print(f"hpcrl: note: rewards are graded unconfined: {loaded.unconfined}", file=sys.stderr, flush=True)

    def _request(self, job: GradingJob, number: int) -> GradingTask:
        job.task.id = number
        return job.task

    def _settle(self, job: GradingJob, reply: GradingReply) -> None:
        if self._is_repeated(job, reply):
            self._waiting.appendleft(job)
        else:
            job.future.set_result(reply.outcomes)

    def _is_repeated(self, job: GradingJob, reply: GradingReply) -> bool:
        """Whether it is done again: with more time where it failed in deterministic mode."""
        if lost := next((found.text for found in reply.outcomes if found.failure == LOST), ""):
            self._tallies.say(LOST, f"graded again: {lost}")
            job.lost += 1
            return job.lost < TRIES
        failed = any(found.failure for found in reply.outcomes)
        if not failed or job.attempt or not self._options.deterministic_mode:
            return False
        job.attempt = 1
        job.alone = True
        job.task.seconds *= MORE
        return True

    def _blame(self, job: GradingJob, failure: str, text: str) -> None:
        said = f"reward {' '.join(job.task.words)} {text}"
        outcome = GradingOutcome(failure=failure, text=said)
        self._settle(job, GradingReply(job.task.id, [outcome] * len(job.task.samples)))

    def _over(self, process: GradingProcess, job: GradingJob, passed: float) -> tuple[str, str] | None:
        job.waited += passed
        o, by = self._options, MORE if job.attempt else 1
        if job.waited > job.task.seconds + (PATIENCE if job.shares else 0):
            return TIMEOUT, f"took more than --reward-timeout {job.task.seconds:g} s"
        if not job.shares and process.cpu_seconds() - job.cpu > o.reward_cpu_limit * by:
            return TIMEOUT, f"took more than --reward-cpu-limit {o.reward_cpu_limit * by:g} s of CPU time"
        if process.memory() > self._setup.memory:
            return ERROR, f"took more than {self._setup.memory / 2**30:g} GiB"
        return None


def _types_in(files: Iterable[PromptFile], options: Options) -> Iterable[tuple[str, RewardWord]]:
    """(the rm_type of a prompt's metadata, the reward).

    Raises:
        DataError: names file and line of one that there is not.
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
