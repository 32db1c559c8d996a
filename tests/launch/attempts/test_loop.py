"""One attempt after another in a job: which failures another follows, and what ends the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import EXITED, UNEXPECTED, HpcrlError, PeerError, Stopped
from hpcrl.launch.attempts import loop
from hpcrl.launch.attempts.host_processes import HeldHosts
from hpcrl.launch.attempts.loop import StageAttempts, stay
from hpcrl.launch.attempts.progress import FRUITLESS
from hpcrl.launch.attempts.retries import HostFault
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.plan import Host, Plan
from hpcrl.run.attempt_log import (
    ATTEMPTS,
    FailureRecord,
    LeftOutRecord,
    ReadyRecord,
    lowered_settings,
    note_ready,
    read_attempts,
)
from hpcrl.run.pauses import CarriedOver
from hpcrl.run.peers import TrainerPeer, publish
from hpcrl.run.role import read_options
from hpcrl.run.rundir import RunDir
from hpcrl.run.summary import Summary, write_summary

Fails = Callable[[RunDir, StopRequest], str]
LOST = "node1"
HOSTS = (Host("node0", 1), Host(LOST, 1), Host("node2", 1, spare=True))
TWO = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 0, "loss_type": "sft_loss"}


class Job:
    """A stage whose attempts fail as told, and then finish.

    Attributes:
        warm: whether the hosts wait for the next attempt.
        failing: the role that fails, and its words.
        ended: the attempts after which all processes were ended.
        begun: each attempt, and whether it took over the hosts.
        engines: that the last one took over.
        options: of each attempt.
    """

    failing = ("trainer", "killed")

    def __init__(self, rundir: RunDir, monkeypatch: pytest.MonkeyPatch, fails: list[Fails], warm: bool = True) -> None:
        self.rundir = rundir
        self.options: list[Options] = []
        self.fails = fails
        self.stop = StopRequest()
        self.ended: list[int] = []
        self.begun: list[tuple[int, bool]] = []
        job = self

        class Hosts(HeldHosts):
            def pause(self, rundir: RunDir, poll: Callable[[], None]) -> bool:
                self.absent = set() if warm else {LOST}
                return warm

            def carry(self, plan: Plan, engines: bool = True) -> None:
                self.carried = CarriedOver(engines={0: 0} if engines else {})

            def end(self, rundir: RunDir, poll: Callable[[], None], at_once: Callable[[], bool]) -> None:
                job.ended.append(rundir.attempt)
                self.members, self.carried = [], None

        self.held = Hosts(hosts=list(HOSTS))
        self.left_out: list[str] = []
        monkeypatch.setattr(loop, "run_attempt", self._attempt)

    def _attempt(self, options: Any, backend: Any, run_id: str, rundir: RunDir, *more: Any) -> Summary:
        if rundir.attempt:
            rundir.make_attempt()
        self.begun.append((rundir.attempt, self.held.carried is not None))
        self.options.append(options)
        self.engines = self.held.engines
        self.held.members, self.held.carried = [SimpleNamespace(status=None)], None  # type: ignore[list-item]
        publish(rundir, TrainerPeer(start=rundir.attempt, total=9))
        if rundir.attempt < len(self.fails):
            role, words = self.failing
            rundir.fail(role, 1, f"{words} {'x' * rundir.attempt}", self.fails[rundir.attempt](rundir, self.stop))
            raise PeerError("trainer-1: killed")
        return Summary("finished", rundir.attempt)

    def run(self, leave: Any = stay, **options: Any) -> Summary:
        @contextmanager
        def observe(rundir: RunDir) -> Iterator[Callable[[], None]]:
            yield lambda: None

        backend: Any = SimpleNamespace(leave_out=self.left_out.extend, again="hpcrl resume {}".format)
        given = (
            Options(**(TWO | options)),
            backend,
            "id",
            self.rundir.root,
            self.stop,
            observe,
            lambda rundir: None,
            leave,
        )
        return StageAttempts(*given, held_hosts=self.held).run(self.rundir)


def killed(*_: Any) -> str:
    return ""


def checkpoint(rundir: RunDir, _: Any) -> str:
    """It has begun where the one before had saved, and saved before it was killed."""
    note_ready(rundir, max(rundir.attempt - 1, 0))
    (rundir.root / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(rundir.attempt))
    return ""


def test_next_attempt_takes_the_hosts_over(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(rundir, monkeypatch, [killed, killed])
    assert job.run().attempt == 2
    assert job.begun == [(0, False), (1, True), (2, True)] and job.ended == [2], "once, at the end"
    assert [e.why for e in read_attempts(rundir.root) if isinstance(e, FailureRecord)] == ["killed ", "killed x"]


def test_killed_launcher_is_a_fault_too(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was written of its end: the next one does, once, at the step that it had come to; not of a run that was
    stopped, and has saved."""
    earlier = ReadyRecord(0, 100.0, 2, 1.0)
    (rundir.root / ATTEMPTS).write_bytes(msgspec.json.encode(earlier) + b"\n")
    rundir.metrics_file.write_text('{"rollout_id": 6, "train/loss": 1.0}\n')
    later = RunDir(rundir.root, 1)
    for _ in range(2):
        loop._note_unrecorded(later)
    [found] = [e for e in read_attempts(rundir.root) if isinstance(e, FailureRecord)]
    assert (found.attempt, found.step, found.who, found.launcher) == (0, 7, "launcher", 1.0)
    (rundir.root / ATTEMPTS).write_bytes(msgspec.json.encode(earlier) + b"\n")
    write_summary(rundir.root, Summary("stopped", 0))
    Job(later, monkeypatch, []).run()
    assert not [e for e in read_attempts(rundir.root) if isinstance(e, FailureRecord)]


