"""When Slurm would start a job: the queue gone through as its backfill pass does, and what is read of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.launch.scheduler import ScriptVerdict
from hpcrl.run.queued_job import ExpectedStart
from hpcrl.slurm import start_times
from hpcrl.slurm.backfill import MOST_WORK, AskedNodes, JobInQueue, NodeInTime, expected
from hpcrl.slurm.start_times import FOREVER, QueueView, as_job, expected_starts, read_jobs, read_nodes
from tests.support.cluster import Cluster
from tests.support.drawn_queues import out_of_order, pairs_said, try_queue


def cluster_of(count: int = 4) -> list[NodeInTime]:
    return [NodeInTime(f"n{i}", frozenset({"main"}), 8, 16) for i in range(count)]


def job(seconds: float, *nodes: int, on: str = "", gpus: int = 8, whole: bool = False) -> JobInQueue:
    names = tuple(f"n{i}" for i in on)
    return JobInQueue(seconds, tuple(AskedNodes(n, gpus, 1, whole, ("main",), names) for n in nodes))


def test_a_short_job_goes_into_a_gap() -> None:
    """What waits is delayed by nothing that comes after it: a job that ends before starts at once, a longer one waits
    behind it."""
    running, waiting = [job(100, 2, on="01")], [job(50, 4)]
    assert expected(cluster_of(), running, waiting, job(100, 2)) == 0.0
    assert expected(cluster_of(), running, waiting, job(101, 2)) == 150.0
    assert expected(cluster_of(), running, [], job(101, 3)) == 100.0
    assert expected(cluster_of(), running, waiting, job(10, 5)) is None


def test_nodes_that_are_shared() -> None:
    """GPUs and processors of a node are counted at every moment; a job that wants it alone waits."""
    running = [job(100, 1, on="0", gpus=4)]
    assert expected(cluster_of(1), running, [], job(50, 1, gpus=4)) == 0.0
    assert expected(cluster_of(1), running, [], job(50, 1, gpus=5)) == 100.0
    assert expected(cluster_of(1), running, [], job(50, 1, gpus=1, whole=True)) == 100.0
    later = [job(100, 1, gpus=6)]  # from 100 on
    assert expected(cluster_of(1), running, later, job(150, 1, gpus=3)) == 200.0
    assert expected(cluster_of(1), running, later, job(150, 1, gpus=2)) == 0.0


def test_components_start_together() -> None:
    """Each of a heterogeneous job on nodes of its own, none before all can."""
    running = [job(100, 1, on="0"), job(200, 1, on="1")]
    assert expected(cluster_of(3), running, [], job(10, 1, 1)) == 100.0
    assert expected(cluster_of(3), running, [], job(10, 1, 2)) == 200.0
    assert expected(cluster_of(3), running, [job(10, 1, 2)], job(300, 1)) == 210.0


def test_no_node_holds_too_much() -> None:
    """In drawn queues no moment has more on a node than it has, and a job more never starts another earlier."""
    for seed in range(20):
        drawn = random.Random(seed)
        waiting = [job(drawn.randint(1, 300), drawn.randint(1, 4), gpus=drawn.choice((2, 4, 8))) for _ in range(12)]
        ask = job(60, drawn.randint(1, 4))
        before = 0.0
        for count in range(0, 13, 4):
            nodes = cluster_of()
            start = expected(nodes, [], waiting[:count], ask)
            assert start is not None and start >= before
            before = start
            for node in nodes:
                for moment in {one[0] for one in node.taken}:
                    assert sum(one[2] for one in node.taken if one[0] <= moment < one[1]) <= node.gpus


def test_a_queue_too_large() -> None:
    """Beyond some seconds of work nothing is computed."""
    waiting = [job(1, 1)] * (MOST_WORK // 4 + 1)
    assert expected(cluster_of(), [], waiting, job(1, 1)) is None


NODES = """\
node1|main*|16|gpu:8|mix
node1|train|16|gpu:8|mix
node2|main*|16|gpu:h100:8(S:0-1)|idle
node3|main*|16|gpu:8|down*
"""
JOBS = """\
1016+0|PENDING|1|1|N/A|30:00|30:00|main||1100|NO|Resources
1016+1|PENDING|2|4|gres/gpu:h100:4|30:00|30:00|main,train||1100|OK|Resources
1015|PENDING|4|4|gres:gpu:8|5:00|5:00|main||1200|OK|Priority
1017|PENDING|1|1|N/A|5:00|5:00|main||9999|OK|Dependency
1014|PENDING|1|1|N/A|5:00|UNLIMITED|main||1100|OK|None
1012|RUNNING|2|32|gres:gpu:8|1-00:02:57|3:00|main|node[1-2]|1100|OK|None
a line that says nothing
"""


def test_what_is_read_of_the_queue() -> None:
    """Nodes that are up with all their partitions; jobs by priority, then number; components as one job; no job that
    waits for something else than nodes."""
    nodes, default = read_nodes(NODES)
    assert [node.name for node in nodes] == ["node1", "node2"] and default == "main"
    assert nodes[0].partitions == {"main", "train"} and nodes[1].gpus == 8
    running, waiting = read_jobs(JOBS)
    assert [one.seconds for one in running] == [86400 + 177]
    assert running[0].parts == (AskedNodes(2, 8, 16, False, ("main",), ("node1", "node2")),)
    assert [len(one.parts) for one in waiting] == [1, 1, 2] and waiting[0].parts[0].nodes == 4
    assert waiting[1].seconds == FOREVER
    assert waiting[2].parts[0].whole and waiting[2].parts[1].gpus == 4


@pytest.fixture
def submission(tmp_path: Path):
    from hpcrl.config.recipe import load_recipe
    from hpcrl.launch.site import load_site
    from hpcrl.launch.submission import preview
    from tests.fit.models import recipe

    node = {"trainer.gpus_per_node": 8, "trainer.cpus_per_node": 16, "trainer.partition": "main"}
    site = load_site(None, {**node, "time": "10"})
    return preview(load_recipe(recipe(tmp_path)), {}, site)


def test_one_question_for_each_request(submission, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ask for the same are one question; where the queue is hidden Slurm's own time is taken; a Slurm that
    does not answer is asked no more."""
    asked: list[str] = []
    said = "Job 7 to start at 2026-11-26T18:00:16 using 16 processors on nodes node3 in partition main"

    def answer(script: str, seconds: float) -> ScriptVerdict:
        asked.append(script)
        return ScriptVerdict(True, said)

    monkeypatch.setattr(start_times, "PAUSE", 0.0)
    monkeypatch.setattr(start_times, "test_only", answer)
    monkeypatch.setattr(start_times, "read_queue", lambda: QueueView("", "", False))
    longer = replace(submission, site=submission.site.model_copy(update={"time": "20"}))
    found = expected_starts([submission, submission, longer])
    assert len(asked) == 2 and found[0] == found[1] and not found[0].computed
    assert found[0].start and found[0].told == said
    seen = QueueView(JOBS, NODES.replace("down*", "idle"), True)
    monkeypatch.setattr(start_times, "read_queue", lambda: seen)
    assert expected_starts([submission])[0].computed
    monkeypatch.setattr(start_times, "test_only", lambda *_: ScriptVerdict(False, "no answer within 20 s"))
    late = expected_starts([submission, longer])
    assert [one.start for one in late] == [None, None] and all(one.silent for one in late)
    monkeypatch.setattr(start_times, "test_only", lambda *_: ScriptVerdict(False, "invalid account", "", True))
    assert expected_starts([submission])[0] == ExpectedStart(told="invalid account", refused=True)


def test_what_a_run_asks_for(submission) -> None:
    """As its script does: nodes, GPUs, processors, partition, the time limit."""
    assert as_job(submission, "other") == JobInQueue(600.0, (AskedNodes(1, 8, 16, False, ("main",)),))


@pytest.mark.cluster
def test_the_order_in_a_drawn_queue(cluster: Cluster, tmp_path: Path) -> None:
    """Shapes of `hpcrl fit` start in the order that it says; ten such queues: make soak SOAK=start_order."""
    rows = try_queue(cluster, tmp_path, 1, (3, 4), (1, 4), second=0.2)
    assert len(rows) == 2 and pairs_said(rows, "fit") > 0
    assert not out_of_order(rows, "fit"), rows
