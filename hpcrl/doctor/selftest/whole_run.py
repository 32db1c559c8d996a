"""Small runs of hpcrl itself, for the checks that look at what a user would run.

Invariant: they are started as a user starts them, with `hpcrl run`, and none outlives its check.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hpcrl.doctor.selftest.tiny_model import make_model, make_prompts
from hpcrl.errors import HpcrlError
from hpcrl.report.file_tail import end_of_text
from hpcrl.report.metrics import last_records
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.process import end_processes
from hpcrl.run.rundir import RunDir
from hpcrl.utils.check_results import last_line
from hpcrl.utils.waiting import Deadline

LONG = 420.0  #: seconds that a run may take: an engine on a GPU compiles for minutes
#: what the self-test's ranks get from the environment
OF_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
GRACE = 15.0
ENGINES = ("torch", "megatron.core", "vllm", "transformers")  #: packages of a run with engines
COMMON: dict[str, Any] = {
    "input_key": "prompt",
    "label_key": "label",
    "apply_chat_template": True,
    "actor_num_gpus_per_node": 1,
    "lr": 1e-3,
    "deterministic_mode": True,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 512,
    "rollout_batch_size": 8,
}


def write_recipe(directory: Path, name: str, gpus: int, **values: Any) -> Path:
    """A recipe over the tiny model, which is made if it is not there; bf16 where there are GPUs."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "model" / "config.json").exists():
        make_model(directory / "model")
        make_prompts(directory / "prompts.jsonl")
    places = {
        "hf_checkpoint": str(directory / "model"),
        "prompt_data": str(directory / "prompts.jsonl"),
        "bf16": gpus > 0,
    }
    path = directory / f"{name}.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in {**COMMON, **places, **values}.items()))
    return path


def run(
    words: list[str], log: Path, status: int = 0, turn: Callable[[], bool] = lambda: False, seconds: float = LONG
) -> None:
    """`hpcrl run WORDS` to its end, within `seconds`.

    Args:
        turn: called until it says True.

    Raises:
        HpcrlError: with its last words, for another exit status.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcrl", "run", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={name: value for name, value in os.environ.items() if name not in OF_RANKS},
        )
        deadline, done = Deadline(seconds), False
        try:
            while process.poll() is None and not deadline.over:
                done = done or turn()
                time.sleep(0.02)
        finally:
            late = process.poll() is None
            if late:
                end_processes([psutil.Process(process.pid)], GRACE)
            process.wait()
    if late:
        raise HpcrlError(f"hpcrl run did not end within {seconds:.0f} s", f"see {log}")
    if process.returncode != status:
        raise HpcrlError(f"hpcrl run {how_it_ended(process.returncode)}: {last_line(end_of_text(log))}", f"see {log}")


def steps(root: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a run, in order."""
    return [row for row in last_records(RunDir(root).metrics_file, 10_000) if "train/loss" in row]


def sampling_run(directory: Path, gpus: int) -> list[dict[str, Any]]:
    """The steps of a run with an engine; made once for the checks that read it."""
    root = directory / "sampling"
    if (root / "summary.json").exists():
        return steps(root)
    return engine_run(directory, "sampling", gpus, colocate=gpus == 1)


def engine_run(
    directory: Path,
    name: str,
    gpus: int,
    seconds: float = LONG,
    turn: Callable[[], bool] = lambda: False,
    **values: Any,
) -> list[dict[str, Any]]:
    """The steps of a run of `recipe_with_engines` in DIRECTORY/NAME.

    Its checkpoints are removed: those of a large model have tens of GB.
    """
    root = directory / name
    recipe = recipe_with_engines(directory, name, gpus, **values)
    run([str(recipe), "--run-dir", str(root)], directory / f"{name}.log", turn=turn, seconds=seconds)
    shutil.rmtree(root / "checkpoints", ignore_errors=True)
    return steps(root)


def recipe_with_engines(directory: Path, name: str, gpus: int, **values: Any) -> Path:
    """Two steps of GRPO with an engine, every update compared tensor by tensor, where `values` do not say otherwise."""
    common = {
        "rollout_num_gpus": 1,
        "num_rollout": 2,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 16,
        "rollout_max_context_len": 64,
        "rm_type": "random",
        "advantage_estimator": "grpo",
        "check_weight_update_equal": True,
        "engine_start_timeout": LONG,
    }
    return write_recipe(directory, name, gpus, **common | values)


def gpu_count() -> int:
    """GPUs that a process here would get; 0 where runs are on the CPU."""
    from hpcrl.launch.node_checks.one_node import look_at_node

    return look_at_node("here", "", Path("/")).gpu_count
