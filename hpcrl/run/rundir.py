"""The run directory: where a run keeps everything, and how an attempt is told to stop, to end, or that it has failed.

    RUN/                          mode 0700
      options.json                the resolved options
      prepared/                   what the recipe's prepare command made
      keys/                       CURVE key pairs and the HTTP key of this run, mode 0700
      attempts/N/plan.json        who runs where
      attempts/N/hosts.json       the hosts that the attempt was given, with all their slots
      attempts/N/peers/ROLE-I.json    what a process published (peers.py); of engines more (engine_files.py)
      attempts/N/engines.json     how each engine is (engine_files.py)
      attempts/N/error.json       the first error of the attempt
      attempts/N/hosts/NAME.json  what a host reported of itself before the plan was made
      attempts/N/beats/NAME       a host's sign of life, while it lives
      attempts/N/stop             exists when the run was asked to save and end
      attempts/N/end              exists when every process of the attempt is to end now
      attempts/N/over             exists when summary.json has what came of the attempt
      logs/attempt-N/ROLE-I.log   and logs/latest -> attempt-N; of attempts before the last two attempt-N.tar.gz
      bank/N.groups               groups that are finished, or begun, and not yet trained
      attempts.jsonl              how attempts have begun to train, and failed (attempt_log.py)
      ledger/attempt-N.jsonl      what became of every group; ledger.json: how many are where
      passed-over.json            damaged checkpoints that a resume has passed over (skipped_checkpoints.py)
      position.json               how far a run without a trainer is
      timeline/                   what every process did when (report/timeline/)
      checkpoints/ samples/ tensorboard/ metrics.jsonl curves.svg

Invariants: every file appears whole or not at all (written next to it, then renamed); the first error of an attempt is
kept and later ones never overwrite it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.run.owners import refuse_foreign, refuse_replaceable
from hpcrl.run.storage_errors import describe, remedy, retry_while_passing
from hpcrl.utils.untrusted_files import Damaged, as_given, count_of, make_parents, read_json, touch

T = TypeVar("T")

#: errors of a network file system, or of too many open files, that may be gone at the next look
STALE = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
TRACKER = "latest_checkpointed_iteration.txt"  #: next to checkpoints: which of them is the last
CHOSEN = "ckpt_step.txt"  #: next to it: the one that `hpcrl resume --ckpt-step` has named, until another is saved
OVER = "over"  #: name of a mark in attempts/N
STOP = "stop"  #: the same, of a run that was asked to save and end
ERROR = "error.json"  #: the first error of an attempt: its name in attempts/N
HOSTS = "hosts.json"  #: its name in attempts/N
BEATS = "beats"  #: attempts/N/beats: the hosts' signs of life
HALF = re.compile(r"\.(.+)\.\d+")  #: the name of a file that `write_atomic` has not renamed yet
#: what an attempt alone writes into RUN; other files there may be of a process that is alive, such as `hpcrl resume`
OWN = ("state.json", "ledger.json", "summary.json", "position.json", "metrics.jsonl", "passed-over.json")
WRITTEN = ("ahead", "bank", "ledger")  #: directories of RUN that the rollout process makes, if it needs them
FOLDERS = ("keys", "checkpoints", "samples", "attempts", "logs")  #: what a run has from the start


def _claim(path: Path) -> Path:
    """Make `path`, or the first of path-2, path-3, ... that is not there; mkdir gives it to one process alone.
    OSError."""
    for number in count(1):
        own = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            own.mkdir(mode=0o700)
            return own
    raise AssertionError


def write_atomic(path: Path, data: bytes, mode: int = 0o600, patience: float = 0.0) -> None:
    """Write `data` next to `path`, flush it to disk, and rename: a reader sees the old file or the new one.

    Args:
        patience: seconds for which it is tried again while the file system is full, read-only or stale.

    Raises:
        HpcrlError: with what the system said.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        retry_while_passing(lambda: _write(beside, path, data, mode), patience)
    except OSError as error:
        raise _refused(path, error) from error


