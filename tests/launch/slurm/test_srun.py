"""What a step of srun says while it runs."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe
from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.launch.attempts.attempt import _check
from hpcrl.launch.broken_hosts import note_broken_host
from hpcrl.launch.slurm import srun
from hpcrl.launch.slurm.srun import ORPHANED, SrunHosts, _check_started
from hpcrl.launch.slurm.steps import HetGroup, Step, read_groups
from hpcrl.run.attempt_log import LeftOutRecord, read_attempts
from hpcrl.run.job_files import JobState, write_state
from hpcrl.run.rundir import RunDir


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    """An srun that lives, over node1 and node2."""
    process = subprocess.Popen(["sleep", "60"])
    log = tmp_path / "step-0.log"
    log.write_text("srun: cluster configuration lacks support for cpu binding\n")
    yield Step("srun on node1,node2", log, process, nodes=("node1", "node2"))
    process.kill()
    process.wait(60)


def add(step: Step, text: str) -> None:
    with step.log.open("a") as file:
        file.write(text)


@pytest.mark.parametrize(
    "line", ["node2: task 1: Killed", "node2: tasks 1,3-4: Out Of Memory", "Node failure on node2"]
)
def test_dead_host_before_srun_ends(step: Step, tmp_path: Path, line: str) -> None:
    """A host that died is named before its srun ends."""
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    _check([step], rundir)
    add(step, f"srun: error: {line}\n")
    began = time.monotonic()
    with pytest.raises(PeerError, match="host node2: its process died"):
        _check([step], rundir)
    assert time.monotonic() - began < 10  # the others hold their own errors back for it, and not for long
    failure = rundir.failure()
    assert failure is not None and line in str(failure)


def test_dead_host_after_srun_ends(step: Step, tmp_path: Path) -> None:
    """A host that died is named although its srun ended before the next look."""
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    add(
        step,
        "srun: error: node2: task 1: Killed\nsrun: error: node1: task 0: Terminated\nsrun: Force Terminated "
        "StepId=7.2\n",
    )
    step.process.terminate()
    step.process.wait(60)
    with pytest.raises(PeerError, match="host node2: its process died"):
        _check([step], rundir)


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: node1: task 0: Terminated",  # with another
        "srun: error: node1: task 0: Exited with exit code 1",  # it has said why itself
        "srun: error: node7: task 0: Killed",  # of no host of this step
        "node2 says srun: error: node2: task 1: Killed",
        "slurmstepd: error: *** STEP 7.3 ON node1 CANCELLED AT 2026-01-01T00:00:00 ***",
    ],
)
def test_other_lines_are_no_deaths(step: Step, line: str) -> None:
    add(step, f"{line}\n")
    assert step.lost() == ""


def test_half_a_line_waits_for_the_rest(step: Step) -> None:
    add(step, "srun: error: node2: task 1: ")
    assert step.lost() == ""
    add(step, "Killed\n")
    assert "node2" in step.lost()


@pytest.fixture
def unkillable(tmp_path: Path) -> Iterator[Step]:
    """An srun with --no-kill over node1 to node3, the last of which waits as a spare."""
    process = subprocess.Popen(["bash", "-c", "read -r code; exit $code", "--no-kill"], stdin=subprocess.PIPE)
    log = tmp_path / "step-0.log"
    log.touch()
    yield Step("srun", log, process, nodes=("node1", "node2"), all=("node1", "node2", "node3"))
    process.kill()
    process.wait(60)


def ends(step: Step, code: int) -> int | None:
    step.process.communicate(b"%d\n" % code)
    return step.status


def test_a_step_lives_without_a_node(unkillable: Step, tmp_path: Path) -> None:
    """Its loss ends the attempt, and the next one is judged by the nodes that it uses."""
    add(unkillable, "srun: error: Node failure on node2\n")
    assert "host node2" in unkillable.lost() and unkillable.lives_without() == {"node2"}
    (tmp_path / "later").mkdir()
    unkillable.continues(tmp_path / "later", ["node1", "node3", "other"])
    assert unkillable.nodes == ("node1", "node3") and unkillable.lost() == ""
    add(unkillable, "srun: error: node2: task 1: Killed\n")
    assert unkillable.lost() == "" and ends(unkillable, 1) == 0, "of the lost one alone"


@pytest.mark.parametrize("line", ["node1: task 0: Exited with exit code 7", "node[1,3]: tasks 0,2: Terminated"])
def test_a_step_that_lost_a_node_may_fail(unkillable: Step, line: str) -> None:
    add(unkillable, f"srun: error: Node failure on node3\nsrun: error: {line}\n")
    assert ends(unkillable, 7) == 7


def test_a_step_that_could_not_start_has_failed(unkillable: Step) -> None:
    """No node is named in what srun says of it."""
    add(unkillable, "srun: error: Unable to create step for job 7: Requested node configuration is not available\n")
    assert ends(unkillable, 1) == 1


def test_a_lost_spare_ends_nothing(unkillable: Step) -> None:
    add(unkillable, "srun: error: Node failure on node3\n")
    assert unkillable.lost() == "" and unkillable.lives_without() == {"node3"}
    assert ends(unkillable, 1) == 0


def test_all_goes_with_a_step_that_has_no_say(step: Step) -> None:
    """Slurm ends it with its node."""
    add(step, "srun: error: Node failure on node2\nsrun: error: [: task 1: Killed\n")
    assert step.lost() and step.lives_without() == frozenset()


def test_a_job_without_some_of_its_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps ask for the nodes that are left; a spare one of the first component takes the place of any other."""
    monkeypatch.chdir(tmp_path)
    Path("task.sh").touch()
    words = "srun --no-kill --nodes=3 --ntasks=6 --ntasks-per-node=2 bash task.sh"
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "node[1-3]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "node4",
        "HPCRL_STEP_0": words,
        "HPCRL_STEP_1": words.replace("=3", "=1").replace("=6", "=2"),
        "HPCRL_SLOTS_0": "2",
        "HPCRL_SLOTS_1": "2",
        "HPCRL_SPARES": "1",
    }
    hosts = SrunHosts(read_groups(environment))
    assert [(host.name, host.spare) for host in hosts.nodes()] == [
        ("node1", False),
        ("node2", False),
        ("node3", True),
        ("node4", False),
    ]
    hosts.leave_out(["node2"])
    assert [(host.name, host.spare) for host in hosts.nodes()] == [("node1", False), ("node3", False), ("node4", False)]
    (first, second) = hosts.groups
    assert first.nodes == ("node1", "node3") and second.nodes == ("node4",)
    assert shlex.join(first.step).startswith(words.removesuffix(" bash task.sh")), "the later of two counts"
    assert first.step[-5:] == ("--nodelist=node1,node3", "--nodes=2", "--ntasks=4", "bash", "task.sh")
    hosts.leave_out(["node4"])
    assert [host.name for host in hosts.nodes()] == ["node1", "node3"] and hosts.count == 2


