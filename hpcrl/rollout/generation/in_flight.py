"""The groups that are being made, side by side, from `start` to `pop`; and what there is of them when the rest is not
needed.

Invariants: whatever a sampler raises comes out of `pop` or `stop`, and nothing is at work after `close`; a response
that was ended early keeps its tokens, and so does one that was finished and not yet graded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from hpcrl.errors import HpcrlError
from hpcrl.rollout.async_tasks import as_hpcrl_error, cancel
from hpcrl.rollout.filters.verdict import Verdict
from hpcrl.rollout.ledger.group_progress import GroupProgress
from hpcrl.rollout.samplers.sampler import GREEDY, ResponseRequest, Sampler
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED
from hpcrl.utils.waiting import Deadline

START = "start_rollout_id"  #: in metadata: the rollout in which a response was begun that a later one continues
ENDS = 3  #: how often a response that an engine aborts unasked is resumed
RETURN = 5.0  #: seconds that a sampler may take to return what its engine has ended


class InFlightGroups:
    """The groups of a rollout, or of several.

    Attributes:
        each: responses to a prompt.
        greedy: whether the greedy response is wanted too.
        judge: asked about a finished group before it comes out of `pop`, about several at the same time.
        done: called when there is something to `pop`.
    """

    def __init__(
        self,
        sampler: Sampler,
        each: int,
        greedy: bool,
        judge: Callable[[GroupProgress], Awaitable[Verdict]],
        done: Callable[[], None],
    ) -> None:
        self._sampler = sampler
        self._each = each
        self._greedy = greedy
        self._judge = judge
        self._done = done
        self._running: dict[asyncio.Task[Verdict | None], GroupProgress] = {}
        self._asked: dict[int, list[ResponseRequest]] = {}  # by group, what is asked for now
        self._ended: deque[asyncio.Task[Verdict | None]] = deque()
        self._ending = False
        self._idle = 0.0
        self._idle_since = time.monotonic()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def responses(self) -> int:
        """Those that are not finished."""
        return sum(self._each - len(progress.finished) for progress in self._running.values())

    def complete(self, progress: GroupProgress) -> bool:
        return progress.complete(self._each, self._greedy)

    def idle_time(self) -> float:
        """Seconds in which nothing was at work, since this was last asked."""
        now = time.monotonic()
        idle = self._idle + (0.0 if self._running else now - self._idle_since)
        self._idle = 0.0
        self._idle_since = now
        return idle

    def start(self, progress: GroupProgress, rollout_id: int, version: int) -> None:
        """Make what the group lacks, for this rollout, under this policy."""
        if not self._running:
            self._idle += time.monotonic() - self._idle_since
        task = asyncio.create_task(self._make(progress, rollout_id, version))
        self._running[task] = progress
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Task[Verdict | None]) -> None:
        self._ended.append(task)
        self._done()

    def pop(self) -> tuple[GroupProgress, Verdict] | None:
        """A group that is finished, and what was said of it; the first that was."""
        while self._ended:
            if (task := self._ended.popleft()) in self._running:  # not given up meanwhile
                progress, verdict = self._finished(task)
                assert verdict is not None
                return progress, verdict
        return None

    def _finished(self, task: asyncio.Task[Verdict | None]) -> tuple[GroupProgress, Verdict | None]:
        progress = self._running.pop(task)
        self._asked.pop(progress.number, None)
        if not self._running:
            self._idle_since = time.monotonic()
        if (error := task.exception()) is not None:
            raise as_hpcrl_error(error)
        return progress, task.result()

    async def stop(self, abort: Callable[[], Awaitable[None]] | None) -> list[tuple[GroupProgress, Verdict | None]]:
        """End what is in flight: the groups, finished or not, and what was said of them.

        Args:
            abort: how engines get the abort, so that what they have is kept.
        """
        self._ending = True
        rollouts = {number: asked[0].rollout_id for number, asked in self._asked.items() if asked}
        if abort is not None and self._running:
            await abort()
            await self._returned()
        await cancel(*self._running)
        groups = [
            (progress, None) if task.cancelled() else self._finished(task)
            for task, progress in list(self._running.items())
        ]
        for progress, _ in groups:
            for asked in self._asked.pop(progress.number, ()):
                if asked.results and asked.index not in progress.finished and asked.index != GREEDY:
                    progress.partial[asked.index] = tuple(asked.results)
            if abort is not None and progress.number in rollouts:
                _mark_start(progress, rollouts[progress.number])
        self._running.clear()
        self._ended.clear()
        self._ending = False
        return groups

    async def _returned(self) -> None:
        """Wait, RETURN at most, until samplers have returned what engines have ended."""
        deadline = Deadline(RETURN)
        while not deadline.over:
            working = [task for task, progress in self._running.items() if self._generates(task, progress)]
            if not working:
                return
            await asyncio.wait(working, timeout=0.02)

    def _generates(self, task: asyncio.Task[Verdict | None], progress: GroupProgress) -> bool:
        """Whether a response of the group may still be at an engine: what only waits for its reward is graded another
        time; or all is done but what comes after."""
        open_ = [asked for asked in self._asked.get(progress.number, ()) if asked.index not in progress.finished]
        if self.complete(progress):
            return not task.done()
        return not task.done() and any(not asked.results for asked in open_)

    async def close(self) -> None:
        """Cancel whatever is at work."""
        await cancel(*self._running)
        self._running.clear()

    # ---- one group

    async def _make(self, progress: GroupProgress, rollout_id: int, version: int) -> Verdict | None:
        asked = [
            ResponseRequest(progress.group, index, rollout_id, version, partial=progress.partial.get(index, ()))
            for index in range(self._each)
            if index not in progress.finished
        ]
        if self._greedy and math.isnan(progress.baseline):
            asked.append(ResponseRequest(progress.group, GREEDY, rollout_id, version))
        self._asked[progress.number] = asked
        async with asyncio.TaskGroup() as tasks:
            for one in asked:
                tasks.create_task(self._one(progress, one))
        if self._greedy:
            for sample in progress.samples():
                sample.baseline = progress.baseline
        return await self._judge(progress) if self.complete(progress) else None

    async def _one(self, progress: GroupProgress, asked: ResponseRequest) -> None:
        for _ in range(ENDS):
            samples = _carried(await self._sampler.make(asked), asked.partial)
            if any(sample.status == ABORTED for sample in samples):
                if asked.index != GREEDY and any(sample.response_length for sample in samples):
                    progress.partial[asked.index] = tuple(samples)
                if self._ending:
                    return
                begun = progress.partial.get(asked.index, ()) if asked.index != GREEDY else ()
                again = ResponseRequest(asked.group, asked.index, asked.rollout_id, asked.version, partial=begun)
                self._asked[progress.number] = [
                    again if other is asked else other for other in self._asked[progress.number]
                ]
                asked = again
                continue
            self._add_samples(progress, asked.index, samples)
            return
        raise HpcrlError(
            f"response {asked.index} of group {progress.number} ended early {ENDS} timeswithout a request to abort"
        )

    def _add_samples(self, progress: GroupProgress, index: int, samples: list[Sample]) -> None:
        if index == GREEDY:
            failed = any(sample.grading for sample in samples)
            progress.baseline = math.inf if failed else sum(sample.score for sample in samples) / len(samples)
            return
        progress.partial.pop(index, None)
        progress.finished[index] = samples


# ---- where a response that is continued began


def _mark_start(progress: GroupProgress, rollout_id: int) -> None:
    """Write into the metadata of what there is of a group in which rollout it was begun, as slime does: a buffer filter
    may want to know how old it is."""
    marked = {START: rollout_id}
    for index, samples in progress.finished.items():
        progress.finished[index] = [sample.replace(metadata=marked | sample.metadata) for sample in samples]
    for index, begun in progress.partial.items():
        progress.partial[index] = tuple(sample.replace(metadata=marked | sample.metadata) for sample in begun)


def _carried(samples: list[Sample], begun: Sequence[Sample]) -> list[Sample]:
    """The samples with the mark of those that they continue."""
    start = next((sample.metadata[START] for sample in begun if START in sample.metadata), None)
    if start is None:
        return samples
    return [sample.replace(metadata={START: start} | sample.metadata) for sample in samples]
