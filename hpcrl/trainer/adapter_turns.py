"""Several adapters over one model, trained in turn, each by its own options, data and schedule.

    engines   a: rollout 0   b: rollout 0   c: rollout 0   a: rollout 1   b: rollout 1 ...
    ranks                    a: step 0      b: step 0      c: step 0      a: step 1    ...

While one adapter is trained, engines sample for the others under the weights that these have published: every sample is
of the policy that trains on it.  An adapter's evaluation is waited for before that adapter is trained again, or the
run ends.

Invariants: an adapter's steps are those of a run of its own, whatever the others do; the order of turns is that of the
recipe, and one whose rollouts are done has none any more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpcrl.adapters.run_directories import places_of
from hpcrl.run.summary import Summary, write_summary
from hpcrl.trainer.adapter_metrics import AdapterMetrics, TogetherLog
from hpcrl.trainer.training_loop import TrainingLoop

if TYPE_CHECKING:
    from hpcrl.trainer.rank import TrainerRank


class AdapterTurns:
    """All adapters of an attempt, on one rank."""

    def __init__(self, rank: TrainerRank) -> None:
        from hpcrl.trainer.lora.adapter_states import AdapterStates

        self.rank = rank
        self.states = AdapterStates(rank.policy)
        self.loops: list[TrainingLoop] = []
        self.log = TogetherLog(rank.context.rundir) if rank.driver else None
        for slot, (name, place) in enumerate(places_of(rank.context, make=rank.driver)):
            policy = self.states.add(place.options)
            log = AdapterMetrics(place.rundir, name, self.log) if self.log else None
            self.loops.append(TrainingLoop(rank, place, policy, log, name, slot))

    def _done(self) -> int:
        return sum(loop.at.rollout_id for loop in self.loops)

    def run(self) -> None:
        """Train all of them to their ends, or to where the run is asked to stop."""
        from hpcrl.trainer.rollout_calls import StopAsked

        started = time.monotonic()
        for loop in self.loops:
            self.states.enter(loop.slot)
            loop.begin()
        self.rank.open_engines(self.loops[0].client, self.states.shown)
        if self.rank.engines:
            self.rank.engines.versions[:] = [loop.at.version for loop in self.loops]
        if self.log:
            self.log.begin([(loop.name, loop.log, loop.at.rollout_id) for loop in self.loops if loop.log])
        self.rank.ready(self._done(), sum(loop.total for loop in self.loops))
        try:
            self._train()
        except StopAsked as error:
            for loop in self.loops:
                if loop.more:
                    loop.stop(error)
        for loop in self.loops:  # before any waits for an evaluation: a stop has a deadline
            self.states.enter(loop.slot)
            loop.keep()
        for loop in self.loops:
            loop.end()
        self.rank.leave()
        seconds = time.monotonic() - started
        last = _of_all([loop.finish(seconds) for loop in self.loops])
        if self.log:
            self.log.close()
            write_summary(self.rank.context.rundir.root, last)

    def _train(self) -> None:
        for loop in self.loops:
            self.states.enter(loop.slot)
            loop.start()
            loop.request()
        while left := [loop for loop in self.loops if loop.more]:
            for loop in left:
                self.states.enter(loop.slot)
                loop.step()
                loop.request()
            for loop in self.loops:
                loop.evaluations.look()


def _of_all(summaries: list[Summary]) -> Summary:
    """The summary of a run, of those of its adapters: their rollouts and steps together."""
    return Summary(
        "finished" if all(one.finished for one in summaries) else "stopped",
        summaries[0].attempt,
        sum(one.rollout_id for one in summaries),
        sum(one.total for one in summaries),
        sum(one.policy_version for one in summaries),
        summaries[0].seconds,
    )
