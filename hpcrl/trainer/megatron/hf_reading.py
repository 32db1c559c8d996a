"""All ranks together read the files of a model once: each tensor by one of the ranks that hold a part of it, which
sends the others their parts.

    for part in rounds(divide(parameters, nbytes), LIMIT):
        exchange(part, files, rank, group)

Copies of a part (data and context parallelism, a tied embedding on the last stage) and the parts of a tensor that is
cut come from that one reading, whole and in the order of the file, whatever the layout.  Parts travel over gloo, from
the memory of one host to that of another: a GPU holds no more meanwhile than it does afterwards.

Invariants: every tensor has one reader, and all ranks know which; of those that hold it, the one with the fewest bytes
so far; in a round no rank holds more than LIMIT bytes of files, or one tensor; nothing is sent before all ranks know
that everything of the round could be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcrl.models.files.safetensors_files import SafetensorsDirectory
from hpcrl.trainer.collectives import agree

LIMIT = 256 << 20  #: bytes
PATIENCE = timedelta(minutes=30)  #: for a round of another rank
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Parameter:
    """A parameter that ranks hold parts of.

    Attributes:
        names: of the tensors that it is made of.
        copies: for each part the ranks that hold it.
        cut: (the tensors, number of a part) -> the part.
        mine: this rank's part, None if it holds none.
    """

    names: tuple[str, ...]
    copies: tuple[tuple[int, ...], ...]
    cut: Callable[[Sequence[torch.Tensor], int], torch.Tensor]
    mine: torch.Tensor | None


@dataclass(frozen=True)
class TensorReading:
    """Tensors that are read together, by one rank, for the parameters that are made of them."""

    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    reader: int
    nbytes: int


def divide(parameters: Iterable[Parameter], nbytes: Mapping[str, int]) -> list[TensorReading]:
    """Who reads what; the same on all ranks, whose lists differ in `mine` alone.

    Args:
        nbytes: of each tensor, in its file.
    """
    together: dict[tuple[str, ...], list[Parameter]] = {}
    for parameter in parameters:
        together.setdefault(parameter.names, []).append(parameter)
    given: dict[int, int] = {}
    found = []
    for names, group in together.items():
        holders = sorted({rank for parameter in group for ranks in parameter.copies for rank in ranks})
        reader = min(holders, key=lambda rank: (given.get(rank, 0), rank))
        size = sum(nbytes[name] for name in names)
        given[reader] = given.get(reader, 0) + size
        found.append(TensorReading(names, tuple(group), reader, size))
    return found


def rounds(readings: Iterable[TensorReading], limit: int) -> list[list[TensorReading]]:
    """The readings in order, in rounds in which no rank reads more than `limit` bytes, or one reading."""
    found: list[list[TensorReading]] = []
    given: dict[int, int] = {}
    for reading in readings:
        if not found or given.get(reading.reader, reading.nbytes) + reading.nbytes > limit:
            found.append([])
            given = {}
        found[-1].append(reading)
        given[reading.reader] = given.get(reading.reader, 0) + reading.nbytes
    return found


def exchange(readings: Sequence[TensorReading], files: SafetensorsDirectory, rank: int, group: Group) -> None:
    """One round: read what this rank reads, send parts of it, and receive those that others read; collective.

    Raises:
        DataError: the same on all ranks, names a file that cannot be read.
        HpcrlError: likewise, if a rank has too little memory.
    """
    sends, receives = agree(lambda: _prepare(readings, files, rank))
    works = [dist.isend(part, to, group=group, tag=tag) for part, to, tag in sends]
    works += [dist.irecv(buffer, reader, group=group, tag=tag) for _, buffer, reader, tag in receives]
    for work in works:
        work.wait()
    for mine, buffer, *_ in receives:
        mine.copy_(buffer)


def _prepare(
    readings: Sequence[TensorReading], files: SafetensorsDirectory, rank: int
) -> tuple[list[tuple[torch.Tensor, int, int]], list[tuple[torch.Tensor, torch.Tensor, int, int]]]:
    """Read what this rank reads, keep its own part, and take the memory of a round before any other rank waits for it:
    ([(part, rank to send it to, tag)], [(parameter, buffer, rank that sends it, tag)])."""
    read = {r.names: [files.tensor(name) for name in r.names] for r in readings if r.reader == rank}
    sends, receives = [], []
    for tag, (reading, parameter, number, ranks) in enumerate(_parts(readings)):
        mine = parameter.mine if rank in ranks else None
        if reading.reader == rank:
            part = parameter.cut(read[reading.names], number).contiguous()
            sends += [(part, to, tag) for to in ranks if to != rank]
            if mine is not None:
                mine.copy_(part)
        elif mine is not None:
            receives.append((mine, torch.empty(mine.shape, dtype=mine.dtype), reading.reader, tag))
    return sends, receives


def _parts(readings: Iterable[TensorReading]) -> Iterator[tuple[TensorReading, Parameter, int, tuple[int, ...]]]:
    """Every part of a round, in the same order on all ranks."""
    for reading in readings:
        for parameter in reading.parameters:
            for number, ranks in enumerate(parameter.copies):
                yield reading, parameter, number, ranks


@contextmanager
def host_group() -> Iterator[Group]:
    """A group of all ranks whose tensors are in host memory: the world's, or one for as long as the context;
    collective."""
    if dist.get_backend() == "gloo":
        yield None
        return
    made = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield made
    finally:
        dist.destroy_process_group(made)
