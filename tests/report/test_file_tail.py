"""The end of long and growing files: whole lines only, each once, at a cost that does not grow with the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.report import file_tail
from hpcrl.report.file_tail import BLOCK, FileTail, last_lines
from hpcrl.report.metrics import last_records


@pytest.mark.parametrize("within", [1, 7, 16, 17, 1000])
def test_the_end_of_a_file_has_whole_lines_only(tmp_path: Path, within: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"first\nsecond\nthird\ntorn")
    found = last_lines(path, within=within)
    assert found == [b"first", b"second", b"third"][3 - len(found) :]
    assert len(found) == {1: 0, 7: 0, 16: 1, 17: 1, 1000: 3}[within]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 10_000])
@pytest.mark.parametrize("end", ["\n", ""])
def test_last_and_new_lines(tmp_path: Path, count: int, end: str) -> None:
    """The last lines of a file of any size, and those that are appended."""
    lines = [f"{i} {'x' * (i % 97)}".encode() for i in range(5000)]
    path = tmp_path / "x.log"
    path.write_bytes(b"\n".join(lines) + end.encode())
    assert path.stat().st_size > 2 * BLOCK
    tail, whole = FileTail(path), lines if end else lines[:-1]
    assert tail.last(count) == last_lines(path, count) == (whole[-count:] if count else [])
    assert tail.rest == (b"" if end else lines[-1])
    with path.open("a") as file:
        file.write("more\nlast")
    assert tail.new() == [b"more" if end else lines[-1] + b"more"]
    path.write_text("anew\n")
    assert tail.new() == [b"anew"], "a file that was cut is read from its beginning"
    assert (
        FileTail(tmp_path / "none").last(3) == FileTail(tmp_path / "none").new() == last_lines(tmp_path / "none") == []
    )


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=5).map(lambda b: b.replace(b"\n", b"")), max_size=8),
    st.integers(0, 9),
    st.integers(1, 40),
)
def test_lines_that_lie_across_blocks(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], count: int, block: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "blocks.log"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + b"torn")
    before = file_tail.BLOCK
    file_tail.BLOCK = block
    try:
        assert last_lines(path, count) == lines[max(0, len(lines) - count) :]
        within = last_lines(path, count, within=block)
        assert within == lines[len(lines) - len(within) :] and len(b"\n".join([*within, b"torn"])) <= block + 4
    finally:
        file_tail.BLOCK = before


def test_a_long_file_costs_no_more_than_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # holes: to read it would take an hour
        file.seek(0, 2)
        file.writelines(b'\n{"rollout_id": %d}' % i for i in range(10))
        file.write(b"\n")
    assert [row["rollout_id"] for row in last_records(path, 3)] == [7, 8, 9]
    assert len(last_lines(path)) == 10
    tail = FileTail(path)
    assert tail.last(1) == [b'{"rollout_id": 9}'] and tail.new() == []


def test_lines_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Following takes each line once even if it comes in pieces."""
    path, found = tmp_path / "x", list[bytes]()
    tail = FileTail(path)
    whole = b"".join(b"line %d\n" % i for i in range(20))
    assert tail.new() == []
    for cut in range(0, len(whole), 7):
        with path.open("ab") as file:
            file.write(whole[cut : cut + 7])
        found += tail.new()
    assert found == whole.splitlines()
    (tmp_path / "y").write_bytes(whole + b"one more line\n")
    (tmp_path / "y").replace(path)
    assert tail.new() == [*whole.splitlines(), b"one more line"], "a file that was replaced is read anew"
    monkeypatch.setattr(file_tail, "FARTHEST", 10)
    assert FileTail(path).new() == [b"line 0"], "and a long one in parts"
