"""A process that rehearses ranks, each in a fork of it, so many at a time: `python -m hpcrl.planning.rehearsal.process
DIRECTORY AT-ONCE RANK ...`, with the options in DIRECTORY/options.json; what each found is in DIRECTORY/rank-N.json,
what it says on stderr in DIRECTORY/rank-N.txt.

Invariants: a rank that raises, or dies, is a report that says so; torch and Megatron are imported once.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

import msgspec

from hpcrl.config.options import Options
from hpcrl.planning.rehearsal.library_errors import refused
from hpcrl.run.gpu_environment import Where, missing, wanted
from hpcrl.utils.untrusted_files import read_regular

MODULES = ("megatron.hf_weights", "megatron.settings", "megatron.model", "checkpoint.save_load", "step.train_batch")


def main(argv: list[str]) -> int:
    """Rehearse the ranks of `argv` after its directory."""
    directory = Path(argv[0])
    options = Options.model_validate_json(read_regular(directory / "options.json"))
    os.environ.update(missing(wanted("trainer", Where(options)), os.environ))
    prepare()
    gc.collect()
    gc.freeze()  # what is imported is not looked through again, and stays shared between the forks
    running = 0
    for rank in map(int, argv[2:]):
        if running == int(argv[1]):
            os.wait()
            running -= 1
        if os.fork() == 0:
            _rank(options, rank, directory)
        running += 1
    for _ in range(running):
        os.wait()
    return 0


def prepare() -> None:
    """Be a process whose Megatron finds a GPU and the packages that go with it; before anything imports it."""
    from hpcrl.planning.fake_libraries import deep_ep, transformer_engine

    transformer_engine.install()
    deep_ep.install()
    from hpcrl.planning.rehearsal import device

    device.install()
    for name in MODULES:
        importlib.import_module(f"hpcrl.trainer.{name}")


def _rank(options: Options, rank: int, directory: Path) -> None:
    """Write the report of a rank and end."""
    from hpcrl.planning.rehearsal.one_rank import rehearse

    said = os.open(directory / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(said, 2)
    try:
        report = rehearse(options, rank)
    except BaseException as error:  # noqa: BLE001  (told to the user)
        report = refused(rank, error, options)
    (directory / f"rank-{rank}.json").write_bytes(msgspec.json.encode(report))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
