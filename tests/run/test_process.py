"""Nothing that we started outlives us, and nothing else is touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.children import read_line
from tests.support.runs import gone

pytestmark = pytest.mark.process

#: a tree whose grandchild leaves the session and whose middle dies: only adoption finds it
TREE = """
import subprocess, sys
from hpcrl.run.process import adopt_orphans, end_descendants
adopt_orphans()
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
middle = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True, stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True)"
out = subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE, check=True).stdout
end_descendants(0.3)
print(out.decode().strip())
"""


def test_a_stubborn_orphan_in_its_own_session_is_ended() -> None:
    out = subprocess.run([sys.executable, "-c", TREE], stdout=subprocess.PIPE, check=True, timeout=60).stdout
    assert gone([int(out)], 60)


def test_role_dies_with_its_parent() -> None:
    """A role dies with its parent, even when that is killed."""
    child = (
        "from hpcrl.run.process import die_with_parent; die_with_parent(); import time; print('up', flush=True); "
        "time.sleep(600)"
    )
    parent = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, "
        "start_new_session=True); p.stdout.readline(); print(p.pid, flush=True); import time; time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(read_line(process))
    process.kill()
    process.wait(60)
    assert gone([pid], 60)


#: a role whose forked process, and what that one forked, wait for what never comes
FORKS = """
import multiprocessing, os, sys, time
from hpcrl.run.process import die_with_parent
die_with_parent(forks=True)
context = multiprocessing.get_context("fork")
def wait(more):
    print(os.getpid(), flush=True)
    if more:
        context.Process(target=wait, args=(False,)).start()
    time.sleep(600)
context.Process(target=wait, args=(True,)).start()
time.sleep(600)
"""


def test_what_a_role_has_forked_dies_with_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pids = [int(read_line(process)) for _ in range(2)]
    process.kill()
    process.wait(60)
    assert gone(pids, 60)


WAITS_IN_TORCH = """
import sys, threading, time
from hpcrl.run.process import exit_after

def main():
    import atexit
    from datetime import timedelta
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

    def look():
        while True:
            store.check(["never"])

    atexit.register(print, "the end")
    threading.Thread(target=look, daemon=True).start()
    time.sleep(0.2)
    return 3

exit_after(main)
"""


@pytest.mark.process
def test_a_thread_in_torch_does_not_abort_an_end() -> None:
    for _ in range(3):  # four of five were aborted
        done = subprocess.run([sys.executable, "-c", WAITS_IN_TORCH], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (3, "the end\n"), done.stderr
