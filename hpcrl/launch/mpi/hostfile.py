"""Hostfiles of every dialect: read into hosts and slots, written in the dialect that a launcher wants.

    Open MPI    node1 slots=8 max_slots=8      (slots, cpu and count mean the same; spaces around = are allowed)
    MPICH       node1:8  node1:8,node2:8       (Intel MPI's machinefile too)
    Slurm       node[01-03,07]  node[1-2]:8    (a node list; every node gets the same slots)
    slime       10.0.0.1 slot=8                (no launcher reads this one)

A host may be repeated: its slots are added up, as MPICH and Open MPI do.  A host with slots=0 runs nothing but the
rollout process.  IPv6 addresses stand bare, or in brackets where slots follow: [fe80::1]:8.  What LSF, Grid Engine and
PBS tell a job of its hosts is rewritten as such a file first (`job_hostfile`).

Invariant: a line is either understood whole or refused with its line and column; nothing in it is silently ignored.
Two spellings of one machine are refused.  Order is line order.  What a launcher would read differently from us is said
in `notes`.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import hostlist

from hpcrl.errors import UsageError
from hpcrl.plan import Host
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.shipped_files import copy_hint
from hpcrl.utils.untrusted_files import read_given

MAX_HOSTS, MAX_SLOTS = 65536, 4096
BLANKS = " \t"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_FIRST = re.compile(r"(?:\[[^\]]*\]?|[^\s\[])+")  #: the host part: up to a blank that is outside brackets
_PART = re.compile(r"(?:^|,)((?:\[[^\]]*\]?|[^,\[])*)")  #: of it, between commas that are outside brackets
_SCOPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}")  #: an interface, as in fe80::1%eth0
_TOKEN = re.compile(r"\s*([A-Za-z_-]+)\s*=\s*([^\s=#]*)")
_SLOTS = {"slots", "cpu", "cpus", "count"}
_MAXIMUM = {"max_slots", "max-slots", "slots_max", "slots-max", "cpu_max", "count_max"}
SSH = "put it into ~/.ssh/config (Host, User, Port), which every launcher reads"
_OTHER = {"username", "user-name", "user_name", "port"}


class HostfileError(UsageError):
    """A line of a hostfile that is not understood: says file, line, column, and how to write it."""

    def __init__(self, origin: str, line: int, column: int, what: str, hint: str = "") -> None:
        self.line = line
        self.column = column
        super().__init__(f"{origin}:{line}:{column}: {strip_control(what)}", strip_control(hint))


@dataclass(frozen=True)
class Hostfile:
    """Hosts in rank order, and what a launcher would have read differently."""

    hosts: tuple[Host, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Line:
    """One line with its place, for errors."""

    origin: str
    number: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.origin}:{self.number}"

    def error(self, column: int, what: str, hint: str = "") -> HostfileError:
        return HostfileError(self.origin, self.number, column + 1, what, hint)


def read_hostfile(path: str | Path) -> Hostfile:
    """Parse the hostfile at `path`.

    Raises:
        UsageError: if it cannot be read, HostfileError for a bad line.
    """
    try:
        text = read_given(path).removeprefix("\ufeff")  # a byte-order mark, as Windows writes it
    except OSError as error:
        hint = copy_hint(path) or "give a file with one host a line"
        raise UsageError(f"--hostfile {path}: {error.strerror}", hint) from error
    except UnicodeDecodeError as error:
        data = error.object
        line = data[: error.start].count(b"\n") + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1)
        raise HostfileError(str(path), line, column + 1, "this is not text (UTF-8)") from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, origin: str = "hostfile") -> Hostfile:
    """Parse a hostfile of any dialect.

    Raises:
        HostfileError: with line and column for what is not understood.
    """
    found: list[tuple[Host, _Line, bool]] = []
    notes: list[str] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = _Line(origin, number, raw.removesuffix("\r"))
        if raw.endswith("\r"):
            notes.append(f"{line.place}: the line ends in CR LF, which Open MPI refuses; write it with LF")
        found += [(host, line, explicit) for host, explicit in _parse_line(line, notes)]
        if len(found) > MAX_HOSTS:
            raise line.error(0, f"more than {MAX_HOSTS} hosts")
    if not found:
        raise HostfileError(origin, 1, 1, "no host in it", "write one host a line, as in: node1 slots=8")
    return Hostfile(_merge(found, notes), tuple(dict.fromkeys(notes)))


def _parse_line(line: _Line, notes: list[str]) -> list[tuple[Host, bool]]:
    """(host, whether its slots were written) of one line; nothing for blanks and comments."""
    text = line.text
    comment = text.find("#")
    if comment > 0 and text[:comment].strip():
        notes.append(f"{line.place}: MPICH refuses a comment after a host; put it on a separate line")
    body = text if comment < 0 else text[:comment]
    if not body.strip() or body.lstrip().startswith("//"):
        return []
    start = len(body) - len(body.lstrip())
    odd = next((at for at, sign in enumerate(body) if sign.isspace() and sign not in BLANKS), None)
    if odd is not None:
        raise line.error(odd, f"{body[odd]!r} is not a plain blank", "write a space or a tab")
    end = _FIRST.match(body, start).end()  # type: ignore[union-attr]  # it begins with no blank
    found = _hosts_of(line, start, body[start:end])
    written = _settings(line, end, body[end:], notes)
    if written is not None and any(count is not None for _, count in found):
        raise line.error(end, f"slots are given twice: {body[start:end]} and slots={written}", "give them once")
    slots = [(name, written if count is None else count) for name, count in found]
    return [(Host(name, 1 if count is None else count), count is not None) for name, count in slots]


def _hosts_of(line: _Line, column: int, word: str) -> list[tuple[str, int | None]]:
    """(host, its slots) of `node1`, `node1:8`, `node1:8,node2:8`, `node[01-03,07]:8`, `[fe80::1]:8`."""
    if "@" in word:
        raise line.error(column, f"{word} names a user", SSH)
    if _address(word.strip("[]")) == 6:
        return [(word.strip("[]"), None)]
    found: list[tuple[str, int | None]] = []
    for part in _PART.finditer(word):
        found += _part(line, column + part.start(1), part[1])
        if len(found) > MAX_HOSTS:
            break  # `parse_hostfile` refuses them
    if len({count is None for _, count in found}) > 1:
        raise line.error(column, f"{word} has slots after some hosts and not after others", "write them after each")
    return found


def _part(line: _Line, column: int, word: str) -> list[tuple[str, int | None]]:
    """The same of one part between commas."""
    bracketed = re.match(r"\[([0-9A-Fa-f:.]+(?:%[^\]]*)?)\](?=:|\Z)", word)
    if bracketed and _address(bracketed[1]) == 6:
        names, name = [bracketed[1]], bracketed[0]
        colon = word[len(name) : len(name) + 1]
        number = word[len(name) + 1 :]
    else:
        name, colon, number = word.partition(":")
        try:
            names = hostlist.expand_hostlist(name) if re.search(r"[\[\]]", name) else [name]
        except hostlist.BadHostlist as error:
            raise line.error(column, f"{name} is not a node list: {error}", "write it as in node[01-03,07]") from error
        for one in names:
            if not _NAME.match(one) or len(one) > 253 or (re.fullmatch(r"[0-9.]+", one) and _address(one) != 4):
                hint = "letters, digits, '-' and '.' make a host name"
                hint = "leave out the dot at its end" if one.endswith(".") else hint
                hint = "write the address without leading zeros" if re.search(r"\.0\d", one) else hint
                raise line.error(column, f"{one!r} is not a host name", hint)
    count = _number(line, column + len(name) + 1, number, 0) if colon else None
    return [(one, count) for one in names]


def _address(word: str) -> int | None:
    """4 or 6 if the word is an IP address of that version; Python takes any text for the scope of one."""
    _, scoped, scope = word.partition("%")
    if scoped and not _SCOPE.fullmatch(scope):
        return None
    try:
        return ipaddress.ip_address(word).version
    except ValueError:
        return None


def _settings(line: _Line, column: int, rest: str, notes: list[str]) -> int | None:
    """Slots from `slots=8 max_slots=8 ...`.

    Raises:
        HostfileError: for anything unknown.
    """
    slots = maximum = None
    at = 0
    while rest[at:].strip():
        where = column + at + len(rest[at:]) - len(rest[at:].lstrip())
        match = _TOKEN.match(rest, at)
        if not match:
            word = rest[at:].split()[0]
            hint = f"write slots={word}" if word.isdigit() else "write slots=N"
            raise line.error(where, f"{word!r} is not understood (Open MPI would ignore it silently)", hint)
        key, value, at = match[1].lower(), match[2], match.end()
        if at < len(rest) and not rest[at].isspace():
            raise line.error(column + at, f"{rest[at:].split()[0]!r} does not belong here")
        value_column = column + match.start(2)
        if key in _SLOTS or key == "slot":
            if slots is not None:
                raise line.error(where, "slots are given twice", "give them once")
            slots = _number(line, value_column, value, 0)
            if key == "slot":
                ours = f"for Open MPI write slots={slots}, for MPICH host:{slots}"
                notes.append(f"{line.place}: no launcher reads slot=; {ours}")
            elif match[1] != key:
                notes.append(f"{line.place}: Open MPI reads {key}= in small letters only")
        elif key in _MAXIMUM:
            maximum = _number(line, value_column, value)
        elif key == "ifhn":  # MPICH's hydra: the name of the interface that it uses itself
            notes.append(f"{line.place}: {match[0].strip()} is left to MPICH; hpcrl takes --interface")
        elif key in _OTHER:
            raise line.error(where, f"{key}= would not be used", SSH)
        else:
            raise line.error(where, f"{match[1]}= is unknown", "hosts take slots=N")
    if maximum is not None and slots is None:
        raise line.error(column, f"max_slots={maximum} is only a bound", f"say how many are used: slots={maximum}")
    if maximum is not None and slots is not None and slots > maximum:
        raise line.error(column, f"slots={slots} is more than max_slots={maximum}")
    return slots


def _number(line: _Line, column: int, text: str, least: int = 1) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not least <= int(text) <= MAX_SLOTS:
        hint = "write one host a line" if "," in text else f"write a number from {least} to {MAX_SLOTS}"
        raise line.error(column, f"{text!r} is not a number of slots", hint)
    return int(text)


def _merge(found: list[tuple[Host, _Line, bool]], notes: list[str]) -> tuple[Host, ...]:
    """Each host once, with all its slots.

    Raises:
        HostfileError: where two names are one machine.
    """
    spelled: dict[str, str] = {}
    merged: dict[str, int] = {}
    last = None
    for host, line, written in found:
        if (other := spelled.setdefault(_key(host.name), host.name)) != host.name:
            raise _same(line, host.name, other)
        if host.name in merged and host.name != last:
            notes.append(f"{line.place}: {host.name} is repeated; its ranks stay together, at its first place")
        if not written and (end := re.fullmatch(r"([0-9a-f:]*::?[0-9a-f]+):(\d{1,3})", host.name)):
            notes.append(f"{line.place}: write [{end[1]}]:{end[2]} if {end[2]} is meant as slots")
        merged[host.name] = merged.get(host.name, 0) + host.slots
        if merged[host.name] > MAX_SLOTS:
            raise line.error(0, f"{host.name} has more than {MAX_SLOTS} slots in all")
        last = host.name
    times = Counter(host.name for host, _, _ in found)
    if any(not written and times[host.name] == 1 for host, _, written in found):
        notes.append("hosts without slots count as one slot here; Open MPI takes the number of the host's cores")
    if not any(merged.values()):
        raise found[0][1].error(0, "no host has a slot", "write slots=N after those that have GPUs")
    for host, line, _ in found:
        first, domain, _ = host.name.lower().partition(".")
        if domain and _address(host.name) is None and first in spelled:
            raise _same(line, host.name, spelled[first])
    return tuple(Host(name, slots) for name, slots in merged.items())


def _same(line: _Line, name: str, other: str) -> HostfileError:
    column = len(line.text) - len(line.text.lstrip())
    return line.error(column, f"{name} and {other} are one host", "write it in one way")


def _key(name: str) -> str:
    """The same for all spellings of a machine: an address however written, a name's letters in either case, the
    loopback."""
    if _address(name):
        address = ipaddress.ip_address(name)
        return "localhost" if address.is_loopback else str(address)
    return name.lower().removesuffix(".localdomain")


#: dialect -> a line of a host; {bracketed}: its name, an IPv6 address in brackets
WRITERS = {
    "openmpi": "{name} slots={slots}\n",
    "mpich": "{bracketed}:{slots}\n",
    "intel": "{bracketed}:{slots}\n",
    "slime": "{name} slot={slots}\n",
}


def write_hostfile(hosts: tuple[Host, ...], dialect: str) -> str:
    """The hosts as a file of `dialect`: openmpi, mpich, intel, slime, or slurm (one node list)."""
    if dialect == "slurm":
        if len({host.slots for host in hosts}) > 1:
            raise UsageError(
                "a Slurm node list has no slots, and these hosts differ in them", "choose openmpi or mpich"
            )
        return hostlist.collect_hostlist([host.name for host in hosts]) + "\n"
    if dialect not in WRITERS:
        raise UsageError(f"--to {dialect} is unknown", f"choose one of {', '.join([*WRITERS, 'slurm'])}")
    return "".join(
        WRITERS[dialect].format(name=h.name, bracketed=f"[{h.name}]" if ":" in h.name else h.name, slots=h.slots)
        for h in hosts
    )


# ---- hosts of a job of LSF, Grid Engine or PBS
#
#     LSF     LSB_MCPU_HOSTS="n1 8 n2 8", or LSB_HOSTS="n1 n1 n2" with a name for each slot
#     SGE     PE_HOSTFILE: a file with "n1 8 all.q@n1 UNDEFINED" in each line
#     PBS     PBS_NODEFILE: a file with a name for each slot

#: scheduler -> the variables that it sets in a job, the best first
VARIABLES = {"lsf": ("LSB_MCPU_HOSTS", "LSB_HOSTS"), "sge": ("PE_HOSTFILE",), "pbs": ("PBS_NODEFILE",)}


def job_hostfile(scheduler: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """(hostfile text, where it came from).  UsageError outside of such a job, or for another scheduler."""
    if scheduler not in VARIABLES:
        raise UsageError(f"--from {scheduler} is unknown", f"choose one of {', '.join(VARIABLES)}")
    names = VARIABLES[scheduler]
    name = next((name for name in names if environment.get(name, "").strip()), None)
    if name is None:
        raise UsageError(f"{' and '.join(names)} {'are' if names[1:] else 'is'} not set", "run it in a job")
    text = environment[name]
    if name in ("PE_HOSTFILE", "PBS_NODEFILE"):
        try:
            text = read_given(text)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}={text} cannot be read: {error}") from error
    words = text.split()
    if name == "PE_HOSTFILE":
        rows = [line.split()[:2] for line in text.splitlines() if line.strip()]
    elif name == "LSB_MCPU_HOSTS":
        rows = [words[at : at + 2] for at in range(0, len(words), 2)]
    else:
        rows = [[word, "1"] for word in words]
    if short := next((row for row in rows if len(row) < 2), None):
        raise UsageError(f"${name} is not a list of HOST SLOTS: {short[0]!r} has no slots")
    return "".join(f"{host} slots={slots}\n" for host, slots in rows), f"${name}"
