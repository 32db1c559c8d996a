"""Weights from a Hugging Face directory into the ranks, and out of them again.

Invariants: loading reads every tensor once in all ranks together (hf_reading.py), and every tensor of the files has
exactly one place; export gives back every tensor once, bit for bit what the ranks hold, with one full tensor in memory
at a time.  Nothing is pickled between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from hpcrl.errors import DataError, HpcrlError
from hpcrl.models.files.fp8 import Scheme
from hpcrl.models.files.from_fp8 import Dequantized, widened
from hpcrl.models.files.safetensors_files import (
    ITEM_BYTES,
    SINGLE,
    Entry,
    SafetensorsDirectory,
    listing,
    read_header,
)
from hpcrl.models.files.stacked_experts import ExpertsApart, single
from hpcrl.models.shared.mtp import is_head
from hpcrl.models.slicing import CUTS, Shapes
from hpcrl.trainer.collectives import agree, broadcast_json
from hpcrl.trainer.lora.layer import sent_values
from hpcrl.trainer.megatron.hf_reading import LIMIT, Parameter, divide, exchange, host_group, rounds
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.megatron.parameter_shards import (
    HeldParameter,
    absent_tensors,
    again,
    held_table,
    own_parameters,
    shapes_of,
    some_of,
)

PACE = 1 << 30  #: bytes that rank 0 is behind the ranks that send to it, at most
FLOATS = ("float32", "bfloat16", "float16", "float64")


# ---- in


@torch.no_grad()
def load_hf(
    policy: Policy,
    directory: str | Path,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    scheme: Scheme | None = None,
) -> int:
    """Fill the model from the safetensors of a Hugging Face directory; collective, each tensor is read by one rank.

    Args:
        progress: what shows how far it is, such as report.progress.track.
        scheme: how FP8 matrices are coded, which are then read for what they stand for; None: there may be none.

    Returns:
        Bytes of tensors that this rank has read.

    Raises:
        DataError: the same on all ranks, names the tensors that are missing, in excess, of another shape or no floats,
            or the file that cannot be read.
    """
    directory = Path(directory)
    rank = policy.ranks.rank
    names = _listing(directory, rank, policy.family.stacked)
    table = held_table(policy)
    where = {name: entry.file for name, entry in names.items()}
    names = widened(names, scheme, directory) if scheme else names
    _check_wide(directory, names)
    _check_names(policy, directory, names)
    _check_shapes(policy, directory, names, table)
    nbytes = {name: math.prod(e.shape) * ITEM_BYTES[e.dtype] for name, e in names.items() if e.dtype in FLOATS}
    readings = divide(_parameters(policy, table), nbytes)
    limit = LIMIT if policy.ranks.world > 1 else 0  # one tensor at a time, where none waits for it
    with ExitStack() as stack, host_group() as group:
        reader = ExpertsApart if policy.family.stacked else SafetensorsDirectory
        files = Dequantized(directory, stack, where, scheme) if scheme else reader(directory, stack, where)
        shown = iter(progress(readings))
        for some in rounds(readings, limit):
            exchange(some, files, rank, group)
            for _ in some:
                next(shown)
        next(shown, None)  # it ends only where it is asked for more
    policy.optimizer.reload_model_params()  # the optimizer's fp32 copies
    return files.read


def _listing(directory: Path, rank: int, stacked: bool) -> dict[str, Entry]:
    """The tensors of a directory, as rank 0 has found them, single experts of stacked ones; collective."""

    def find() -> dict[str, Entry]:
        found = listing(directory) or read_header(directory / SINGLE)
        return single(found) if stacked else found

    found = agree(find, rank == 0)
    return msgspec.convert(broadcast_json(found), dict[str, Entry])


def _parameters(policy: Policy, table: Iterable[HeldParameter]) -> Iterator[Parameter]:
    """Every parameter of the table, with this rank's part of it."""
    mine = own_parameters(policy)
    for held in table:
        cut = partial(_part, held, shapes_of(policy, held.rule))
        own = mine.get(held.rule.megatron)
        yield Parameter(held.rule.hf, held.copies, cut, own[1].detach() if own else None)