def test_a_script_without_its_task_is_refused(tmp_path: Path) -> None:
    step = {"HPCRL_STEP_0": f"srun bash {tmp_path}/task.sh", "HPCRL_SLOTS_0": "1"}
    with pytest.raises(UsageError, match=f"{tmp_path}/task.sh, which does not exist"):
        read_groups(step | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"})


def test_what_a_task_said_is_the_reason(tmp_path: Path) -> None:
    """srun itself only says that its tasks ended."""
    (tmp_path / "probe.log").write_text("python3: not found\nsrun: error: node1: task 0: Exited with exit code 127\n")
    step = subprocess.Popen(["false"])
    step.wait(20)
    with pytest.raises(HpcrlError, match="did not start: python3: not found"):
        _check_started([step], tmp_path / "probe.log")


def test_a_node_that_cannot_be_had_at_the_start(tmp_path: Path) -> None:
    """A spare one with as many slots takes its place at once; where there is none, another allocation may do better."""
    rundir, step = RunDir.create(tmp_path / "run"), ("srun", "--nodes=3", "bash")
    hosts = SrunHosts(
        [HetGroup(("node1", "node2", "node3"), 2, step, spares=("node3",)), HetGroup(("node4",), 4, step)]
    )
    assert hosts._replace(["node4"], "no answer from", rundir) == ["node4"]
    note_broken_host(rundir.root, "node1", "CUDA error")
    assert hosts._known_broken(rundir) == ["node1"]
    assert hosts._replace(hosts._known_broken(rundir), "broken:", rundir) == []
    assert [host.name for host in hosts.nodes()] == ["node3", "node2", "node4"] and hosts._known_broken(rundir) == []
    (told,) = read_attempts(rundir.root)
    assert isinstance(told, LeftOutRecord) and (told.host, told.spare) == ("node1", "node3")
    assert hosts._replace(["node2"], "no answer from", rundir) == ["node2"]


LOST = "JobId=7 JobState=RUNNING NodeList=node[2-3] BatchHost=node1 NumNodes=2"
KEPT = "JobId=7 JobState=RUNNING NodeList=node[1-3] BatchHost=node1 NumNodes=3"


@pytest.mark.parametrize(
    ("records", "again", "answers", "asked", "calls"),
    [
        ([LOST], "1", [""], "", ["requeue 7"]),
        ([f"{LOST}\nJobId=8 JobState=RUNNING NodeList=node1 BatchHost=node1"], "1", [""], "", ["requeue 7"]),
        ([LOST, LOST], "1", ["Unable to contact slurm controller", ""], "", ["requeue 7", "requeue 7"]),
        ([LOST], "1", ["Requested operation is presently disabled"], "", ["requeue 7", "scancel 7"]),
        ([LOST], "0", [], "", ["scancel 7"]),
        ([LOST], "1", [], "stop", ["scancel 7"]),
        ([LOST], "1", [], "cancel", ["scancel 7"]),
        ([KEPT, "! Unable to contact", "JobId=7 JobState=COMPLETING NodeList=node2 BatchHost=node1"], "1", [], "", []),
        ([KEPT, "! slurm_load_jobs error: Invalid job id specified"], "1", [], "", []),
        ([KEPT, "JobId=7 JobState=PENDING NodeList= NumNodes=2"], "1", [], "", []),
    ],
)
def test_a_job_that_has_lost_its_batch_process(
    tmp_path: Path, records: list[str], again: str, answers: list[str], asked: str, calls: list[str]
) -> None:
    """It is queued again or cancelled; one that has its node, that has ended, or of which Slurm says nothing, is left
    alone.  The loop ends with what it was there for, or with the job."""
    for name, texts in (("record", records), ("answer", answers)):
        for number, text in enumerate(texts, 1):
            (tmp_path / f"{name}-{number}").write_text(text)
    (tmp_path / "scontrol").write_text(
        f"""#!/bin/bash
        cd {tmp_path}
        case "$*" in
        *show\\ job*) echo >> shown; said=$(cat record-$(wc -l < shown)); [ "${{said:0:1}}" = ! ] && bad=1 ;;
        show\\ hostnames*) seq -f node%g $(tr -d 'node[]' <<< "$3" | tr - ' '); exit ;;
        requeue*) echo "$*" >> calls; said=$(cat answer-$(grep -c requeue calls)); [ -n "$said" ] && bad=1 ;;
        esac
        echo "$said"; exit ${{bad:-0}}
        """.replace("\\\\", "\\")
    )
    (tmp_path / "scancel").write_text(f'#!/bin/bash\necho "scancel $*" >> {tmp_path}/calls\n')
    for name in ("scontrol", "scancel"):
        (tmp_path / name).chmod(0o755)
    write_state(tmp_path, JobState("running", 0.0))
    if asked:
        (tmp_path / asked).touch()
    command = ["bash", "-c", ORPHANED.replace("sleep 10", "sleep 0.01"), "orphaned", "7", str(tmp_path), "40", again]
    subprocess.run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60, check=True)
    made = tmp_path / "calls"
    assert (made.read_text().splitlines() if made.exists() else []) == calls
    assert len((tmp_path / "shown").read_text()) == len(records)


