"""Hostfiles: every dialect read, every bad line refused with its place, nothing ignored."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpcrl.errors import UsageError
from hpcrl.mpi.hostfile import Hostfile, HostfileError, parse_hostfile, read_hostfile, write_hostfile
from hpcrl.plan import Host


def hosts(text: str) -> list[tuple[str, int]]:
    return [(h.name, h.slots) for h in parse_hostfile(text).hosts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1 slots=8\nnode2 slots=4\n", [("node1", 8), ("node2", 4)]),
        ("node1 slots = 8", [("node1", 8)]),
        ("\tuser@node1  slots=2 max_slots=4 port=22\n", [("node1", 2)]),
        ("node1 cpu=3\nnode2 count=2", [("node1", 3), ("node2", 2)]),
        ("node1:8\n# a comment\n\n10.0.0.2:4", [("node1", 8), ("10.0.0.2", 4)]),
        ("a\nb\na\n", [("a", 2), ("b", 1)]),
        ("node[01-03,07]:8", [("node01", 8), ("node02", 8), ("node03", 8), ("node07", 8)]),
        ("n[1-2],m5 slots=4", [("n1", 4), ("n2", 4), ("m5", 4)]),
        ("10.0.0.1 slot=8\n10.0.0.2 slot=8", [("10.0.0.1", 8), ("10.0.0.2", 8)]),
        ("node2 slots=1\nnode1 slots=1 # last", [("node2", 1), ("node1", 1)]),
        ("// nothing\nnode1 max_slots=3", [("node1", 3)]),
    ],
)
def test_dialects(text: str, expected: list[tuple[str, int]]) -> None:
    assert hosts(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "column", "word"),
    [
        ("node1 slots=8\nnode2 3", 2, 7, "slots=3"),
        ("node1 slots=", 1, 13, "no number"),
        ("node1 slots=x", 1, 13, "'x'"),
        ("node1 slots=0", 1, 13, "'0'"),
        ("node1:0", 1, 7, "'0'"),
        ("node1:", 1, 7, "no number"),
        ("node1 gpus=8", 1, 7, "gpus= is unknown"),
        ("node1 slots=8 slots=8", 1, 15, "twice"),
        ("node1:4 slots=8", 1, 8, "twice"),
        ("node1 slots=8\nnode1 slots=8", 2, 1, "listed twice"),
        ("n[3-1]", 1, 1, "start > stop"),
        ("n[a]", 1, 1, "bad range"),
        ("n[1", 1, 1, "unbalanced"),
        ("-node1", 1, 1, "no host name"),
        ("node1 slots=9 max_slots=8", 1, 6, "more than max_slots"),
        ("", 1, 1, "no host"),
        ("node1 slots=8=9", 1, 14, "does not belong"),
    ],
)
def test_bad_lines_are_refused_with_line_and_column(text: str, line: int, column: int, word: str) -> None:
    with pytest.raises(HostfileError, match=f"hostfile:{line}:{column}: ") as caught:
        parse_hostfile(text)
    assert word in str(caught.value)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_what_launchers_read_differently_is_said() -> None:
    notes = "\n".join(parse_hostfile("a slot=8\nb\nc SLOTS=2 # x\r\n").notes)
    for word in ("slots=8, for MPICH host:8", "number of the host's cores", "small letters", "CR LF", "behind a host"):
        assert word in notes


@pytest.mark.parametrize("dialect", ["openmpi", "mpich", "intel", "slime"])
def test_written_files_are_read_back(dialect: str) -> None:
    made = (Host("n1", 8), Host("n2", 4))
    assert parse_hostfile(write_hostfile(made, dialect)).hosts == made


def test_a_slurm_list_has_no_slots() -> None:
    assert write_hostfile((Host("n1", 8), Host("n2", 8)), "slurm") == "n[1-2]\n"
    with pytest.raises(UsageError, match="differ"):
        write_hostfile((Host("n1", 8), Host("n2", 4)), "slurm")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"node1 slots=8\n\xff")
    with pytest.raises(HostfileError, match=":2:1: this is not text"):
        read_hostfile(tmp_path / "bytes")


def test_ten_thousand_mutated_lines_give_hosts_or_an_error_with_its_place() -> None:
    rng = random.Random(7)
    seeds = [
        "node1 slots=8",
        "node1:8",
        "user@n2 slots = 3 max_slots=4",
        "node[01-03,07]:8",
        "10.0.0.1 slot=8 # x",
        "a",
        "n[1-2]x[3-4] count=2",
    ]
    alphabet = "".join(map(chr, range(9, 127))) + "é\u2028\x00"
    refused = 0
    for _ in range(10_000):
        text = list(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randint(0, 2)] = rng.choices(alphabet, k=rng.randint(0, 2))
        try:
            result = parse_hostfile("".join(text))
            assert isinstance(result, Hostfile) and all(h.slots >= 1 and h.name for h in result.hosts)
        except HostfileError as error:
            refused += 1
            lines = "".join(text).split("\n")
            assert 1 <= error.line <= len(lines)
            assert 1 <= error.column <= len(lines[error.line - 1]) + 1
    assert 1_000 < refused < 9_900


def test_the_command_says_what_it_understood_and_writes_other_dialects(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from hpcrl.cli import main

    (tmp_path / "h").write_text("n1 slot=8\nn2 slot=4\n")
    assert main(["hostfile", str(tmp_path / "h")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["n1  8 slots  ranks 0-7", "n2  4 slots  ranks 8-11"]
    assert "for Open MPI write slots=8" in err
    assert main(["hostfile", str(tmp_path / "h"), "--to", "mpich"]) == 0
    assert capsys.readouterr().out == "n1:8\nn2:4\n"
    assert main(["hostfile", str(tmp_path / "h"), "--to", "mpihc"]) == 2
    assert "openmpi, mpich" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("hostfiles/*.txt")), ids=lambda p: p.name)
def test_the_examples_are_read_without_a_note(path: Path) -> None:
    assert read_hostfile(path).hosts and not read_hostfile(path).notes
