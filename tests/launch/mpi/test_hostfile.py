"""Hostfiles: every dialect read, every bad line refused with its place, nothing ignored."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpcrl.errors import UsageError
from hpcrl.launch.mpi.hostfile import (
    VARIABLES,
    Hostfile,
    HostfileError,
    job_hostfile,
    parse_hostfile,
    read_hostfile,
    write_hostfile,
)
from hpcrl.plan import Host
from hpcrl.utils.plain_text import CONTROL


def hosts(text: str) -> list[tuple[str, int]]:
    return [(h.name, h.slots) for h in parse_hostfile(text).hosts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1 slots=8\nnode2 slots=4\n", [("node1", 8), ("node2", 4)]),
        ("node1 slots = 8", [("node1", 8)]),
        ("\tnode1  slots=2 max_slots=4\n", [("node1", 2)]),
        ("node1 cpu=3\nnode2 count=2", [("node1", 3), ("node2", 2)]),
        ("node1:8\n# a comment\n\n10.0.0.2:4", [("node1", 8), ("10.0.0.2", 4)]),
        ("a\nb\na\n", [("a", 2), ("b", 1)]),
        ("node[01-03,07]:8", [("node01", 8), ("node02", 8), ("node03", 8), ("node07", 8)]),
        ("n[1-2],m5 slots=4", [("n1", 4), ("n2", 4), ("m5", 4)]),
        ("10.0.0.1 slot=8\n10.0.0.2 slot=8", [("10.0.0.1", 8), ("10.0.0.2", 8)]),
        ("node2 slots=1\nnode1 slots=1 # last", [("node2", 1), ("node1", 1)]),
        ("// nothing\nnode1 slots=0\nnode2 slots=3", [("node1", 0), ("node2", 3)]),
        ("node1:8,node2:4,node[3-4]:2", [("node1", 8), ("node2", 4), ("node3", 2), ("node4", 2)]),
        ("fe80::1 slots=2\n[fe80::2]:8\n[fe80::3] slots=4", [("fe80::1", 2), ("fe80::2", 8), ("fe80::3", 4)]),
        ("node1 slots=8\nnode1 slots=8", [("node1", 16)]),
        ("node1:2\nnode2:4\nnode1:1\n", [("node1", 3), ("node2", 4)]),
        ("n1.a.edu\nn1.b.edu", [("n1.a.edu", 1), ("n1.b.edu", 1)]),
    ],
)
def test_dialects(text: str, expected: list[tuple[str, int]]) -> None:
    assert hosts(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "column", "word"),
    [
        ("node1 slots=8\nnode2 3", 2, 7, "slots=3"),
        ("node1 slots=", 1, 13, "not a number"),
        ("node1 slots=x", 1, 13, "'x'"),
        ("node1 slots=4, node2 slots=4", 1, 13, "one host a line"),
        ("node1 slots=4\nnode2. slots=4", 2, 1, "dot at its end"),
        ("node1 slots=0", 1, 1, "host has a slot"),
        ("node1:0", 1, 1, "host has a slot"),
        ("node1 max_slots=8", 1, 6, "slots=8"),
        ("node1 slots=2 port=22", 1, 15, "~/.ssh/config"),
        ("node1 username=bob slots=2", 1, 7, "~/.ssh/config"),
        ("bob@node1:8", 1, 1, "~/.ssh/config"),
        ("n1.hpc.edu:8\nn1:8", 1, 1, "n1.hpc.edu and n1 are one host"),
        ("localhost\n127.0.0.1", 2, 1, "localhost are one host"),
        ("N1\n n1", 2, 2, "n1 and N1 are one host"),
        ("10.0.0.1\n10.0.0.01", 2, 1, "not a host name"),
        ("fe80::1\nfe80:0::1", 2, 1, "are one host"),
        ("n1,n2:8", 1, 1, "not after others"),
        ("node1\u00a0slots=8", 1, 6, "not a plain blank"),
        ("node1:", 1, 7, "not a number"),
        ("node1 gpus=8", 1, 7, "gpus= is unknown"),
        ("node1 slots=8 slots=8", 1, 15, "twice"),
        ("node1:4 slots=8", 1, 8, "twice"),
        ("n[3-1]", 1, 1, "start > stop"),
        ("n[a]", 1, 1, "bad range"),
        ("n[1", 1, 1, "unbalanced"),
        ("-node1", 1, 1, "not a host name"),
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
    assert "n1 is repeated" in parse_hostfile("n1:1\nn2:1\nn1:1").notes[0]
    for word in ("slots=8, for MPICH host:8", "number of the host's", "small letters", "CR LF", "after a host"):
        assert word in notes


@pytest.mark.parametrize("dialect", ["openmpi", "mpich", "intel", "slime"])
def test_written_files_are_read_back(dialect: str) -> None:
    made = (Host("n1", 8), Host("n2", 4), Host("fe80::7", 2))
    assert parse_hostfile(write_hostfile(made, dialect)).hosts == made


def test_a_slurm_list_has_no_slots() -> None:
    assert write_hostfile((Host("n1", 8), Host("n2", 8)), "slurm") == "n[1-2]\n"
    with pytest.raises(UsageError, match="differ"):
        write_hostfile((Host("n1", 8), Host("n2", 4)), "slurm")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfnode1 slots=2\nnode2 slots=2\n")
    assert read_hostfile(tmp_path / "hosts").hosts == (Host("node1", 2), Host("node2", 2))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"node1 slots=8\n\xff")
    with pytest.raises(HostfileError, match=":2:1: this is not text"):
        read_hostfile(tmp_path / "bytes")


def test_mutated_lines() -> None:
    """Ten thousand mutated lines give hosts, or an error with its place."""
    rng = random.Random(7)
    seeds = [
        "node1 slots=8",
        "node1:8",
        "n2 slots = 3 max_slots=4",
        "n1:8,[fe80::1]:2",
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
            assert isinstance(result, Hostfile) and all(h.slots >= 0 and h.name for h in result.hosts)
        except HostfileError as error:
            refused += 1
            lines = "".join(text).split("\n")
            assert 1 <= error.line <= len(lines)
            assert 1 <= error.column <= len(lines[error.line - 1]) + 1
    assert 1_000 < refused < 9_900


def test_command_shows_and_converts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command shows what it understood and writes other dialects."""
    from hpcrl.cli.main import main

    (tmp_path / "h").write_text("n1 slot=8\nn2 slot=4\n")
    assert main(["hostfile", str(tmp_path / "h")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["n1  8 slots  ranks 0-7", "n2  4 slots  ranks 8-11"]
    assert "for Open MPI write slots=8" in err
    assert main(["hostfile", str(tmp_path / "h"), "--to", "mpich"]) == 0
    assert capsys.readouterr().out == "n1:8\nn2:4\n"
    assert main(["hostfile", str(tmp_path / "h"), "--to", "mpihc"]) == 2
    assert "openmpi, mpich" in capsys.readouterr().err
    (tmp_path / "few").write_text("n1 slots=0\nn2:1 ifhn=n2-ib\n")
    assert main(["hostfile", str(tmp_path / "few")]) == 0
    said = capsys.readouterr()
    (tmp_path / "v6").write_text("2001:db8::1:8\nn1\nn1\n")
    assert main(["hostfile", str(tmp_path / "v6")]) == 0
    notes = capsys.readouterr().err
    assert "write [2001:db8::1]:8 if 8" in notes and "host's cores" in notes
    (tmp_path / "zero").write_text("10.77.0.011\n")
    assert main(["hostfile", str(tmp_path / "zero")]) == 2 and "leading zeros" in capsys.readouterr().err
    (tmp_path / "pbs").write_text("n1\nn1\n")
    assert main(["hostfile", str(tmp_path / "pbs")]) == 0 and "host's cores" not in capsys.readouterr().err
    assert said.out.splitlines() == ["n1  0 slots  no rank", "n2  1 slot  rank 0"] and "ifhn=n2-ib is left" in said.err


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[3].glob("hostfiles/*.txt")), ids=lambda p: p.name)
def test_the_examples_are_read_without_a_note(path: Path) -> None:
    assert read_hostfile(path).hosts and not read_hostfile(path).notes


