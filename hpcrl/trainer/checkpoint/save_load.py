"""Checkpoints: Megatron's torch_dist layout, written whole or not at all.

    DIR/iter_0000020/                   20 rollouts done: model, optimizer, schedule, RNG (torch_dist), hpcrl.json
    DIR/iter_0000020/reference/         further sets of weights, where a run has them (../reference_and_critic.py)
    DIR/iter_0000020/critic/            a second model, where a run has one
    DIR/latest_checkpointed_iteration.txt   "20"

Invariant: a directory named iter_* is complete.  A checkpoint is written under another name, flushed, renamed, and only
then named by the tracker file; a crash at any moment leaves the previous checkpoint good.  Model, optimizer, RNG, data
position and policy version are in the same directory, so they can never be of different steps.  It loads into any other
parallel layout.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from hpcrl.errors import HpcrlError
from hpcrl.models.files.hf_writer import settle_directory
from hpcrl.models.files.torch_dist import TorchDist, latest, step
from hpcrl.models.shared.mtp import is_head
from hpcrl.run import storage_errors
from hpcrl.run.rundir import CHOSEN, TRACKER, write_atomic
from hpcrl.trainer.checkpoint import contents, optimizer_shards, writers
from hpcrl.trainer.checkpoint.whole import RECORD, CheckpointRecord, check, manifest, open_stored, saved_by
from hpcrl.trainer.collectives import agree, agree_in_step, broadcast_json
from hpcrl.trainer.lora.saved import ADAPTER, adapter_record, check_same_adapter, refuse_adapter, trained_tensors
from hpcrl.trainer.megatron.model import Policy, padded_vocab_size
from hpcrl.trainer.parallel_state import Ranks

__all__ = ["Position", "latest", "load_checkpoint", "load_weights", "save", "saved_by", "step", "writable"]

#: the output layer: a critic's is of another kind
HEAD = ("output_layer.weight", "output_layer.bias")
#: optimizer state that any layout can read (Megatron's name for it); each rank writes and reads its own part
#: (optimizer_shards.py)
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


@dataclass(frozen=True)
class Position:
    """Where a run is: rollouts done, optimizer steps done (the policy version), and the rollout process's own state."""

    rollout_id: int = 0
    version: int = 0
    data: dict[str, Any] | None = None


# ---- out


def nothing(_: Position, __: Path) -> None:
    """Write nothing more."""


def save(
    policy: Policy,
    ranks: Ranks,
    directory: Path,
    position: Position,
    run_id: str,
    also: Callable[[Position, Path], None] = nothing,
) -> Path:
    """Save everything as DIR/iter_N (N = position.rollout_id); collective.

    Args:
        also: writes more into the directory before it gets its name; collective.

    Raises:
        HpcrlError: when it cannot be written.
    """
    final = step(directory, position.rollout_id)
    if is_latest(final):  # a run stopped right after a save: nothing has changed since
        return final
    with name_checkpoint_in_error(final):
        staging = prepare(final, ranks)
        write(everything(policy, ranks, position), staging)
        also(position, staging)
        commit(staging, final, position, run_id, ranks)
    return final


def is_latest(final: Path) -> bool:
    """Whether the tracker names this checkpoint, as rank 0 sees it; collective.

    Another rank's host may remember for a minute what a network file system had there before.
    """
    return broadcast_json(agree(lambda: latest(final.parent) == final, dist.get_rank() == 0))


@contextlib.contextmanager
def name_checkpoint_in_error(final: Path) -> Iterator[None]:
    """Let an error, of all ranks or of this one alone, name the checkpoint that was not saved."""
    try:
        yield
    except HpcrlError as error:
        hint = f"{error.hint}; the" if error.hint else "the"
        free = ""
        space = ""
        if storage_errors.lacks_space(error.what, final.parent, _still_needed(final)):
            free = f" ({(storage_errors.free(final.parent) or 0) / 1e6:.1f} MB are free there)"
            space = "free space and "
        raise HpcrlError(
            f"checkpoint {final} was not saved: {error.what}{free}",
            f"{hint} previous checkpoint is untouched: {space}use --resume",
        ) from error


