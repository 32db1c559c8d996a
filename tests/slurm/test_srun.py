"""What a step of srun says while it runs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.config.recipe import Recipe
from hpcrl.errors import PeerError
from hpcrl.launch.attempts.attempt import _check
from hpcrl.run.rundir import RunDir
from hpcrl.slurm.srun import HetGroup, SrunHosts, Step


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    """An srun that lives, over node1 and node2."""
    process = subprocess.Popen(["sleep", "60"])
    log = tmp_path / "step-0.log"
    log.write_text("srun: cluster configuration lacks support for cpu binding\n")
    yield Step("srun on node1,node2", log, process, nodes=("node1", "node2"))
    process.kill()
    process.wait()


def add(step: Step, text: str) -> None:
    with step.log.open("a") as file:
        file.write(text)


@pytest.mark.parametrize(
    "line", ["node2: task 1: Killed", "node2: tasks 1,3-4: Out Of Memory", "Node failure on node2"]
)
def test_dead_host_before_srun_ends(step: Step, tmp_path: Path, line: str) -> None:
    """A host that died is named before its srun ends."""
    rundir = RunDir.create(tmp_path / "run")
    rundir.begin()
    _check([step], rundir)
    add(step, f"srun: error: {line}\n")
    began = time.monotonic()
    with pytest.raises(PeerError, match="host node2: its process died"):
        _check([step], rundir)
    assert time.monotonic() - began < 1  # the others hold their own errors back for it, and not for long
    failure = rundir.failure()
    assert failure is not None and line in str(failure)


def test_dead_host_after_srun_ends(step: Step, tmp_path: Path) -> None:
    """A host that died is named although its srun ended before the next look."""
    rundir = RunDir.create(tmp_path / "run")
    rundir.begin()
    add(
        step,
        "srun: error: node2: task 1: Killed\nsrun: error: node1: task 0: Terminated\nsrun: Force Terminated "
        "StepId=7.2\n",
    )
    step.process.terminate()
    step.process.wait()
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
