"""A sample as bytes: whatever `Sample` declares comes back from every form that it is written in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest

from hpcrl.rollout.ledger import bank
from hpcrl.rollout.ledger.group_progress import GroupProgress
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.saved_rollouts import read_rollout, write_rollout, write_samples
from hpcrl.rollout.worker_messages import CustomCall, CustomResult, GradingTask, send_sample
from hpcrl.sample import (
    COLUMNS,
    FIELDS,
    OPTIONAL,
    REQUIRED,
    ROW,
    STATUSES,
    PackedSample,
    Sample,
    SampleBatch,
    pack,
    struct_of,
    unpack,
)
from hpcrl.transport.share_format import WIRE, decode, encode
from tests.support.shares import share_of

PROMPT, RESPONSE = 3, 5
SIZES = {"length": PROMPT + RESPONSE, "response_length": RESPONSE}


def full() -> Sample:
    """A sample in which every declared field and column has a value that is not its default."""
    rng = np.random.default_rng(7)
    columns = {
        name: rng.integers(0, 2, (SIZES[kind.counted_by], *range(2, 2 + kind.dims))).astype(kind.dtype)
        for name, kind in COLUMNS.items()
    }
    made = {int: 3, float: 0.5, str: "text", bool: True, Any: ["any"]}
    values = {name: made.get(kind, {"a": 1.5}) for name, kind in get_type_hints(Sample).items() if name not in COLUMNS}
    values |= {"response_length": RESPONSE, "status": STATUSES[2]}
    values |= {name: columns.pop(name) for name in REQUIRED}
    return Sample(**values | {"extra": columns})


def assert_same(one: Sample, other: Sample, but: tuple[str, ...] = ()) -> None:
    for field in dataclasses.fields(Sample):
        if field.name in (*COLUMNS, *but, "extra"):
            continue
        assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert one.columns().keys() == other.columns().keys()
    assert one.columns().keys() == (COLUMNS if one.extra else REQUIRED).keys()
    for name, column in one.columns().items():
        there = other.columns()[name]
        assert column.dtype == there.dtype and column.shape == there.shape and (column == there).all(), name


def through_bank(sample: Sample, _: Path) -> Sample:
    group = Group(4, Prompt(0, 0, np.asarray([5], np.int32)))
    return bank.decode(bank.encode(GroupProgress(group, {0: [sample]})), group).finished[0][0]


def through_saved_rollout(sample: Sample, folder: Path) -> Sample:
    write_rollout(folder / "saved", 0, 0, [sample])
    return read_rollout(folder / "saved").samples[0]


def through_grading(sample: Sample, _: Path) -> Sample:
    task = msgspec.msgpack.encode(GradingTask(0, [], None, 1.0, [send_sample(sample, columns=True)]))
    return unpack(msgspec.msgpack.decode(task, type=GradingTask).samples[0])


def through_call(sample: Sample, _: Path) -> Sample:
    call = msgspec.msgpack.encode(CustomCall(0, send_sample(sample, columns=True), {}, "", "", False, 0))
    return unpack(msgspec.msgpack.decode(call, type=CustomCall).sample)


def through_result(sample: Sample, _: Path) -> Sample:
    result = msgspec.msgpack.decode(msgspec.msgpack.encode(CustomResult(0, [pack(sample)])), type=CustomResult)
    assert result.samples is not None
    return unpack(result.samples[0])


CODECS = [through_bank, through_saved_rollout, through_result]
#: what a worker is not shown: how its sample was graded, and columns that may be larger than all others
NOT_SHOWN = "reward baseline rewards grading grading_error extra teacher_error remove_sample transcript".split()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.__name__)
def test_every_declared_field_and_column_comes_back(codec: Callable[[Sample, Path], Sample], tmp_path: Path) -> None:
    sample = full()
    defaults = {field.name: field.default for field in dataclasses.fields(Sample)}
    same = [name for name in defaults if name not in COLUMNS and getattr(sample, name) == defaults[name]]
    assert not same, "the test would not see that these are lost"
    assert_same(sample, codec(sample, tmp_path))


@pytest.mark.parametrize("codec", [through_grading, through_call], ids=lambda codec: codec.__name__)
def test_every_field_that_a_worker_is_shown_comes(codec: Callable[[Sample, Path], Sample], tmp_path: Path) -> None:
    sample, plain = full(), Sample(0, 0, np.zeros(0), 0, np.zeros(0), np.zeros(0), np.zeros(0))
    shown = dataclasses.replace(sample, **{name: getattr(plain, name) for name in NOT_SHOWN})
    found = codec(sample, tmp_path)
    assert all(getattr(found, name) == getattr(shown, name) or name == "baseline" for name in NOT_SHOWN)
    assert_same(shown, found, ("baseline",))  # NaN


def test_a_share_carries_all_columns_and_rows() -> None:
    sample = full()
    share = decode([bytes(frame) for frame in encode(share_of([sample]))])
    assert list(share.batch.columns()) == list(COLUMNS)
    for name, column in sample.columns().items():
        assert np.array_equal(share.batch.columns()[name], column) and name in WIRE, name
    row = dict(zip(ROW.names, share.table[0].item(), strict=True))
    assert row.pop("status") == STATUSES.index(sample.status)
    assert row.pop("length") == len(sample.tokens) and row.pop("trained") == sample.loss_mask.sum()
    assert row == {name: getattr(sample, name) for name in row}


def test_rows_have_the_rewards_of_their_samples() -> None:
    """In their order, also where some are taken out: a neighbour's reward would train the wrong response."""
    samples = [
        dataclasses.replace(full(), index=index, reward=reward) for index, reward in enumerate((0.25, 1.0, -2.0))
    ]
    batch = SampleBatch.from_samples(samples)
    assert batch.rows["reward"].tolist() == [0.25, 1.0, -2.0]
    assert batch.select([2, 0]).rows[["index", "reward"]].tolist() == [(2, -2.0), (0, 0.25)]


