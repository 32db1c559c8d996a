"""The Python API: `import hpcrl`, then `hpcrl.run`, `hpcrl.submit`, `hpcrl.open`, `hpcrl.init`.

    run = hpcrl.run("mine/recipe.toml", num_rollout=20, grpo={"lr": 2e-5})
    run.status.phase, run.metrics(), run.samples(), run.checkpoints

Invariants: a run is the same processes as with the command, in a session of their own, so that it holds nothing of the
caller's and outlives an interpreter that ends; what a command would refuse is refused by the same check, as the same
exception (`hpcrl.errors`).  These names and signatures are kept: docs/customise.md lists them.
"""

from __future__ import annotations

import contextlib
import io
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec

from hpcrl.cli.find_run import Ending, find_run, look_at_run
from hpcrl.cli.init import write_folder
from hpcrl.config.flags import flag_words, parse_flags
from hpcrl.config.recipe import Recipe, load_recipe
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.job import directory_of, run_dir_of
from hpcrl.report.metrics import read_metrics
from hpcrl.report.run_files import Run, StageFiles, entries, load_json
from hpcrl.report.run_status import Status
from hpcrl.run.started_runs import is_run
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.untrusted_files import as_given, open_append, open_regular
from hpcrl.utils.waiting import Deadline

OUTPUT = "launcher.log"  #: in RUN/logs: what a run says that this interpreter does not wait for
LOOK = 0.1  #: seconds between looks at a process that is followed
WATCH = 1.0  #: seconds between looks at a run that is waited for
START = 120.0  #: seconds within which a run that is begun has a run directory
RECIPE = "recipe.toml"


# ---- beginning


def init(folder: str | Path, task: str = "math", model: str | Path | None = None) -> Path:
    """Write a folder to start from, as `hpcrl init` does; returns it.

    Args:
        task: math, tools, agents, sft or dpo.
        model: a Hugging Face directory; None: a tiny model, made when the run begins.

    Raises:
        UsageError: if the folder is there, or there is no such task or model.
    """
    return write_folder(Path(folder), task, None if model is None else str(model))


def run(recipe: str | Path, *, wait: bool = True, **options: Any) -> OpenRun:
    """Train on this machine, as `hpcrl run` does; progress goes to stderr.

    Args:
        recipe: a TOML file, or a directory with a recipe.toml.
        wait: until it has ended. Ctrl-C then stops it as it does the command: it saves a checkpoint and ends.
        options: those of the run by name, which go before the recipe's; of one stage as a dict under its name.

    Returns:
        The run. One that was stopped has the phase `stopped`.

    Raises:
        UsageError: for what the command would refuse.
        HpcrlError: if it fails.
    """
    file = _recipe_file(recipe)
    words, root = _read(file, options)
    literal = str(root).replace("{", "{{").replace("}", "}}")  # braces would be placeholders
    command = [sys.executable, "-m", "hpcrl", "run", str(file), *words, f"--run-dir={literal}"]
    if not wait:
        root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".hpcrl-", dir=None if wait else root.parent) as place:
        output = Path(place) / "output"
        with open_append(output) as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        with open_regular(output) as reading:
            try:
                said = _followed(process, reading, None if wait else root)
            except BaseException:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)  # it saves and ends, as it would at a terminal
                raise
        status = process.poll()
        if status is None:
            output.rename(root / "logs" / OUTPUT)  # to which the run writes on
    if status not in (None, 0, 143):
        errors = [line.partition("error: ")[2] for line in said if line.startswith("hpcrl: error: ")]
        ended = f"the run ended with status {status}: {'; '.join(said[-3:])}"
        raise (UsageError if status == 2 else HpcrlError)(errors[-1] if errors else ended)
    return OpenRun(root)