def _still_needed(final: Path) -> int:
    """Bytes that a checkpoint which is being written will still take, if it gets as large as the one before it."""
    with contextlib.suppress(OSError, HpcrlError):
        before = latest(final.parent)
        return _bytes(before) - _bytes(_partial(final)) if before else 0
    return 0


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _partial(final: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return final.with_name(f".partial-{final.name}")


def prepare(final: Path, ranks: Ranks) -> Path:
    """An empty directory next to `final` to write in; what a crash left of earlier ones is removed.  Collective."""
    staging = _partial(final)

    def make() -> None:
        for pattern in (".partial-*", ".deleted-*"):
            for old in final.parent.glob(pattern):
                shutil.rmtree(old, ignore_errors=True)
        for old in final.parent.glob(f".{TRACKER}.*"):
            old.unlink(missing_ok=True)
        staging.mkdir(parents=True)

    agree(make, ranks.rank == 0)
    return staging


def make_directory(directory: Path, ranks: Ranks) -> None:
    """Make a directory of a checkpoint that is being written, the same for all ranks or to each its own; collective."""
    agree(directory.mkdir, ranks.rank == 0)
    agree(lambda: directory.mkdir(exist_ok=True), ranks.rank != 0)


def write(state: dict[str, Any], staging: Path) -> None:
    """Write `state` into an empty directory; collective.

    Raises:
        HpcrlError: the same on all ranks, if any could not; one that fails in the middle of Megatron's work raises it
            alone, and the others end with it.
    """
    request = plan(state, staging)
    agree(lambda: writers.write_here(request))
    for finalize in request.finalize_fns:  # gathers what was written where, and writes .metadata
        agree_in_step(finalize)


def division() -> Any:
    """Megatron's division among data-parallel ranks of what they hold equally, which it remembers."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group, do_cache_distribution=True)


def plan(state: dict[str, Any], staging: Path, divided: Any = None) -> Any:
    """Megatron's request to write `state` into an empty directory; collective.

    Args:
        divided: the `division` of an earlier request for the same tensors, whose parts were compared then.
    """
    strategy = division() if divided is None else divided
    writers.write_in_place(state)
    how: dict[str, Any] = {"content_metadata": dict(SHARDING), "async_sharded_save": True}
    if strategy.cached_distribution is not None:
        how["validate_access_integrity"] = False
    if (
        "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    ):  # since 0.17, where another is the default
        how["async_strategy"] = "mcore"
    return agree_in_step(lambda: dist_checkpointing.save(state, str(staging), strategy, **how))


def commit(staging: Path, final: Path, position: Position, run_id: str, ranks: Ranks) -> None:
    """Add hpcrl.json, rename to `final` and name it in the tracker; collective."""

    def last() -> None:
        record = CheckpointRecord(run_id, position.rollout_id, position.version, position.data, manifest(staging))
        write_atomic(staging / RECORD, msgspec.json.encode(record), mode=0o644)
        settle(staging, final, str(position.rollout_id))

    agree(last, ranks.rank == 0)


def settle(staging: Path, final: Path, name: str) -> None:
    """Flush, rename, and write `name` into the tracker; one rank does it."""
    settle_directory(staging, final)  # one that is there was left by a crash before the tracker named it
    write_atomic(final.parent / TRACKER, name.encode(), mode=0o644)
    (final.parent / CHOSEN).unlink(missing_ok=True)


# ---- in


def load_checkpoint(policy: Policy, ranks: Ranks, path: Path, run_id: str | None, verify: bool = False) -> Position:
    """Resume from a checkpoint of ours, saved in whatever layout, once it is known to be whole; collective.

    Args:
        run_id: HpcrlError if another run saved it (None: any may have).
        verify: compare the tensors with their checksums first.

    Raises:
        DataError: the same on all ranks, if the checkpoint is damaged or does not fit the model, naming tensor or file.
    """
    record = check(path, ranks, run_id, verify)
    load_state(policy, ranks, path)
    return Position(record.rollout_id, record.version, record.data)


def load_state(policy: Policy, ranks: Ranks, path: Path) -> None:
    """Model, optimizer, schedule and random numbers of a torch_dist checkpoint of ours that is whole; collective.

    Raises:
        DataError: as `load_checkpoint`.
    """
    policy = policy.trained
    optimizer_shards.before_load(policy.optimizer)
    stored = open_stored(path, ranks)
    request = everything(policy, ranks, Position(), loading=True)
    if not stored.holds(request["rng_state"].unique_key):  # another layout has other ranks: they keep their fresh ones
        del request["rng_state"]
    optimizer = [
        {k: copy.deepcopy(v) for k, v in leaf.items() if k != "param_state"}
        for leaf in contents.optimizer_parts(request["optimizer"])
    ]
    state = read(request, stored, policy)
    _fill(policy, state)
    state = {name: part for name, part in state.items() if not name.startswith("model")}  # which takes memory again
    policy.optimizer.load_state_dict(contents.as_chained(state["optimizer"], optimizer))
    optimizer_shards.after_load(policy.optimizer)
    policy.scheduler.load_state_dict(state["opt_param_scheduler"])
    if "rng_state" in request:
        contents.restore_rng(state["rng_state"][0])


def load_weights(policy: Policy, ranks: Ranks, path: Path, heads: bool = True) -> None:
    """Take a torch_dist checkpoint's weights and nothing else: ours, slime's, or Megatron-LM's; collective.

    A critic takes all but the output layer from a checkpoint of a policy.

    Args:
        heads: with the layers that predict further tokens.  Else the policy's stay as they are, whether the checkpoint
            has any or not.

    Raises:
        DataError: as `load_checkpoint`.
    """
    stored = open_stored(path, ranks)
    request = weights(policy)
    spare: tuple[str, ...] = ()
    if policy.value_head and (HEAD[1] not in stored.all or stored.all[HEAD[1]].shape != (1,)):
        spare = HEAD
    if not heads:
        spare += (*filter(is_head, {*stored.tensors, *(name for _, part in _chunks(request) for name in part)}),)
    request |= {key: {n: value for n, value in part.items() if n not in spare} for key, part in _chunks(request)}
    _fill(policy, read(request, stored, policy, spare))
    policy.optimizer.reload_model_params()  # the optimizer's fp32 copies


def _chunks(request: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(key, value) for key, value in request.items() if key.startswith("model")]


def read(request: dict[str, Any], stored: TorchDist, policy: Policy, spare: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `request` asks for, once it is known to fit; collective.

    Args:
        spare: tensors of the model that the checkpoint may have and that are not asked for.

    Raises:
        DataError: as `load_checkpoint`.
    """
    if policy.of_adapters:
        common = agree_in_step(lambda: dist_checkpointing.load_common_state_dict(str(stored.path)))
        check_same_adapter(policy, common.get(ADAPTER), stored.path)
    else:
        agree(lambda: refuse_adapter(stored))
    request = contents.fitting(request, stored, policy.vocab_size, spare)
    try:
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(stored.path)),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )  # each file is read once for all data-parallel ranks
        return agree_in_step(lambda: dist_checkpointing.load(request, str(stored.path), strategy))
    except HpcrlError as error:
        raise HpcrlError(
            f"{stored.path} does not load into this model: {error.what}",
            "is it a checkpoint of --hf-checkpoint's model?",
        ) from error


