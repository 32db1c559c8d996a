"""Timelines: what is written survives crashes and full disks, traces nest."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from hpcrl.report.timeline.reading import Span, Track, lanes, read_launchers, read_stage, read_tracks, trace
from hpcrl.report.timeline.spans import GENERATE, Header, Timeline, launcher_timeline, order, role_timeline
from hpcrl.run.rundir import RunDir


def header(role: str = "trainer", index: int = 0, host: str = "a", opened: int = 0) -> Header:
    return Header(role=role, index=index, host=host, pid=1, opened=opened)


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path, 3)
    timeline = role_timeline(rundir, "trainer", 2, "node1")
    with timeline.span("train", rollout_id=7):
        timeline.mark("saved", rollout_id=6)
    with pytest.raises(ValueError, match="inside"), timeline.span("broken"):
        raise ValueError("inside")
    for running in (5, 6):  # within a second: the first counts
        timeline.count("#requests", running=running)
    (track,) = read_stage(tmp_path)
    assert (track.attempt, track.name, track.header.host, track.header.pid) == (3, "trainer-2", "node1", os.getpid())
    saved, train, broken, count = track.spans
    assert (saved.name, saved.more, saved.begin) == ("saved", {"rollout_id": 6}, saved.end)
    assert (train.name, train.more) == ("train", {"rollout_id": 7}) and train.begin <= saved.begin <= train.end
    assert (broken.name, broken.more) == ("broken", {}) and (count.name, count.more) == ("#requests", {"running": 5})


def test_lines_are_written_at_once(tmp_path: Path) -> None:
    """Every line is there at once, and a torn one does not count."""
    path = tmp_path / "x.jsonl"
    timeline = Timeline(path, "rollout", 0, "a")
    timeline.mark("one")
    with path.open("ab") as file:
        file.write(b'["torn",1')
    again = Timeline(path, "rollout", 0, "a")
    again.mark("two")
    with path.open("ab") as file:
        file.write(b'[]\n["x",1]\n{"role":1}\n\xff\n["three",5,6]\n["torn",')
    first, second = read_tracks(path, 0)  # each process says who it is
    assert [span.name for span in first.spans] == ["one"]
    assert [span.name for span in second.spans] == ["two", "three"]
    assert second.spans[1] == Span("three", 5, 6, {})


def test_a_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    timeline = Timeline(path, "trainer", 0, "a", most=2000)
    for number in range(1000):
        timeline.add("train", 10 * number, 10 * number + 7, n=number)
    assert 2000 <= path.stat().st_size < 2100
    (track,) = read_tracks(path, 0)
    assert [span.more["n"] for span in track.spans] == list(range(len(track.spans)))


def test_a_run_without_room_for_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = Timeline(tmp_path / "file" / "x.jsonl", "trainer", 0, "a")
    with nowhere.span("train"):
        nowhere.mark("saved")
    full = Timeline(tmp_path / "x.jsonl", "trainer", 0, "a")
    os.close(full._file)
    full._file = os.open("/dev/full", os.O_WRONLY)
    full.mark("one")
    full.mark("two")
    full.close()
    Timeline(None).mark("nothing")


def test_lines_of_several_threads_stay_whole(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "x.jsonl", "rollout", 0, "a")
    threads = [threading.Thread(target=lambda: [timeline.mark("x", n=n) for n in range(200)]) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    (track,) = read_tracks(tmp_path / "x.jsonl", 0)
    assert len(track.spans) == 800


def test_every_start_of_a_launcher_has_a_file(tmp_path: Path) -> None:
    for _ in range(3):
        launcher_timeline(tmp_path).mark("alive")
    assert [track.header.index for track in read_launchers(tmp_path)] == [0, 1, 2]


def test_a_sign_of_life_is_given_once_in_a_while(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "x.jsonl", "launcher", 0, "a")
    for _ in range(100):
        timeline.alive()
    (track,) = read_tracks(tmp_path / "x.jsonl", None)
    assert len(track.spans) == 1


# ---- the trace


def test_spans_of_a_thread_nest() -> None:
    spans = [
        Span("a", 0, 10, {}),
        Span("b", 2, 5, {}),
        Span("c", 4, 12, {}),
        Span("d", 5, 9, {}),
        Span("e", 12, 13, {}),
    ]
    assert {span.name: lane for lane, span in lanes(spans)} == {"a": 1, "b": 1, "c": 2, "d": 1, "e": 1}


def test_a_trace_has_a_process_a_track() -> None:
    tracks = [
        Track(
            header("rollout", 0, "n2", 1000),
            0,
            [Span(GENERATE, 2000, 5000, {"engine": 10}), Span("#r", 2500, 2500, {"n": 3})],
        ),
        Track(header("engine", 10, "n3", 1500), 0, [Span("start up", 1500, 1900, {})]),
        Track(
            header("trainer", 0, "n1", 1000),
            0,
            [Span("train", 3000, 4000, {"rollout_id": 1}), Span("saved", 4100, 4100, {})],
        ),
        Track(header("trainer", 0, "n1", 9000), 1, [Span("train", 9500, 9900, {"rollout_id": 1})]),
    ]
    found = json.loads(json.dumps(trace(tracks, "r")))
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert list(names.values()) == ["trainer-0 (n1)", "rollout-0 (n2)", "engine-10 (n3)"]
    whose = {(names[e["pid"]], e["name"], e["ts"], e["dur"]) for e in found["traceEvents"] if e["ph"] == "X"}
    assert whose == {
        ("trainer-0 (n1)", "train", 2000, 1000),
        ("trainer-0 (n1)", "train", 8500, 400),
        ("engine-10 (n3)", "start up", 500, 400),
        ("engine-10 (n3)", GENERATE, 1000, 3000),
    }
    (counter,) = [e for e in found["traceEvents"] if e["ph"] == "C"]
    assert (counter["name"], counter["args"], counter["ts"]) == ("r", {"n": 3}, 1500)
    assert [e["args"] for e in found["traceEvents"] if e["ph"] == "i"] == [{"attempt": 0}]
    assert trace([])["traceEvents"] == []


def test_tracks_stand_in_the_order_of_a_run() -> None:
    names = ["engine-10", "engine-9", "rollout-0", "trainer-1", "trainer-0", "host of b", "host of a", "launcher"]
    assert sorted(names, key=order) == [
        "launcher", "host of a", "host of b", "trainer-0", "trainer-1", "rollout-0", "engine-9", "engine-10",
    ]  # fmt: skip
