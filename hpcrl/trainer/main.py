"""One trainer rank: trains the policy of the run.

    torchrun ... -m hpcrl.trainer.main RUN --attempt N

Invariants: nothing heavy is imported before the process knows its place in the run; an error is recorded once, by the
rank that had it, before others that only saw that rank end.
"""

from __future__ import annotations

import os

from hpcrl.report.timeline.spans import trainer_timeline
from hpcrl.run.process import die_with_parent, exit_after
from hpcrl.run.role import RoleContext, act, open_role
from hpcrl.utils.imports import without_collection

#: seconds to hold back an error that may only mean that another rank is gone: that rank's own error is to be recorded
#: first, or its launcher's, which waits 3 s for a more telling one
ECHO = 6.0


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
            from hpcrl.trainer.megatron import replaced

            replaced.install()
        timeline = trainer_timeline(context.rundir, context.plan, rank)
        from hpcrl.trainer.rank import TrainerRank
        from hpcrl.trainer.training_loop import train_policy

        train_policy(TrainerRank(context, timeline))
        timeline.close()

    return act("trainer", context, rank, body, late)


if __name__ == "__main__":
    exit_after(main)
