"""`hpcrl launch` does not wait for ever for an mpirun that never ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.launch.mpi import exit_status_relay, mpirun
from hpcrl.launch.mpi.host_rank import HostRank
from hpcrl.launch.mpi.mpirun import explain_end
from hpcrl.run.job_files import JobState, write_state
from hpcrl.run.rundir import RunDir
from hpcrl.run.started_runs import RecipeFile, write_recipe_file
from hpcrl.utils.untrusted_files import read_json
from tests.support.runs import alive

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mpirun, "GRACE", 0.5)
    monkeypatch.setattr(mpirun, "REST", 1.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


WORD = exit_status_relay.drawn()


def run(script: str, agent: str = "ssh", hosts: tuple[str, ...] = ()) -> int:
    return mpirun._run(
        ["env", f"{exit_status_relay.ENVIRONMENT}={WORD}", "sh", "-c", script], "openmpi", agent, WORD, hosts
    )


def test_what_is_left_after_the_run_has_ended_is_ended(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a host's link is cut for ever: rank 0 has said its last word, mpirun waits for the host, and its ssh to
    that host would outlive it."""
    monkeypatch.setattr(mpirun, "GRACE", 2.0)  # what follows the last word here takes a moment
    begun = time.monotonic()
    tell = f"{sys.executable} -c 'from hpcrl.launch.mpi.exit_status_relay import tell; tell(3)'"
    ssh = f"sh -c 'echo $$ > {tmp_path}/ssh; exec sleep 100'"
    assert run(f"echo error >&2; {tell}; printf more >&2; {ssh}; true") == 3
    assert time.monotonic() - begun < 60
    assert not alive(int((tmp_path / "ssh").read_text()))
    said = capfdbinary.readouterr().err
    assert said.startswith(b"error\nmore") and b"mpirun did not end within" in said, said


@pytest.mark.parametrize("end", ["exit 1", "kill -HUP $$"])
def test_the_last_word_is_the_exit_status(end: str) -> None:
    """MPICH's mpiexec has ended with 1, since a process was hung up, after the run had finished."""
    tell = f"{sys.executable} -c 'from hpcrl.launch.mpi.exit_status_relay import tell; tell(0)'"
    assert run(f"{tell}; {end}") == 0


