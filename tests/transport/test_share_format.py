"""The wire format: what is sent arrives bit for bit; and no noise is taken for a message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.errors import DataError, HpcrlError, PeerError
from hpcrl.transport import messages
from hpcrl.transport.share_format import ROW, RUN, SampleBatch, Share, WireError, decode, encode
from hpcrl.utils.sample_parts import OPTIONAL
from tests.support.shares import part_of, plain_sample, same, sample, share, share_of

lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=6)


def frames_of(its: Share) -> list[bytes]:
    """As they come over the wire: bytes of their own."""
    return [bytes(frame) for frame in encode(its)]


# ---- there and back


@given(lengths)
def test_what_is_encoded_is_decoded(sizes: list[tuple[int, int]]) -> None:
    its = share_of([sample(i, prompt, answer) for i, (prompt, answer) in enumerate(sizes)], rollout_id=3, version=9)
    assert same(decode(frames_of(its)), its)


def test_columns_that_only_some_runs_have_arrive_too() -> None:
    samples = [sample(i, answer=i, optional=True) for i in range(4)]
    its = part_of(samples, [2, 0])
    frames = frames_of(its)
    assert len(frames) == 7 + len(OPTIONAL)
    assert same(decode(frames), its)
    picked = its.batch.select([1])
    assert all(np.array_equal(picked.extra[name], samples[0].array(name)) for name in OPTIONAL)
    with pytest.raises(DataError, match="samples of a batch.*teacher_log_probs, sample 1 of group 0 differs"):
        SampleBatch.from_samples([samples[0], sample(1)])


def test_rows_have_the_rewards_of_their_samples() -> None:
    """In their order, also where some are taken out: a neighbour's reward would train the wrong response."""
    samples = [
        plain_sample().replace(response_index=index, reward=reward) for index, reward in enumerate((0.25, 1.0, -2.0))
    ]
    batch = SampleBatch.from_samples(samples)
    assert batch.rows["reward"].tolist() == [0.25, 1.0, -2.0]
    assert batch.select([2, 0]).rows[["response_index", "reward"]].tolist() == [(2, -2.0), (0, 0.25)]


def test_the_large_arrays_are_views_on_the_frames() -> None:
    frames = frames_of(share())
    found = decode(frames).batch
    table = decode(frames).table
    for array, frame in ((table, frames[1]), (found.tokens, frames[3]), (found.rollout_log_probs, frames[5])):
        assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
    assert np.shares_memory(np.frombuffer(encode(its := share())[3], np.uint8), its.batch.tokens)


def test_a_frame_at_an_odd_address_is_decoded() -> None:
    frames = frames_of(share())
    odd = [memoryview(b"x" + frame)[1:] for frame in frames]
    assert same(decode(odd), share())
    assert decode(odd).batch.rollout_log_probs.flags.aligned


def test_wire_size_per_token() -> None:
    """Nothing on the wire grows with tokens but their columns."""
    its = share(answers=(50_000,))
    its.batch.versions[:] = 4
    its.batch.versions[20_000:] = 5
    frames = frames_of(its)
    assert len(frames[0]) < 500
    assert len(frames[4]) == 50_000 / 8
    assert len(frames[6]) == 2 * RUN.itemsize
    assert np.array_equal(decode(frames).batch.versions, its.batch.versions)


def test_table_of_all_samples() -> None:
    """A share of several ranks has the table of all samples."""
    samples = [sample(i, answer=i) for i in range(9)]
    for own in ([4, 0, 8], [7], list(range(9))):
        its = part_of(samples, own)
        found = decode(frames_of(its))
        assert same(found, its)
        assert [row["reward"] for row in found.table] == list(range(9))
        assert [row["reward"] for row in found.batch.rows] == own
    assert len(frames_of(part_of(samples, [0]))[1]) == 9 * ROW.itemsize


def test_a_version_for_every_token_is_possible() -> None:
    its = share()
    its.batch.versions[:] = np.arange(len(its.batch.versions))
    assert same(decode(frames_of(its)), its)


def test_rows_that_are_trained_twice_are_not_sent() -> None:
    for micro_batches in ([[[0, 1]]], [[[0, 1], [2, 2]]], [[[0, 1], [3]]]):
        with pytest.raises(AssertionError, match="each of 3 rows once"):
            encode(replace(share(), micro_batches=micro_batches))


