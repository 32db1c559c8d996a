"""Bytes that nobody should have sent, for every decoder: an error of ours or a valid value, whatever they are, and
little memory.

HPCRL_MUTATIONS=100000 makes as many for each; HPCRL_SEED draws others.
"""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.errors import HpcrlError
from hpcrl.plan import Location, Plan
from hpcrl.report.file_tail import last_lines
from hpcrl.report.metrics import parse_record
from hpcrl.run.job_files import JobState
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import AttemptFailure, RunDir
from hpcrl.transport import messages
from hpcrl.transport.share_format import WireError
from hpcrl.utils.untrusted_files import Damaged, parse_json, read_json

COUNT = int(os.environ.get("HPCRL_MUTATIONS", "300"))
SEED = int(os.environ.get("HPCRL_SEED", "1"))


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with a few changes: flipped, cut, doubled, or with numbers and nests where there were none."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << chance.randrange(8)
            case 1:
                del found[at:]
            case 2:
                found[at:at] = found[: chance.randrange(64)]
            case 3:
                found[at:at] = chance.randbytes(chance.randrange(9))
            case 4:
                found[at : at + 4] = chance.choice(
                    [b"\xff\xff\xff\xff", b"\xdd\x7f\xff\xff", b"9" * 400, b"1e999", b"\x00" * 8]
                )
            case 5:
                found[at:at] = chance.choice([b"[", b"\x91", b'{"a":']) * chance.choice([3, 2000])
    return bytes(found)


def of_file(read: Callable[[Path], Any]) -> Callable[[bytes], None]:
    path = Path(f"/dev/shm/hpcrl-mutated-{os.getpid()}")

    def decoder(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read(path)
        finally:
            path.unlink()

    return decoder


PLAN = Plan("run", 0, (Location("node1", (0, 1)),), (Location("node2", (0,)),), Location("node1", ()))
MESSAGES = [
    messages.Hello(messages.PROTOCOL, "run", 0, 0, 2, "host"),
    messages.Fetch(3, 4),
    messages.Call("client", 1, "begin", {"state": {"a": [1, 2.5, None]}}),
]
FAILURE = msgspec.json.encode(AttemptFailure("trainer", 0, "it failed", 1.0))
STATE = msgspec.json.encode(JobState("running", 1.0, host="node1", pid=3))
RECORD = b'{"rollout_id": 3, "time": 1.5, "train/loss": 0.25, "rollout/reward": null}'
#: decoder -> (valid inputs, what may come of others)
DECODERS: dict[str, tuple[list[bytes], Callable[[bytes], Any], tuple[type[Exception], ...]]] = {
    "messages of clients": (
        [messages.pack(m) for m in MESSAGES],
        lambda data: messages.read_from_client([data]),
        (WireError,),
    ),
    "messages of the server": (
        [messages.pack(m) for m in (messages.Failed("no"), messages.Answer(("share", 1), [1, 2]))],
        messages.read_from_server,
        (WireError,),
    ),
    "results of calls": ([messages.pack({"a": [1, 2.5, None]})], messages.read_result, (WireError,)),
    "state": ([STATE], of_file(lambda path: read_json(path, JobState)), (Damaged,)),
    "errors": ([FAILURE], of_file(lambda path: read_json(path, AttemptFailure)), (Damaged,)),
    "metrics": ([RECORD], parse_record, ()),
    "lines": ([RECORD + b"\n" + RECORD], of_file(lambda path: [parse_record(line) for line in last_lines(path)]), ()),
    "values": ([RECORD], parse_json, (Damaged,)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_whatever_the_bytes_are(name: str) -> None:
    valid, decoder, allowed = DECODERS[name]
    chance = random.Random(f"{SEED} {name}")
    for data in valid:
        decoder(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(COUNT):
        data = mutated(chance.choice(valid), chance)
        try:
            decoder(data)
        except allowed:
            pass
        except Exception as error:
            raise AssertionError(f"input {number} of seed {SEED}, {data[:200]!r}: {error!r}") from error
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100 << 10, f"{grown} KiB"


def test_whatever_a_plan_holds(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path / "run")
    chance = random.Random(SEED)
    rundir.make_attempt()
    valid = msgspec.json.encode(PLAN)
    rundir.plan_file.write_bytes(valid)
    assert read_plan(rundir) == PLAN
    for number in range(COUNT):
        rundir.plan_file.write_bytes(data := mutated(valid, chance))
        try:
            read_plan(rundir)
        except HpcrlError:
            pass
        except Exception as error:
            raise AssertionError(f"input {number} of seed {SEED}, {data[:200]!r}: {error!r}") from error
