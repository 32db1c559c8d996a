"""Where each adapter of a run keeps what is its own.

    RUN/adapters/NAME/                     as a run directory: options.json (of this adapter), checkpoints/, samples/,
                                           metrics.jsonl, tensorboard/, bank/, ledger/
    RUN/attempts/N/adapters/NAME/peers/    where the trainer finds its rollout queue

Invariants: an adapter has no life of its own: keys, plan, logs, requests to stop and errors are the run's; what reads a
run directory of one policy reads that of an adapter as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.config.rules.several_adapters import adapter_options
from hpcrl.run.role import RoleContext
from hpcrl.run.rundir import ADAPTERS, AttemptFailure, RunDir, write_atomic


class AdapterDir(RunDir):
    """The directory of one adapter in one attempt of a run.

    Attributes:
        run: the directory of the run.
        name: the adapter's.
    """

    def __init__(self, run: RunDir, name: str) -> None:
        super().__init__(run.root / ADAPTERS / name, run.attempt)
        self.run = run
        self.name = name

    def make(self, options: Options) -> None:
        """Make the directories of this attempt, and say which options the adapter has.

        Raises:
            OSError, HpcrlError: if that cannot be written.
        """
        for folder in (self.root, self.checkpoints, self.samples, self.here / "peers"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(self.options_file, options.model_dump_json(indent=2).encode())

    @property
    def keys(self) -> Path:
        return self.run.keys

    @property
    def here(self) -> Path:
        """Of this attempt, what is the adapter's own."""
        return self.run.here / ADAPTERS / self.name

    @property
    def plan_file(self) -> Path:
        return self.run.plan_file

    @property
    def logs(self) -> Path:
        return self.run.logs

    def fail(self, role: str, index: int, message: str, kind: str = "") -> None:
        self.run.fail(role, index, message, kind)

    def correct(self, message: str) -> None:
        self.run.correct(message)

    def failure(self) -> AttemptFailure | None:
        return self.run.failure()

    def signs(self) -> frozenset[str]:
        return self.run.signs()

    def request_stop(self) -> None:
        self.run.request_stop()

    def request_end(self) -> None:
        self.run.request_end()

    def superseded(self) -> bool:
        return self.run.superseded()


def places_of(context: RoleContext, make: bool) -> Iterator[tuple[str, RoleContext]]:
    """(name, place) of every adapter of a run that has several, in the order of their slots; of a run of one policy
    ("", the run's).

    Args:
        make: the directories.
    """
    for name, options in adapter_options(context.options).items():
        rundir = AdapterDir(context.rundir, name)
        if make:
            rundir.make(options)
        yield name, replace(context, rundir=rundir, options=options)
    if not context.options.adapter:
        yield "", context