def write_unread(path: Path, data: bytes) -> None:
    """Write a file that no process reads yet, and that none misses after a crash.

    One call that changes the file system, and no wait for the disk: for files of which there is one for each rank.

    Raises:
        HpcrlError: with what the system said.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> HpcrlError:
    return HpcrlError(f"cannot write {path}: {describe(error, path)}", remedy(error) or "choose another --run-dir")


def _write(beside: Path, path: Path, data: bytes, mode: int) -> None:
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_first(path: Path, data: bytes) -> bool:
    """Write `data`, whole, unless there is such a file; whether it was written.  OSError."""
    beside = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.link(beside, path)
        return True
    except FileExistsError:
        return False
    finally:
        beside.unlink(missing_ok=True)


def read_if_whole(path: Path, kind: type[T]) -> T | None:
    """A JSON file as `kind`; None if it is not there or cannot be read."""
    try:
        return read_json(path, kind)
    except (OSError, Damaged):
        return None


def read_record(path: Path, kind: type[T], hint: str = "", error: type[HpcrlError] = HpcrlError) -> T | None:
    """A JSON file that hpcrl has written, as `kind`; None if it is not there.

    Raises:
        HpcrlError: an `error` with this hint; names a file that cannot be read.
    """
    try:
        return read_json(path, kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, Damaged) as found:
        raise error(f"{path} is damaged, or of another version of hpcrl: {found}", hint) from found


def flush(path: Path) -> None:
    """Have a file that was written, or the names in a directory, on disk before continuing."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class AttemptFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What error.json holds.

    Attributes:
        role, index: of the process that failed, `launcher` and `host` among them.
        time: unix time.
        kind: of the error that it ended with (`errors.failure_kind`), EXITED, or "" where others have seen its end: it
            was killed, hangs, or is lost.
    """

    role: str
    index: int
    message: str
    time: float
    kind: str = ""

    def __str__(self) -> str:
        """For a user: who failed, and why; what the launcher says speaks for itself."""
        return self.message if self.role == "launcher" else f"{self.role}-{self.index}: {self.message}"


class RunDir:
    """Paths of one attempt of one run, and the marks by which its processes tell one another its state."""

    def __init__(self, root: str | Path, attempt: int = 0) -> None:
        self.root = as_given(root)
        self.attempt = attempt
        self.options_file = self.root / "options.json"
        self.keys = self.root / "keys"
        self.checkpoints = self.root / "checkpoints"
        self.samples = self.root / "samples"
        self.metrics_file = self.root / "metrics.jsonl"
        self.tensorboard = self.root / "tensorboard"
        self.logs = self.root / "logs" / f"attempt-{attempt}"
        self.here = self.root / "attempts" / str(attempt)  # of this attempt
        self.plan_file = self.here / "plan.json"

    # ---- life

    @classmethod
    def create(cls, root: str | Path, folders: tuple[str, ...] = FOLDERS, *, another: bool = False) -> RunDir:
        """A new run directory with its `folders`, mode 0700.

        Args:
            another: where `root` is taken, the first of root-2, root-3, ... that is not; no other process can have got
                the same.

        Raises:
            UsageError: if it is not empty, cannot be made, or would be where others may put something else in its
                place.
        """
        refuse_foreign(Path(root))
        path = as_given(root)
        taken = UsageError(f"--run-dir {root} is not empty", f"give another, or continue that run: hpcrl resume {root}")
        if not another and path.is_dir() and any(path.iterdir()):
            raise taken
        try:
            refuse_replaceable(path)  # before anything is made there
            make_parents(path)
            refuse_replaceable(path)
            refuse_foreign(path)
            path = _claim(path) if another else path
            path.mkdir(exist_ok=True, mode=0o700)
            path.chmod(0o700)  # EPERM where it is another's
            for name in folders:
                (path / name).mkdir(mode=0o700)
        except FileExistsError as error:  # by another process, since we looked
            raise taken from error
        except OSError as error:
            reason = "no directory can be made there" if error.errno == errno.ENOENT else describe(error, path)
            raise UsageError(f"--run-dir {root}: {reason}", remedy(error) or "choose a writable directory") from error
        return cls(path)

    @classmethod
    def latest(cls, root: str | Path) -> RunDir:
        """The last attempt of an existing run."""
        path = Path(root)
        if not (path / "options.json").is_file():
            raise UsageError(
                f"{root} is not a run directory: it has no options.json", "name one that hpcrl run printed"
            )
        numbers = [count_of(name) for name in listed(path / "attempts")]
        return cls(path, max((n for n in numbers if n is not None), default=0))

    def make_attempt(self) -> None:
        """Make the directories of this attempt and point logs/latest to it; what a kill left half written goes."""
        self._sweep()
        (self.here / "peers").mkdir(parents=True, exist_ok=False, mode=0o700)
        (self.here / "hosts").mkdir(mode=0o700)
        self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        link = self.root / "logs" / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.logs.name)
        link.replace(self.root / "logs" / "latest")

    def _sweep(self) -> None:
        """Remove the files that were being written next to their places when their writer was killed, and signs of life
        of the dead."""
        last = self.root / "attempts" / str(self.attempt - 1)
        shutil.rmtree(last / BEATS, ignore_errors=True)
        trees = (self.keys, *(self.root / name for name in ("samples", *WRITTEN)), last)
        below = (
            Path(folder) for tree in trees for folder, _, _ in os.walk(tree)
        )  # links into other places are not followed
        for folder in (self.root, self.root / "checkpoints", *below):
            for name in listed(folder):
                found = HALF.fullmatch(name)
                if found is None or (folder == self.root and found[1] not in OWN):
                    continue
                with contextlib.suppress(OSError):
                    (folder / name).unlink()

    # ---- failure and stop

    def fail(self, role: str, index: int, message: str, kind: str = "") -> None:
        """Record an error; only the first of an attempt is kept.

        Args:
            kind: as in `AttemptFailure`.
        """
        record = AttemptFailure(role, index, message, time.time(), kind)
        with contextlib.suppress(OSError):  # the disk is full: exit status and launcher still tell
            write_first(self.here / ERROR, msgspec.json.encode(record))

    def correct(self, message: str) -> None:
        """Record the launcher's error as the attempt's, as it has found the cause of what another process saw
        first."""
        record = AttemptFailure("launcher", 0, message, time.time())
        with contextlib.suppress(OSError, HpcrlError):
            write_atomic(self.here / ERROR, msgspec.json.encode(record))

    def failure(self) -> AttemptFailure | None:
        """The first error of this attempt, or None.

        Raises:
            PeerError: if it is there and cannot be read: the attempt has failed.
        """
        path = self.here / ERROR
        try:
            return read_json(path, AttemptFailure)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in STALE:  # a network file system that has forgotten it for a moment; who waits looks again
                return None
            why = str(error.strerror)
        except Damaged as error:
            why = f"is damaged: {error}"
        raise PeerError(f"the attempt has failed, and {path} {why}", f"see the logs in {self.logs}")

    def check(self) -> frozenset[str]:
        """The signs.

        Raises:
            PeerError: if this attempt has failed somewhere: no use in waiting on.
        """
        signs = self.signs()
        if ERROR in signs and (found := self.failure()):
            raise PeerError(str(found))
        return signs

    def signs(self) -> frozenset[str]:
        """What has been said of this attempt so far, by name, in one look: STOP, "end", the file of the first
        error."""
        return listed(self.here)

    def request_stop(self) -> None:
        """Ask the run to save a checkpoint and end."""
        touch(self.here / STOP)

    def request_end(self) -> None:
        """Tell every host to end its processes of this attempt now."""
        touch(self.here / "end")

    def superseded(self) -> bool:
        """Whether the run has been started again: what is left of this attempt, on a host cut off, must end."""
        return str(self.attempt + 1) in listed(self.root / "attempts")


def listed(directory: Path) -> frozenset[str]:
    """The names in a directory; none if it is not there.

    For a process that waits for a file: a network file system may remember for a minute that a file was absent, but
    looks at a directory again that is read.
    """
    try:
        return frozenset(os.listdir(directory))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        if error.errno in STALE:
            return frozenset()
        raise
