"""The phrase for an exit status, also of processes that really ended so."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.run.exit_status import MemoryWatch, how_it_ended, out_of_memory, signal_name


@pytest.mark.parametrize(
    ("code", "phrase"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("raise SystemExit(143)", "ended with exit code 143 (SIGTERM)"),
        ("raise SystemExit(137)", "ended with exit code 137 (SIGKILL; memory may have run out)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL (memory may have run out)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 2)", f"was killed by signal {signal.SIGRTMIN + 2}"),
    ],
)
def test_how_a_process_ended(code: str, phrase: str) -> None:
    assert how_it_ended(subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode) == phrase


V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/slurm/uid_0/job_7/step_0\n0::/\n",
    "sys/fs/cgroup/memory/slurm/uid_0/job_7/step_0/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}
V2 = {
    "proc/self/cgroup": "0::/system.slice/job_7/step_0\n",
    "sys/fs/cgroup/system.slice/job_7/step_0/memory.events": "low 0\nmax 9\noom 1\noom_kill 1\n",
}
INSIDE = {"proc/self/cgroup": "0::/outside/of/us\n", "sys/fs/cgroup/memory.events": "oom_kill 1\n"}
NONE = {
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/memory.events": "oom 0\noom_kill 0\n",
}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (V1, "out of memory: the kernel killed 2 processes: ask for more memory"),
        (V2, "out of memory: the kernel killed 1 process: ask for more memory"),
        (INSIDE, "out of memory: the kernel killed 1 process: ask for more memory"),
        (NONE, ""),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "garbage\n"}, ""),
        ({}, ""),
    ],
)
def test_kills_of_a_cgroup_are_said(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(re.sub(r"oom_kill \d", "oom_kill 0", text))
    watch = MemoryWatch(tmp_path)
    assert watch.describe_kills() == ""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = watch.describe_kills()
    assert found.endswith(said) and bool(found) == bool(said)


def test_the_kernels_word_takes_the_place_of_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryWatch, "describe_kills", lambda _: "the kernel did it")
    watch = MemoryWatch()
    assert how_it_ended(-9, watch) == "was killed by SIGKILL (the kernel did it)"
    assert how_it_ended(-15, watch) == "was killed by SIGTERM"
    assert how_it_ended(137, watch) == "ended with exit code 137 (SIGKILL; the kernel did it)"


def test_a_kill_before_the_process_is_none_of_its(tmp_path: Path) -> None:
    for name, text in V2.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert MemoryWatch(tmp_path).describe_kills() == ""


@pytest.mark.parametrize("status", [-1000, -65, 0, 1, 127, 128, 193, 255, 4096])
def test_no_status_is_an_error(status: int) -> None:
    assert how_it_ended(status) and signal_name(abs(status))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("torch.OutOfMemoryError: Allocation on device would exceed allowed memory.", 0),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation", 0),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", 0),
        ("NCCL error in: x.cpp:77, unhandled cuda error\nLast error:\n  Cuda failure 2 'out of memory'", 2),
        ("Cuda failure 'out of memory'", 0),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 0),
        ("cudaMalloc: cudaErrorMemoryAllocation", 0),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", 0),
        ("Free memory on device cuda:0 (1/2 GiB) on startup is less than desired GPU memory utilization (0.9)", 0),
        ("out of memory: the kernel killed 1 process", None),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", None),
        ("CUDA error: an illegal memory access was encountered", None),
        ("", None),
    ],
)
def test_a_gpu_without_memory_is_told(text: str, line: int | None) -> None:
    assert out_of_memory(text) == ("" if line is None else text.splitlines()[line].strip())