@pytest.mark.parametrize(
    ("scheduler", "variable", "value", "file"),
    [
        ("lsf", "LSB_MCPU_HOSTS", "n1 2 n2 1", None),
        ("lsf", "LSB_HOSTS", "n1 n1 n2", None),
        ("sge", "PE_HOSTFILE", None, "n1 2 all.q@n1 UNDEFINED\nn2 1 all.q@n2 UNDEFINED\n"),
        ("pbs", "PBS_NODEFILE", None, "n1\nn1\nn2\n"),
    ],
)
def test_hosts_of_other_schedulers_jobs(
    scheduler: str,
    variable: str,
    value: str | None,
    file: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hpcrl.cli.main import main

    for names in VARIABLES.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert main(["hostfile", "--from", scheduler]) == 2
    assert variable in capsys.readouterr().err
    if file is not None:
        (tmp_path / "hosts").write_text(file)
    monkeypatch.setenv(variable, value or str(tmp_path / "hosts"))
    assert main(["hostfile", "--from", scheduler, "--to", "openmpi"]) == 0
    assert capsys.readouterr().out == "n1 slots=2\nn2 slots=1\n"
    assert main(["hostfile", "--from", "pbspro"]) == 2
    assert main(["hostfile"]) == 2


def test_damaged_lists_of_other_schedulers_are_named() -> None:
    with pytest.raises(UsageError, match="list of HOST SLOTS"):
        job_hostfile("lsf", {"LSB_MCPU_HOSTS": "n1 2 n2"})
    with pytest.raises(UsageError, match="cannot be read"):
        job_hostfile("pbs", {"PBS_NODEFILE": "/nowhere"})


@pytest.mark.parametrize(
    "line",
    [
        "fe80::1%\x1b[31m",
        "[::1%;id]:8",
        "[::1%$(id)]",
        "fe80::1%`id`",
        "fe80::1%-oProxyCommand=id",
        "[fe80::1%a b]:8",
        "fe80::1%",
        "fe80::1%a%b",
        "-oProxyCommand=id",
        "node1;id",
        "$(id)",
        "`id` slots=8",
        "node1\x00",
        "node1\x1b[2J slots=8",
        "node[1-2;id]",
        "node[$(id)]",
        "'node1'",
        "node1 slots=8;id",
        "node1 slots=$(id)",
        "node1\u2028node2",
        "-v slots=2",
        "node1:8,-oX=y:8",
        "\u00a0node1",
        "\x0bnode1",
    ],
)
def test_hostile_lines_are_refused(line: str) -> None:
    """What is a host becomes a word of ssh, mpirun and scripts; the error shows no escape."""
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(f"node0 slots=8\n{line}\n")
    assert caught.value.line == 2 and not CONTROL.search(str(caught.value))


def test_a_line_of_many_names_is_read_in_one_pass() -> None:
    """Commas inside brackets part no hosts; a line of a megabyte is refused for its hosts, at once."""
    assert [host.name for host in parse_hostfile("a[1,3],b").hosts] == ["a1", "a3", "b"]
    with pytest.raises(HostfileError):
        parse_hostfile(",".join(["n"] * 500_000))


def test_interfaces_of_addresses() -> None:
    for line in ("fe80::1%eth0 slots=8", "[fe80::1%eth0]:8", "[fe80::1%ib0.8001]:8"):
        (host,) = parse_hostfile(line).hosts
        assert host.name.startswith("fe80::1%") and host.slots == 8
