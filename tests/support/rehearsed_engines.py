"""Engines put through vLLM's choices on the machine of hpcrl/planning/rehearsal/h100.py, with a fix of hpcrl's taken
away or not: one process imports vLLM, and a fork of it rehearses each.

    python -m tests.support.rehearsed_engines DIRECTORY    # DIRECTORY/NAME/options.json for every engine NAME
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.planning.rehearsal.reports import EngineReport
from hpcrl.utils.untrusted_files import read_json

LIMIT = 600.0
GPUS = 32
TOOLS = "tools"  #: the folder next to engines: bin/ is the interpreter's, nvidia/cu13/ what pip has installed


def _without_tools() -> None:
    from hpcrl.engine import server_settings

    server_settings.build_tools = lambda base, nvcc=False: {}


def _without_batch() -> None:
    from hpcrl.engine import server_settings

    server_settings.batched_tokens = lambda options: None  # vLLM's own


def _without_drawn() -> None:
    from hpcrl.engine.loading import empty_start

    empty_start.DRAWN = ("nothing",)


#: by what the name of an engine ends with: the fix that it does not have
TAKEN: Mapping[str, Callable[[], None]] = {
    "batch": _without_batch,
    "tools": _without_tools,
    "drawn": _without_drawn,
}


def rehearse_engines(directory: Path, engines: Mapping[str, Options]) -> dict[str, EngineReport]:
    """What vLLM says of each; PATH has neither nvcc nor ninja, and the interpreter's folder has both."""
    tools = directory / TOOLS
    for place, said in (("bin/ninja", "1.11"), ("bin/python", ""), ("nvidia/cu13/bin/nvcc", "release 13.0, V13.0.1")):
        (tools / place).parent.mkdir(parents=True, exist_ok=True)
        (tools / place).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tools / place).chmod(0o755)
    for name, options in engines.items():
        (directory / name).mkdir()
        (directory / name / "options.json").write_text(options.model_dump_json())
    left = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
    path = [str(Path.cwd()), str(tools)]
    more = {
        "PATH": str(tools / "empty"),
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_CACHE_ROOT": str(directory / "cache"),
    }
    command = [sys.executable, "-m", "tests.support.rehearsed_engines", str(directory)]
    subprocess.run(command, env=left | more, check=True, timeout=LIMIT)
    return {name: read_json(directory / name / "engine.json", EngineReport) for name in engines}


def _main(directory: Path) -> None:
    from hpcrl.planning.rehearsal import engine_process, h100

    os.environ.update(engine_process.ENVIRONMENT)
    h100.install(GPUS)
    import vllm.engine.arg_utils  # noqa: F401
    from vllm.utils import flashinfer

    from hpcrl.run import gpu_environment

    for place in sorted(directory.glob("*/options.json")):
        child = os.fork()
        if child == 0:
            sys.executable = str(directory / TOOLS / "bin" / "python")
            TAKEN.get(place.parent.name.rpartition("-")[2], lambda: None)()
            gpu_environment.CUDA = flashinfer._DEFAULT_CUDA_HOME = str(directory)  # whatever this machine has there
            flashinfer.has_flashinfer.cache_clear()  # whose answer is the environment's
            os._exit(engine_process.main([str(place.parent)]))
        os.waitpid(child, 0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
