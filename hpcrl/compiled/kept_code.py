"""Compiled code of one role on one node: unpacked before it starts, packed when it has compiled more.

    code = KeptCode(context, "engine", part, base, spare)
    environment = base | code.variables
    code.watch()                    # a thread, on the one node that packs
    code.finish()                   # at a good end

Invariants: nothing here ends a run, or keeps it waiting beyond a deadline: what cannot be read or written is one line
in the role's log, and the role compiles for itself; of all nodes of a shape one packs, and of the processes of a node
one unpacks at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.compiled.archive import MOST_BYTES, CompiledFile, listing, pack, unpack
from hpcrl.compiled.shape import machine_facts, role_facts, shape_of
from hpcrl.compiled.store import ArchiveDirectory, identity
from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, HpcrlError
from hpcrl.run.gpu_environment import CACHES, Role, cache_directory, compile_caches
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.run.started_runs import is_run
from hpcrl.run.sweep_file import is_sweep
from hpcrl.toolbox.deadline import Deadline, poll
from hpcrl.untrusted_files import Damaged, open_append, read_json

NONE = "none"  #: value of --compile-cache
NOT_KEPT = {"compile_cache": NONE}  #: the option
DEFAULT = ".hpcrl-compiled"  #: its name next to a run's directory
LOCK = ".lock"  #: in a directory of compiled code: held by the process that unpacks there
KNOWN = ".unpacked.json"  #: there: what was unpacked last
UNPACK = 120.0  #: seconds that unpacking may take, a wait for another process of the node included
PACK = 300.0  #: seconds that packing may take,
LAST = 5.0  #: and at the end of a role, which its host ends by force a little later
FIRST_LOOK = 10.0  #: seconds until the first look for new files,
LONGEST = 600.0  #: and between two of them at most; each pause is twice the last
QUIET = 5.0  #: seconds without a new file before new ones are packed: more are to come otherwise
NICE = 19
#: torch would compile its C++ headers first, 150 MB for the processor alone, into the process's temporary directory:
#: an engine's own goes with the engine, and what is there would be compiled again at every start
ALSO = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


class Unpacked(msgspec.Struct, frozen=True):
    """What a directory has from an archive, and from which."""

    identity: str = ""
    files: dict[str, CompiledFile] = {}


class CodePlaces(NamedTuple):
    """CodePlaces a role's compiled code is.

    Attributes:
        shape: name of the archive.
        here: on this node.
        kept: the directory of archives, on all nodes.
    """

    shape: str
    here: Path
    kept: Path


class KeptCode:
    """The compiled code of one role on this node.

    Attributes:
        variables: of the role's environment.
    """

    def __init__(
        self,
        options: Options,
        rundir: RunDir,
        role: Role,
        part: tuple[int, ...],
        base: Mapping[str, str],
        spare: Path | None = None,
    ) -> None:
        self._known = Unpacked()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.where: CodePlaces | None = None
        try:
            self.where = _where(options, rundir, role, part, base)
        except (HpcrlError, OSError) as error:
            say(f"note: compile cache: {error}; none is kept")
        self.variables = compile_caches(base, spare, self.where.here if self.where else None)
        if self.where:
            self.variables |= {name: value for name, value in ALSO.items() if name not in base}
            self._noted(self._unpack)

    def watch(self, compiled: bool = False) -> None:
        """Have a thread look for new code, and pack it.

        Args:
            compiled: whether what is compiled at the start is there already.
        """
        if self.where and self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(compiled,), name="compiled code", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The role is about to end: what it compiled last is packed meanwhile."""
        self._ending.set()

    def finish(self) -> None:
        """The role has ended well: wait for that, but no longer than LAST."""
        self.end()
        if self._thread is not None:
            self._thread.join(LAST)

    # ---- one at a time

    def _noted(self, work: Callable[[], None]) -> bool:
        """Do what may fail; whether it has not."""
        assert self.where
        try:
            work()
        except (OSError, Damaged, DeadlineError, HpcrlError, MemoryError) as error:
            say(f"note: compile cache: {error}; without effect on the run ({self.where.kept}, {self.where.shape})")
            return False
        return True

    def _unpack(self) -> None:
        assert self.where
        begun = time.monotonic()
        shape, here, kept = self.where
        deadline = Deadline(UNPACK)
        try:
            archives = ArchiveDirectory(kept)
        except FileNotFoundError:
            say(f"compile cache: nothing kept for this shape yet ({kept}, {shape})")
            return
        with archives, _locked(here, deadline):
            try:
                file = archives.open(shape)
            except FileNotFoundError:
                say(f"compile cache: nothing kept for this shape yet ({kept}, {shape})")
                return
            with file:
                found = identity(os.fstat(file.fileno()))
                self._known = _known(here)
                if self._known.identity != found:
                    try:
                        self._known = Unpacked(found, unpack(file, here, deadline))
                    except Damaged as error:
                        archives.remove(shape)
                        raise Damaged(f"the archive is damaged, and removed: {error}") from error
                    write_atomic(here / KNOWN, msgspec.json.encode(self._known))
            archives.used(shape)
        size = sum(entry.size for entry in self._known.files.values())
        say(
            f"compile cache: {len(self._known.files)} files, {size / 2**20:.1f} MiB, unpacked in "
            f"{time.monotonic() - begun:.1f} s ({kept}, {shape})"
        )

    def _watch(self, compiled: bool) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        pause = 0.0 if compiled else FIRST_LOOK
        while True:
            ending = self._ending.wait(pause)
            found = listing(self.where.here) if self.where else {}
            newest = max((entry.mtime for entry in found.values()), default=0)
            settled = compiled or ending or not 0 <= time.time() - newest < QUIET
            new = settled and found.items() - self._known.files.items()
            if new and not self._noted(partial(self._pack, found, Deadline(LAST if ending else PACK))):
                return
            if ending:
                return
            compiled, pause = False, min(2 * pause or FIRST_LOOK, LONGEST)

    def _pack(self, found: dict[str, CompiledFile], deadline: Deadline) -> None:
        """Pack these files, and what another run of the shape has packed meanwhile."""
        assert self.where
        shape, here, kept = self.where
        with ArchiveDirectory(kept, make=True) as archives:
            with contextlib.suppress(FileNotFoundError), archives.open(shape) as file:
                if identity(os.fstat(file.fileno())) != self._known.identity:
                    with contextlib.suppress(Damaged), _locked(here, deadline):
                        found = unpack(file, here, deadline) | found
            size = sum(entry.size for entry in found.values())
            if size > MOST_BYTES:
                raise HpcrlError(f"{size >> 20} MiB are more than the {MOST_BYTES >> 20} that an archive may have")
            begun = time.monotonic()
            made = archives.put(shape, lambda out: pack(here, found, out, deadline))
        self._known = Unpacked(made, found)
        write_atomic(here / KNOWN, msgspec.json.encode(self._known))
        say(
            f"compile cache: {len(found)} files, {size / 2**20:.1f} MiB, packed in {time.monotonic() - begun:.1f} s "
            f"({kept}, {shape})"
        )