def _followed(process: subprocess.Popen[bytes], reading: IO[bytes], until: Path | None) -> list[str]:
    """Show what a process says until it has ended, or the run in `until` has begun; its last lines."""
    said: list[str] = []
    deadline, done, rest = Deadline(START), False, b""
    while not done:
        try:
            done = process.poll() is not None or (until is not None and is_run(until))
            *lines, rest = (rest + reading.read()).split(b"\n")
            for line in [*lines, rest] if done and rest else lines:
                text = strip_control(line.decode(errors="replace"))
                said = [*said[-20:], text]
                if until is None:
                    print(text, file=sys.stderr, flush=True)
            if until is not None and deadline.over:
                raise HpcrlError(f"no {until} after {START:.0f} s", "; ".join(said[-3:]))
            Deadline(LOOK).sleep(LOOK)
        except KeyboardInterrupt:
            if process.poll() is not None:
                raise
            process.send_signal(signal.SIGINT)
    return said


def submit(
    recipe: str | Path,
    site: str | None = None,
    *,
    time: str | None = None,
    layout: str | None = None,
    set: Mapping[str, Any] | None = None,
    chain: int = 1,
    **options: Any,
) -> Any:
    """Submit a run as one Slurm job, as `hpcrl submit` does.

    Args:
        recipe: a TOML file, or a directory with a recipe.toml.
        site, time, layout, chain: as the flags of the command, with $HPCRL_SITE as the default site.
        set: keys of the profile, such as {"trainer.partition": "gpu"}.
        options: as of `run`.

    Returns:
        submitit's Job: job_id, state, stdout(), cancel(), result() (the run's
        summary). Of a chain the first one.

    Raises:
        UsageError: for what the command would refuse, and then nothing is left behind.
    """
    from hpcrl.launch.site_file import load_site
    from hpcrl.launch.slurm.submission import submit_new

    changes = dict(set or {}) | {
        key: value for key, value in {"time": time, "layout": layout}.items() if value is not None
    }
    if chain < 1:
        raise UsageError(f"chain={chain}: a chain has one job at least", "leave it out")
    profile = load_site(site, changes)
    loaded = load_recipe(_recipe_file(recipe))
    given = _by_stage(loaded, options)
    flags = parse_flags(flag_words(given))[0] | ({"run_dir": given["run_dir"]} if "run_dir" in given else {})
    loaded = replace(loaded, name=flags.get("name", loaded.name))
    return submit_new(loaded, profile.options(loaded, flags), profile, chain)[1][0]


def open(run: str | Path) -> OpenRun:
    """A run that has begun: by its directory, its name, or its job's number.

    Raises:
        UsageError: if there is none, or more than one.
    """
    return OpenRun(find_run(str(run)).root)


def _recipe_file(recipe: str | Path) -> Path:
    path = Path(recipe)
    return path / RECIPE if path.is_dir() else path