def writable(directory: Path) -> None:
    """Make the checkpoint directory; HpcrlError before any work if nothing can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (probe := directory / f".probe-{os.getpid()}").touch()
        probe.unlink()
    except OSError as error:
        raise HpcrlError(f"--save {directory}: {error.strerror}", "choose a writable directory") from error


# ---- what is saved


def everything(policy: Policy, ranks: Ranks, position: Position, *, loading: bool = False) -> dict[str, Any]:
    """Model, optimizer, schedule and RNG, under Megatron-LM's keys; collective."""
    policy = policy.trained
    optimizer_shards.before_load(policy.optimizer)  # before the first step there is no state to save
    optimizer_shards.fill_states(policy.optimizer, loading)
    model = weights(policy)
    optimizer = policy.optimizer.sharded_state_dict(
        {k: v for k, v in model.items() if k.startswith("model")}, is_loading=loading, metadata=metadata()
    )
    for part in contents.optimizer_parts(optimizer):
        if part.get("param_state", "") is None:  # this rank has no part; Megatron would warn that ranks differ
            del part["param_state"]
        if not loading:
            contents.drop_classes(part)
    return model | {
        "iteration": position.rollout_id,
        "optimizer": optimizer,
        "opt_param_scheduler": policy.scheduler.state_dict(),
        "rng_state": contents.rng_object(ranks),
    }


def weights(policy: Policy) -> dict[str, Any]:
    """The model alone, and what a reader asks for in addition; under model, or of virtual stages model0, model1, ..."""
    many = len(policy.modules) > 1
    model = {
        f"model{i if many else ''}": trained_tensors(m, policy, metadata())
        if policy.of_adapters
        else m.sharded_state_dict(metadata=metadata())
        for i, m in enumerate(policy.modules)
    }
    for part in model.values() if policy.value_head else ():
        for name in HEAD:
            if name in part:  # Megatron takes it for rows of the vocabulary, which may be padded
                part[name].allow_shape_mismatch = False
    args = contents.megatron_args(policy, padded_vocab_size(policy.vocab_size, policy.ranks.tp_size))
    adapter = {ADAPTER: adapter_record(policy)} if policy.of_adapters else {}
    return {"args": args, "checkpoint_version": 3.0, "iteration": 0, **adapter, **model}


def metadata() -> dict[str, Any]:
    """What Megatron's sharded_state_dict wants to know."""
    return SHARDING | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _fill(policy: Policy, state: dict[str, Any]) -> None:
    for i, module in enumerate(policy.modules):
        own = state["model"] if len(policy.modules) == 1 else state[f"model{i}"]
        module.load_state_dict(own, strict=False)  # fit.check has compared the names already