def _where(
    options: Options, rundir: RunDir, role: Role, part: tuple[int, ...], base: Mapping[str, str]
) -> CodePlaces | None:
    """None where nothing is to be kept, or all places of compiled code are the user's."""
    if options.compile_cache == NONE or set(base) >= set(CACHES):
        return None
    root = cache_directory()
    if root is None:
        return None
    shape = shape_of(role_facts(role, options, part) | machine_facts(root))
    here = cache_directory(shape)
    return here and CodePlaces(shape, here, kept_directory(options.compile_cache, rundir.root))


def kept_directory(given: str | None, root: Path) -> Path:
    """The directory of archives of a run, of a stage of one, or of a run of a sweep."""
    whole = root.parent if is_run(root.parent) and not is_run(root) else root
    whole = whole.parent if is_sweep(whole.parent) else whole
    return Path(given) if given else whole.parent / DEFAULT


def _known(here: Path) -> Unpacked:
    """What was unpacked there last."""
    try:
        return read_json(here / KNOWN, Unpacked)
    except (OSError, Damaged):
        return Unpacked()


@contextlib.contextmanager
def _locked(here: Path, deadline: Deadline) -> Iterator[None]:
    """While no other process of the node unpacks there.

    Raises:
        DeadlineError.
    """
    with open_append(here / LOCK) as file:

        def held() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not poll(held, deadline, 0.1):
            raise DeadlineError(f"another process has unpacked for {deadline.seconds:.0f} s")
        yield
