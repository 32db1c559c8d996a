"""How attempts have begun and failed, and what the faults between them have cost."""

from __future__ import annotations

from hpcrl.report.not_learning import notes_of
from hpcrl.report.status_text import fault_rows
from hpcrl.run.attempt_log import (
    ATTEMPTS,
    FailureRecord,
    LeftOutRecord,
    ReadyRecord,
    faults_of,
    note_failed,
    note_lowered,
    note_ready,
    read_attempts,
)
from hpcrl.run.rundir import AttemptFailure, RunDir


def ready(attempt: int, time: float, step: int) -> ReadyRecord:
    return ReadyRecord(attempt, time, step, 0.0)


def failed(attempt: int, time: float, step: int) -> FailureRecord:
    return FailureRecord(attempt, time, step, 0.0, "trainer-1", "node2", "killed")


def test_what_a_fault_has_cost() -> None:
    """Steps since the checkpoint that the next attempt to train began at, and the time until then."""
    events = [
        ready(0, 100.0, 0),
        failed(0, 200.0, 7),
        failed(1, 205.0, 7),  # while it started
        ready(2, 215.0, 5),
        failed(2, 300.0, 9),
    ]
    found = faults_of(events)
    assert [(f.attempt, f.step, f.repeated, f.seconds) for f in found] == [
        (0, 7, 2, 5.0),
        (1, 7, 0, 10.0),
        (2, 9, None, None),
    ]
    resumed = [*events[:2], ReadyRecord(1, 9e9, 5, 7.0)]
    assert [(f.repeated, f.seconds) for f in faults_of(resumed)] == [(2, None)], "the queue costs nothing"
    assert faults_of([]) == [] and faults_of(events[:1]) == []


def test_lines_that_are_whole_count(rundir: RunDir) -> None:
    note_ready(rundir, 3)
    note_failed(rundir, 4, AttemptFailure("trainer", 1, "x" * 9000, 12.0), "node2")
    note_failed(RunDir(rundir.root, rundir.attempt + 1), 4, None, "")
    with (rundir.root / ATTEMPTS).open("ab") as file:
        file.write(b'{"type":"failed","attempt":9,"ti')
    begun, first, second = read_attempts(rundir.root)
    assert isinstance(begun, ReadyRecord) and begun.step == 3
    assert (first.who, first.host, first.time, len(first.why)) == ("trainer-1", "node2", 12.0, 500)
    assert (second.attempt, second.who, second.why) == (rundir.attempt + 1, "launcher", "?")
    assert read_attempts(rundir.root / "none") == []


def test_faults_in_the_status_of_a_run() -> None:
    """Their number and cost, and the last of them by name and host."""
    events = [ready(0, 90.0, 0), failed(0, 200.0, 7), ready(1, 215.0, 6), failed(1, 230.0, 8)]
    (_, cost), (_, last) = fault_rows(faults_of(events))
    assert cost.startswith("2: 1 step repeated, 15 s") and "attempt 1, at step 8: trainer-1 on node2" in last
    (_, cost), _ = fault_rows(faults_of(events[:2]))
    assert cost == "1: it has not trained again"
    out = [LeftOutRecord(1, 231.0, 0, 0.0, *pair, "lost") for pair in (("node2", "node4"), ("node3", ""))]
    (_, _, told) = fault_rows(faults_of([*events, *out]))
    assert told == ("left out", "node2 (node4 in its place), node3")
    assert fault_rows([]) == []


def test_what_was_lowered_is_told(rundir: RunDir) -> None:
    """Among the notes of the run's numbers; to a fault it adds nothing."""
    note_ready(rundir, 3)
    note_failed(rundir, 4, None, "")
    note_lowered(rundir, 4, "max_num_seqs", "--vllm-max-num-seqs 4, as engine-0 ran out of memory")
    assert notes_of(rundir.root, []) == [
        "since attempt 1, step 4: --vllm-max-num-seqs 4, as engine-0 ran out of memory"
    ]
    (fault,) = faults_of(read_attempts(rundir.root))
    assert fault.repeated is None and fault.seconds is None
