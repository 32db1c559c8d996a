"""The training loop of one policy on one rank; rank 0 drives it.

    generate -> fetch -> train -> publish weights -> save -> evaluate

With --loop async and fully-async the next rollout is requested before this one is trained on (`loop_schedule.py`).
With --colocate the checkpoint is saved before the weights are published: after that the engines have the GPUs.
What each call does is in `loop_calls.py`; what watches the loop learns of it by `observe` (`loop_watchers.py`).

Invariants: all ranks take the same branch at every step, because the answers that rank 0 gets from the queue, and what
it sees of a request to stop, are shared before any rank acts on them; a stop waits for no other role; the policy
version grows by one with each optimizer step; what is saved is always the state between two rollouts; a resumed run
first makes up for an evaluation that is due.
"""

from __future__ import annotations

import contextlib

from hpcrl.trainer.loop_calls import LoopCalls
from hpcrl.trainer.loop_schedule import publishes, settles
from hpcrl.trainer.rank import TrainerRank
from hpcrl.trainer.rollout_calls import StopAsked


def train_policy(rank: TrainerRank) -> None:
    """The policy of the run, to its end or to where the run is asked to stop."""
    loop = LoopCalls(rank)
    begin = rank.timeline.now()
    try:
        loop.publish_weights()
        if rank.options.runs_ahead:
            loop.generate(loop.at.rollout_id)
        if loop.evaluations.owed(loop.at.rollout_id):
            loop.evaluate(loop.at.rollout_id - 1)
        while loop.at.rollout_id < loop.total:
            step(loop, loop.at.rollout_id)
    except StopAsked as error:
        loop.stop(error)
    if loop.total and rank.saver.saved is not loop.at:  # what was only evaluated has not changed
        loop.save()
    loop.finish(begin)


def step(loop: LoopCalls, rollout_id: int) -> None:
    """One rollout and its optimizer steps.  StopAsked before it, if the run is to stop."""
    begin, options = loop.rank.timeline.now(), loop.options
    evaluates = loop.evaluations.due(rollout_id)
    loop.generate(rollout_id)
    share = loop.fetch(rollout_id)
    loop.observe("fetched", rollout_id, begin)
    if options.runs_ahead:
        loop.generate(rollout_id + 1)
    metrics = share.metrics | loop.train(share)
    publishing = loop.held > loop.at.version and publishes(options, rollout_id, evaluates)
    loop.end_rollout(rollout_id, settles(options, publishing))
    if publishing and not options.takes_turns:
        metrics |= loop.publish_weights()
    if options.runs_ahead:
        with contextlib.suppress(StopAsked), loop.waiting():  # the next fetch ends the run, once this step is logged
            loop.generate(rollout_id + 2)
    loop.observe("stepped", rollout_id, begin, metrics=metrics, share=share)
    loop.save_if_due()
    if options.takes_turns:
        metrics = loop.publish_weights() | {"perf/hand_over_time": loop.rank.gpu_sharing.seconds}
        loop.observe("handed over", rollout_id, metrics=metrics)
    if evaluates:
        loop.evaluate(rollout_id)
