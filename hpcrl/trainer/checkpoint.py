"""Checkpoints: Megatron's torch_dist layout, written whole or not at all.

    DIR/iter_0000020/                   20 rollouts done: model, optimizer, schedule, RNG (torch_dist), hpcrl.json
    DIR/latest_checkpointed_iteration.txt   "20"

Invariant: a directory named iter_* is complete.  A checkpoint is written under another name, flushed, renamed, and only
then named by the tracker file; a crash at any moment leaves the previous checkpoint good.  Model, optimizer, RNG, data
position and policy version are in the same directory, so they can never be of different steps.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from hpcrl.errors import HpcrlError
from hpcrl.rundir import write_atomic
from hpcrl.trainer import cpu
from hpcrl.trainer.agree import broadcast_bytes, device
from hpcrl.trainer.megatron import Ranks
from hpcrl.trainer.model import Policy

TRACKER = "latest_checkpointed_iteration.txt"
#: optimizer state that any data-parallel size can read (Megatron's name for it)
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


@dataclass(frozen=True)
class Position:
    """Where a run is: rollouts done, optimizer steps done (the policy version), and the rollout process's own state."""

    rollout_id: int = 0
    version: int = 0
    data: dict[str, Any] | None = None


def latest(directory: Path) -> Path | None:
    """The checkpoint that the tracker file names, or None if there is no tracker.

    HpcrlError if the tracker names a checkpoint that is not there.
    """
    tracker = directory / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    path = directory / (f"iter_{int(text):07d}" if text.isdigit() else text)
    if not path.is_dir():
        raise HpcrlError(f"{tracker} names {path.name}, which is not there", "write the number of an iter_* directory into it")
    return path


def save(policy: Policy, ranks: Ranks, directory: Path, position: Position, run_id: str) -> Path:
    """Save everything as DIR/iter_N (N = position.rollout_id); collective.  HpcrlError when it cannot be written."""
    final = directory / f"iter_{position.rollout_id:07d}"
    if latest(directory) == final:  # a run stopped right after a save: nothing has changed since
        return final
    beside = directory / f".partial-{final.name}"
    error = _attempt(lambda: _prepare(beside), ranks.rank == 0)
    _agree(error, beside)
    state = _state(policy, ranks, loading=False)
    error = _attempt(lambda: dist_checkpointing.save(state, str(beside), content_metadata=SHARDING), True)
    _agree(error, beside)
    error = _attempt(lambda: _commit(beside, final, directory, position, run_id), ranks.rank == 0)
    _agree(error, beside)
    return final


def load(policy: Policy, ranks: Ranks, path: Path, run_id: str, *, weights_only: bool = False) -> Position:
    """Load a checkpoint into `policy`; collective.

    weights_only: take the model's weights and nothing else (another stage's result): the position is the start.
    HpcrlError if the checkpoint is damaged, does not fit the model, or was saved by another run than `run_id`.
    """
    try:
        if weights_only:
            state = dist_checkpointing.load({"model": _model_state(policy)}, str(path))
            _load_model(policy, state)
            policy.optimizer.reload_model_params()
            return Position()
        record = _record(path, run_id)
        cpu.before_load(policy.optimizer)
        state = dist_checkpointing.load(_state(policy, ranks, loading=True), str(path))
    except HpcrlError:
        raise
    except (Exception, CheckpointException) as error:
        raise HpcrlError(
            f"{path} does not load into this model: {_short(error)}", "is it a checkpoint of --hf-checkpoint's model?"
        ) from error
    _load_model(policy, state)
    policy.optimizer.load_state_dict(state["optimizer"])
    cpu.after_load(policy.optimizer)
    policy.scheduler.load_state_dict(state["opt_param_scheduler"])
    _set_random(state["rng_state"][0])
    return Position(record["rollout_id"], record["version"], record["data"])


def _record(path: Path, run_id: str) -> dict[str, Any]:
    """hpcrl.json of a checkpoint of this run."""
    record = msgspec.json.decode((path / "hpcrl.json").read_bytes(), type=dict)
    if record["run_id"] != run_id:
        raise HpcrlError(f"{path} was saved by another run", "give --save a directory of its own; --load starts from its weights")
    return record


def writable(directory: Path) -> None:
    """Make the checkpoint directory; HpcrlError before any work if nothing can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (probe := directory / f".probe-{os.getpid()}").touch()
        probe.unlink()
    except OSError as error:
        raise HpcrlError(f"--save {directory}: {error.strerror}", "choose a writable directory") from error


# ---- what is saved


def _state(policy: Policy, ranks: Ranks, *, loading: bool) -> dict[str, Any]:
    model = _model_state(policy)
    return {
        "checkpoint_version": 3.0,
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_metadata()),
        "opt_param_scheduler": policy.scheduler.state_dict(),
        "rng_state": _random_state(ranks),
    }


def _metadata() -> dict[str, Any]:
    return SHARDING | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _model_state(policy: Policy) -> dict[str, Any]:
    return policy.module.sharded_state_dict(metadata=_metadata())


def _load_model(policy: Policy, state: dict[str, Any]) -> None:
    policy.module.load_state_dict(state["model"], strict=False)  # dist_checkpointing has checked the names already


def _random_state(ranks: Ranks) -> ShardedObject:
    """This rank's random-number states, as one object per (pipeline, tensor) rank, as Megatron-LM keeps them."""
    mine = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    shape, offset = (ranks.pp_size, ranks.tp_size), (ranks.pp_rank, ranks.tp_rank)
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [mine], shape, offset, replica_id=replica)


def _set_random(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if state["cuda_rng_state"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


# ---- whole or not at all


def _prepare(beside: Path) -> None:
    for old in beside.parent.glob(".partial-*"):  # of a save that a crash cut short
        shutil.rmtree(old, ignore_errors=True)
    beside.mkdir(parents=True)


def _commit(beside: Path, final: Path, directory: Path, position: Position, run_id: str) -> None:
    record = {"run_id": run_id, "rollout_id": position.rollout_id, "version": position.version, "data": position.data}
    write_atomic(beside / "hpcrl.json", msgspec.json.encode(record))
    for file in beside.iterdir():
        _flush(file)
    _flush(beside)
    if final.exists():  # left by a crash before the tracker named it: nobody reads it
        shutil.rmtree(final)
    os.rename(beside, final)
    _flush(directory)
    write_atomic(directory / TRACKER, str(position.rollout_id).encode())


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _attempt(action: Any, wanted: bool) -> str:
    """Run `action` if wanted; the error's text, or ''."""
    if not wanted:
        return ""
    try:
        action()
        return ""
    except (Exception, CheckpointException) as error:  # noqa: BLE001  (told to all ranks by _agree, which raises)
        return _short(error) or type(error).__name__


def _agree(error: str, beside: Path) -> None:
    """All ranks raise the first failing rank's error: none goes on with half a checkpoint."""
    world = dist.get_world_size()
    first = torch.tensor([dist.get_rank() if error else world], device=device())
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if first.item() == world:
        return
    why = broadcast_bytes(error.encode(), int(first)).decode()
    free = shutil.disk_usage(beside.parent).free / 1e6 if beside.parent.is_dir() else 0.0
    raise HpcrlError(
        f"checkpoint {beside.parent / beside.name.removeprefix('.partial-')} was not saved: {why} ({free:.1f} MB are free there)",
        "the previous checkpoint is untouched: free space and use --resume",
    )


def _short(error: BaseException) -> str:
    """The line of an error that says most: a CheckpointException lists the ranks first and the cause last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1 if isinstance(error, CheckpointException) else 0][:300] if lines else ""