def test_a_launcher_that_gives_signs_of_life(tmp_path: Path) -> None:
    """Slurm is not asked while state.json changes, nor of a run that is over."""
    write_state(tmp_path, JobState("running", 0.0))
    command = ["bash", "-c", ORPHANED.replace("sleep 10", "sleep 0.05"), "orphaned", "7", str(tmp_path), "200", "1"]
    process = subprocess.Popen(command, env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for beat in range(8):
        time.sleep(0.5)
        write_state(tmp_path, JobState("running", float(beat)))
    assert process.poll() is None
    write_state(tmp_path, JobState("finished", 9.0))
    assert process.communicate(timeout=60) == (b"", None) and process.returncode == 0


def test_a_job_is_watched_from_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the container, where Slurm's commands are, on one that is missed at once; on another if it is lost."""
    asked: list[list[str]] = []
    monkeypatch.setattr(
        srun, "spawn", lambda words, log: asked.append(words) or SimpleNamespace(poll=lambda: None, kill=lambda: None)
    )
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    step = ("srun", "--no-kill", "--container-image=a.sqsh", "--nodes=3", "bash", "task.sh")
    hosts = SrunHosts([HetGroup(("node1", "node2", "node3"), 1, step, spares=("node3",))], "7", again=True)
    rundir = RunDir.create(tmp_path / "run")
    for _ in range(2):
        hosts._watch_launcher(Options(), rundir)
    (words,) = asked
    assert "--nodelist=node2" in words and "task.sh" not in words and not any("container" in word for word in words)
    assert words[words.index("orphaned") + 1 :] == ["7", str(rundir.root), "80", "1"]
    hosts.leave_out(["node2"])
    assert len(asked) == 2 and "--nodelist=node3" in asked[1]
    SrunHosts([HetGroup(("node1", "node2"), 1, ("srun", "bash"))], job_id="7")._watch_launcher(Options(), rundir)
    assert len(asked) == 2, "it ends with its node"


def test_prepare_runs_the_nodes_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container it is not the one that the batch process runs with, wherever in a word it is named."""
    monkeypatch.setenv("HPCRL_PYTHON", "/opt/inside/python")
    hosts = SrunHosts([HetGroup(("node1",), 1, ("printf", "%s,"))])
    recipe = Recipe("r", tmp_path / "r.toml", {}, (("bash", "-c", "{python} a && {python} b"),), ())
    (command,) = recipe.prepare_commands(tmp_path, {}, hosts.python)
    process = hosts.prepare(command, tmp_path / "log")
    assert process.wait(30) == 0
    said = "once,bash,-c,/opt/inside/python a && /opt/inside/python b,"
    assert (tmp_path / "log").read_text() == said
