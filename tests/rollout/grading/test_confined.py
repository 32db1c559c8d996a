"""Processes of built-in rewards confine themselves: a response that takes over a parser reaches nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpcrl.config.options import Options
from hpcrl.config.plugin_names import own_reward
from hpcrl.errors import HpcrlError
from hpcrl.rollout.grading.service import Grading
from tests.support.able import needs

pytestmark = [pytest.mark.process, needs("namespaces")]
HERE = "tests.support.own_rewards"
#: starts a process that grades, says its number, and is killed
PARENT = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.rollout.grading.test_confined import started
async def main():
    print((await started(rm_type="exact"))._processes[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""

#: a step of confining that is refused the process itself, and not the one in which it is tried
REFUSING = """
import os
import hpcrl.sandbox.confine as confine
itself, before = os.getpid(), confine.{step}
def refuse(*flags):
    if os.getpid() == itself:
        raise OSError(28, "refused only here")
    before(*flags)
confine.{step} = refuse
"""


async def started(**values: object) -> Grading:
    """Rewards whose one process is ready."""
    grading = Grading(Options(**values))
    await asyncio.wait_for(grading.start(), 60)
    return grading


def seen(**values: object) -> tuple[bool, set[str]]:
    """Whether the process has a filter of system calls, and what it sees of this machine."""

    async def go() -> tuple[bool, set[str]]:
        more = tuple(map(own_reward, values.pop("more", ())))
        grading = Grading(Options(**values), more=more)
        try:
            await asyncio.wait_for(grading.start(), 60)
            pid = grading._processes[0].pid
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            return "Seccomp:\t2" in lines, set(os.listdir(f"/proc/{pid}/root"))
        finally:
            await grading.close()

    return asyncio.run(go())


@pytest.mark.parametrize("rewards", ["math", "math_verify:1 gpqa:0.5 f1:1", "dapo", "deepscaler exact:2"])
def test_built_in_rewards_are_confined(rewards: str) -> None:
    filtered, there = seen(rm_type=rewards.split())
    assert filtered and not there & {"root", "sys", "mnt", "boot"} and {"usr", "tmp"} <= there
    assert os.listdir("/sys")


def test_the_log_is_not_open_in_a_confined_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It could read and cut what others wrote; what it writes itself gets there all the same."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('written by it', file=sys.stderr, flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    async def go() -> list[str]:
        grading = await started(rm_type="exact")
        try:
            return [os.readlink(f"/proc/{grading._processes[0].pid}/fd/{number}") for number in (0, 1, 2)]
        finally:
            await grading.close()

    empty, *output = asyncio.run(go())
    assert empty == "/dev/null" and all(place.startswith("pipe:") for place in output)
    said, began = capfd.readouterr().err, time.monotonic()
    while "written by it" not in said:
        assert time.monotonic() - began < 60
        time.sleep(0.05)
        said += capfd.readouterr().err


def test_what_others_wrote_is_not_confined() -> None:
    """Functions of the user's own, alone or next to others, and rewards that ask over a network."""
    for values in (
        {"rm_type": None, "custom_rm_path": f"{HERE}.length"},
        {"rm_type": ["exact"], "more": [f"{HERE}.length"]},
        {"rm_type": ["exact", "remote_rm"], "rm_url": "http://127.0.0.1:1"},
    ):
        filtered, there = seen(**values)
        assert not filtered and "sys" in there


def test_where_it_cannot_be_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A machine without namespaces trains all the same, with one line in the log."""
    (tmp_path / "sitecustomize.py").write_text(
        "import hpcrl.sandbox.confine as confine\n"
        "def refuse(flags):\n    raise OSError(1, 'refused by the test')\n"
        "confine.unshare = refuse\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    filtered, there = seen(rm_type=["exact"])
    assert not filtered and "sys" in there
    assert capfd.readouterr().err.count("graded unconfined: refused by the test") == 1


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()", "a thread"),
        (REFUSING.format(step="unshare"), "only here"),
    ],
    ids=["a second thread", "the last namespace"],
)
def test_what_only_the_real_attempt_meets(
    hook: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where confining can be tried but not done, and has not begun, there is one line in the log too."""
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    filtered, there = seen(rm_type=["exact"])
    assert not filtered and "sys" in there
    lines = [line for line in capfd.readouterr().err.splitlines() if "graded unconfined" in line]
    assert len(lines) == 1 and said in lines[0]


def test_a_half_confined_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of rewards whose confining fails in its middle grades nothing."""
    (tmp_path / "sitecustomize.py").write_text(REFUSING.format(step="drop_capabilities"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(HpcrlError, match="did not start"):
        seen(rm_type=["exact"])


def test_it_still_ends_with_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    deadline = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - deadline < 60
        time.sleep(0.05)
