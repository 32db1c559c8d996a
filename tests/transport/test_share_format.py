"""The wire format: what is sent arrives bit for bit, and nothing else is ever taken for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.errors import DataError, HpcrlError, PeerError
from hpcrl.transport import messages
from hpcrl.transport.sample_batch import ROW, SampleBatch
from hpcrl.transport.share_format import FORMAT, RUN, Share, WireError, decode, encode
from hpcrl.utils.sample_parts import OPTIONAL
from tests.support.shares import part_of, plain_sample, same, sample, share, share_of

lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=6)


def frames_of(its: Share) -> list[bytes]:
    """As they come over the wire: bytes of their own."""
    return [bytes(frame) for frame in encode(its)]


def with_header(frames: list[bytes], **changes: Any) -> list[bytes]:
    """The same frames under another header."""
    return [msgspec.msgpack.encode(msgspec.msgpack.decode(frames[0]) | changes), *frames[1:]]


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


def test_optional_columns_are_checked() -> None:
    """A column that only some runs have is checked as well."""
    its = share_of([sample(0, optional=True)])
    frames = frames_of(its)
    columns = msgspec.msgpack.decode(frames[0])["columns"]
    for changes, message in (
        ({0: "another"}, "columns 'another', 'rollout_routed_experts'.*addition to the usual"),
        ({1: "float64"}, "of type 'float64'"),
        ({2: 4}, "4 elements declared"),
        ({3: [2, 2, 2, 2]}, "and 4$"),
    ):
        wrong = [*columns[:6], [changes.get(i, value) for i, value in enumerate(columns[6])], *columns[7:]]
        with pytest.raises(WireError, match=message):
            decode(with_header(frames, columns=wrong))
    its.batch.extra["teacher_log_probs"][3] = np.nan
    with pytest.raises(WireError, match="teacher_log_probs 3: not finite"):
        encode(its)
    its.batch.extra["teacher_log_probs"] = its.batch.extra["teacher_log_probs"][1:]
    with pytest.raises(WireError, match="the rows hold 5 elements of teacher_log_probs"):
        encode(its)


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


# ---- what must not be


def spoil(part: str, at: int, value: Any) -> Callable[[Share], None]:
    """Overwrite one element of a column, or of a field of the rows."""

    def act(its: Share) -> None:
        column = its.batch.rows[part] if part in ROW.names else getattr(its.batch, part)
        column[at] = value

    return act


SPOILED: list[tuple[Callable[[Share], Any], str]] = [
    (spoil("response_length", 1, -1), "row 1( of the table)?: response_length"),
    (spoil("response_length", 0, 100), "row 0( of the table)?: response_length"),
    (spoil("length", 2, 12), "12 elements|elements of tokens"),
    (spoil("status", 1, 4), "row 1.*the table: unknown status"),
    (spoil("status", 1, -1), "row 1.*the table: unknown status"),
    (spoil("reward", 2, np.nan), "row 2.*reward is not finite"),
    (spoil("reward", 1, np.inf), "row 1.*reward is not finite"),
    (spoil("reward", 1, -np.inf), "row 1.*reward is not finite"),
    (spoil("baseline", 0, np.inf), "row 0.*baseline is not finite"),
    (spoil("baseline", 2, -np.inf), "row 2.*baseline is not finite"),
    (lambda s: setattr(s, "own", np.array([0, 1, 3])), "sample 2.*row of the table"),
    (lambda s: setattr(s, "own", np.array([0, -1, 2])), "sample 1.*row of the table"),
    (lambda s: setattr(s, "own", np.array([0, 1, 1])), "in the share twice"),
    (lambda s: setattr(s, "step_samples", [4]), "4 samples, the table 3"),
    (spoil("tokens", 4, -2), "token 4: negative id"),
    (spoil("tokens", 0, -1), "token 0: negative id"),
    (spoil("loss_mask", 3, 2), "loss_mask 3"),
    (spoil("rollout_log_probs", 5, np.inf), "logprob 5: not finite"),
    (spoil("rollout_log_probs", 5, -np.inf), "logprob 5: not finite"),
    (spoil("rollout_log_probs", 5, np.nan), "logprob 5: not finite"),
    (
        lambda s: setattr(s.batch, "rollout_log_probs", s.batch.rollout_log_probs[1:]),
        "elements of rollout_log_probs|the columns hold 13 elements",
    ),
    (lambda s: setattr(s.batch, "versions", s.batch.versions[1:]), "elements of versions"),
    (lambda s: setattr(s, "micro_batches", [[[0, 1]]]), "each of the 3 rows exactly once"),
    (lambda s: setattr(s, "micro_batches", [[[0, 1], [2, 2]]]), "exactly once"),
    (lambda s: setattr(s, "micro_batches", [[[0, 1], [3]]]), "exactly once"),
    (lambda s: setattr(s, "micro_batches", [[[0, 1], [], [2]]]), "no rows"),
    (lambda s: setattr(s, "micro_batches", [[[0, 1, 2]], []]), "2 optimizer steps"),
    (lambda s: setattr(s, "step_samples", [2]), "2 samples over all ranks,.*3"),
    (lambda s: setattr(s, "step_tokens", [1, 2]), "step_tokens has 2"),
    (lambda s: setattr(s, "metrics", {"loss": float("nan")}), "metric 'loss' is nan"),
    (lambda s: setattr(s, "metrics", {"loss": float("inf")}), "metric 'loss' is inf"),
    (lambda s: setattr(s, "metrics", {"loss": -float("inf")}), "metric 'loss' is -inf"),
    (lambda s: setattr(s, "metrics", {"loss": object()}), "must be real number"),
]


@pytest.mark.parametrize(("act", "message"), SPOILED)
def test_a_share_that_does_not_fit_is_not_sent(act: Callable[[Share], Any], message: str) -> None:
    its = share(rollout_id=5)
    act(its)
    with pytest.raises(WireError, match=f"the share of rollout 5 cannot be sent.*({message})"):
        encode(its)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        case
        for case in SPOILED
        if "real number" not in case[1] and "loss_mask 3" not in case[1] and "versions" not in case[1]
    ],
)
def test_a_share_that_does_not_fit_is_not_taken(
    act: Callable[[Share], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = share(rollout_id=5)
    act(its)
    with monkeypatch.context() as blind:  # a sender that does not look
        blind.setattr("hpcrl.transport.share_format._check", lambda *_: None)
        blind.setattr("hpcrl.transport.share_format._check_lengths", lambda *_: None)
        frames = frames_of(its)
    with pytest.raises(WireError, match=message):
        decode(frames)


@pytest.mark.parametrize("number", [0, FORMAT - 1, FORMAT + 1, FORMAT + 3])
def test_another_wire_format_is_named(number: int) -> None:
    with pytest.raises(WireError, match=rf"wire format {number}, this side speaks {FORMAT}.*one version"):
        decode([msgspec.msgpack.encode({"format": number, "anything": ["else"]}), *frames_of(share())[1:]])


@pytest.mark.parametrize("column", range(6))
def test_a_column_must_be_what_it_says(column: int) -> None:
    frames = frames_of(share())
    for other in (frames[column + 1][:-1], frames[column + 1] + b"\x00", frames[column + 1] + bytes(64)):
        with pytest.raises(WireError, match=r"bytes\), \d+ bytes found"):
            decode([*frames[: column + 1], other, *frames[column + 2 :]])
    columns = msgspec.msgpack.decode(frames[0])["columns"]
    columns[column][1] = "float64"
    with pytest.raises(WireError, match="found '.*' of type 'float64'"):
        decode(with_header(frames, columns=columns))


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_id": -1},
        {"rollout_id": "1"},
        {"micro_batches": [[[2**40]]]},
        {"metrics": {"a": "b"}},
        {"columns": []},
        {"extra": 1},
    ],
)
def test_a_header_must_be_what_it_says(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode(with_header(frames_of(share()), **changes))


@pytest.mark.parametrize("size", [1, 3])
def test_a_mask_has_a_bit_for_each_token(size: int) -> None:
    frames = frames_of(share())
    columns = msgspec.msgpack.decode(frames[0])["columns"]
    columns[3][2] = size
    with pytest.raises(WireError, match=f"{size} bytes do not hold.*14 tokens"):
        decode([*with_header(frames, columns=columns)[:4], bytes(size), *frames[5:]])


@pytest.mark.parametrize(
    "runs", [[(1, 14), (1, 0)], [(1, 13)], [(1, 15)], [(1, -1), (1, 15)], [(1, 2**62), (1, 2**62)], [(2**40, 14)]]
)
def test_runs_of_versions_hold_exactly_the_tokens(runs: list[tuple[int, int]]) -> None:
    frames = frames_of(share())
    columns = msgspec.msgpack.decode(frames[0])["columns"]
    columns[5][2] = len(runs)
    with pytest.raises(WireError, match="versions"):
        decode([*with_header(frames, columns=columns)[:6], np.array(runs, RUN).tobytes()])


def attempt(frames: list[bytes]) -> None:
    """Decode; what comes out is consistent, or a WireError is raised."""
    try:
        found = decode(frames)
    except WireError:
        return
    assert same(decode(frames_of(found)), found)


@settings(max_examples=300, deadline=None)
@given(st.data(), lengths)
def test_damaged_frames(data: st.DataObject, sizes: list[tuple[int, int]]) -> None:
    """Damaged frames decode to something valid or raise WireError."""
    optional = data.draw(st.booleans())
    frames = frames_of(share_of([sample(i, prompt, answer, optional) for i, (prompt, answer) in enumerate(sizes)]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(frames) - 1)))
        match data.draw(st.sampled_from(["cut", "flip", "insert", "swap", "drop", "twice"])):
            case "cut":
                frames[at] = frames[at][: data.draw(st.integers(0, len(frames[at])))]
            case "flip" if frames[at]:
                byte = data.draw(st.integers(0, len(frames[at]) - 1))
                frames[at] = frames[at][:byte] + bytes([data.draw(st.integers(0, 255))]) + frames[at][byte + 1 :]
            case "insert":
                byte = data.draw(st.integers(0, len(frames[at])))
                frames[at] = frames[at][:byte] + data.draw(st.binary(max_size=8)) + frames[at][byte:]
            case "swap":
                other = data.draw(st.integers(0, len(frames) - 1))
                frames[at], frames[other] = frames[other], frames[at]
            case "drop" if len(frames) > 1:
                del frames[at]
            case "twice":
                frames.insert(at, frames[at])
    attempt(frames)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=8))
def test_noise_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        decode([b"\x91" * 100_000 + b"\x00", *frames_of(share())[1:]])
    with pytest.raises(WireError):
        messages.read_from_client(
            [b"\x85\xa2is\xa4call\xa6client\xa1c\xa6number\x00\xa6method\xa1m\xa6params\x81\xa1a" + b"\x91" * 100_000]
        )


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