def test_a_column_of_another_kind_is_converted() -> None:
    its = share()
    b = its.batch
    columns = (
        b.tokens.astype(np.int64),
        b.loss_mask.astype(bool),
        b.rollout_log_probs.astype(np.float64),
        b.versions.astype(np.int64),
    )
    wide = replace(its, batch=SampleBatch(b.rows, *columns))
    assert same(decode(frames_of(wide)), its)


# ---- messages and pieces


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        messages.read_from_client(
            [b"\x85\xa2is\xa4call\xa6client\xa1c\xa6number\x00\xa6method\xa1m\xa6params\x81\xa1a" + b"\x91" * 100_000]
        )


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_no_message(frame: bytes) -> None:
    for read in (lambda one: messages.read_from_client([one]), messages.read_from_server):
        with pytest.raises(WireError):
            read(frame)


def test_a_message_of_the_wrong_side_is_refused() -> None:
    with pytest.raises(WireError):
        messages.read_from_client([messages.pack(messages.Pending())])
    fetch = messages.Fetch(3, 4)
    with pytest.raises(WireError):
        messages.read_from_server(messages.pack(fetch))
    assert messages.read_from_client([messages.pack(fetch)]) == fetch


@pytest.mark.parametrize("params", [{"a": object()}, {"a": 2**70}, {1: np.float32(1)}])
def test_what_msgpack_cannot_carry_is_told(params: dict[Any, Any]) -> None:
    with pytest.raises(WireError, match="cannot be sent over"):
        messages.pack(messages.Call("c", 0, "m", params))


def test_too_large_a_message_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE", 100)
    with pytest.raises(WireError, match="100 are allowed"):
        messages.pack(messages.Call("c", 0, "m", {"a": "x" * 100}))
    with pytest.raises(WireError, match="100 are allowed"):
        messages.pack({"a": "x" * 100})
    with pytest.raises(WireError, match="100 are allowed"):
        messages.read_from_client([b"x" * 60, b"x" * 60])


def test_errors_keep_their_class_if_it_is_ours() -> None:
    there = messages.error_of(messages.read_from_server(*messages.failed(DataError("line 3", "hint it"), ("call", 5))))
    assert (type(there), str(there)) == (DataError, "line 3; hint it")
    assert type(messages.error_of(messages.Failed("x", kind="SystemExit"))) is PeerError
    surrogate = messages.failed(HpcrlError("\ud800 surrogate"))
    assert type(messages.error_of(messages.read_from_server(*surrogate))) is PeerError


def cut_and_joined(frames: list[bytes], piece: int) -> tuple[list[Any], list[Any]]:
    """The pieces of an answer, and what is made of them."""
    with pytest.MonkeyPatch.context() as small:
        small.setattr(messages, "PIECE_BYTES", piece)
        head, *pieces = messages.answer(("share", 0), frames)
        return pieces, messages.join(messages.read_from_server(head).sizes, pieces)


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 20))
def test_an_answer_comes_in_bounded_pieces(frames: list[bytes], piece: int) -> None:
    pieces, joined = cut_and_joined(frames, piece)
    assert all(len(one) <= piece for one in pieces)
    assert [bytes(frame) for frame in joined] == frames


@given(st.lists(st.binary(max_size=9), max_size=5), st.lists(st.integers(0, 9), max_size=5))
def test_pieces_of_other_sizes_are_refused(pieces: list[bytes], sizes: list[int]) -> None:
    if sizes == list(map(len, pieces)):
        assert messages.join(sizes, pieces) == pieces
    else:
        with pytest.raises(WireError, match="were declared"):
            messages.join(sizes, pieces)


def test_a_huge_declared_size_is_refused() -> None:
    with pytest.raises(WireError, match="were declared"):
        messages.join([2**62, 1], [b"x", b"y"])


def test_frames_that_arrive_whole_are_not_copied() -> None:
    frames = [b"head", b"", b"x" * 100]
    _, joined = cut_and_joined(frames, 100)
    assert all(
        np.shares_memory(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))
        for a, b in zip(joined, frames, strict=True)
        if len(b)
    )
