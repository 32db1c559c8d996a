"""`hpcrl engines`: what it shows, what it asks of the run, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.cli import main
from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.engines.add import command, request_of, script_of
from hpcrl.launch.engines.join import LifeSign, deaf, where
from hpcrl.launch.probe import HostReport, Network
from hpcrl.launch.site import SiteProfile, from_flags
from hpcrl.plan import Location, Plan
from hpcrl.run.engine_files import (
    EngineAdded,
    EngineEnd,
    EngineView,
    claim,
    is_added,
    record_end,
    with_added,
    write_views,
)
from hpcrl.run.rundir import RunDir
from tests.support.children import read_line
from tests.support.rundirs import begin, make


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    root = make(tmp_path / "run", time=time.time())
    begin(root)
    views = [
        EngineView(index=0, host="a", state="serving", version=7, requests=3, restarts=0),
        EngineView(index=1, host="b", state="ended", version=None, requests=0, restarts=2, why="hangs\x1b[2J"),
        EngineView(index=2, host="b", state="gone", version=None, requests=0, restarts=0, why="removed"),
    ]
    rundir = RunDir(root, 0)
    write_views(rundir, 7, views)
    return rundir


def test_engines_are_listed(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", str(rundir.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ENGINE", "STATE", "HOST", "VERSION", "REQUESTS", "RESTARTS"]
    assert lines[1].split() == ["0", "serving", "a", "7", "3", "0"]
    assert lines[2].split() == ["1", "ended", "b", "-", "0", "2", "hangs"]
    assert main(["engines", str(rundir.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["published"] == 7
    assert main(["status", str(rundir.root)]) == 0
    assert "1 serving, 1 ended, 1 gone; 2 restarts" in capsys.readouterr().out


def test_one_is_asked_to_leave(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "remove", str(rundir.root), "1"]) == 0
    assert "remove-engine-1" in rundir.signs() and "asked engine 1" in capsys.readouterr().out
    assert main(["engines", "remove", str(rundir.root), "2"]) == 2
    assert "has no engine 2; it has 0, 1" in capsys.readouterr().err
    write_views(rundir, 7, [EngineView(index=0, host="a", state="serving", version=7, requests=3, restarts=0)])
    assert main(["engines", "remove", str(rundir.root), "0"]) == 2
    assert "engine 0 is the last one" in capsys.readouterr().err


def test_what_has_no_effect_is_refused(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "add", str(rundir.root), "--nodes", "2"]) == 2
    assert "--nodes has no effect without --site" in capsys.readouterr().err
    assert main(["engines", "add", str(rundir.root), "--site", "generic", "--first-slot", "3"]) == 2
    assert "--first-slot has no effect" in capsys.readouterr().err


PLAN = Plan(
    "run",
    0,
    (Location("a", (0,), "10.0.0.1", "ib0"),),
    (Location("a", (1,), "10.0.0.1", "ib0"),),
    Location("a", (), "10.0.0.1"),
)


def test_engines_are_added_under_numbers_of_their_own(rundir: RunDir) -> None:
    added = EngineAdded(host="c", slots=(4,), address="10.0.0.9", interface="ib0")
    assert [claim(rundir, PLAN, added) for _ in range(3)] == [1, 2, 3]
    assert not is_added(rundir, 0) and is_added(rundir, 3)
    whole = with_added(rundir, PLAN)
    assert len(whole.engines) == 4 and whole.engines[3] == Location("c", (4,), "10.0.0.9", "ib0")
    assert not record_end(rundir, 2, "c", 0, 0, True, "killed") and rundir.failure() is None, (
        "its end is never the run's"
    )
    assert not record_end(rundir, 0, "a", 0, 0, True, "killed") and rundir.failure().message == "killed"
    assert (
        msgspec.json.decode((rundir.here / "peers/engine-2.0.ended.json").read_bytes(), type=EngineEnd).again is False
    )


def report(*networks: Network) -> HostReport:
    return HostReport(host="c", hostname="c", networks=networks, sees=True, time=0.0, cpus=1, memory=1)


IB = Network("ib0", "10.0.0.9", 24, 0)
ETH = Network("eth0", "192.168.0.9", 24, 0)


def test_an_added_engine_is_on_the_runs_network() -> None:
    assert where("c", PLAN, None, report(IB, ETH)) == ("10.0.0.9", "ib0")
    assert where("c", PLAN, None, report(Network("ib1", "10.0.0.9", 24, 0), ETH)) == ("10.0.0.9", "ib1"), (
        "by its subnet"
    )
    assert where("c", PLAN, "eth0", report(IB, ETH)) == ("192.168.0.9", "eth0")
    assert where("a", PLAN, None, report()) == ("10.0.0.1", "ib0"), "a host of the run's own"
    with pytest.raises(UsageError, match="host c is not"):
        where("c", PLAN, None, report(ETH))
    alone = Plan("run", 0, (), (), Location("127.0.0.1", (), "127.0.0.1", "lo"))
    with pytest.raises(UsageError, match="listens only there"):
        where("c", alone, None, report(IB))


def test_the_job_is_one_component_of_engines(rundir: RunDir) -> None:
    request = request_of(Options(rollout_num_gpus_per_engine=2), SiteProfile(name="x", time="60"), nodes=3, each=4)
    (component,) = request.components
    assert (component.name, component.nodes, component.slots) == ("engine", 3, 8)
    text = command(rundir, 4)
    assert text.startswith('bash -c "exec $HPCRL_STEP_0 "') and f"join {rundir.root} --attempt 0 --engines 4" in text


def test_the_script_starts_its_step_and_nothing_else(tmp_path: Path) -> None:
    """Run by bash, with an srun that says what it was called with."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    site = from_flags({"set": ["engine.partition=low", "engine.qos=idle", "requeue=false"], "time": "20"})
    text = script_of(RunDir(tmp_path / "some run", 3), Options(rollout_num_gpus_per_engine=2), site, 2, 4)
    assert {"#SBATCH --partition=low", "#SBATCH --qos=idle", "#SBATCH --nodes=2", "#SBATCH --time=20"} <= set(
        text.splitlines()
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run(
        ["bash", "-c", text],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout.splitlines()
    program = ["bash", f"{tmp_path}/some run/added/launch/task.sh", "join", f"{tmp_path}/some run"]
    assert said[-8:] == [*program, "--attempt", "3", "--engines", "4"]


def test_a_run_that_says_nothing_any_more_is_gone(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.launch.engines import join
    from hpcrl.toolbox import signs
    from tests.launch.test_host import TimeLimitWatcher

    clock = TimeLimitWatcher()
    monkeypatch.setattr(signs, "time", clock)
    sign = LifeSign(rundir)
    for _ in range(30):
        clock.sleep(10)
        write_views(rundir, 7, [])
        assert not sign.lost()
    clock.sleep(join.SILENCE / 2)
    assert not sign.lost()
    clock.sleep(join.SILENCE)
    assert sign.lost()


def test_added_job_outlives_schedulers_warning() -> None:
    """Slurm sends SIGUSR1 to all processes of a step, which ends whoever does not handle it."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with deaf():
            engine = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1)
        assert read_line(engine) == b"up\n"
        for pid in (engine.pid, os.getpid()):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        assert heard == [signal.SIGUSR1] and engine.poll() is None
        assert engine.communicate(b"\n")[0] == b"" and engine.returncode == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
