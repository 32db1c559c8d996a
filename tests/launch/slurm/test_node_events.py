"""Which hosts Slurm has lost, by its own words: nodes that are down, and what accounting keeps of those that came
back."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.launch.slurm.node_events import failures, named
from hpcrl.run.queued_job import JobKey, QueueAnswer, QueuedJob
from tests.support.rundirs import FakeSlurm

NODES = ("node1", "node2", "node3")
AT = 1795392996.0
WHEN = time.strftime("%H:%M:%S", time.localtime(AT))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.bin}:/bin")
    fake.command(
        "scontrol",
        node("node1", "IDLE") + node("node2", "MIXED+DRAIN", "disk [root@1795392996]") + node("node3", "ALLOCATED"),
    )
    fake.command("sacctmgr")
    return fake


def node(name: str, state: str, reason: str = "") -> str:
    """A line of `scontrol --oneliner show node` with SLURM_TIME_FORMAT=%s, in short."""
    said = f" Reason={reason}" if reason else ""
    return (
        f"NodeName={name} Arch=x86_64 State={state} ThreadsPerCore=1 BootTime=1795391957 "
        f"SlurmdStartTime=1795393009{said}\n"
    )


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("DOWN+NOT_RESPONDING", "Not responding [root@1795392996]", "Not responding"),
        ("DOWN*", "Node unexpectedly rebooted [slurm@1795392996]", "Node unexpectedly rebooted"),
        ("DOWN+DRAIN", "power [see a@b] [root@1795392996]", "power [see a@b]"),
    ],
)
def test_down_node_with_slurms_reason(slurm: FakeSlurm, state: str, reason: str, said: str) -> None:
    """A node that is down is named with Slurm's reason."""
    slurm.command("scontrol", node("node1", "IDLE") + node("node2", state, reason))
    assert failures(NODES, AT - 100, AT + 100) == {"node2": f"Slurm has had it down since {WHEN}: {said}"}
    assert slurm.calls("scontrol") == ["--oneliner show node node1,node2,node3"]
    assert slurm.calls("sacctmgr") == []


@pytest.mark.parametrize(
    ("state", "reason", "named"),
    [
        ("ALLOCATED+DRAIN", "NHC: check_nvidia: Xid 79 on GPU 3", True),
        ("IDLE+DRAIN", "dcgm diag failed", True),
        ("MIXED+DRAIN", "kernel update on Tuesday", False),
        ("MIXED+DRAIN", "NVIDIA driver update 570", False),
        ("MIXED+DRAIN", "GPU firmware upgrade after job ends", False),
        ("MIXED+DRAIN", "moved to gpu-test reservation", False),
        ("DRAINED", "ib0 down", True),
        ("ALLOCATED", "gpu", False),
    ],
)
def test_a_health_check_that_drains_a_node_is_heard(slurm: FakeSlurm, state: str, reason: str, named: bool) -> None:
    """Of the nodes that are drained, those whose reason is broken hardware."""
    slurm.command("scontrol", node("node1", state, f"{reason} [root@1795392996]"))
    said = f"Slurm has had it drained since {WHEN}: {reason}"
    assert failures(NODES, AT - 100, AT + 100) == ({"node1": said} if named else {})


def test_a_drain_long_before_the_failure_is_no_cause(slurm: FakeSlurm) -> None:
    """And it does not hide a node that was down for a while, which accounting knows."""
    slurm.command("scontrol", node("node1", "ALLOCATED+DRAIN", "GPU 3 failed [root@1795392996]"))
    assert failures(NODES, AT - 9000, AT + 7000) == {}
    slurm.command("sacctmgr", "node3|DOWN*|1795392990|Not responding\n")
    assert set(failures(NODES, AT - 9000, AT + 100)) == {"node1", "node3"}


@pytest.mark.parametrize(("since", "until"), [(AT + 1, AT + 100), (AT - 100, AT - 1)])
def test_a_failure_at_another_time_is_none(slurm: FakeSlurm, since: float, until: float) -> None:
    slurm.command("scontrol", node("node2", "DOWN", "Not responding [root@1795392996]"))
    slurm.command("sacctmgr", "node3|DOWN*|1795392996|Not responding\n")
    assert failures(NODES, since, until) == {}


def test_accounting_knows_a_node_that_has_come_back(slurm: FakeSlurm) -> None:
    other = "||1795392921|Cluster Registered TRES\nnode1|DRAIN|1795392990|disk\nnode9|DOWN|1795392996|another's\n"
    slurm.command("sacctmgr", f"{other}node3|DOWN*|1795392996|a|b\n")
    assert failures(NODES, AT - 100, float("inf")) == {"node3": f"Slurm has had it down since {WHEN}: a|b"}
    (called,) = slurm.calls("sacctmgr")
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(AT - 100))
    assert "nodes=node1,node2,node3" in called and f"start={start}" in called


def test_a_slurm_that_says_nothing_names_nobody(slurm: FakeSlurm) -> None:
    assert failures(NODES, 0, float("inf")) == {}, "one that is drained has lost no job"
    slurm.command("scontrol", node("node2", "DOWN", "x [root@1795392996]"), 1, "slurm_load_node error")
    slurm.command("sacctmgr", "You do not have privileges\n", 1)
    assert failures(NODES, 0, float("inf")) == {}
    (slurm.bin / "sacctmgr").unlink()
    assert failures(NODES, 0, float("inf")) == {} == failures((), 0, float("inf"))


def test_status_names_the_node_that_ended_a_job(slurm: FakeSlurm) -> None:
    slurm.command("sacct", "node[1-2]|1795392900|1795392996\nnode3|1795392900|1795392997\n")
    slurm.command("sacctmgr", "node2|DOWN*|1795392996|Not responding\n")
    lost, other = JobKey("7", "id", 0.0), JobKey("8", "id", 0.0)
    failed = QueuedJob("ended", "NODE_FAIL", "one of its nodes failed", outcome="failed")
    answer = named(QueueAnswer({lost: failed, other: msgspec.structs.replace(failed, word="FAILED")}, "a note"))
    assert "nodes failed: node2" in answer.jobs[lost].reason
    assert answer.jobs[lost].reason.endswith(f"since {WHEN}: Not responding)")
    assert (answer.jobs[other].reason, answer.note) == ("one of its nodes failed", "a note")
    assert len(slurm.calls("sacct")) == 1
    for text in ("", "Unknown|x|y\n", "None assigned|1795392900|1795392997\n", "node[1-2|1795392900|1795392997\n"):
        slurm.command("sacct", text)
        assert named(QueueAnswer({lost: failed})).jobs[lost] == failed
