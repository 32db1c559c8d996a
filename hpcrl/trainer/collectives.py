"""Small collectives of trainer ranks: a decision, an error or a few bytes of one rank known to all, and the gathering
of pieces of unequal length, which gloo refuses.

Invariants: bytes travel as uint8 tensors, nothing is pickled; results and the order of sums are the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from hpcrl import errors
from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.run.exit_status import out_of_memory

ALONE = "raised by this rank alone"  #: a note of such an error


def is_alone(error: HpcrlError) -> bool:
    """Whether this rank alone has raised it: the others may wait for it in the middle of a collective function."""
    return ALONE in getattr(error, "__notes__", ())


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The JSON values of all ranks of `group` (default: all), in their order, on every rank; collective."""
    data = bytearray(msgspec.json.encode(value))
    world = dist.get_world_size(group)
    if world == 1:
        return [msgspec.json.decode(data)]
    where = device(group)
    sizes = torch.empty(world, dtype=torch.int64, device=where)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(data)], dtype=torch.int64, device=where), group=group)
    piece = torch.frombuffer(data, dtype=torch.uint8).to(where)
    lengths = sizes.tolist()
    whole = gather_uneven(piece, group, lengths).cpu().split(lengths)
    return [msgspec.json.decode(part.numpy().tobytes()) for part in whole]


def device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors of a collective must be: CUDA with NCCL, else the CPU."""
    cuda = torch.cuda.is_available() and dist.get_backend(group) != "gloo"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def connect_when_needed() -> None:
    """Have gloo's groups, made from now on, connect two ranks when they first exchange something.

    By default a group connects every rank to every other when it is made, and every one looks up the addresses of all
    in the store: 2 N^2 requests for each group of N ranks.  Rings and trees need N log N connections.  Read by torch
    when a group is made (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp); a user's own setting stays.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def make_patient(options: Options) -> dist.ProcessGroup:
    """A group of all ranks for waiting on other roles, as long as any of them may take; collective.

    Megatron's own groups give up after --distributed-timeout-minutes, which is right for ranks that compute together
    and wrong for ranks that wait while the first one waits for samples or engines.  gloo: these are small messages.
    """
    seconds = 60 + max(options.rollout_timeout, options.engine_start_timeout, options.update_timeout)
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def broadcast_bytes(data: bytes | None, source: int = 0, group: dist.ProcessGroup | None = None) -> bytes:
    """`data` of the rank with global number `source`, on every rank of `group` (default: all); collective."""
    if dist.get_world_size(group) == 1:
        assert data is not None
        return data
    mine = dist.get_rank() == source
    where = device(group)
    size = torch.tensor([len(data) if mine and data is not None else 0], dtype=torch.int64, device=where)
    dist.broadcast(size, source, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=where)
    if mine and data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, source, group=group)
    return buffer.cpu().numpy().tobytes()


def broadcast_json(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """A JSON value of rank `source`, on every rank of `group`; collective."""
    data = msgspec.json.encode(value) if dist.get_rank() == source else None
    return msgspec.json.decode(broadcast_bytes(data, source, group))


def least(mine: int, group: dist.ProcessGroup) -> int:
    """The least of all ranks' numbers; collective over a gloo group."""
    if dist.get_world_size(group) == 1:
        return mine
    found = torch.tensor(mine)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return int(found)


def may_be_echo(error: BaseException) -> bool:
    """Whether an error may come from a collective whose other ranks are gone or late: by its class, whatever it says.

    NCCL, the stores and torch's own checks raise kinds of DistError; gloo raises RuntimeError itself (torch 2.13),
    where torch's other errors mostly have their own classes.  torch.save's do not, but name the source file of its
    archives.
    """
    # before there is a group the ranks meet, and one may be gone
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    alone = world == 1
    of_gloo = type(error) is RuntimeError and "inline_container.cc" not in str(error)
    return not alone and not out_of_memory(str(error)) and (isinstance(error, dist.DistError) or of_gloo)


def agree(action: Callable[[], Any], wanted: bool = True) -> Any:
    """Run `action` on the ranks where it is wanted; collective.  Its result, or None elsewhere.

    If it fails on any rank, all ranks raise the error of the first that failed: none continues alone.
    """
    result = None
    error = None
    if wanted:
        try:
            result = action()
        except (Exception, CheckpointException) as caught:  # noqa: BLE001  (told to all ranks)
            error = caught
    if dist.get_world_size() == 1:
        if error is not None:
            raise _as_ours(error) from error
        return result
    world = dist.get_world_size()
    first = torch.tensor([dist.get_rank() if error is not None else world], device=device())
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if first.item() == world:
        return result
    ours = _as_ours(error) if error is not None else HpcrlError("")
    kind, what, hint = broadcast_json([errors.kind_of(ours), ours.what, ours.hint], int(first))
    raise errors.KINDS[kind](what, hint) from error


def agree_in_step(action: Callable[[], Any]) -> Any:
    """Run `action`, a library's collective function, on all ranks; its result.

    What torch has told every rank already (CheckpointException) they all raise as `agree` does.  Any other error is
    this rank's alone and raised at once: the others may wait for it in the middle of `action`, and end as this rank's
    connections do.
    """
    result = None
    told = None
    try:
        result = action()
    except CheckpointException as error:
        told = error
    except Exception as error:
        if may_be_echo(error):
            raise
        ours = _as_ours(error)
        ours.add_note(ALONE)
        raise ours from error

    def outcome() -> Any:
        if told is not None:
            raise told
        return result

    return agree(outcome)


def _as_ours(error: BaseException) -> HpcrlError:
    if isinstance(error, HpcrlError):
        return error
    return HpcrlError(out_of_memory(str(error)) or short(error) or type(error).__name__)


def short(error: BaseException) -> str:
    """The line of an error that says most: a CheckpointException lists the ranks first and the cause last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1 if isinstance(error, CheckpointException) else 0][:300] if lines else ""


def gather_uneven(piece: torch.Tensor, group: Any, sizes: Sequence[int]) -> torch.Tensor:
    """The pieces of all ranks laid end to end [sum of sizes, ...].

    Args:
        sizes: rows of each rank's piece.
    """
    if (longest := max(sizes)) == 0:
        return piece
    padded = torch.cat([piece, piece.new_zeros(longest - piece.size(0), *piece.shape[1:])])
    found = piece.new_empty(longest * len(sizes), *piece.shape[1:])
    dist.all_gather_into_tensor(found, padded.contiguous(), group=group)
    return torch.cat([rows[:size] for rows, size in zip(found.split(longest), sizes, strict=True)])
