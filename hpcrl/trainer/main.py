"""One trainer rank; rank 0 turns the crank of the whole run.

    generate -> train -> publish weights -> save -> evaluate

Invariants: all ranks take the same turn at every step, because rank 0's queue answers decide and are shared before
anyone acts; the policy version grows by one with each optimizer step; what is saved is always the state between two
rollouts; a resumed run first makes up for an evaluation that it owes.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from hpcrl.run.peers import TrainerPeer, publish
from hpcrl.run.process import die_with_parent
from hpcrl.run.role import RoleContext, act, open_role, say
from hpcrl.run.summary import Summary, write_summary

ECHO = 3.0  #: seconds to hold back an error that may only say that another rank is gone: that rank's own error comes first


class Crank:
    """The training loop of one rank."""

    def __init__(self, context: RoleContext) -> None:
        from hpcrl.config.plugin_points import load_points
        from hpcrl.queue.client import QueueClient
        from hpcrl.report.metrics import MetricsLog
        from hpcrl.trainer.checkpoint import save_load
        from hpcrl.trainer.checkpoint.resume import restore
        from hpcrl.trainer.checkpoint.saver import Saver
        from hpcrl.trainer.megatron import model
        from hpcrl.trainer.other_models import OtherModels
        from hpcrl.trainer.own_hooks import TrainerHooks
        from hpcrl.trainer.parallel.collectives import make_patient
        from hpcrl.trainer.parallel.parallel_state import initialize
        from hpcrl.trainer.parallel.verify_groups import verify
        from hpcrl.trainer.step.share_exchange import ShareExchange
        from hpcrl.trainer.weight_stream import WeightExit
        from hpcrl.weights.sender import WeightSender

        self.context, self.options = context, context.options
        self.hooks = TrainerHooks(context.options, load_points(context.options, "trainer"))
        self.ranks = initialize(context.options)
        self.hooks.initialized()
        verify(context.options, self.ranks.rank)
        self.policy = model.build(context.options, self.ranks)
        self.checkpoints = Path(context.options.save) if context.options.save else context.rundir.checkpoints
        save_load.writable(self.checkpoints)
        self.patient = make_patient(context.options)
        self.at, said = restore(self.policy, self.ranks, context.options, self.checkpoints, context.plan.run_id)
        self.saved = self.saving = self.at.version  # of the newest checkpoint, and of the one that is being written
        if self.driver:
            say(said)
        resumed = save_load.step(self.checkpoints, self.at.rollout_id) if self.at.rollout_id else None
        self.others = OtherModels(self.policy, self.ranks, context.options, resumed)
        also = lambda beside: self.others.save(self.at.rollout_id, self.at.version, beside)  # noqa: E731
        self.saver = Saver(self.policy, self.ranks, self.checkpoints, context.plan.run_id, context.options, also)
        self.shares = ShareExchange(self.ranks, context.options.distributed_timeout_minutes)
        args = (context.rundir, context.plan, self.ranks.dp_rank, self.ranks.dp_size, self.options.rollout_timeout)
        self.client = QueueClient(*args) if self.shares.fetches else None
        self.log = MetricsLog(context.rundir) if self.driver else None
        self.stopping = False
        self.total = self._ask("begin", rollout_id=self.at.rollout_id, state=self.at.data)["num_rollout"]
        self.exit = WeightExit(self.policy, self.patient, context.plan.trainers[self.ranks.rank].at, self.options.hf_checkpoint)
        self.sender = WeightSender(context.rundir, context.plan, context.options, self.driver) if context.plan.engines else None
        if self.driver:
            self.log.truncate(self.at.rollout_id)
            publish(context.rundir, TrainerPeer(start=self.at.rollout_id, total=self.total))
        self._together()

    @property
    def driver(self) -> bool:
        return self.ranks.rank == 0

    # ---- the loop

    def run(self) -> None:
        started = time.monotonic()
        self._publish()
        if self._owes_evaluation():
            self._evaluate(self.at.rollout_id - 1)
        while self.at.rollout_id < self.total:
            if not self._step():
                self.stopping = True
                self._save()
                self._finish("stopped", started)
                return
        if self.total:  # what was only evaluated has not changed
            self._save()
        self._finish("finished", started)

    def _step(self) -> bool:
        """One rollout and its optimizer steps; False if the run was asked to stop before it."""
        from hpcrl.trainer.step import train_batch
        from hpcrl.trainer.step.sample_record import record_samples
        from hpcrl.trainer.step.staleness import check_staleness

        rollout_id, begun = self.at.rollout_id, time.monotonic()
        self._ask("generate", rollout_id=rollout_id, version=self.at.version)
        fetched = self.client.fetch(rollout_id, self.options.rollout_timeout) if self.client else None
        self._together()
        share = self.shares.exchange(fetched)
        if share is None:
            return False
        check_staleness(share, self.at.version, self.options.staleness_bound)
        others = self.others.of_share(share.version, self.at.version)
        record = partial(record_samples, self.context.rundir.root, self.options, self.ranks)
        metrics = train_batch.train(self.policy, self.ranks, self.options, share, others, record, self.hooks)
        self.others.trained(rollout_id + 1)
        steps = train_batch.policy_steps(self.options, share)
        data = self._ask("snapshot", rollout_id=rollout_id, saved=self.saved)
        self.at = replace(self.at, rollout_id=rollout_id + 1, version=self.at.version + steps, data=data)
        metrics = share.metrics | metrics | (self._publish() if steps else {})
        metrics["perf/step_time"] = time.monotonic() - begun
        if self.log:
            self.log.append(rollout_id, metrics | {"policy_version": self.at.version})
        if path := self.saver.poll():
            self.saved = self.saving
            if self.driver:
                say(f"saved {path}")
        if self._due(self.options.save_interval) or self.at.rollout_id == self.total:
            self._save()
        if self._due(self.options.eval_interval) or self.at.rollout_id == self.total:
            self._evaluate(rollout_id)
        return True

    def _due(self, interval: int | None) -> bool:
        return bool(interval) and self.at.rollout_id % interval == 0

    def _publish(self) -> dict[str, float]:
        """The current weights into every engine."""
        metrics = self.sender.publish(self.exit.stream(), self.at.version) if self.sender else {}
        self.others.published(self.at.version)
        return metrics

    def _owes_evaluation(self) -> bool:
        """Whether the current weights are to be evaluated and, in a run that was stopped or killed, have not been."""
        if self.at.rollout_id == 0:
            return not self.options.skip_eval_before_train
        from hpcrl.trainer.parallel.collectives import broadcast_json

        due = self._due(self.options.eval_interval) or self.at.rollout_id == self.total
        done = broadcast_json(self.log.evaluated(self.at.rollout_id - 1) if self.log else None, group=self.patient)
        return due and not done

    def _evaluate(self, rollout_id: int) -> None:
        """Held-out accuracy, logged with the rollout that it follows (-1: before the first)."""
        if self.options.eval_interval is None or not self.context.plan.engines:
            return
        results = self._ask("evaluate", rollout_id=rollout_id, version=self.at.version)
        if self.log and results:  # none if the run was asked to stop meanwhile
            self.log.append(rollout_id, {f"eval/{name}/{key}": v for name, row in results.items() for key, v in row.items()})

    def _save(self) -> None:
        """Save; the last time, and before an early end, to the end."""
        last = self.at.rollout_id == self.total or self.stopping
        begun = time.monotonic()
        path = self.saver.save(self.at, wait=last)
        self.saved, self.saving = self.saving if self.saver.pending else self.at.version, self.at.version
        if self.log:
            self.log.append(self.at.rollout_id - 1, {"perf/save_time": time.monotonic() - begun})
        if self.driver:
            say(f"{'saving' if self.saver.pending else 'saved'} {path}")

    def _finish(self, status: Literal["finished", "stopped"], started: float) -> None:
        self._ask("finish", rollout_id=self.at.rollout_id)
        self.exit.leave()
        if self.driver:
            self.log.close()
            self.sender and self.sender.close()
            rundir, seconds = self.context.rundir, time.monotonic() - started
            last = Summary(status, rundir.attempt, self.at.rollout_id, self.total, self.at.version, seconds)
            write_summary(rundir.root, last)

    def _ask(self, method: str, **params: object) -> dict:
        """Rank 0 asks the rollout process; every rank gets the answer."""
        from hpcrl.trainer.parallel.collectives import broadcast_json

        answer = self.client.call(method, self.options.rollout_timeout, **params) if self.driver else None
        return broadcast_json(answer, group=self.patient)

    def _together(self) -> None:
        """Wait until all ranks are here, as long as one of them may have to wait for other roles."""
        import torch.distributed as dist

        dist.barrier(group=self.patient)


def main() -> int:
    die_with_parent()
    return work(open_role(), int(os.environ.get("RANK", "0")))


def work(context: RoleContext, rank: int) -> int:
    """Be trainer rank `rank` to the end of the run; the exit status."""

    def late(error: BaseException) -> float:
        from hpcrl.trainer.parallel.collectives import may_be_echo

        return ECHO if may_be_echo(error) else 0.0

    def body() -> None:
        from hpcrl.trainer.megatron import cpu_shim

        cpu_shim.install()
        Crank(context).run()

    return act("trainer", context, rank, body, late)


if __name__ == "__main__":
    sys.exit(main())
