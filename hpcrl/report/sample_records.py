"""The samples of a run as files, for those who look from outside.

    samples/00000012.jsonl              what was asked, answered and earned in rollout 12, by the rollout process
    samples/eval-NAME-12.jsonl          the same of an evaluation after it
    samples/trained/00000012.jsonl      what the trainer made of each, in the same order: `Trained`

A step is counted from 0, as its file is.  An evaluation is known by how many steps were done before it: 0 is before the
first, and what its file calls 12 (the step that it followed) is 13 here and in whatever is shown.

Invariants: reading never fails because of what a file holds: a line that is torn or damaged is left out and counted; a
file is read line by line, and what is kept of it does not grow with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcrl.report.run_files import entries
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.untrusted_files import open_regular

T = TypeVar("T")

LONGEST = 1 << 26  #: bytes of a line; a longer one counts as damaged


class Record(msgspec.Struct):
    """One sample, as the rollout process wrote it."""

    group: int = 0
    index: int = 0
    prompt: Any = None
    response: str = ""
    label: Any = None
    reward: float = 0.0
    rewards: dict[str, float] = {}
    baseline: float | None = None
    prompt_len: int = 0
    response_len: int = 0
    status: str = ""
    versions: list[int] = []
    grading: str = ""
    grading_error: str = ""
    transcript: dict[str, Any] = {}


class Trained(msgspec.Struct, omit_defaults=True):
    """What the trainer made of a sample, over its trained tokens; means, and the greatest difference.

    Attributes:
        tokens: how many.
        advantage: None where the loss has none.
        trainer, engine: log-probs, the engine's None where nothing was sampled.
        differ, differ_max: absolute difference of the two.
    """

    group: int
    index: int
    tokens: int
    trainer: float
    advantage: float | None = None
    engine: float | None = None
    differ: float | None = None
    differ_max: float | None = None


@dataclass
class Look:
    """A sample with what the trainer made of it.

    Attributes:
        at: its place in the rollout.
    """

    at: int
    record: Record
    trained: Trained | None = None


@dataclass
class Reading:
    """The records of a file of samples, read one by one.

    Attributes:
        damaged: lines that could not be read.
    """

    damaged: int = 0


# ---- names


def samples_file(stage: Path, step: int, held_out: str | None = None) -> Path:
    """The name of the file of samples of a step or an evaluation.

    Args:
        step: of an evaluation how many steps were done.
    """
    return stage / "samples" / (f"{step:08d}.jsonl" if held_out is None else f"eval-{held_out}-{step - 1}.jsonl")


def trained_file(stage: Path, step: int) -> Path:
    return stage / "samples" / "trained" / f"{step:08d}.jsonl"


def steps_of(stage: Path, held_out: str | None = None) -> list[int]:
    """The steps that there are samples of, ascending; of evaluations of the set `held_out` how many steps were done."""
    if held_out is not None:
        return sorted(step for name, step in _evaluations(stage) if name == held_out)
    return sorted(
        int(match[1]) for name in entries(stage / "samples") if (match := re.fullmatch(r"(\d{8,})\.jsonl", name))
    )


def held_out_sets(stage: Path) -> list[str]:
    """The names of the evaluations that there are samples of."""
    return sorted({name for name, _ in _evaluations(stage)})


#: the shortest name that leaves a step: eval-a--1 is of the set a before the first step, not of a set a- after step 1
_EVALUATION = re.compile(r"eval-(.+?)-(-1|\d{1,18})\.jsonl")


def _evaluations(stage: Path) -> Iterator[tuple[str, int]]:
    """(held-out set, steps done) of every file of an evaluation's samples."""
    for name in entries(stage / "samples"):
        if match := _EVALUATION.fullmatch(name):
            yield match[1], int(match[2]) + 1


# ---- reading


def read_looks(stage: Path, step: int, held_out: str | None = None, reading: Reading | None = None) -> Iterator[Look]:
    """Every sample of a step, in order."""
    beside = _lines(trained_file(stage, step), Trained) if held_out is None else iter(())
    for at, record in enumerate(_lines(samples_file(stage, step, held_out), Record)):
        trained = next(beside, None)
        if record is None:
            if reading is not None:
                reading.damaged += 1
            continue
        fits = trained is not None and (trained.group, trained.index) == (record.group, record.index)
        yield Look(at, record, trained if fits else None)


def _lines(path: Path, kind: type[T]) -> Iterator[T | None]:
    """A line after another, None for one that is damaged."""
    decode = msgspec.json.Decoder(kind, strict=False).decode
    try:
        with open_regular(path) as file:
            while line := file.readline(LONGEST):
                try:
                    yield decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    yield None
    except OSError:
        return


# ---- the trainer's side


def write_trained(stage: Path, step: int, found: Sequence[Trained]) -> None:
    """Write the file of a step, whole.

    Raises:
        HpcrlError: if the disk does not take it.
    """
    path = trained_file(stage, step)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, b"".join(msgspec.json.encode(row) + b"\n" for row in found))