def test_normal_end_is_waited_for(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Though somebody who outlives it keeps its output open."""
    text = "".join(f"line {i}\n" for i in range(20_000))
    begun = time.monotonic()
    assert (
        run(
            "sleep 1; i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done >&2; sleep 90 & echo $! > "
            f"{tmp_path}/pid; exit 5"
        )
        == 5
    )
    assert time.monotonic() - begun < 60
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert capfdbinary.readouterr().err.decode() == text


def test_another_launchs_word_is_not_ours(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    other = f"{exit_status_relay.drawn()} 7"
    assert run(f"echo {other} >&2; sleep 2") == 0
    assert capfdbinary.readouterr().err.decode() == f"{other}\n"


ORTE = """
ORTE has lost communication with a remote daemon.

  HNP daemon   : [[48046,0],0] on node head
  Remote daemon: [[48046,0],2] on node node2

"""


@pytest.fixture
def begun(tmp_path: Path) -> RunDir:
    """A run under mpirun whose launcher has said last that it runs."""
    rundir = RunDir.create(tmp_path / "run")
    write_recipe_file(rundir.root, RecipeFile("a1b2", str(tmp_path / "r.toml"), {}), "")
    (rundir.root / "options.json").write_text("{}")
    rundir.make_attempt()
    write_state(rundir.root, JobState("saving", time.time()))
    return rundir


@pytest.mark.parametrize("first", ["", "RuntimeError: Connection closed by peer [10.77.0.12]:1747"])
def test_host_lost_by_mpirun_is_the_error(
    tmp_path: Path, begun: RunDir, capfd: pytest.CaptureFixture[str], first: str
) -> None:
    """It ends the ranks so soon after that none of them may have said why."""
    if first:
        begun.fail("trainer", 0, first)
    (tmp_path / "orte").write_text(ORTE)
    with pytest.raises(HpcrlError, match=f"^host node2 cannot be reached any.*hpcrl launch --resume {begun.root} "):
        run(f"{says_where(begun)}; cat {tmp_path}/orte >&2; exit 143")
    failure, said = begun.failure(), capfd.readouterr().err
    assert ORTE in said and WORD not in said
    seen = f" (first seen as: trainer-0: {first})" if first else ""
    assert str(failure).startswith("host node2 ") and str(failure).endswith(f" exit code 143 (SIGTERM){seen}")
    state = read_json(begun.root / "state.json", JobState)
    assert state.phase == "failed" and "node2" in state.message


def says_where(rundir: RunDir) -> str:
    """What rank 0 does once it knows its run."""
    code = f'from hpcrl.launch.mpi.exit_status_relay import tell_where as t; from pathlib import Path; t(Path("{rundir.root}"), "a1b2")'
    return f"{sys.executable} -c '{code}'"


def test_silent_host_is_the_error(tmp_path: Path, begun: RunDir) -> None:
    """Where mpirun names no host, the one that does not answer is the error."""
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = node1 ] || { echo no route >&2; exit 255; }\n')
    agent.chmod(0o755)
    with pytest.raises(HpcrlError, match="^hosts node2, node3 cannot be reached any"):
        run(f"{says_where(begun)}; exit 255", str(agent), ("node1", "node2", "node3"))
    assert "node2, node3" in str(begun.failure())
    (begun.here / "error.json").unlink()
    with pytest.raises(HpcrlError, match="^mpirun ended with exit code 5.*run was over"):
        run(f"{says_where(begun)}; exit 5", str(agent), ("node1",))
    assert "with exit code 5" in str(begun.failure())


def test_a_host_whose_shell_takes_long_is_not_lost(
    tmp_path: Path, begun: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'Authenticated to it.' >&2\nexec sleep 60\n")
    ssh.chmod(0o755)
    monkeypatch.setattr("hpcrl.launch.mpi.ssh_check.REACH", 2.0)
    with pytest.raises(HpcrlError, match="^mpirun ended with exit code 5.*run was over"):
        run(f"{says_where(begun)}; exit 5", str(ssh), ("node1", "node2"))


@pytest.mark.parametrize(
    "words",
    [
        "echo '=   PID 171 RUNNING AT node2'",
        "echo 'mpirun noticed that process rank 1 with PID 0 on node node2 exited on signal 9 (Killed).' >&2",
    ],
)
def test_the_host_on_which_a_rank_died_is_the_error(
    begun: RunDir, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    """Of MPICH on its output, of Open MPI among its errors."""
    with pytest.raises(HpcrlError, match="^host node2:.*ended with exit code 9"):
        run(f"{says_where(begun)}; {words}; exit 9")
    assert str(begun.failure()).startswith("host node2: its MPI rank died")
    said = capfd.readouterr()
    assert "node2" in (said.err if ">&2" in words else said.out), "and the user sees it where mpirun has put it"


def test_rank_0_cut_off_blames_no_one(tmp_path: Path, begun: RunDir) -> None:
    """From its side it is they who are silent; this machine hears them, and not it."""
    begun.fail("launcher", 0, "host node2 did not answer for 20 s")
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = node2 ]\n')
    agent.chmod(0o755)
    tell = f"{sys.executable} -c 'from hpcrl.launch.mpi.exit_status_relay import tell; tell(1)'"
    with pytest.raises(HpcrlError, match="^host node1 cannot be reached any"):
        run(f"{says_where(begun)}; {tell}; exec sleep 100", str(agent), ("node1", "node2"))
    failure = str(begun.failure())
    assert failure.startswith("host node1 cannot") and failure.endswith(
        "(first seen as: host node2 did not answer for 20 s)"
    )
    agent.write_text("#!/bin/sh\n")
    assert run(f"{says_where(begun)}; {tell}; exec sleep 100", str(agent), ("node1", "node2")) == 1


def test_earlier_error_stays(begun: RunDir) -> None:
    """An error already recorded for that host or by the launcher stays."""
    begun.fail("launcher", 0, "host node2 did not answer for 20 s")
    write_state(begun.root, JobState("failed", 7.0, message="said"))
    for lost in (["node2"], []):
        explain_end(exit_status_relay.RunLocation("a1b2", begun.root), lost, "was killed")
    assert str(begun.failure()) == "host node2 did not answer for 20 s"
    assert read_json(begun.root / "state.json", JobState).message == "said"


@pytest.mark.parametrize("place", ["another", "nowhere"])
def test_the_error_is_not_put_into_another_run(begun: RunDir, place: str) -> None:
    """As where hpcrl launch does not see the run directory, and has one of that name itself."""
    where = {
        "another": exit_status_relay.RunLocation("c3d4", begun.root),
        "nowhere": exit_status_relay.RunLocation("a1b2", begun.root / "no"),
    }
    what, hint = explain_end(where[place], ["node2"], "was killed")
    assert "host node2 cannot" in what and "--resume" in hint
    assert begun.failure() is None and read_json(begun.root / "state.json", JobState).phase == "saving"


def test_own_error_or_no_start_stays(begun: RunDir) -> None:
    """A run that recorded an error, or never began, keeps its own."""
    tell = f"{sys.executable} -c 'from hpcrl.launch.mpi.exit_status_relay import tell; tell(3)'"
    assert run(f"{says_where(begun)}; {tell}; exit 3", "false", ("node1",)) == 3
    assert run("exit 3", "false", ("node1",)) == 3
    assert begun.failure() is None


def test_a_run_that_ended_well_has_lost_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("printf '  Remote daemon: [[1,0],2] on node node2\n' >&2") == 0


class Silence:
    """A channel to a launcher of which nothing has come for too long."""

    def say(self, to: int, message: object) -> bool:
        """Nobody hears it."""
        return False

    def receive(self) -> list[tuple[int, Any]]:
        return []

    def silent(self) -> list[int]:
        return [0]


def test_a_rank_that_has_lost_rank_0_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where it is rank 0's host whose link is cut."""
    monkeypatch.setenv(exit_status_relay.ENVIRONMENT, WORD)
    status = HostRank(cast(Any, Silence()), "b").run()
    said = capfd.readouterr().err
    assert status and "the launcher on rank 0 was silent" in said and f"{WORD} {status}\n" in said
