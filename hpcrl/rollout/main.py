"""The rollout role: the rollouts of the policy that is trained, and the engines that they ask.

    python -m hpcrl.rollout.main RUN --attempt N

Invariants: whatever is wrong with the data, the tokenizer or the reward shows before any engine is waited for; an error
here is recorded before anybody hears of it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from hpcrl.engine.membership.registry import Registry
from hpcrl.errors import failure_kind
from hpcrl.report.timeline.spans import IMPORT, REQUESTS, SANDBOXES_NOW, process_began, role_timeline
from hpcrl.report.trackers.live import sending_live
from hpcrl.rollout.async_tasks import as_hpcrl_error, cancel, text_of
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.rollout.engines.external import keep_engines
from hpcrl.rollout.engines.membership import EngineMembership
from hpcrl.rollout.inputs import RolloutInputs
from hpcrl.rollout.policy_rollouts import PolicyRollouts
from hpcrl.run.engine_files import restart_limit
from hpcrl.run.process import die_with_parent
from hpcrl.run.role import RoleContext, act, open_role, say
from hpcrl.run.rundir import STOP
from hpcrl.sandbox.nodes.location import follow, say_where
from hpcrl.utils.imports import without_collection
from hpcrl.utils.waiting import LastSign

POLL = 0.2  #: seconds between two counts of requests
LOOK = 1.0  #: seconds between two looks at the stop file and at the other roles' errors
TERMINATED = 128 + signal.SIGTERM


class RolloutRole:
    """One attempt's rollout process.

    Attributes:
        imported: when this process had imported all that it needs (microseconds of unix time), 0 if that is not known.
    """

    def __init__(self, context: RoleContext, work: RolloutInputs, imported: int = 0) -> None:
        self.context = context
        self.timeline = role_timeline(context.rundir, "rollout", 0, context.plan.rollout.host)
        if imported:
            self.timeline.add(IMPORT, process_began(), imported)
        registry = Registry(restart_limit(context.options, context.plan))
        self.pool = EnginePool(context.rundir, context.plan, context.options, self.timeline, registry)
        self.membership = EngineMembership(context.rundir, self.pool)
        self.policy = PolicyRollouts(
            context, work, self.pool, self.membership, self.timeline, self._fail, self._finished
        )
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._sandboxes = False  # whether there were any

    async def run(self) -> int:
        """Serve until the trainer finishes (0) or SIGTERM comes (143); raises what went wrong."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._settle, TERMINATED)
        watch = asyncio.create_task(self._watch())
        keep = asyncio.create_task(keep_engines(self.membership, self.context))
        keep.add_done_callback(self._kept)
        starting = asyncio.create_task(self.policy.start())
        try:
            await asyncio.wait([starting, self._end], return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                return await self._end
            await starting
            self.timeline.started()
            return await self._end
        except Exception as error:  # told to the trainer, then raised
            self._note(error)
            await self.policy.fail(text_of(error))
            raise
        finally:
            await cancel(starting, watch, keep)
            await self.policy.halt()
            self.pool.loads.close()
            await self.pool.close()
            await self.policy.close()
            self.timeline.close()

    async def _watch(self) -> None:
        """Look out for the stop file and for other roles' errors."""
        looked = LastSign(ago=LOOK)
        try:
            while True:
                if looked.due(LOOK):
                    asked = STOP in self.context.rundir.check()
                    if asked and not self._stopping:
                        say("asked to stop")
                    self._stopping = asked
                    await self.policy.stop_if_asked(asked)
                self.timeline.count(REQUESTS, running=self.pool.loads.total)
                self._count_sandboxes()
                await asyncio.sleep(POLL)
        except Exception as error:  # noqa: BLE001  (any error of the watch ends the role)
            self._fail(error)

    def _count_sandboxes(self) -> None:
        states = self.policy.sandboxes.states()
        if self._sandboxes or any(states.values()):
            self._sandboxes = True
            self.timeline.count(SANDBOXES_NOW, **states)

    def _kept(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _finished(self) -> None:
        """There are no more rollouts."""
        asyncio.get_running_loop().call_later(POLL, self._settle, 0)

    def _note(self, error: BaseException) -> None:
        self.context.rundir.fail("rollout", 0, text_of(error), failure_kind(error))

    def _fail(self, error: BaseException) -> None:
        self._note(error)
        if not self._end.done():
            self._end.set_exception(as_hpcrl_error(error))

    def _settle(self, status: int) -> None:
        if not self._end.done():
            self._end.set_result(status)


def main() -> int:
    die_with_parent()
    context = open_role()
    ended = 0

    imported = time.time_ns() // 1000

    async def serve(work: RolloutInputs) -> int:
        return await RolloutRole(context, work, imported).run()

    def body() -> None:
        nonlocal ended
        say_where(context.rundir, context.options, len(context.plan.sandboxes))  # before any other process is started
        follow()
        with without_collection():
            work = RolloutInputs(context)
        with sending_live(context.options, context.rundir.root):
            ended = asyncio.run(serve(work))

    return act("rollout", context, 0, body) or ended


if __name__ == "__main__":
    sys.exit(main())
