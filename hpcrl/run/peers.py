"""How the processes of an attempt find each other: attempts/N/peers/ROLE-I.json, which a role writes once it is up.

Invariants: every role publishes one typed record and every reader gets that type or one clear error; a peer of an
earlier attempt does not count; every wait has a deadline and names whom it waited for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import msgspec

from hpcrl.errors import DeadlineError, PeerError
from hpcrl.run.rundir import RunDir, listed, read_record, write_atomic
from hpcrl.utils.untrusted_files import MOST, Damaged, read_json
from hpcrl.utils.waiting import Deadline, Pauses, poll

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
HostName = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role"):
    """Base of all records.

    Attributes:
        pid: of the process, for those who look on its host; set by `publish`.
    """

    pid: Count = 0


class TrainerPeer(Peer, tag="trainer"):
    """Trainer rank 0 is about to train.

    Attributes:
        start: rollouts that were done before.
        total: rollouts of the whole run.
        device: what the driver calls its GPU, "" for a CPU.
        tflops: what that is rated for in BF16; 0 where it is not known.
        versions: of the packages that it works with.
    """

    start: Count
    total: Count
    device: str = ""
    tflops: float = 0.0
    versions: dict[str, str] = {}


class StorePeer(Peer, tag="store"):
    """Where the trainer's ranks meet."""

    host: HostName
    port: Port


class RolloutPeer(Peer, tag="rollout"):
    """Where the rollout queue listens.

    Attributes:
        public_key: of its server, Z85.
        run_id, attempt: those that it serves.
    """

    host: HostName
    port: Port
    public_key: str
    run_id: str
    attempt: Count


#: seconds for which a client keeps an idle connection to an engine.  The server keeps it several times as long: if the
#: server were the one to close it, a request that is sent at that moment would be lost, and look like the end of the
#: engine
IDLE = 15


class EnginePeer(Peer, tag="engine"):
    """Where an engine answers.

    Attributes:
        model_len: tokens of prompt and response together that it can hold, None if it did not say.
        incarnation: how often it was started before (`run/engine_files.py`).
        key_name: of an engine that the run has not started, the name under which it derives its key this time.
    """

    host: HostName
    port: Port
    model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    incarnation: Count = 0
    key_name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{0,64}$")] = ""


class SandboxPeer(Peer, tag="sandbox"):
    """Where the sandboxes of a node are served.

    Attributes:
        incarnation: how often their server was started before in this attempt.
    """

    host: HostName
    port: Port
    incarnation: Count = 0


class MeetingPeer(Peer, tag="engine-meeting"):
    """Where the parts of an engine over several hosts meet: on its first.

    Attributes:
        port: of their process group.
        rpc_port: of the handshake of data-parallel parts.
    """

    host: HostName
    port: Port
    rpc_port: Port


T = TypeVar("T")
P = TypeVar("P", TrainerPeer, StorePeer, RolloutPeer, EnginePeer, SandboxPeer, MeetingPeer)


def role_of(kind: type[Peer]) -> str:
    """The name of its role in files and logs."""
    return str(kind.__struct_config__.tag)


def peer_file(here: Path, kind: type[Peer], index: int, incarnation: int = 0) -> Path:
    """Where ROLE-INDEX of the attempt in `here` (attempts/N) publishes.

    Args:
        incarnation: of an engine, or a node's sandboxes, that was started again.
    """
    stem = f"{role_of(kind)}-{index}"
    return here / "peers" / (f"{stem}.{incarnation}.json" if incarnation else f"{stem}.json")


def publish(rundir: RunDir, peer: Peer, index: int = 0) -> None:
    """Tell the other processes of this attempt that this one is up, and where."""
    data = msgspec.json.encode(msgspec.structs.replace(peer, pid=os.getpid()))
    incarnation = peer.incarnation if isinstance(peer, EnginePeer | SandboxPeer) else 0
    write_atomic(peer_file(rundir.here, type(peer), index, incarnation), data)


def find(rundir: RunDir, kind: type[P], index: int = 0) -> P | None:
    """What ROLE-INDEX published in this attempt, or None.

    Raises:
        PeerError: names a file that holds something else.
    """
    path = peer_file(rundir.here, kind, index)
    return read_published(path, kind) if path.name in listed(path.parent) else None


def newest(rundir: RunDir, kind: type[P], index: int) -> P | None:
    """What the newest incarnation of ROLE-INDEX has published in this attempt, or None.

    Raises:
        PeerError: names a file that holds something else.
    """
    stem = f"{role_of(kind)}-{index}"
    names = listed(rundir.here / "peers")
    numbers = [int(name.split(".")[1]) for name in names if re.fullmatch(rf"{re.escape(stem)}\.\d+\.json", name)]
    if not numbers and f"{stem}.json" not in names:
        return None
    return read_published(peer_file(rundir.here, kind, index, max(numbers, default=0)), kind)


def read_published(path: Path, kind: type[T]) -> T | None:
    """What another process has written to `path`, or None if it is gone.

    Raises:
        PeerError: names a file that holds something else.
    """
    return read_record(path, kind, "use one version on all hosts, and start the run again", PeerError)


def wait_for(rundir: RunDir, kind: type[P], index: int, seconds: float) -> P:
    """What ROLE-INDEX publishes, waited for at most `seconds`.

    Raises:
        DeadlineError: names role and log.
        PeerError: as soon as the attempt has failed elsewhere.
    """

    def look() -> P | None:
        if (found := find(rundir, kind, index)) is None:
            rundir.check()
        return found

    # many wait, and each look is a call to a file system that all share
    if (found := poll(look, Deadline(seconds), iter(Pauses(0.05, 1.0, growth=1.2)))) is None:
        name = f"{role_of(kind)}-{index}"
        raise DeadlineError(f"{name} did not come up within {seconds:.0f} s", f"see {rundir.logs / f'{name}.log'}")
    return found


# ---- many records in one directory


class PublishedRecords(Generic[T]):
    """The records that others put into a directory, each in its own file, whole.

    found: what has come so far, by the file's name without its ending; each file is read once
    damaged: those that could not be read, by the same name
    """

    def __init__(self, directory: Path, kind: type[T], ending: str = ".json", most: int = MOST) -> None:
        """Create one.

        Args:
            most: bytes of a record.
        """
        self.found: dict[str, T] = {}
        self.damaged: set[str] = set()
        self._directory = directory
        self._kind = kind
        self._ending = ending
        self._most = most

    def poll(self) -> dict[str, T]:
        """All that is there: one listing, and what is new in it."""
        names = {name.removesuffix(self._ending) for name in listed(self._directory) if name.endswith(self._ending)}
        for name in sorted(names - self.found.keys() - self.damaged):
            try:
                self.found[name] = read_json(self._directory / f"{name}{self._ending}", self._kind, most=self._most)
            except FileNotFoundError:  # it is gone again
                continue
            except (OSError, Damaged):
                self.damaged.add(name)
        return self.found

    def wait(
        self,
        wanted: int | Collection[str],
        deadline: Deadline,
        every: float,
        over: Callable[[], bool | None] = lambda: False,
    ) -> dict[str, T]:
        """What is there once the records have come, the deadline is over, or `over` says so.

        Args:
            wanted: how many, or their names; one that is damaged has come too.
            every: seconds between two looks.
            over: asked after each look in vain; may raise.
        """

        def come() -> bool:
            there = self.poll().keys() | self.damaged
            return len(there) >= wanted if isinstance(wanted, int) else there >= set(wanted)

        poll(lambda: come() or over(), deadline, every)
        return self.found
