"""Engines of a run on the cluster that are killed, stopped and cut off, again and again, at moments that a seed draws.

SEED: which faults, and which loop (even: sync, odd: fully-async); N: how many a seed (20).  An engine is struck at any
moment of a step, weight update included, or while it comes back from the fault before.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.run.engine_files import EngineView, read_views
from tests.support.cluster import Cluster
from tests.support.ledger_account import account
from tests.support.runs import POLICY, metrics, recipe, rows
from tests.support.slurm import Job, hpcrl, submit

pytestmark = [pytest.mark.soak, pytest.mark.cluster]

SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1,2").split(",")]
FAULTS = int(os.environ.get("N") or 20)
KINDS = ("kill the server", "kill the core", "kill the supervisor", "stop the server", "stop the core", "cut off")
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
CUT = (2.0, 7.0)  #: seconds without a network; Slurm declares a node lost after 12
LONG = {"rollout_max_response_len": 120, "rollout_max_context_len": 192, "max_tokens_per_gpu": 2048}
NEVER_WAITS = LONG | {"loop": "fully-async", "max_staleness": 2, "use_tis": True, "deterministic_mode": False}


class Faults:
    """Strikes the engines of a run, and knows what it did."""

    def __init__(self, cluster: Cluster, job: Job, chance: random.Random) -> None:
        self.cluster = cluster
        self.job = job
        self.chance = chance
        plan = json.loads((job.root / "attempts/0/plan.json").read_text())
        self.hosts: list[str] = [place["host"] for place in plan["engines"]]
        self.shared = {place["host"] for place in plan["trainers"]} | {plan["rollout"]["host"]}
        self.done: list[dict[str, Any]] = []

    def views(self) -> list[EngineView]:
        found = read_views(self.job.root / f"attempts/{self.job.attempt()}")
        return found.engines if found else []

    def all_serve(self) -> bool:
        return [view.state for view in self.views()] == 2 * ["serving"]

    def moment(self) -> str:
        """Wait until it is time for the next fault."""
        if self.done and self.chance.random() < 0.35:  # what was struck last is on its way back
            self.job.until(lambda: not self.all_serve() or self.settled(), 60)
            time.sleep(self.chance.uniform(0, 12))
            return "joining"
        self.job.until(self.all_serve, 300)
        steps = self.job.steps()
        self.job.until(lambda: self.job.steps() > steps, 300)
        time.sleep(self.chance.uniform(0, self.step_time()))
        return "step"

    def settled(self) -> bool:
        return self.all_serve() and time.monotonic() > self.done[-1]["at"] + 30

    def step_time(self) -> float:
        times = [row["perf/step_time"] for row in rows(self.job.root) if "perf/step_time" in row]
        return statistics.median(times[-10:])

    def strike(self) -> None:
        when, kind = self.moment(), self.chance.choice(KINDS)
        index = self.chance.randrange(len(self.hosts))
        if kind == "cut off":
            index = next(i for i, host in enumerate(self.hosts) if host not in self.shared)
        elif when == "joining":
            index = next((view.index for view in self.views() if view.state != "serving"), index)
        before = self.views()[index].state
        hit = self.cut(self.hosts[index]) if kind == "cut off" else self.signal(index, kind)
        until = time.monotonic() + 15
        while not hit and time.monotonic() < until:  # between two lives
            time.sleep(0.2)
            hit = self.signal(index, kind)
        self.done.append(
            {"fault": kind, "when": when, "engine": index, "state": before, "hit": hit, "at": time.monotonic()}
        )
        print(json.dumps(self.done[-1] | {"step": self.job.steps()}), flush=True)

    def cut(self, node: str) -> bool:
        self.cluster.link(node, "down")
        time.sleep(self.chance.uniform(*CUT))
        self.cluster.link(node, "up")
        return True

    def signal(self, index: int, kind: str) -> bool:
        """False if there was nothing to strike: between two lives."""
        what, _, whom = kind.partition(" the ")
        try:
            words = {"supervisor": "hpcrl.engine.main", "server": "hpcrl.engine.server", "core": "hpcrl.engine.server"}
            found = [
                psutil.Process(pid)
                for pid, argv in self.cluster.processes(self.hosts[index])
                if words[whom] in argv and argv[argv.index("--index") + 1] == str(index) and str(self.job.root) in argv
            ]
            if whom == "core":
                found = [child for server in found for child in server.children()]
            if not found:
                return False
            found[-1].send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        except psutil.Error:
            return False
        return True


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_end_at_random_moments(cluster: Cluster, tmp_path: Path, task: Path, seed: int) -> None:
    """Engines end at random moments, and the run continues."""
    values = {
        "num_rollout": 100000,
        "save_interval": 1,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 2,
    }
    values |= {"attempts": 2 * FAULTS + 1, "rollout_health_check_timeout": 8, "update_timeout": 30}
    settings = ("engine.gpus_per_node=1", "requeue=false")
    more = NEVER_WAITS if seed % 2 else {}
    job = submit(cluster, recipe(tmp_path, task, **(POLICY | values | more)), tmp_path / "run", settings=settings)
    job.until(lambda: job.steps() >= 10)
    faults = Faults(cluster, job, random.Random(seed))
    assert len(set(faults.hosts)) == 2
    before = faults.step_time()
    while sum(one["hit"] for one in faults.done) < FAULTS:
        faults.strike()
    job.until(faults.all_serve, 300)
    steps = job.steps()
    job.until(lambda: job.steps() >= steps + 10)
    hpcrl(cluster, "stop", job.root)
    job.ends("FAILED")  # with 143: stopped, and saved
    found, trained = account(job.root), list(metrics(job.root).values())
    restarts = [view.restarts for view in faults.views()]
    numbers = {"seed": seed, "faults": sum(one["hit"] for one in faults.done), "restarts": restarts}
    numbers |= {
        "attempts that ended in an update": job.attempt(),
        "steps": len(trained),
        "seconds a step before": before,
        "after": faults.step_time(),
    }
    print(json.dumps(numbers), flush=True)
    assert job.attempt() <= FAULTS
    assert [row["rollout_id"] for row in rows(job.root) if "train/loss" in row] == list(range(len(trained)))
    assert not found.wrong, found.wrong
    assert found.trained == len(trained) * POLICY["rollout_batch_size"]
    assert max(row["staleness/max"] for row in trained) <= (2 if seed % 2 else 0)
    of_current_weights = [row[DIFFERENCE] for row in trained if DIFFERENCE in row]  # not of stale tokens alone
    assert of_current_weights and max(of_current_weights) <= 1e-5, "nobody answered with other weights"
