"""Ranks and engines that run out of memory in mid-run, once for each file that says so."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.runs import odd_tokens

SAID = "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.10 GiB"
PLACES = ("forward", "backward", "optimizer")  #: of the steps 1, 2 and 3
ORDER = "no-memory"
SCHEDULER = "tests.support.full_scheduler.FullScheduler"  #: of an engine that has no memory once there is a file


def engine_flags(order: Path) -> tuple[str, ...]:
    """Of `hpcrl run` and `submit`, for engines that have no memory once there is the file `order`."""
    return "--vllm-scheduler-cls", SCHEDULER, "--vllm-additional-config", json.dumps({"order": str(order)})


def fail(*_: Any) -> None:
    raise torch.OutOfMemoryError(SAID)


def in_a_rank(options: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """A hook before each optimizer step: the last rank has no memory for it, once in each of PLACES."""
    if dist.get_rank() < dist.get_world_size() - 1 or not 0 < rollout_id <= len(PLACES):
        return
    place = PLACES[rollout_id - 1]
    told = Path(options.run_dir, place)
    if told.exists():
        return
    told.touch()
    if place == "forward":
        model[0].register_forward_pre_hook(fail)
    elif place == "backward":
        next(model[0].parameters()).register_hook(fail)
    else:
        optimizer.prepare_grads = fail


def in_another_thread(options: Any, rollout_id: int, *more: Any) -> None:
    """The same, and in step 4 as NCCL's watchdog does it: a word in the log, and the process is gone."""
    in_a_rank(options, rollout_id, *more)
    told = Path(options.run_dir, "aborted")
    if dist.get_rank() and rollout_id == 4 and not told.exists():
        told.touch()
        print("terminate called, what():  CUDA error: out of memory", file=sys.stderr, flush=True)
        os.abort()


def until_it_recomputes(options: Any, rollout_id: int, step_id: int, model: Any, *more: Any) -> None:
    """Once there is a file ORDER, the last rank has no memory for what activations take without recomputation."""
    told = dist.get_rank() == dist.get_world_size() - 1 and Path(options.run_dir, ORDER).exists()
    if told and options.megatron.get("recompute_granularity") != "full":
        model[0].register_forward_pre_hook(fail)


async def counted(options: Any, sample: Any) -> float:
    """The reward of the runs of tests, of which a line is kept."""
    with Path(options.run_dir, "graded").open("a") as file:
        file.write(f"{sample.group_index}\n")
    return await odd_tokens(options, sample)
