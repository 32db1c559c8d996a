"""What is tried: a stage of a recipe, as the options of one engine.

Invariants: nothing is started; what a recipe's prepare commands make is made once, and in a directory of the
user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, load_recipe, resolve_stages
from hpcrl.errors import DeadlineError, HpcrlError, UsageError
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.started_runs import links_folder
from hpcrl.utils.locks import try_lock
from hpcrl.utils.untrusted_files import open_append, read_regular, touch
from hpcrl.utils.waiting import Deadline, poll

PREPARING = 3600.0  #: seconds for a prepare command


@dataclass(frozen=True)
class TriedModel:
    """What is tried.

    Attributes:
        options: of one engine; its model is there.
        description: what it is, for the user.
        folder: of the user's, kept from one time to the next.
    """

    options: Options
    description: str
    folder: Path


def home_of(what: Path, more: str = "") -> Path:
    """The directory that is kept for `what`, made if need be."""
    name = hashlib.sha256(f"{what.resolve()}\0{more}".encode()).hexdigest()[:16]
    folder = links_folder().parent / "tried" / f"{what.stem}-{name}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


# ---- a recipe


def of_recipe(path: Path, overrides: Mapping[str, Any], stage: str | None = None) -> TriedModel:
    """The stage that is named, or the last that samples; its prepare commands have been run.

    Raises:
        UsageError: if none samples, or its model is made by another stage; HpcrlError: if a prepare command fails.
    """
    recipe = load_recipe(path)
    text = recipe.text if recipe.text is not None else read_regular(recipe.path).decode()
    folder = home_of(recipe.path, f"{text}\0{sorted(overrides.items())}" if recipe.prepare else "")
    places = {"run": str(folder), "prepared": str(folder / "prepared")}
    name, options = sampling_stage(recipe, overrides, places, stage)
    with alone(folder, PREPARING):
        prepare(recipe, folder, overrides)
    return TriedModel(one_engine(options), f"{recipe.path.name}{f', stage {name}' if name else ''}", folder)


def sampling_stage(
    recipe: Recipe, overrides: Mapping[str, Any], places: dict[str, str], wanted: str | None
) -> tuple[str, Options]:
    """The stage `wanted` of a recipe, or the last one with engines: its name and its options.

    Args:
        places: what {run} and {prepared} stand for.

    Raises:
        UsageError: if there is no such stage, or none has engines.
    """
    stages = zip(recipe.stages, resolve_stages(recipe, overrides, places), strict=True)
    sampling = {stage.name: options for stage, options in stages if options.needs_engines}
    name = recipe.path.name
    if wanted is not None and wanted not in sampling:
        raise UsageError(
            f"--stage {wanted}: no stage of {name} of that name samples", f"it has {', '.join(sampling) or 'none'}"
        )
    if not sampling:
        raise UsageError(f"{name} has no stage that samples", "hpcrl run learns its labels, without engines")
    name = wanted if wanted is not None else list(sampling)[-1]
    return name, sampling[name]


def prepare(recipe: Recipe, folder: Path, overrides: Mapping[str, Any]) -> None:
    """Run the recipe's prepare commands, unless they have been run.

    Raises:
        HpcrlError: names the command and its log.
    """
    done = folder / "prepared" / ".done"
    if not recipe.prepare:
        return
    if done.exists():
        print(f"hpcrl: as prepared before in {folder}; remove it to prepare again", file=sys.stderr, flush=True)
        return
    print("hpcrl: preparing", file=sys.stderr, flush=True)
    shutil.rmtree(folder / "prepared", ignore_errors=True)
    (folder / "prepared").mkdir()
    log = folder / "prepare.log"
    for command in recipe.prepare_commands(folder, dict(overrides), sys.executable):
        with open_append(log) as file:
            try:
                status = subprocess.call(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=PREPARING)
            except subprocess.TimeoutExpired:
                raise HpcrlError(
                    f"prepare command {' '.join(command)} took more than {PREPARING:.0f} s", f"see {log}"
                ) from None
        if status:
            raise HpcrlError(f"prepare command {' '.join(command)} {how_it_ended(status)}", f"see {log}")
    touch(done)


def one_engine(options: Options) -> Options:
    """The options as those of a single engine that belongs to no run."""
    return options.model_copy(
        update={
            "rollout_num_gpus": options.rollout_num_gpus_per_engine,
            "colocate": False,
            "rollout_external_engine_addrs": [],
            "rollout_external_engine_keys": None,
        }
    )


# ---- one try at a time
#
# Two commands may want the same thing to be made and kept: one makes it, and the other waits.


POLL = 0.2


@contextlib.contextmanager
def alone(folder: Path, seconds: float) -> Iterator[None]:
    """In a directory.

    Raises:
        DeadlineError: if another has been at it for longer than it may take.
    """
    with open_append(folder / "lock") as file:
        if not poll(lambda: try_lock(file, lambda _: None), Deadline(seconds), POLL):
            raise DeadlineError(f"another process has used {folder} for {seconds:.0f} s", "try again")
        yield