def _part(held: HeldParameter, shapes: Shapes, tensors: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    return CUTS[held.rule.kind].part(tensors, number, held.shape, shapes).to(held.dtype)


def _check_wide(directory: Path, names: Mapping[str, Entry]) -> None:
    """Raise DataError if the weights are FP8: training starts from the numbers that were quantised, not from what is
    left of them.
    """
    if scaled := sorted(name for name in names if name.endswith((".weight_scale", ".weight_scale_inv"))):
        raise DataError(
            f"{directory} holds quantised weights ({scaled[0]}), which training cannot start from",
            "give the unquantised weights with --ref-load or --load; --hf-checkpoint may stay, for the engines",
        )


def _check_names(policy: Policy, directory: Path, names: Mapping[str, Entry]) -> None:
    held = set(names)
    expected = _expected(policy)
    missing = expected - held
    extra = {n for n in held - expected if not policy.family.ignores(n, policy.hf_config)}
    if missing or extra:
        texts = [
            f"{what} {some_of(sorted(which))}"
            for what, which in (("lacks", missing), ("holds in excess", extra))
            if which
        ]
        further = any(is_head(rule.megatron) and missing.intersection(rule.hf) for _, rule in policy.tensors())
        fix = "leave out --mtp-num-layers" if further else "do config.json and weights belong together?"
        raise DataError(f"{directory}: the model {' and '.join(texts)}", fix)


def _check_shapes(policy: Policy, directory: Path, names: Mapping[str, Entry], table: Iterable[HeldParameter]) -> None:
    wrong = []
    for held in table:
        rule = held.rule
        full = CUTS[held.rule.kind].full(held.shape, shapes_of(policy, held.rule))
        for name, wanted in zip(rule.hf, full, strict=True):
            found = names[name]
            if found.shape != wanted:
                wrong.append(f"{name} is {list(found.shape)}, config.json asks for {list(wanted)}")
            elif found.dtype not in FLOATS:
                wrong.append(f"{name} holds {found.dtype}, not one of {', '.join(FLOATS)}")
    if wrong:
        raise DataError(f"{directory}: {some_of(wrong, '; ')}")


# ---- out


@torch.no_grad()
def export(
    policy: Policy, patient: dist.ProcessGroup | None = None, heads: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of every tensor, once; collective: all ranks iterate to the end.

    Tensors are valid on global rank 0 and only until the next is asked for; other ranks get tensors on "meta".  A tied
    output layer is not a separate tensor.  The parts of one parameter at a time (of an expert: of one linear layer)
    go from the ranks that hold them to rank 0; no other rank has more than its own.

    A rank does not begin to send long before rank 0 can take what it sends: a send that waits counts against the
    timeout of the groups from its first moment, and the last of a large model is taken many minutes after the first.

    Args:
        patient: a gloo group of all ranks, in which they wait for what rank 0 does with the tensors; None: the world.
        heads: with the layers that predict further tokens, where the model has them.
    """
    mine = own_parameters(policy)
    rows: dict[tuple[str, ...], HeldParameter] = {}
    for held in held_table(policy):
        rows.setdefault(held.rule.hf, held)  # of a tied pair, the embedding; in the order of `holdings`
    if missing := _expected(policy) - {name for names in rows for name in names}:
        raise HpcrlError(f"no rank holds {some_of(sorted(missing))}")
    ahead = 0
    made = sent_values(policy.modules, policy.part)
    copies, absent = again(policy), absent_tensors(policy)
    for held in rows.values():
        if is_head(held.rule.megatron) and not heads:
            continue
        own = mine.get(held.rule.megatron)
        if ahead >= PACE:
            if policy.ranks.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # waiting for a send of NCCL's does not hold the host
            dist.barrier(group=patient)
            ahead = 0
        ahead += held.nbytes
        value = None if own is None else own[1] if made is None else made(own[1])
        for name, tensor in zip(held.rule.hf, _collect(policy, held, value), strict=True):
            if name not in absent:
                yield from ((called, tensor) for called in (name, *copies.get(name, ())))


def _collect(policy: Policy, held: HeldParameter, parameter: torch.Tensor | None) -> list[torch.Tensor]:
    """The tensors of one rule, on rank 0; elsewhere their likes on "meta"."""
    rank = policy.ranks.rank
    cut = CUTS[held.rule.kind]
    shapes = shapes_of(policy, held.rule)
    if rank:
        if rank in held.owners:
            _exchange(dist.isend, [(parameter.detach().contiguous(), 0)])
        return [torch.empty(shape, dtype=held.dtype, device="meta") for shape in cut.full(held.shape, shapes)]
    empty = partial(torch.empty, held.shape, dtype=held.dtype, device=policy.ranks.device)
    parts = [empty() if owner else parameter.detach() for owner in held.owners]
    _exchange(dist.irecv, [(part, owner) for part, owner in zip(parts, held.owners, strict=True) if owner])
    return cut.join(parts, shapes)


def _exchange(operation: Callable[..., Any], pairs: list[tuple[torch.Tensor, int]]) -> None:
    """Send or receive tensors to or from ranks of the world."""
    if pairs:  # batched, NCCL uses the world's own communicator instead of making one for each pair of ranks
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer) for tensor, peer in pairs]):
            work.wait()


def _expected(policy: Policy) -> set[str]:
    """The tensors that a directory must hold and an export gives."""
    return {name for _, rule in policy.tensors() for name in rule.hf}
