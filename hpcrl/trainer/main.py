"""One trainer rank: trains the policy of the run.

    torchrun ... -m hpcrl.trainer.main RUN --attempt N

Invariant: an error is recorded once, by the rank that had it, before others that only saw that rank end.
"""

from __future__ import annotations

import os
import time

from hpcrl.report.timeline.spans import trainer_timeline
from hpcrl.run.process import die_with_parent, exit_after
from hpcrl.run.role import RoleContext, act, open_role
from hpcrl.trainer.rank import TrainerRank
from hpcrl.trainer.training_loop import TrainingLoop
from hpcrl.utils.imports import without_collection

#: seconds to hold back an error that may only mean that another rank is gone: that rank's own error is to be recorded
#: first, or its launcher's, which waits 3 s for a more telling one
ECHO = 6.0


def train(rank: TrainerRank) -> None:
    """The policy of the run, to its end or to where the run is asked to stop."""
    from hpcrl.trainer.rollout_calls import StopAsked

    loop = TrainingLoop(rank)
    loop.start_rollouts()
    rank.open_engines(loop.client)
    rank.ready(loop.at.rollout_id, loop.total)
    started = time.monotonic()
    try:
        loop.start()
        while loop.more:
            loop.step()
    except StopAsked as error:
        loop.stop(error)
    loop.keep()
    loop.end_rollouts()
    rank.leave()
    loop.finish(time.monotonic() - started)


def main() -> int:
    die_with_parent(forks=True)
    return work(open_role(), int(os.environ.get("RANK", "0")))


def work(context: RoleContext, rank: int) -> int:
    """Be trainer rank `rank` to the end of the run; the exit status."""

    def late(error: BaseException) -> float:
        from hpcrl.trainer.collectives import may_be_echo

        return ECHO if may_be_echo(error) else 0.0

    def body() -> None:
        with without_collection():
            from hpcrl.trainer.cpu import cpu_shim

            cpu_shim.install()
        timeline = trainer_timeline(context.rundir, context.plan, rank)
        train(TrainerRank(context, timeline))
        timeline.close()

    return act("trainer", context, rank, body, late)


if __name__ == "__main__":
    exit_after(main)