def test_every_field_is_shown_in_the_sample_file(tmp_path: Path) -> None:
    sample = full()
    write_samples(tmp_path / "samples.jsonl", [sample])
    row = msgspec.json.decode((tmp_path / "samples.jsonl").read_bytes())
    names = {"response_length": "response_len", "remove_sample": "removed"}
    for name in FIELDS:
        assert row[names.get(name, name)] == getattr(sample, name), name


def test_declared_columns_are_fields() -> None:
    for kind in (Sample, SampleBatch):
        arrays = {name for name, hint in get_type_hints(kind).items() if hint is np.ndarray}
        assert arrays - {"rows"} == set(REQUIRED), kind
    assert not set(REQUIRED) & set(OPTIONAL) and all(column.counted_by in ROW.names for column in COLUMNS.values())


def test_what_an_earlier_version_wrote_is_read() -> None:
    """Fields that are new have their default; those that are no more are left out."""
    packed = msgspec.to_builtins(pack(full()))
    del packed["fields"]["teacher_error"], packed["fields"]["baseline"]
    found = unpack(msgspec.convert(packed | {"fields": packed["fields"] | {"gone": 1}}, PackedSample))
    assert_same(full(), found, but=("teacher_error", "baseline"))
    assert found.teacher_error == "" and math.isnan(found.baseline)


def test_fields_left_out_are_not_in_the_message() -> None:
    kept = struct_of("Kept", ("reward", "prompt")).__struct_fields__
    assert "label" in kept and not {"reward", "prompt", "extra", *COLUMNS} & set(kept)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_another_length_is_refused(name: str) -> None:
    sample = full()
    shorter = sample.columns()[name][1:]
    if name in OPTIONAL:
        sample.extra[name] = shorter
    else:
        setattr(sample, name, shorter)
    with pytest.raises(ValueError, match=str(sample.index)):
        unpack(pack(sample))