def test_all_begins_again_where_hosts_do_not_wait(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(rundir, monkeypatch, [killed], warm=False)
    assert job.run().attempt == 1
    assert job.begun == [(0, False), (1, False)] and job.ended == [0, 1]


@pytest.mark.parametrize(
    ("fails", "options", "last"),
    [
        ([killed] * 9, {"attempts": 3}, 2),
        ([killed], {"attempts": 1}, 0),
        ([lambda *_: "UsageError"], {}, 0),
        ([lambda *_: UNEXPECTED, killed], {}, None),
    ],
)
def test_a_job_ends_with_its_last_failure(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, fails: list[Fails], options: dict[str, Any], last: int | None
) -> None:
    job = Job(rundir, monkeypatch, fails)
    if last is None:
        assert job.run(**options).finished
        return
    with pytest.raises(PeerError, match="killed"):
        job.run(**options)
    assert job.begun[-1][0] == last and job.ended == [last]


def copied(rundir: RunDir, _: Any) -> str:
    """It has begun from a later copy in memory than the attempt before, and was killed."""
    note_ready(rundir, rundir.attempt)
    return ""


def resumed(rundir: RunDir, _: Any) -> str:
    """It has saved once, has begun there ever since, and was killed."""
    (rundir.root / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    note_ready(rundir, 3 if rundir.attempt else 0)
    return ""


def test_a_run_without_headway_ends(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five attempts in a row without a new checkpoint are enough; each that has one, on disk or in memory, counts from
    there."""
    job = Job(rundir, monkeypatch, [killed] * 99)
    with pytest.raises(PeerError, match="killed"):
        job.run(attempts=99)
    assert len(job.begun) == FRUITLESS + 1
    once = RunDir.create(rundir.root.parent / "once")
    once.make_attempt()
    job = Job(once, monkeypatch, [resumed] * 99)
    with pytest.raises(PeerError, match="killed"):
        job.run(attempts=99)
    assert len(job.begun) == FRUITLESS + 1, "that a later attempt begins at the only checkpoint is none"
    for name, fails in (("saves", checkpoint), ("copies", copied)):
        later = RunDir.create(rundir.root.parent / name)
        later.make_attempt()
        job = Job(later, monkeypatch, [fails] * 9)
        assert job.run(attempts=99).attempt == 9


def test_scheduler_may_want_the_hosts_back(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def leave(error: HpcrlError, well: bool, stuck: dict[str, str]) -> HostFault:
        asked.append((error.what, well))
        return HostFault("preempted" if len(asked) == 2 else "")

    job = Job(rundir, monkeypatch, [killed] * 3)
    with pytest.raises(PeerError):
        job.run(leave)
    assert asked == [("trainer-1: killed", True)] * 2 and job.begun[-1][0] == 1


@pytest.mark.parametrize("warm", [True, False])
def test_a_spare_host_takes_the_place_of_a_lost_one(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """Once: for the second host that is lost there is none, and the job ends.  What waits on the others is taken over
    where the lost one alone is absent."""
    faults = iter([HostFault("node1 was lost", ("node1",)), HostFault("node0 was lost", ("node0",))])
    job = Job(rundir, monkeypatch, [killed, killed])
    monkeypatch.setattr(job.held, "pause", lambda *_: setattr(job.held, "absent", {LOST} if warm else {LOST, "node0"}))
    with pytest.raises(PeerError):
        job.run(lambda *_: next(faults), spares=1)
    assert job.begun == [(0, False), (1, warm)] and job.left_out == [LOST]
    assert [host.name for host in job.held.hosts] == ["node0", "node2"]
    (told,) = [e for e in read_attempts(rundir.root) if isinstance(e, LeftOutRecord)]
    assert (told.host, told.spare, told.why) == (LOST, "node2", "node1 was lost")


def test_a_lost_host_ends_a_job_without_spares(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(rundir, monkeypatch, [killed])
    with pytest.raises(PeerError):
        job.run(lambda *_: HostFault("node1 was lost", (LOST,)), attempts=3)
    assert job.begun == [(0, False)] and job.left_out == []


def test_a_lost_host_explains_an_error_of_a_rank(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before anything was trained, as hardware breaks: a spare host takes over; where all hosts are well, the job
    ends as it would without spares."""
    monkeypatch.setattr(loop, "reason_to_end", lambda *_: "it had not begun to train")
    faults = iter([HostFault("node1 was lost", (LOST,)), HostFault()])
    job = Job(rundir, monkeypatch, [killed, killed])
    with pytest.raises(PeerError):
        job.run(lambda *_: next(faults), spares=1)
    assert [number for number, _ in job.begun] == [0, 1] and job.left_out == [LOST]
    later = RunDir.create(rundir.root.parent / "settings")
    later.make_attempt()
    job = Job(later, monkeypatch, [lambda *_: "UsageError"])
    with pytest.raises(PeerError):
        job.run(lambda *_: HostFault("node1 was lost", (LOST,)), spares=1)
    assert job.left_out == [], "no host is to blame for a setting"


def test_hosts_are_left_out_of_jobs_that_allow_it(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm ends any other with its node, even where the plan would do without it."""
    job = Job(rundir, monkeypatch, [killed])
    job.held.hosts = [*HOSTS[:2], Host("node3", 0)]
    with pytest.raises(PeerError):
        job.run(lambda *_: HostFault("no answer from node3", ("node3",)))
    assert job.begun == [(0, False)] and job.left_out == []


def test_what_cannot_be_killed_costs_its_host(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another takes its place; else no attempt begins on top of it."""
    for spares in (1, 0):
        rundir = RunDir.create(rundir.root.parent / f"spares-{spares}")
        rundir.make_attempt()
        job = Job(rundir, monkeypatch, [killed])
        job.held.hosts = list(HOSTS[: 2 + spares])
        job.held.stuck = {"node0": "on node0 process 7 cannot be killed"}
        if spares:
            assert job.run(spares=1).attempt == 1 and job.left_out == ["node0"]
        else:
            with pytest.raises(PeerError):
                job.run()
            assert job.begun == [(0, False)]


def test_stop_between_two_attempts(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing begins after it, and it counts as a stop; a run that was to save, and failed, has failed."""

    def asked(_: RunDir, stop: StopRequest) -> str:
        stop.request_stop("hpcrl stop")
        return ""

    job = Job(rundir, monkeypatch, [killed])
    with pytest.raises(Stopped, match="hpcrl stop.*killed"):
        job.run(lambda *_: job.stop.request_stop("hpcrl stop") or HostFault())
    assert job.begun == [(0, False)] and job.ended == [0]
    later = RunDir.create(rundir.root.parent / "saves")
    later.make_attempt()
    with pytest.raises(PeerError, match="killed"):
        Job(later, monkeypatch, [asked]).run()


FULL = "OutOfMemoryError: CUDA out of memory."
PACKED = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096, "attempts": 2}


def test_less_memory_after_each_error(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever was trained before, and without a checkpoint, up to --oom-retries; options.json and attempts.jsonl have it,
    also for another job; then an error counts as any other, and the last words say what was lowered."""
    job = Job(rundir, monkeypatch, [lambda *_: UNEXPECTED] * 9)
    job.failing = ("trainer", FULL)
    with pytest.raises(PeerError, match="killed"):
        job.run(**PACKED)
    used = [(o.log_probs_chunk_size, o.max_tokens_per_gpu, o.megatron.get("recompute_method")) for o in job.options]
    assert used == [(-1, 4096, None), (2048, 4096, None), (2048, 2048, None), *[(2048, 2048, "uniform")] * 2]
    assert job.begun[-1] == (4, True) and job.engines == {0: 0}, "engines continue"
    assert read_options(rundir) == job.options[-1]
    told = [(one.attempt, one.step, one.what) for one in lowered_settings(rundir.root)]
    assert told[0] == (0, 0, "--log-probs-chunk-size 2048, as trainer-1 ran out of memory") and len(told) == 3
    said = capsys.readouterr().err
    assert said.count("lowered before: --log-probs-chunk-size 2048") == 1 and "--attempts 2" in said, said
    later = RunDir(rundir.root, 5)
    job = Job(later, monkeypatch, [lambda *_: "UsageError"] * 6)
    job.failing = ("trainer", FULL)
    with pytest.raises(PeerError):
        job.run(**PACKED)
    assert [number for number, _ in job.begun] == [5], "all retries are used"


def test_engines_are_restarted_with_less(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was trained, too; hosts stay."""
    job = Job(rundir, monkeypatch, [lambda *_: EXITED])
    monkeypatch.setattr(loop, "find", lambda *_: None)
    job.failing = ("engine", FULL)
    assert job.run(vllm={"gpu_memory_utilization": 0.9}).attempt == 1
    assert job.begun == [(0, False), (1, True)] and job.engines == {}
    assert job.options[1].vllm == {"gpu_memory_utilization": 0.85}


def test_disk_that_is_full_for_a_moment(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for; one that stays full ends the job."""
    obstacles = iter(["No space left", "No space left", ""])
    monkeypatch.setattr(loop, "write_obstacle", lambda path: next(obstacles))
    monkeypatch.setattr(loop, "LOOK", 0.0)
    assert Job(rundir, monkeypatch, [killed]).run().attempt == 1
    monkeypatch.setattr(loop, "write_obstacle", lambda path: "No space left")
    monkeypatch.setattr(loop, "DISK", 0.0)
    later = RunDir.create(rundir.root.parent / "full")
    later.make_attempt()
    with pytest.raises(PeerError):
        Job(later, monkeypatch, [killed]).run()
