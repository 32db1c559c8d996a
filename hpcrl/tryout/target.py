"""What is tried: a recipe, a run, or a Hugging Face directory, as the options of one engine.

Invariants: nothing is started; what a recipe's prepare commands make, and a run's checkpoint in Hugging Face's form, is
made once, and in a directory of the user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.commands.convert import convert
from hpcrl.commands.find_run import find_run
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, Stage, load_recipe, resolve_stages
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.model_files.config_json import read_config
from hpcrl.report.run_files import Run
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.owners import refuse_foreign
from hpcrl.run.role import read_options
from hpcrl.run.rundir import TRACKER, RunDir
from hpcrl.run.started_runs import links_folder
from hpcrl.tryout.alone import alone
from hpcrl.untrusted_files import as_given, open_append, read_regular, touch

PREPARING = 3600.0  #: seconds for a prepare command
MODEL = 4096  #: tokens of a conversation, if the model has room for them and nothing says otherwise
#: what a recipe needs to be one, of which nothing is read
NO_RUN = {
    "num_rollout": 1,
    "debug_rollout_only": True,
    "prompt_data": ["none.jsonl"],
    "rm_type": ["random"],
    "n_samples_per_prompt": 2,
}


@dataclass(frozen=True)
class TriedModel:
    """What is tried.

    Attributes:
        options: of one engine; its model is there.
        said: what it is, for the user.
        folder: of the user's, kept from one time to the next.
    """

    options: Options
    said: str
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
    stages = dict(zip([one.name for one in recipe.stages], resolve_stages(recipe, overrides, places), strict=True))
    name, options = _choose(recipe.path.name, stages, stage)
    with alone(folder, PREPARING):
        prepare(recipe, folder, overrides)
    return TriedModel(one_engine(options), f"{recipe.path.name}{f', stage {name}' if name else ''}", folder)


def _choose(recipe: str, stages: Mapping[str, Options], wanted: str | None) -> tuple[str, Options]:
    sampling = {name: options for name, options in stages.items() if options.needs_engines}
    if wanted is not None and wanted not in sampling:
        raise UsageError(
            f"--stage {wanted}: no stage of {recipe} of that name samples", f"it has {', '.join(sampling) or 'none'}"
        )
    if not sampling:
        raise UsageError(f"nothing is sampled in {recipe}", "hpcrl run learns its labels; there is nothing to try")
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


# ---- a model


def of_model(word: str, overrides: Mapping[str, Any]) -> TriedModel:
    """A Hugging Face directory, or the last checkpoint of a run.

    Raises:
        UsageError: if it is neither.
    """
    path = as_given(word)
    if path.is_dir() and (path / "config.json").is_file():
        return _of_directory(path, {}, overrides, f"{path}", home_of(path))
    return _of_run(find_run(word), overrides)


def _of_directory(
    path: Path, values: Mapping[str, Any], overrides: Mapping[str, Any], said: str, folder: Path
) -> TriedModel:
    room = read_config(str(path)).get("max_position_embeddings", MODEL)
    usual: dict[str, Any] = {"rollout_max_context_len": min(int(room), MODEL)} | NO_RUN
    left = usual | dict(values) | dict(overrides) | {"hf_checkpoint": str(path)}
    left["rollout_num_gpus"] = left.get("rollout_num_gpus_per_engine", 1)
    recipe = Recipe("chat", path, left, (), (Stage("", {}),), "")
    (options,) = resolve_stages(recipe, {}, {"run": str(folder), "prepared": str(folder / "prepared")})
    return TriedModel(one_engine(options), said, folder)


def _of_run(run: Run, overrides: Mapping[str, Any]) -> TriedModel:
    """With the engine settings of the run's last stage that samples."""
    refuse_foreign(run.root)
    stages = [stage for stage in run.stages if (stage.root / "options.json").is_file()]
    if not stages:
        raise UsageError(f"{run.root} has not begun", "wait for its first checkpoint")
    stage = stages[-1]
    options = read_options(RunDir(stage.root, 0))
    folder = home_of(run.root)
    newest = _newest(Path(options.save or stage.root / "checkpoints"))
    if newest is None:
        raise UsageError(f"{stage.root} holds no checkpoint yet", "wait for its first, or name a model's directory")
    with alone(folder, PREPARING):
        model = _converted(newest, folder, str(options.hf_checkpoint))
    names = ("vllm", "bf16", "rollout_num_gpus_per_engine", "rollout_max_context_len", "seed")
    kept = {name: value for name in names if (value := getattr(options, name)) is not None}
    return _of_directory(model, kept, overrides, f"{run.root.name}, {newest.name}", folder)


def _newest(checkpoints: Path) -> Path | None:
    """The one that the tracker names, or else the last."""
    with contextlib.suppress(OSError, ValueError):
        named = checkpoints / f"iter_{int(read_regular(checkpoints / TRACKER)):07d}"
        if (named / ".metadata").is_file():
            return named
    found = sorted(checkpoints.glob("iter_[0-9]*"), key=lambda path: path.name)
    return next((path for path in reversed(found) if (path / ".metadata").is_file()), None)


def _converted(checkpoint: Path, folder: Path, origin: str) -> Path:
    """A checkpoint as a Hugging Face directory, named after what it was made of; those of others are removed.

    Raises:
        HpcrlError: if it cannot be converted.
    """
    seen = (checkpoint / ".metadata").stat()
    made_of = f"{checkpoint.resolve()} {seen.st_size} {seen.st_mtime_ns}"
    model = folder / f"{checkpoint.name}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if (model / "config.json").is_file():
        return model
    print(f"hpcrl: {checkpoint} to {model}", file=sys.stderr, flush=True)
    for old in folder.glob("iter_*"):
        shutil.rmtree(old, ignore_errors=True)
    words = ["to-hf", "--input-dir", str(checkpoint), "--output-dir", str(model), "--origin-hf-dir", origin]
    if status := convert(words):
        raise HpcrlError(f"{checkpoint} could not be converted (exit status {status})", "hpcrl convert to-hf says why")
    return model


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
