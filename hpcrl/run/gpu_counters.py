"""The error counters of a host's GPUs and NVLinks, at the start and at the end of its part of a run.

    STAGE/attempts/N/gpu-errors/HOST.json      GpuErrors; its folder is there where a host has GPUs

Invariant: a driver that does not answer within SECONDS costs that time, and fails no run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.run.process import run_command
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.utils.untrusted_files import Damaged, read_json

FOLDER = "gpu-errors"
SECONDS = 20.0
LEAVING = 3.0  #: the limit at the end, where a host may have to end within seconds
QUERY = ["nvidia-smi", "--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader,nounits"]
#: lines of `nvidia-smi nvlink -e` that mean a bad link; others, as FEC's, count in health too
LINK = re.compile(r"(Link \d+): ((?:Replay|Recovery|CRC)[\w ]* Errors): (\d+)")


class GpuErrors(msgspec.Struct):
    """What a host's counters said, by the name of each."""

    start: dict[str, int]
    end: dict[str, int] = {}


def read_counters(seconds: float = SECONDS) -> dict[str, int]:
    """Every counter of an error that the driver shows, since it was loaded -> its count."""
    found = {}
    for line in run_command(QUERY, seconds).out.splitlines():
        index, _, errors = (word.strip() for word in line.partition(","))
        if errors.isdecimal():
            found[f"GPU {index}: uncorrected ECC errors"] = int(errors)
    gpu = ""
    for line in run_command(["nvidia-smi", "nvlink", "-e"], seconds).out.splitlines():
        gpu = line.partition(":")[0] if line.startswith("GPU ") else gpu
        if link := LINK.search(line):
            found[f"{gpu}: {link[2]} of NVLink {link[1]}"] = int(link[3])
    return found


@contextlib.contextmanager
def counting_errors(rundir: RunDir, host: str) -> Iterator[None]:
    """Keep the counters of this host at the beginning and at the end of this context, where it has GPUs."""
    from hpcrl.run.gpu_environment import gpus_are_here  # with the options, which `grown_counters` does not need

    if not gpus_are_here():
        yield
        return
    kept, file = GpuErrors(read_counters()), rundir.here / FOLDER / f"{host}.json"
    try:
        yield
    finally:
        kept.end = read_counters(LEAVING)
        with contextlib.suppress(HpcrlError, OSError):
            file.parent.mkdir(exist_ok=True, mode=0o700)
            write_atomic(file, msgspec.json.encode(kept))


def grown_counters(stage: Path) -> list[str]:
    """A line for every counter of a stage's attempts that grew while the run used the GPU."""
    lines = []
    for file in sorted(stage.glob(f"attempts/*/{FOLDER}/*.json")):
        with contextlib.suppress(OSError, Damaged):
            found = read_json(file, GpuErrors)
            for name, end in found.end.items():
                if (more := end - found.start.get(name, end)) > 0:  # a driver may not have answered at the start
                    lines.append(f"host {file.stem}, {name} rose by {more}: exclude it, and ask the site to look at it")
    return lines
