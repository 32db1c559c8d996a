"""Compiled code of one role on one node: unpacked before it starts, packed when it has compiled more.

    code = KeptCode(context, "engine", part, base, spare)
    environment = base | code.variables
    code.watch()                    # a thread, on the one node that packs
    code.finish()                   # at a good end

Invariants: nothing here ends a run: what cannot be read or written is one line in the role's log, and the role
compiles for itself.  A deadline is looked at between two reads or writes; one that the file system does not answer
has none.  Nothing is packed while files change.  Of all nodes of a shape one packs, and, where the file system has
locks, of the processes of a node one unpacks at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, HpcrlError
from hpcrl.run.compile_cache.archive import MOST_BYTES, CompiledFile, listing, pack, unpack
from hpcrl.run.compile_cache.node_directory import Unpacked, clear, known, locked, note_known, remove_unused, use
from hpcrl.run.compile_cache.shape import machine_facts, role_facts, shape_of
from hpcrl.run.compile_cache.store import ArchiveDirectory, identity
from hpcrl.run.gpu_environment import CACHES, Role, cache_directory, compile_caches
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.run.started_runs import is_run
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.retry import Pauses
from hpcrl.utils.untrusted_files import Damaged

NONE = "none"  #: value of --compile-cache
NOT_KEPT = {"compile_cache": NONE}  #: the option
DEFAULT = f".hpcrl-compiled-{os.getuid()}"  #: its name next to a run's directory, where other users may have runs too
UNPACK = 120.0  #: seconds that unpacking may take, a wait for another process of the node included
PACK = 300.0  #: seconds that packing may take,
LAST = 5.0  #: and at the end of a role, which its host ends by force a little later,
TO_CLEAR = 0.8  #: of that to pack; the rest is to remove what is half packed
ABORT = 2.0  #: seconds for that, where the role ends otherwise
FIRST_LOOK = 10.0  #: seconds until the first look for new files,
LONGEST = 600.0  #: and between two of them at most; each pause is twice the last
QUIET = 5.0  #: seconds in which no file has changed before new ones are packed: one may be half written otherwise
NICE = 19
#: torch would compile its C++ headers first, 150 MB for the processor alone, into the process's temporary directory:
#: an engine's own goes with the engine, and what is there would be compiled again at every start
ALSO = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


JOB = re.compile(r"[A-Z]+_JOB_?ID")
NUMBER = re.compile(r"[0-9]+")


class Packing(Deadline):
    """PACK seconds, and less if the role ends before."""

    __slots__ = ("_late",)

    def __init__(self, late: Callable[[], bool]) -> None:
        super().__init__(PACK)
        self._late = late

    @property
    def over(self) -> bool:
        """Whether none are left."""
        return self._late() or super().over


class CodePlaces(NamedTuple):
    """Where a role's compiled code is.

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
        self._last: Deadline | None = None  # once the role ends
        self._used: BinaryIO | None = None
        self._earlier = False  # whether code of earlier starts is here
        self.where: CodePlaces | None = None
        try:
            self.where = _where(options, rundir, role, part, base)
        except (HpcrlError, OSError, Damaged) as error:
            say(f"note: compile cache: {error}; none is kept")
        self.variables = compile_caches(base, spare, self.where.here if self.where else None)
        if self.where:
            self.variables |= {name: value for name, value in ALSO.items() if name not in base}
            self._noted(self._restore)

    def watch(self, compiled: bool = False) -> None:
        """Have a thread look for new code, and pack it.

        Args:
            compiled: whether what is compiled at the start is there already.
        """
        if self.where and self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(compiled,), name="compiled code", daemon=True)
            self._thread.start()
            atexit.register(self._abort)

    def end(self) -> None:
        """The role is about to end: what it compiled last is packed meanwhile."""
        self._last = self._last or Deadline(LAST * TO_CLEAR)
        self._ending.set()

    def finish(self) -> None:
        """The role has ended well: wait for that, but no longer than LAST."""
        self.end()
        if self._thread is not None:
            self._thread.join(LAST)

    def discard(self) -> None:
        """The role died before it was up: code of earlier starts, which may be why, goes."""
        if self.where and self._earlier:
            self._noted(self._discard)

    def _abort(self) -> None:
        """The process ends, well or not: what is half packed is removed."""
        self._last = Deadline(0.0)
        self._ending.set()
        if self._thread is not None:
            self._thread.join(ABORT)

    def _late(self) -> bool:
        """Whether the role ends, and there is no time left to pack."""
        return self._last is not None and self._last.over

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

    def _restore(self) -> None:
        assert self.where
        here = self.where.here
        self._used = use(here)
        try:
            self._unpack()
        finally:
            self._earlier = bool(listing(here))
            remove_unused(here.parent)

    def _discard(self) -> None:
        assert self.where
        shape, here, kept = self.where
        with contextlib.suppress(FileNotFoundError), ArchiveDirectory(kept) as archives:
            archives.remove(shape)
        with locked(here, Deadline(LAST)):
            clear(here)
        say(
            "compile cache: this role died before it was up, perhaps by code that earlier ones compiled: the archive "
            f"and the files on this node are removed, and the next start compiles for itself ({kept}, {shape})"
        )

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
        with archives, locked(here, deadline):
            try:
                file = archives.open(shape)
            except FileNotFoundError:
                say(f"compile cache: nothing kept for this shape yet ({kept}, {shape})")
                return
            with file:
                found = identity(os.fstat(file.fileno()))
                self._known = known(here)
                if self._known.identity != found or self._known.files.keys() - listing(here).keys():
                    try:
                        self._known = Unpacked(found, unpack(file, here, deadline))
                    except Damaged as error:
                        archives.remove(shape)
                        raise Damaged(f"the archive is damaged, and removed: {error}") from error
                    note_known(here, self._known)
            archives.used(shape)
            archives.trim(shape)
        size = sum(entry.size for entry in self._known.files.values())
        say(
            f"compile cache: {len(self._known.files)} files, {size / 2**20:.1f} MiB, unpacked in "
            f"{time.monotonic() - begun:.1f} s ({kept}, {shape})"
        )

    def _watch(self, compiled: bool) -> None:
        assert self.where
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        pauses = iter(Pauses(FIRST_LOOK, LONGEST))
        pause = 0.0 if compiled else next(pauses)
        while True:
            ending = self._ending.wait(pause)
            if self._late():
                return
            found = listing(self.where.here)
            newest = max((entry.mtime for entry in found.values()), default=0)
            age = time.time() - newest / 1e9
            quiet = not 0 <= age < QUIET
            new = _sizes(found) - _sizes(self._known.files)
            if new and quiet and not self._noted(partial(self._pack, found, Packing(self._late))):
                return
            if ending and self._last:
                if new and not quiet:
                    if QUIET - age < self._last.left:
                        time.sleep(QUIET - age)
                        continue
                    say(f"compile cache: files still change: they are not packed ({self.where.here})")
                return
            pause = QUIET if new and not quiet else next(pauses)

    def _pack(self, found: dict[str, CompiledFile], deadline: Deadline) -> None:
        """Pack these files, and what another run of the shape has packed meanwhile."""
        assert self.where
        shape, here, kept = self.where
        gone = self._known.files.keys() - found.keys()
        with ArchiveDirectory(kept, make=True) as archives:
            with contextlib.suppress(FileNotFoundError), archives.open(shape) as file:
                if gone or identity(os.fstat(file.fileno())) != self._known.identity:
                    with contextlib.suppress(Damaged), locked(here, deadline):
                        found = unpack(file, here, deadline) | found
            size = sum(entry.size for entry in found.values())
            if size > MOST_BYTES:
                raise HpcrlError(f"{size >> 20} MiB are more than the {MOST_BYTES >> 20} that an archive may have")
            begun = time.monotonic()
            taken: dict[str, CompiledFile] = {}
            made = archives.put(shape, lambda out: taken.update(pack(here, found, out, deadline)))
        self._known = Unpacked(made, taken)
        note_known(here, self._known)
        size = sum(entry.size for entry in taken.values())
        say(
            f"compile cache: {len(taken)} files, {size / 2**20:.1f} MiB, packed in {time.monotonic() - begun:.1f} s "
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
    if named_after_job(root, base):
        say(f"compile cache: {root} has another path in each job, where compiled code is of no use: none is kept")
        return None
    shape = shape_of(role_facts(role, options, part) | machine_facts(root, base))
    here = cache_directory(shape)
    return here and CodePlaces(shape, here, kept_directory(options.compile_cache, rundir.root))


def named_after_job(root: Path, base: Mapping[str, str]) -> bool:
    """Whether a path has the number of the batch job, which every scheduler's environment has by such a name."""
    jobs = [found[0] for name in base if JOB.fullmatch(name) and (found := NUMBER.match(base[name]))]
    return any(job in NUMBER.findall(str(root)) for job in jobs)


def _sizes(files: Mapping[str, CompiledFile]) -> set[tuple[str, int]]:
    """What tells new code from old: not its times, or two nodes that compile the same would pack in turns for ever."""
    return {(name, entry.size) for name, entry in files.items()}


def kept_directory(given: str | None, root: Path) -> Path:
    """The directory of archives of a run, or of a stage of one."""
    whole = root.parent if is_run(root.parent) and not is_run(root) else root
    return Path(given) if given else whole.parent / DEFAULT
