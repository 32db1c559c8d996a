"""The ranks of a rehearsal in processes of their own, as many at a time as there are cores for, within a deadline.

Invariants: no process outlives the call; this module imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.planning.rehearsal.library_errors import UNKNOWN
from hpcrl.planning.rehearsal.reports import EngineReport, RankReport
from hpcrl.utils.untrusted_files import read_json, read_regular
from hpcrl.utils.waiting import Deadline

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
#: where packages keep what they have found out: nothing is written outside the rehearsal's own directory
CACHES = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "HF_MODULES_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
A_RANK = 600.0  #: seconds that a rank may take, in the mean
AN_ENGINE = 600.0  #: seconds that vLLM may take
LARGEST = 1 << 28  #: bytes of a report
LAST_WORDS = 300  #: characters of what a process that died has said


@contextlib.contextmanager
def asking_engine(options: Options) -> Iterator[Callable[[], EngineReport]]:
    """Ask vLLM's config classes about the first engine's settings; the returned function waits for the answer.

    It raises HpcrlError if the answer does not come in time.
    """
    with tempfile.TemporaryDirectory(prefix="hpcrl-rehearsal-") as name:
        directory = Path(name)
        (directory / "options.json").write_text(options.model_dump_json())
        process = _start("engine_process", directory)

        def answer() -> EngineReport:
            said = _end_rank(process, Deadline(AN_ENGINE))
            if not (directory / "engine.json").exists():
                return EngineReport(error=f"vLLM's process died: {' '.join(said.split())[-LAST_WORDS:]}")
            return read_json(directory / "engine.json", EngineReport)

        try:
            yield answer
        finally:
            _kill(process)


def run_ranks(options: Options, ranks: Sequence[int], at_once: int) -> list[RankReport]:
    """What each of `ranks` took, in that order.

    Raises:
        HpcrlError: if a process dies or does not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="hpcrl-rehearsal-") as name:
        directory = Path(name)
        (directory / "options.json").write_text(options.model_dump_json())
        process = _start("process", directory, [at_once, *ranks])
        try:
            said = _end_rank(process, Deadline(A_RANK * math.ceil(len(ranks) / at_once)))
        finally:
            _kill(process)
        return [_read(directory, rank, said) for rank in ranks]


def _kill(process: Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and the forks of it that are at work
    process.wait()


def _start(module: str, directory: Path, numbers: Sequence[int] = ()) -> Popen[bytes]:
    command = [sys.executable, "-m", f"hpcrl.planning.rehearsal.{module}", str(directory), *map(str, numbers)]
    caches = dict.fromkeys(CACHES, str(directory / "cache"))
    environment = os.environ | ENVIRONMENT | caches
    return Popen(command, env=environment, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True)


def _end_rank(process: Popen[bytes], deadline: Deadline) -> str:
    """What it has said on stderr."""
    try:
        _, said = process.communicate(timeout=deadline.left)
    except TimeoutExpired:
        raise HpcrlError("the rehearsal took too long", "rehearse fewer ranks: --ranks 0") from None
    return said.decode(errors="replace")


def _read(directory: Path, rank: int, said: str) -> RankReport:
    path, own = directory / f"rank-{rank}.json", directory / f"rank-{rank}.txt"
    if not path.exists():
        if own.exists():
            said = read_regular(own).decode(errors="replace") or said
        words = " ".join(said.split())[-LAST_WORDS:]
        died = f"its process died: {words}" if words else "its process died"
        return RankReport(rank, error=died, hint=UNKNOWN, unshown=True)
    return read_json(path, RankReport, most=LARGEST)
