"""A sample as bytes: whatever `Sample` declares comes back from every form that it is written in; and what of it is
refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hpcrl.rollout.ledger import bank
from hpcrl.rollout.ledger.group_progress import GroupProgress
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.saved_rollouts import read_rollout, write_rollout, write_samples
from hpcrl.rollout.worker_messages import CustomCall, CustomResult, GradingTask, pack, send_sample, unpack
from hpcrl.sample import FIELDS, BadSample, Sample
from hpcrl.transport.share_format import ROW, WIRE, SampleBatch, decode, encode
from hpcrl.utils.sample_parts import COLUMNS, OPTIONAL, REQUIRED, STATUSES
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
    made = {int: 3, float: 0.5, float | None: 0.5, str: "text", str | None: "text", bool: True, Any: ["any"]}
    values = {name: made.get(kind, {"a": 1.5}) for name, kind in FIELDS.items()}
    values |= {"response_length": RESPONSE, "status": STATUSES[2]}
    sample = Sample(**values, **columns, train_metadata={"loss": "own"})
    sample.turns = [2]  # type: ignore[attr-defined]  (as functions of slime's users do)
    return sample


def told(sample: Sample) -> dict[str, Any]:
    """What it has besides columns."""
    found = {name: getattr(sample, name) for name in FIELDS if name != "reward"}
    return found | {"score": sample.score, "graded": sample.graded, "attributes": sample.attributes()}


def assert_same(one: Sample, other: Sample, but: tuple[str, ...] = ()) -> None:
    first, second = told(one), told(other)
    assert [name for name in first if first[name] != second[name] and name not in but] == []
    assert one.columns().keys() == other.columns().keys()
    assert one.columns().keys() == (COLUMNS if one.has("teacher_log_probs") else REQUIRED).keys()
    for name, column in one.columns().items():
        there = other.columns()[name]
        assert column.dtype == there.dtype and column.shape == there.shape and (column == there).all(), name


def through_bank(sample: Sample, _: Path) -> Sample:
    group = Group(4, Prompt(0, np.asarray([5], np.int32)))
    return bank.decode(bank.encode(GroupProgress(group, {0: [sample]})), group).finished[0][0]


def through_saved_rollout(sample: Sample, folder: Path) -> Sample:
    write_rollout(folder / "saved", 0, 0, [sample])
    return read_rollout(folder / "saved")[1][0]


def through_grading(sample: Sample, _: Path) -> Sample:
    task = msgspec.msgpack.encode(GradingTask(0, [], None, [send_sample(sample, columns=True)]))
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
NOT_SHOWN = [*"reward baseline rewards grading grading_error teacher_error remove_sample transcript".split(), *OPTIONAL]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.__name__)
def test_every_declared_field_and_column_comes_back(codec: Callable[[Sample, Path], Sample], tmp_path: Path) -> None:
    sample = full()
    plain = told(Sample())
    assert not [name for name, value in told(sample).items() if value == plain[name]], "it would not be seen"
    assert_same(sample, codec(sample, tmp_path))


@pytest.mark.parametrize("codec", [through_grading, through_call], ids=lambda codec: codec.__name__)
def test_every_field_that_a_worker_is_shown_comes(codec: Callable[[Sample, Path], Sample], tmp_path: Path) -> None:
    sample, plain = full(), Sample()
    shown = sample.replace(**{name: getattr(plain, name) for name in NOT_SHOWN})
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
    assert row.pop("length") == len(sample.array("tokens")) and row.pop("trained") == sample.array("loss_mask").sum()
    assert row.pop("reward") == sample.score
    assert row == {name: getattr(sample, name) for name in row}


def test_every_field_is_shown_in_the_sample_file(tmp_path: Path) -> None:
    sample = full()
    write_samples(tmp_path / "samples.jsonl", [sample])
    row = msgspec.json.decode((tmp_path / "samples.jsonl").read_bytes())
    names = {"response_length": "response_len", "remove_sample": "removed"}
    names |= {"group_index": "group", "response_index": "index"}
    sample.reward_key = None
    for name in FIELDS.keys() - {"group_size", "reward_key"}:
        assert row[names.get(name, name)] == getattr(sample, name), name
    assert row["attributes"] == {"train_metadata": {"loss": "own"}, "turns": [2]}


def test_declared_columns_are_fields() -> None:
    assert set(SampleBatch.__annotations__) - {"rows", "extra"} == set(REQUIRED)
    assert not set(REQUIRED) & set(OPTIONAL) and all(column.counted_by in ROW.names for column in COLUMNS.values())


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_another_length_is_refused(name: str) -> None:
    sample = full()
    setattr(sample, name, sample.columns()[name][1:])
    with pytest.raises(BadSample, match=name if name != "tokens" else "for a response of"):
        sample.check()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("status", "done", "status 'done'"),
        ("metadata", [], "not a dict"),
        ("response_length", 9, "response_length to 9, of 8 tokens"),
        ("response_length", 2.5, "response_length to 2.5"),
        ("loss_mask", [2] * RESPONSE, "loss_mask to other .* from 0 to 1"),
        ("loss_mask", "abc", "loss_mask to .* list"),
        ("rollout_log_probs", [float("nan")] * RESPONSE, "finite"),
        ("versions", [-1] * RESPONSE, "versions to other numbers"),
        ("tokens", [2**31] * (PROMPT + RESPONSE), "tokens to other numbers"),
        ("reward", "good", "reward to 'good'"),
        ("reward", float("inf"), "reward to inf"),
        ("reward", {"acc": 1.0}, "object with acc: 'text'"),
        ("rewards", 3, "dict of numbers"),
    ],
)
def test_what_code_of_a_user_sets_is_checked(name: str, value: Any, words: str) -> None:
    """The error says the field; and a good sample passes, as lists, a bare status and numbers of numpy's do."""
    sample = full()
    sample.tokens, sample.status = sample.tokens, "failed"  # type: ignore[assignment]
    sample.reward, sample.remove_sample = {"text": np.float64(2), "acc": 1}, np.True_  # type: ignore[assignment]
    sample.check()
    assert (sample.status, sample.remove_sample, sample.score) == (STATUSES[1], True, 2.0), "failed ones are trained"
    assert sample.rewards == {"text": 2.0, "acc": 1.0} and isinstance(vars(sample)["_tokens"], np.ndarray)
    setattr(sample, name, value)
    with pytest.raises(BadSample, match=words):
        sample.check()