def _by_stage(recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as flags name them, those in a dict under a stage's name as STAGE.option; None is not given."""
    stages = {stage.name for stage in recipe.stages}
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in stages and isinstance(value, Mapping):
            found |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            found[name] = value
    return {name: _plain(value) for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    """A value as TOML has it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) not in (bool, int, float, str) and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()  # a number of numpy's, or torch's
    return value


def _read(file: Path, options: Mapping[str, Any]) -> tuple[list[str], Path]:
    """The options as words of a command line, each of which has been understood, and where the run will be."""
    recipe = load_recipe(file)
    given = _by_stage(recipe, options)
    words = flag_words(given)
    flags = parse_flags(words)[0] | ({"run_dir": str(given["run_dir"])} if "run_dir" in given else {})
    recipe = replace(recipe, name=flags.get("name", recipe.name))
    root = directory_of(recipe, flags)
    found, number = root, 1
    while found.exists() and "{time}" in run_dir_of(recipe, flags):
        number += 1
        found = root.with_name(f"{root.name}-{number}")
    return words, found


# ---- looking


class OpenRun:
    """A run directory: what is in it is read when it is asked for.

    Attributes:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = as_given(root)

    def __repr__(self) -> str:
        return f"hpcrl.open({str(self.root)!r})"

    @property
    def status(self) -> Status:
        """What it is doing, as `hpcrl status` shows it: phase, step, total, reward, accuracy, message, ..."""
        return look_at_run(Run(self.root))

    @property
    def options(self) -> dict[str, Any]:
        """The resolved options of the last stage that has begun."""
        stages = Run(self.root).stages
        return load_json(stages[-1].root / "options.json", dict[str, Any], []) or {} if stages else {}

    def metrics(self, stage: str | None = None, *, frame: bool | None = None) -> Any:
        """What was logged: a record for each step and each evaluation, in order.

        Args:
            stage: of a recipe with stages, one of them; default: all, and `stage` says which.
            frame: a pandas DataFrame, or a list of dicts; default: a DataFrame where pandas is installed.
        """
        rows = []
        for each in self._stages(stage):
            named = {"stage": each.name} if each.name else {}
            rows += [named | row for row in read_metrics(each.root / "metrics.jsonl")]
        if frame is False:
            return rows
        try:
            import pandas
        except ImportError:
            if frame:
                raise UsageError("pandas is not installed", "pip install pandas, or ask with frame=False") from None
            return rows
        return pandas.DataFrame.from_records(rows)

    def samples(
        self, step: int | None = None, *, evaluation: str | None = None, stage: str | None = None
    ) -> list[dict[str, Any]]:
        """Prompts, responses, rewards and what the trainer made of them, of one step or evaluation.

        Args:
            step: counted from 0; of an evaluation how many steps were done; default: the last.
            evaluation: the name of a held-out set; default: what was trained on.
            stage: default: the last one that has samples.

        Raises:
            UsageError: if there are none of that step.
        """
        from hpcrl.report.sample_records import read_looks, steps_of

        having = [each for each in self._stages(stage) if steps_of(each.root, evaluation)]
        if not having:
            return []
        steps = steps_of(having[-1].root, evaluation)
        wanted = steps[-1] if step is None else step
        if wanted not in steps:
            raise UsageError(f"{self.root} has no samples of {wanted}", f"there are {', '.join(map(str, steps))}")
        looks = read_looks(having[-1].root, wanted, evaluation)
        return [msgspec.to_builtins(look.record) | {"trained": msgspec.to_builtins(look.trained)} for look in looks]

    @property
    def checkpoints(self) -> list[Path]:
        """The whole checkpoints, oldest first, each what `--load` or `hpcrl convert to-hf` takes."""
        found = []
        for stage in Run(self.root).stages:
            given = (load_json(stage.root / "options.json", dict[str, Any], []) or {}).get("save")
            folder = Path(given) if isinstance(given, str) else stage.root / "checkpoints"
            names = [name for name in entries(folder) if name.startswith("iter_")]
            found += [folder / name for name in names if (folder / name / ".metadata").is_file()]
        return found

    def stop(self) -> None:
        """Ask it to finish its step, save a checkpoint and end, as `hpcrl stop` does; returns at once.

        Raises:
            HpcrlError: if it is not at work.
        """
        from hpcrl.cli.stop import stop

        with contextlib.redirect_stdout(io.StringIO()):
            stop([str(self.root)])

    def wait(self, timeout: float | None = None) -> Status:
        """Wait until it has ended; its status then.

        Raises:
            TimeoutError: if it has not within `timeout` seconds.
        """
        deadline = Deadline(math.inf if timeout is None else timeout)
        ending = Ending()
        while True:
            found = ending.look(Run(self.root))
            if ending.sure(found):
                return found
            if deadline.over:
                raise TimeoutError(f"{self.root} is {found.phase} after {deadline.seconds:.0f} s")
            deadline.sleep(WATCH)

    def _stages(self, name: str | None) -> Iterator[StageFiles]:
        """The stages that have begun, or the one of that name.

        Raises:
            UsageError: if there is no such.
        """
        run = Run(self.root)
        chosen = run.stages if name is None else [each for each in run.stages if each.name == name]
        if name is not None and not chosen:
            there = ", ".join(each.name for each in run.stages) or "none"
            raise UsageError(f"{self.root} has no stage {name}", f"there are {there}")
        yield from chosen
