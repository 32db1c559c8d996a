"""Start-up: what hpcrl adds to the start of vLLM and torch, beside `ray.init`.

    python bench/startup.py [--rounds 3]

Each round, one after another: a stock vLLM server and a bare torchrun of one rank (torch, Megatron-core, process group)
are started together and timed until both are ready; `hpcrl run` of the same model is timed until its engine has
answered and its trainer rank has asked for the first rollout; `hpcrl --help`; and, where Ray is installed, `ray.init`
with a first task.  Prints a table (also to bench/results/startup.md) and, as its last line, one JSON object of the
medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from tests.support.runs import POLICY, Run, make_task, recipe  # noqa: E402

RANK = """
import os, sys
from hpcrl.trainer.megatron import replaced
replaced.install()
import megatron.core.dist_checkpointing, megatron.core.models.gpt, megatron.core.optimizer
import torch.distributed as dist
dist.init_process_group("nccl" if __import__("torch").cuda.is_available() else "gloo")
open(sys.argv[1], "w").close()
dist.destroy_process_group()
"""
RAY = """
import os
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on Linux it is what keeps Ray on the loopback interface
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
assert ray.get(ray.remote(lambda: 1).remote()) == 1
print("ready", flush=True)
ray.shutdown()
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def child(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own, ended with its whole group."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | env, start_new_session=True, cwd=REPO
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def bare(task: Path, directory: Path) -> float:
    """Seconds until a stock vLLM server and a bare torchrun rank, started together, are both ready."""
    port = free_port()
    marker = directory / "rank-up"
    script = directory / "rank.py"
    marker.unlink(missing_ok=True)
    script.write_text(RANK)
    env = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(task / "model"), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--kv-cache-memory-bytes", "67108864", "--distributed-executor-backend", "uni"]  # fmt: skip
    rank = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "1",
        str(script),
        str(marker),
    ]
    begun = time.monotonic()
    with child(server, directory / "vllm.log", **env), child(rank, directory / "rank.log", **env):
        while not (healthy(port) and marker.exists()):
            if time.monotonic() - begun > 300:
                raise SystemExit(f"bare processes did not come up, see {directory}")
            time.sleep(0.05)
        return time.monotonic() - begun


def ours(task: Path, directory: Path) -> float:
    """Seconds from `hpcrl run` until its engine and its trainer rank have published themselves."""
    root = directory / "run"
    path = recipe(
        directory, task, **(POLICY | {"run_dir": str(root), "num_rollout": 1, "check_weight_update_equal": False})
    )
    begun = time.monotonic()
    run = Run(path, root=root)
    peers = root / "attempts" / "0" / "peers"
    try:
        run.until(lambda: (peers / "engine-0.json").exists() and (peers / "trainer-0.json").exists(), 300)
        return time.monotonic() - begun
    finally:
        run.end()


def timed(command: list[str], until: bytes | None = None) -> float:
    """Seconds until the command ends, or has printed `until`."""
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPO)
    assert process.stdout is not None
    if until:
        next(line for line in process.stdout if until in line)
        seconds = time.monotonic() - begun
        process.communicate()
        return seconds
    process.communicate()
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with_ray = importlib.util.find_spec("ray") is not None
    seen: dict[str, list[float]] = {"bare": [], "hpcrl run": [], "overhead": [], "hpcrl --help": [], "ray.init": []}
    with tempfile.TemporaryDirectory() as scratch:
        task = make_task(Path(scratch))
        for number in range(rounds):
            directory = Path(scratch) / str(number)
            directory.mkdir()
            seen["bare"].append(bare(task, directory))
            seen["hpcrl run"].append(ours(task, directory))
            seen["overhead"].append(seen["hpcrl run"][-1] - seen["bare"][-1])
            seen["hpcrl --help"].append(timed([sys.executable, "-m", "hpcrl", "--help"]))
            if with_ray:
                seen["ray.init"].append(timed([sys.executable, "-c", RAY], b"ready"))
    report({name: statistics.median(values) for name, values in seen.items() if values}, rounds, with_ray)


def report(medians: dict[str, float], rounds: int, with_ray: bool) -> None:
    """The table, and one JSON object as the last line."""
    rows = [
        ("stock vLLM server and bare torchrun rank, together", f"{medians['bare']:.2f} s"),
        ("`hpcrl run` until engine and trainer are up", f"{medians['hpcrl run']:.2f} s"),
        ("what hpcrl adds (median of the rounds' differences)", f"{medians['overhead']:+.2f} s"),
        ("`hpcrl --help`", f"{medians['hpcrl --help']:.2f} s"),
        ("`ray.init` and a first task", f"{medians['ray.init']:.2f} s" if with_ray else "not installed"),
    ]
    table = "\n".join(["| what | median |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])
    text = f"Start-up, {os.cpu_count()} cores, {rounds} rounds.\n\n{table}\n"
    print(text)
    (REPO / "bench" / "results").mkdir(exist_ok=True)
    (REPO / "bench" / "results" / "startup.md").write_text(text)
    ratios = {
        "run_over_bare": medians["hpcrl run"] / medians["bare"],
        "overhead_s": medians["overhead"],
        "help_s": medians["hpcrl --help"],
    }
    if with_ray:
        ratios["overhead_over_ray_init"] = medians["overhead"] / medians["ray.init"]
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
