"""Takes the trainer's place where nothing is trained (--debug-rollout-only): requests one rollout after another.

    python -m hpcrl.trainer.rollout_driver RUN --attempt N

    generate -> fetch -> log -> evaluate

Invariants: imports no torch and builds no model; the engines keep the weights of --hf-checkpoint, as policy version 0;
after each rollout its position is on disk, so a run that was stopped or killed resumes with the next prompts.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Literal

import msgspec

from hpcrl.engine.membership.broadcast import EngineBroadcast
from hpcrl.engine.membership.http import Address
from hpcrl.engine.membership.registry import Engine
from hpcrl.errors import DeadlineError, HpcrlError
from hpcrl.report.metrics import MetricsLog
from hpcrl.report.timeline.spans import READY, STEP, role_timeline
from hpcrl.run.peers import TrainerPeer, publish
from hpcrl.run.process import die_with_parent
from hpcrl.run.role import RoleContext, act, open_role, say
from hpcrl.run.rundir import write_atomic
from hpcrl.run.storage_errors import PATIENCE
from hpcrl.run.summary import Summary, write_summary
from hpcrl.transport.auth import http_key
from hpcrl.transport.client import Late, QueueClient
from hpcrl.transport.messages import UNFINISHED
from hpcrl.transport.share_format import Share
from hpcrl.utils.installed import versions
from hpcrl.utils.untrusted_files import Damaged, read_json
from hpcrl.utils.waiting import Deadline

POSITION = "position.json"  #: in the run directory
SLACK = 30.0  #: seconds that an engine has to publish itself once it may no longer take to start
LOOK = 0.2  #: seconds between two questions while engines start
TURN = 1.0  #: seconds between two looks for engines that have come back


class RolloutDriver:
    """The loop of a run without a trainer."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.options = context.options
        self.path = context.rundir.root / POSITION
        at = self._position()
        self.rollout_id: int = at["rollout_id"]
        self.timeline = role_timeline(context.rundir, "trainer", 0, context.plan.rollout.host)
        self.client = QueueClient(context.rundir, context.plan, 0, 1, self.options.rollout_timeout)
        self.log = MetricsLog(context.rundir)
        self.total: int = self._call("start_run", rollout_id=self.rollout_id, state=at["state"])["num_rollout"]
        self.log.truncate(self.rollout_id)
        self._name_weights()
        publish(context.rundir, TrainerPeer(start=self.rollout_id, total=self.total, versions=versions()))
        self.timeline.started()
        self.timeline.mark(READY, rollout_id=self.rollout_id)

    def _position(self) -> dict[str, Any]:
        """Where an earlier attempt has left off.

        Raises:
            HpcrlError: if that is damaged.
        """
        try:
            at = read_json(self.path, dict[str, Any])
            return {"rollout_id": int(at["rollout_id"]), "state": at["state"]}
        except FileNotFoundError:
            return {"rollout_id": 0, "state": None}
        except (OSError, Damaged, KeyError, TypeError, ValueError) as error:
            raise HpcrlError(f"{self.path} is damaged: {error}", "remove it, and the run starts over") from error

    def _name_weights(self) -> None:
        """Once all engines are up, have each call the weights that it has loaded version 0, as it reports with each
        token."""
        rundir = self.context.rundir
        seconds = self.options.engine_start_timeout + SLACK
        end = Deadline(seconds)
        while starting := self.client.call("engines")["starting"]:
            rundir.check()
            if end.over:
                raise DeadlineError(f"{starting[0]} did not come up within {seconds:.0f} s", f"see {rundir.logs}")
            time.sleep(LOOK)
        self._name("update")

    def _name(self, who: str) -> None:
        """Name the weights of engines that are to be updated, or (waiting) of those that have come back."""
        found = self.client.call("engines")[who]
        for index, incarnation, host, port in found:
            address = Address(host, port, http_key(self.context.rundir, index, incarnation))
            fleet = EngineBroadcast(
                self.context.rundir, [Engine.at(address, index, incarnation)], self.options.update_timeout
            )
            fleet.post("naming its weights", "/update_weight_version", {"new_version": "0"})
            self.client.call("engines_updated", engines=[[index, incarnation]], version=0, alone=True)

    def run(self) -> None:
        """All rollouts, or up to where the run is asked to stop."""
        started = time.monotonic()
        if self.rollout_id == 0 and not self.options.skip_eval_before_train:
            self._evaluate(-1)
        while self.rollout_id < self.total:
            if not self._step():
                self._finish("stopped", started)
                return
        self._finish("finished", started)

    def _step(self) -> bool:
        """One rollout; False if the run was asked to stop before it."""
        rollout_id = self.rollout_id
        begun = time.monotonic()
        at = self.timeline.now()
        self._call("generate", rollout_id=rollout_id, version=0)
        share = self._fetch(rollout_id)
        if share is None:
            return False
        state = self._call("snapshot", rollout_id=rollout_id, saved=0)
        self.rollout_id += 1
        write_atomic(self.path, msgspec.json.encode({"rollout_id": self.rollout_id, "state": state}), patience=PATIENCE)
        self.timeline.add(STEP, at, self.timeline.now(), rollout_id=rollout_id)
        self.log.append(rollout_id, share.metrics | {"perf/step_time": time.monotonic() - begun})
        interval = self.options.eval_interval
        if interval and (self.rollout_id % interval == 0 or self.rollout_id == self.total):
            self._evaluate(rollout_id)
        return True

    def _fetch(self, rollout_id: int) -> Share | None:
        """The samples of a rollout, None if the run is asked to stop; engines that come back meanwhile learn the
        version of their weights."""
        end = Deadline(self.options.rollout_timeout)
        while self.client.stop_seen is None:
            try:
                return self.client.fetch(rollout_id, min(TURN, end.left))
            except Late:
                if end.over:
                    raise
            self._name("waiting")
        return None

    def _evaluate(self, rollout_id: int) -> None:
        if self.options.eval_interval is None:
            return
        while UNFINISHED in (results := self._call("evaluate", rollout_id=rollout_id, version=0, patience=TURN)):
            self._name("waiting")
        if results:
            self.log.append(
                rollout_id, {f"eval/{name}/{key}": v for name, row in results.items() for key, v in row.items()}
            )

    def _finish(self, status: Literal["finished", "stopped"], started: float) -> None:
        self._call("finish", rollout_id=self.rollout_id)
        self.log.close()
        rundir = self.context.rundir
        write_summary(
            rundir.root, Summary(status, rundir.attempt, self.rollout_id, self.total, 0, time.monotonic() - started)
        )
        say(f"{status} after {self.rollout_id} of {self.total} rollouts; nothing was trained")

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        return self.client.call(method, self.options.rollout_timeout, **params)


def main() -> int:
    die_with_parent()
    context = open_role()
    return act("trainer", context, 0, lambda: RolloutDriver(context).run())


if __name__ == "__main__":
    sys.exit(main())
