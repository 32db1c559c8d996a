"""Help for tests that start real runs: recipes of a tiny model, the command, and what it left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from hpcrl.utils.waiting import Deadline, poll
from tests.support.tiny import make_model

REPO = Path(__file__).parents[2]
#: a GRPO run of a random model on made-up rewards: every real part, a few seconds of work
POLICY = {
    "num_rollout": 5,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "rollout_max_response_len": 8,
    "rollout_max_context_len": 64,
    "rollout_num_gpus": 1,
    "custom_rm_path": "tests.support.runs.odd_tokens",
    "advantage_estimator": "grpo",
    "check_weight_update_equal": True,
    "engine_start_timeout": 300,
    "timeout_factor": 0.05,
    "update_timeout": 60,
}
#: supervised fine-tuning: no engine, so seconds from start to end
SFT = {
    "num_rollout": 6,
    "rollout_batch_size": 8,
    "loss_type": "sft_loss",
    "rollout_num_gpus": 0,
    "label_key": "label",
    "timeout_factor": 0.02,
}
#: trainers on two hosts; the engine, where there is one, is on a third
SPREAD = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1}
COMMON = {
    "input_key": "prompt",
    "apply_chat_template": True,
    "rollout_shuffle": True,
    "actor_num_gpus_per_node": 1,
    "bf16": False,
    "lr": 1e-3,
    "save_interval": 2,
    "deterministic_mode": True,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 128,
    # a fault ends the run, so that a test can look at what it has left; KEPT is what a user has
    "attempts": 1,
}
#: after a fault the next attempt begins in the same job
KEPT = {"attempts": 4}


def hold(root: Path, rollouts: int = 10**9) -> None:
    """Let a run end so many rollouts, and no more until this is called again."""
    root.with_name("held").write_text(str(rollouts))


def held(options: Any, rollout_id: int) -> bool:
    """Whether `hold` forbids this rollout; `held.seen` beside the run directory says that it was asked for."""
    path = Path(options.run_dir).with_name("held")
    if found := path.exists() and rollout_id >= int(path.read_text() or 0):
        path.with_suffix(".seen").touch()
    return found


async def odd_tokens(options: Any, sample: Any) -> float:
    """A reward that varies within a group whatever the model says: the share of odd token ids in the response; it waits
    in a rollout that is `held`."""
    while held(options, sample.group_index // options.rollout_batch_size):
        await asyncio.sleep(0.05)
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 for token in response) / len(response) if response else 0.0


def held_step(options: Any, rollout_id: int, *_: Any) -> None:
    """A hook before each optimizer step, which waits in a rollout that is `held`."""
    while held(options, rollout_id):
        time.sleep(0.05)


def held_save(options: Any, rollout_id: int, *_: Any) -> None:
    """A hook before each optimizer step: what is saved after one of a rollout that is `held` is written, and gets no
    name."""
    from hpcrl.trainer.checkpoint import save_load

    if held(options, rollout_id):
        save_load.settle = lambda *_: time.sleep(600)


def make_task(directory: Path) -> Path:
    """A tiny model (tied embeddings) and its prompt files in `directory`."""
    make_model(directory / "model", tied=True)
    for name, first, count in (("train", 0, 40), ("heldout", 40, 6)):
        rows = [
            {"prompt": [{"role": "user", "content": f"{i}+{i % 7}="}], "label": str(i + i % 7)}
            for i in range(first, first + count)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def recipe(directory: Path, task: Path, **values: Any) -> Path:
    """Write a recipe of COMMON and `values`; None leaves a key out."""
    values = COMMON | {"hf_checkpoint": str(task / "model"), "prompt_data": str(task / "train.jsonl")} | values
    path = directory / "recipe.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value is not None))
    return path


def sft(path: Path, task: Path, **values: Any) -> Path:
    """A recipe of supervised fine-tuning over two hosts; `path` is made if it is not there."""
    path.mkdir(exist_ok=True)
    return recipe(path, task, **(SFT | SPREAD | values))


def policy(path: Path, task: Path, held_out: bool = True, **values: Any) -> Path:
    """A recipe of GRPO over three hosts.  held_out: evaluated every third step."""
    path.mkdir(exist_ok=True)
    held = {"eval_prompt_data": ["heldout", str(task / "heldout.jsonl")], "eval_interval": 3, "eval_label_key": "label"}
    return recipe(path, task, **(POLICY | (held if held_out else {}) | SPREAD | values))


class Run:
    """One `hpcrl run` as a child process."""

    def __init__(self, *args: str | Path, root: Path, **env: str) -> None:
        self.root = root
        command = [sys.executable, "-m", "hpcrl", "run", *map(str, args)]
        env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | env
        self.process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=root.parent,
            start_new_session=True,
            umask=0,  # what it writes is of its user alone nevertheless
        )

    def end(self, seconds: float = 240) -> tuple[int, str]:
        """(exit status, output); whatever happens, nothing of the run is left."""
        try:
            out, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            out, _ = self.process.communicate(timeout=60)
            raise AssertionError(f"the run did not end in {seconds} s:\n{out}\n{self.logs()}") from None
        return self.process.returncode, out

    def end_early(self, steps: int, how: signal.Signals, ahead: int = 0) -> None:
        """Stop or kill it once it has trained so many steps; it is held there until it knows, or is gone.  A loop that
        samples `ahead` ends a step when that is done."""
        hold(self.root, steps + ahead)
        self.until(lambda: self.steps() >= steps)
        pids = self.pids()
        os.kill(self.process.pid, how)
        log = self.root / "logs/latest/rollout-0.log"
        poll(lambda: "asked to stop" in log.read_text() or not self.pids(), Deadline(60), 0.1)
        hold(self.root)
        status, out = self.end()
        assert status == (143 if how == signal.SIGTERM else -how), out
        assert all_gone(self.root, pids), processes(self.root)

    def until(self, condition: Callable[[], bool], seconds: float = 180) -> None:
        """Wait for `condition`; fails if the run ends before, or in `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                said = self.process.communicate(timeout=60)[0]
                raise AssertionError(f"the run ended early:\n{said}\n{self.logs()}")
            assert time.monotonic() < deadline, f"waited {seconds} s in vain\n{self.logs()}"
            time.sleep(0.02)

    def steps(self) -> int:
        """Training steps that are in metrics.jsonl."""
        return len(metrics(self.root))

    def logs(self) -> str:
        return "\n".join(f"--- {p}\n{p.read_text()[-3000:]}" for p in sorted(self.root.glob("logs/*/*.log")))

    def pids(self) -> list[int]:
        return processes(self.root)


class SubmittedRun:
    """A run directory, whose processes are somewhere else."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def until(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        """Wait for `condition`; AssertionError with the run's logs if it does not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain\n{self.logs()}"
            time.sleep(0.1)

    def attempt(self) -> int:
        return max((int(p.name) for p in self.root.glob("attempts/*")), default=-1)

    def steps(self) -> int:
        return len(metrics(self.root))

    def training(self, attempt: int, steps: int = 1) -> bool:
        """Whether that attempt has trained so many steps of its own: its trainer is up, and metrics have been written
        since.  With copies of every step in memory, that of the last but one is in both places by then."""
        peer = self.root / "attempts" / str(attempt) / "peers" / "trainer-0.json"
        return peer.exists() and self.steps() >= json.loads(peer.read_text())["start"] + steps

    def trains_after(self, attempt: int) -> bool:
        """Whether a later attempt than that one has trained a step of its own, and is the last."""
        return self.attempt() > attempt and self.training(self.attempt())

    def logs(self) -> str:
        files = [*sorted(self.root.glob("logs/*.out")), *sorted(self.root.glob("logs/attempt-*/*.log"))]
        return "\n".join(f"--- {p.relative_to(self.root)}\n{p.read_text(errors='replace')[-2500:]}" for p in files)


def processes(root: Path) -> list[int]:
    """Living processes of a run: those with its directory in their command line, and their descendants."""
    found: set[int] = set()
    for process in psutil.process_iter(["cmdline"]):
        try:
            if str(root) in " ".join(process.info["cmdline"] or []) and process.status() != psutil.STATUS_ZOMBIE:
                found |= {process.pid, *(child.pid for child in process.children(recursive=True))}
        except psutil.Error:
            continue
    return sorted(found - {os.getpid()})


def all_gone(root: Path, pids: list[int], seconds: float = 30) -> bool:
    """Whether within `seconds` neither `pids` nor any other process of the run is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not processes(root) and not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def gone(pids: Iterable[int], seconds: float = 30) -> bool:
    """Whether none of the processes is left within `seconds`."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def role_pid(root: Path, module: str) -> int:
    """The process of a role, by the module in its command line, within this run: not one that it has forked, whose number
    may be the lower one."""
    parents: dict[int, int] = {}
    for pid in processes(root):
        with contextlib.suppress(psutil.Error):  # some end meanwhile
            process = psutil.Process(pid)
            if module in " ".join(process.cmdline()):
                parents[pid] = process.ppid()
    for pid, parent in parents.items():
        if parent not in parents:
            return pid
    raise AssertionError(f"no {module} in {root}")


def rows(root: Path) -> Iterator[dict[str, Any]]:
    path = root / "metrics.jsonl"
    if path.exists():
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                yield json.loads(line)


def metrics(root: Path) -> dict[int, dict[str, float]]:
    """rollout id -> what a repeated run must repeat: everything but times and speeds."""
    kept: dict[int, dict[str, float]] = {}
    for row in rows(root):
        if "train/loss" in row:
            assert row["rollout_id"] not in kept, "a step is logged twice"
            kept[row["rollout_id"]] = {k: v for k, v in row.items() if k != "time" and not k.startswith("perf/")}
    return kept


def events(root: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a stage: tag -> (step, value), each step once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(root / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def series(root: Path) -> dict[str, list[tuple[int, float]]]:
    """The same of metrics.jsonl."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows(root):
        for name, value in row.items():
            if name not in ("rollout_id", "time"):
                found.setdefault(name, []).append((row["rollout_id"] + 1, value))
    return found


def samples(root: Path) -> dict[str, bytes]:
    """file name -> content of every sample file."""
    return {path.name: path.read_bytes() for path in sorted((root / "samples").glob("*.jsonl"))}


def unused_port() -> int:
    """A port for a server that starts later: below those that the kernel gives to others meanwhile."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are taken")
