"""Slurm's tables as they come out of its commands, and a Slurm that is slow, broken, absent or knows another job."""

from __future__ import annotations

import getpass
import time
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.errors import HpcrlError
from hpcrl.launch.slurm import squeue
from hpcrl.launch.slurm.batch_process import job_number
from hpcrl.launch.slurm.squeue import (
    ENDINGS,
    NEVER,
    REASONS,
    WAITING,
    query_jobs,
    query_squeue,
    remembered,
    together,
    worst,
)
from hpcrl.run.job_files import JobStateFile
from hpcrl.run.queued_job import JobKey, QueueAnswer
from tests.support.cpu_seconds import slowdown
from tests.support.rundirs import NOW, FakeSlurm, make, row, submitted

#: as Slurm 22.05 wrote it, by way of FIELDS and SLURM_TIME_FORMAT=%s
REAL = """\
1003 1003 CANCELLED BeginTime 1795256920 1795256920 1795256920 1 root cnc hpcrl:zzz
1004 1004 PENDING Resources 1795256920 1795257220 NONE 1 root fail (null)
1002 1002 PENDING PartitionNodeLimit 1795256920 N/A N/A 5 root pend (null)
1000+0 1000 RUNNING None 1795256920 1795256920 1795257220 1 root a-hpcrl hpcrl:abc
1000+1 1001 RUNNING None 1795256920 1795256920 1795257220 2 root a-hpcrl hpcrl:abc
""".replace(" ", "\x1f")
ACCOUNTED = (
    """\
1000+0 1000 RUNNING 1795256920 1795256920 Unknown 1 root a-hpcrl -
1000+1 1001 RUNNING 1795256920 1795256920 Unknown 1 root a-hpcrl -
1003 1003 CANCELLED_by_0 1795256920 None 1795256920 1 root cnc hpcrl:zzz
""".replace(" ", "\x1f")
    .replace("_", " ")
    .replace("\x1f-\n", "\x1f\n")
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Slurm's commands from a directory of ours; none to begin with."""
    fake = FakeSlurm(tmp_path / "bin")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cat", "env", "sleep"):
        (tools / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", f"{fake.bin}:{tools}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    return fake


def test_squeue_is_understood(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.command("squeue", REAL)
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")  # a user's settings must not change what we read
    answer = query_squeue(["1000", "1002", "1003", "1004", "nonsense"])
    assert (answer.complete, answer.note, sorted(answer.found)) == (True, "", ["1000", "1002", "1003", "1004"])
    whole = together(answer.found["1000"])
    assert (whole.word, whole.nodes, whole.start, whole.ends) == ("RUNNING", 3, 1795256920.0, 1795257220.0)
    assert together(answer.found["1002"]).never
    assert "nodes (Resources); start expected" in together(answer.found["1004"]).reason
    assert together(answer.found["1003"]).word == "CANCELLED"
    assert together([]) is None
    (call,) = slurm.calls("squeue")
    assert "--jobs 1000,1002,1003,1004 " in call and "--states=all" in call
    env = (slurm.bin / "squeue.env").read_text()
    assert "SLURM_TIME_FORMAT=%s" in env and "SQUEUE_STATES" not in env


def test_sacct_is_understood(slurm: FakeSlurm) -> None:
    assert remembered(["1000"]) == {}
    slurm.command("sacct", ACCOUNTED)
    rows = remembered(["1000", "1003"])
    assert [r.part for r in rows["1000"]] == [0, 1]
    assert together(rows["1003"]).word == "CANCELLED"
    slurm.command("sacct", "", 1, "Slurm accounting storage is disabled")
    assert remembered(["1000"]) == {}


def test_failed_component_is_shown(slurm: FakeSlurm) -> None:
    """A failed component says more than the leader."""
    slurm.command("squeue", row("5+0", "COMPLETED") + row("5+1", "NODE_FAIL"))
    assert together(query_squeue(["5"]).found["5"]).word == "NODE_FAIL"
    assert together(query_squeue(["5"]).found["5"]).cause


def test_task_of_an_array(slurm: FakeSlurm) -> None:
    """SLURM_JOB_ID of array task 123_4 is a number that squeue's first column does not show."""
    slurm.command("squeue", row("123_4", raw="127"))
    assert list(query_squeue(["127"]).found) == ["127"]


def test_tasks_are_told_apart_by_number(slurm: FakeSlurm) -> None:
    """A user may give a script that hpcrl has printed to sbatch as an array.

    SLURM_JOB_ID of one of its tasks is the array's number, by which Slurm means all of them.
    """
    assert job_number({"SLURM_JOB_ID": "77"}) == "77"
    assert job_number({"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}) == "77_3"
    keys = [JobKey(f"77_{number}", f"id-{number}", 0.0) for number in range(3)]
    slurm.command(
        "squeue",
        row("77_2", "PENDING", "JobArrayTaskLimit", raw="77", comment="hpcrl:id-2")
        + row("77_0", raw="78", comment="hpcrl:id-0")
        + row("77_1", raw="80", comment="hpcrl:another"),
    )
    by_job, of_array = JobKey("78", "id-0", 0.0), JobKey("77", "id-0", 0.0)
    jobs = query_jobs([*keys, by_job, of_array]).jobs
    assert [jobs[key].phase for key in keys] == ["running", "gone", "pending"] and jobs[keys[1]].foreign
    assert jobs[keys[2]].reason.startswith("waits for other tasks")
    assert jobs[by_job].phase == "running" and jobs[of_array].phase == "gone", "which has not begun"
    (call,) = slurm.calls("squeue")
    assert "--array" in call and "--jobs 77_0,77_1,77_2,78,77 " in call


def test_a_job_that_slurm_has_forgotten_is_no_error(slurm: FakeSlurm) -> None:
    slurm.command("squeue", "", 1, "slurm_load_jobs error: Invalid job id specified")
    assert query_squeue(["77"]) == squeue.QueueRows(complete=True)


@pytest.mark.parametrize(
    "damage", ["", "\n\n", "garbage\n", "1\x1f2\n", "x\x1f" * 10 + "\n", "\xff\n", row("7_x"), row("")]
)
def test_garbage_is_no_job(slurm: FakeSlurm, damage: str) -> None:
    slurm.command("squeue", damage)
    assert query_squeue(["7"]).found == {}


@pytest.mark.parametrize(
    ("reasons", "words", "never"),
    [
        (["Resources"], "waits for free nodes (Resources)", False),
        (["None", "Resources"], "waits for free nodes (Resources)", False),
        (["Priority", "JobHeldUser"], "held; release it with scontrol release (JobHeldUser)", False),
        (["Resources", "PartitionNodeLimit"], f"{NEVER['PartitionNodeLimit']} (PartitionNodeLimit)", True),
        (["QOSMaxJobsPerUserLimit"], "a limit of its QOS is reached (QOSMaxJobsPerUserLimit)", False),
        (["AssocGrpGRES"], "a limit of its account is reached (AssocGrpGRES)", False),
        (["ReqNodeNotAvail, UnavailableNodes:node[1-2]"], f"{REASONS['ReqNodeNotAvail']} (ReqNodeNotAvail, UnavailableNodes:node[1-2])", False),
        (["(BeginTime)"], "may not begin yet ((BeginTime))", False),
        (["SomethingNew"], "waits (SomethingNew)", False),
        ([""], "waits ()", False),
    ],
)  # fmt: skip
def test_reasons_in_plain_words(reasons: list[str], words: str, never: bool) -> None:
    assert worst(reasons) == (words, never)


@pytest.mark.parametrize("state", [*WAITING, *ENDINGS, "RUNNING", "COMPLETING", "SOMETHING_NEW"])
def test_states_in_hpcrls_words(slurm: FakeSlurm, state: str) -> None:
    slurm.command("squeue", row("5", state, "None"))
    found = together(query_squeue(["5"]).found["5"])
    assert found.phase == ("pending" if state in WAITING else "ended" if state in ENDINGS else "running")
    assert bool(found.outcome) == found.over == (state in ENDINGS) and found.started == (state != "PENDING")
    assert (
        found.reason
        or state in ("CONFIGURING", "RUNNING", "COMPLETING", "SOMETHING_NEW")
        or state.startswith(("REQ", "SPEC"))
    )


def test_partly_ended_job_is_not_over(slurm: FakeSlurm) -> None:
    """A job of which a part has not ended is not over."""
    slurm.command(
        "squeue", row("5+0", "FAILED") + row("5+1", "COMPLETING") + row("6+0", "PENDING") + row("6+1", "RUNNING")
    )
    failed, half = (together(rows) for rows in query_squeue(["5", "6"]).found.values())
    assert (failed.phase, failed.outcome, failed.over) == ("ended", "failed", False)
    assert (half.phase, half.started) == ("pending", True)


def test_one_query_for_many_jobs(slurm: FakeSlurm) -> None:
    """One query for many jobs, and two runs with one job number."""
    mine, before, old, gone = (JobKey(i, f"id-{n}", NOW, history=h) for i, n, h in
                               [("100", "a", True), ("100", "b", True), ("101", "c", True), ("102", "d", False)])  # fmt: skip
    slurm.command("squeue", row("100", comment="hpcrl:id-a"))
    slurm.command("sacct", "101\x1f101\x1fTIMEOUT\x1f1\x1f2\x1f3\x1f2\x1fme\x1fx-hpcrl\x1fhpcrl:id-c\n")
    answer = query_jobs([mine, before, old, gone])
    assert [answer.jobs[key].phase for key in (mine, before, old, gone)] == ["running", "gone", "ended", "gone"]
    assert [answer.jobs[key].foreign for key in (mine, before, old, gone)] == [False, True, False, False]
    assert answer.note == "" and len(slurm.calls("squeue")) == 1 and "-j 101 " in slurm.calls("sacct")[0]
    slurm.command("squeue", "", 1, "squeue: error: no controller")
    assert query_jobs([mine]) == QueueAnswer(note="squeue: error: no controller")


# ---- status with a queue


def test_one_squeue_for_all_runs(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(5):
        submitted(make(tmp_path / f"runs/r{number}"), str(100 + number))
    mark = [f"hpcrl:id-r{number}" for number in range(5)]
    rows = [
        row("100+0", comment=mark[0]),
        row("100+1", comment=mark[0]),
        row("101", "PENDING", "Priority", comment=mark[1]),
    ]
    rows += [row("102", "PENDING", "PartitionTimeLimit", comment=mark[2]), row("103", comment="hpcrl:another")]
    slurm.command("squeue", "".join(rows))
    slurm.command("sacct", "104\x1f104\x1fTIMEOUT\x1f1\x1f2\x1f3\x1f2\x1fme\x1fx-hpcrl\x1f" + mark[4] + "\n")
    assert main(["status"]) == 0
    lines = {text.split()[0]: text for text in capsys.readouterr().out.splitlines()}
    assert "starting" in lines["runs/r0"]
    assert "pending" in lines["runs/r1"] and "jobs come first (Priority)" in lines["runs/r1"]
    assert "longer time limit than" in lines["runs/r2"]
    assert "lost" in lines["runs/r3"] and "Slurm knows no job 103 of this run" in lines["runs/r3"]
    assert "failed" in lines["runs/r4"] and "time limit" in lines["runs/r4"]
    assert len(slurm.calls("squeue")) == 1
    assert [call.split("-j ")[1].split()[0] for call in slurm.calls("sacct")] == ["104"], (
        "only of those squeue has forgotten"
    )


def test_without_slurm_the_directory_alone_counts(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    submitted(make(tmp_path / "runs/a", phase="running", time=time.time()), "100")
    assert main(["status", "a"]) == 0
    out = capsys.readouterr().out
    assert "runs/a: running" in out and "note" not in out


@pytest.mark.parametrize("how", ["slow", "broken"])
def test_a_slurm_that_does_not_answer_is_a_note(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    submitted(make(tmp_path / "runs/a", phase="running", time=time.time()), "100")
    if how == "slow":
        monkeypatch.setattr(squeue, "DEADLINE", 0.3)
        slurm.command("squeue", before="exec sleep 60")
    else:
        slurm.command("squeue", "", 1, "squeue: error: Unable to contact slurm controller")
    begun = time.monotonic()
    assert main(["status", "a"]) == 0
    assert time.monotonic() - begun < 5 * slowdown()
    out = capsys.readouterr().out
    assert "runs/a: running" in out
    what = "no answer within 0 s" if how == "slow" else "error: Unable to contact slurm controller"
    assert f"note        squeue: {what}" in out and "run directory alone" in out
    assert main(["status"]) == 0
    assert what in capsys.readouterr().err


# ---- cancel, with Slurm


def test_cancel_ends_the_job_of_this_run(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    submitted(make(tmp_path / "runs/a", phase="running", time=time.time()), "100")
    slurm.command("squeue", row("100+0", comment="hpcrl:id-a") + row("100+1", comment="hpcrl:id-a"))
    slurm.command("scancel")
    assert main(["cancel", "a"]) == 0
    assert slurm.calls("scancel") == ["100"], "the leader's number ends all components"
    assert "cancelled Slurm job 100 of runs/a" in capsys.readouterr().out
    with pytest.raises(HpcrlError), JobStateFile(tmp_path / "runs/a"):  # its hosts are ended before the launcher is
        raise HpcrlError("host node1 was told to end by SIGTERM")
    slurm.command("squeue", "", 1, "slurm_load_jobs error: Invalid job id specified")
    main(["status", "a"])
    assert "runs/a: cancelled" in (out := capsys.readouterr().out) and "SIGTERM" not in out


def test_launcher_killed_by_a_cancel(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A launcher that was killed by a cancel is not lost."""
    submitted(make(tmp_path / "runs/a", phase="running", time=time.time() - 300), "100", time.time() - 900)
    slurm.command("squeue", row("100", start=int(time.time() - 800), comment="hpcrl:id-a"))
    slurm.command("scancel")
    assert main(["cancel", "a"]) == 0
    slurm.command("squeue", "", 1, "slurm_load_jobs error: Invalid job id specified")
    main(["status", "a"])
    assert "runs/a: cancelled" in capsys.readouterr().out


def test_cancel_of_a_job_that_waits_is_remembered(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    submitted(make(tmp_path / "runs/a"), "100")
    slurm.command("squeue", row("100", "PENDING", "Resources", comment="hpcrl:id-a"))
    slurm.command("scancel")
    assert main(["cancel", "a"]) == 0
    slurm.command("squeue", "", 1, "slurm_load_jobs error: Invalid job id specified")
    main(["status", "a"])
    assert "runs/a: cancelled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (row("100", comment="hpcrl:another"), "not of this run"),
        (row("100", name="other", comment="a word of the site"), "not of this run"),
        (row("100", submit=int(NOW + 5000), user=getpass.getuser()), "not of this run"),
        (row("100", user="somebody-else"), "not of this run"),
        (row("100", "COMPLETED", comment="hpcrl:id-a"), "nothing to cancel: failed"),
        ("", "nothing to cancel: lost"),
    ],
)
def test_cancel_never_ends_what_is_not_ours(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: str, error: str
) -> None:
    submitted(make(tmp_path / "runs/a"), "100")
    slurm.command("squeue", rows)
    slurm.command("scancel")
    assert main(["cancel", "a"]) == 1
    assert slurm.calls("scancel") == []
    assert error in capsys.readouterr().err


def test_cancel_where_the_comment_is_the_sites_own(slurm: FakeSlurm, tmp_path: Path) -> None:
    submitted(make(tmp_path / "runs/a"), "100")
    slurm.command("squeue", row("100", user=getpass.getuser(), comment="billing:x"))
    slurm.command("scancel")
    assert main(["cancel", "a"]) == 0


@pytest.mark.parametrize("how", ["absent", "silent", "refused"])
def test_cancel_says_why_it_cannot(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path, how: str
) -> None:
    submitted(make(tmp_path / "runs/a"), "100")
    if how == "silent":
        slurm.command("squeue", "", 1, "squeue: error: no controller")
    if how == "refused":
        slurm.command("squeue", row("100", comment="hpcrl:id-a"))
        slurm.command("scancel", "", 1, "scancel: error: Kill job error on job id 100: Access/permission denied")
    assert main(["cancel", "a"]) == 1
    said = {
        "absent": "cancel it on login1",
        "silent": "squeue: error: no controller",
        "refused": "Access/permission denied",
    }
    assert said[how] in capsys.readouterr().err
    assert not (tmp_path / "runs/a/cancel").exists()


def test_stop_of_a_job_that_waits_says_what_to_do(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = make(tmp_path / "runs/a")
    submitted(root, "100")
    slurm.command("squeue", row("100", "PENDING", "Resources", comment="hpcrl:id-a"))
    assert main(["stop", "a"]) == 1
    assert "pending (waits for free" in (err := capsys.readouterr().err)
    assert "hpcrl cancel runs/a" in err and not (root / "stop").exists()


def test_the_last_word_of_a_launcher_that_no_file_took(slurm: FakeSlurm) -> None:
    """It stands behind the run's identity, and is why the job has failed; one that another run left is nobody's."""
    said = "cannot write metrics.jsonl: the file system is full (No space left on device; 0.0 MB are free)"
    key = JobKey("100", "id-a", time.time())
    slurm.command("squeue", row("100", "FAILED", comment=f"hpcrl:id-a {said}"))
    found = query_jobs([key]).jobs[key]
    assert (found.outcome, found.reason) == ("failed", said)
    slurm.command("squeue", row("100", "COMPLETED", comment=f"hpcrl:id-a {said}"))
    assert query_jobs([key]).jobs[key].reason != said
    slurm.command("squeue", row("100", "FAILED", comment=f"hpcrl:id-ab {said}"))
    assert query_jobs([key]).jobs[key].foreign
