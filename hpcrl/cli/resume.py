"""`hpcrl resume`: resume a run the way it was started, for longer (--num-rollout), from an earlier checkpoint
(--ckpt-step) or in another layout.

Invariants: a run keeps the options that it began with, except those of LAYOUT, which change no sample.  The error for
another option names the command that starts a run with it.  Nothing is removed: a learning-rate schedule that was made
for the old length is not stretched, but refused; the tracker names the earlier checkpoint, and what the run saves from
there on replaces the later ones.
"""

from __future__ import annotations

import contextlib
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.cli.find_run import find_run
from hpcrl.cli.submit import say_submitted
from hpcrl.config.flags import flag_words, parse_flags
from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options
from hpcrl.config.stage_flags import TABLES, flags_of, leaves, replace_flags, split_name, stage_flag
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError
from hpcrl.launch.job import RunJob, finished, hold_run, reopen_job
from hpcrl.launch.preflight import refuse_settings
from hpcrl.launch.slurm.submission import submit_again
from hpcrl.plan import local_hosts
from hpcrl.run.job_files import read_job
from hpcrl.run.role import read_options
from hpcrl.run.rundir import CHOSEN, TRACKER, RunDir, write_atomic
from hpcrl.run.started_runs import RECIPE, read_recipe_file
from hpcrl.run.summary import read_summary, write_summary
from hpcrl.utils.untrusted_files import read_regular

#: the options that a resume may change, by name, as in a recipe: they change no sample
LAYOUT = frozenset({
    "actor_num_nodes", "actor_num_gpus_per_node", "balance_data", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "log_probs_chunk_size", "max_tokens_per_gpu", "micro_batch_size",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "offload_rollout", "offload_train",
    "pipeline_model_parallel_size", "recompute_granularity", "recompute_method", "recompute_modules",
    "recompute_num_layers", "rollout_num_gpus", "rollout_num_gpus_per_engine", "save_interval", "sequence_parallel",
    "tensor_model_parallel_size", "vllm_gpu_memory_utilization", "vllm_kv_cache_memory_bytes", "vllm_max_num_seqs",
})  # fmt: skip


def _bent(options: Options) -> str:
    """The flag of what was laid out for the run's length, or ""."""
    if options.lr_decay_iters is not None:
        return ""
    if options.lr_decay_style != "constant":
        return f"--lr-decay-style {options.lr_decay_style}"
    if options.lr_warmup_fraction is not None:
        return "--lr-warmup-fraction"
    return "--weight-decay-incr-style" if options.weight_decay_incr_style != "constant" else ""


def extend_run(job: RunJob, num_rollout: int, ckpt_step: int | None = None) -> None:
    """Let the last stage continue to `num_rollout` rollouts.

    Args:
        ckpt_step: the checkpoint that it is to go back to first.

    Raises:
        UsageError: if it has not begun, has done more, or must not.
    """
    *before, last = job.recipe.stages
    directory = job.directory(last)
    if not all(finished(job.directory(stage)) for stage in before) or not (directory / "options.json").is_file():
        what = "reached its last stage" if before else "begun"
        raise UsageError(f"{job.root} has not {what} yet", "leave --num-rollout out")
    with hold_run(job.root):
        rundir = RunDir.latest(directory)
        options = read_options(rundir)
        summary = read_summary(directory)
        done = ckpt_step or (summary.rollout_id if summary else 0)
        if num_rollout <= done:
            raise UsageError(f"--num-rollout {num_rollout}: {done} rollouts are done", "give a larger number")
        if bent := _bent(options):
            raise UsageError(
                f"--num-rollout {num_rollout}: {bent} was planned for the run's original length",
                f"start another run with --load {options.save or rundir.checkpoints}",
            )
        if ckpt_step is not None:
            _checkpoints(rundir, options, ckpt_step)
        longer = options.model_copy(update={"num_rollout": num_rollout})
        write_atomic(rundir.options_file, longer.model_dump_json(indent=1).encode())
        if summary:
            write_summary(directory, msgspec.structs.replace(summary, status="stopped", total=num_rollout))


def _checkpoints(rundir: RunDir, options: Options, number: int) -> Path:
    """Where the run has its checkpoints, of which `number` is one.

    Raises:
        UsageError: if there is none of that number; names those that there are.
    """
    from hpcrl.models.files.torch_dist import step  # with torch, which no other way to resume needs

    directory = Path(options.save or rundir.checkpoints)
    if not step(directory, number).is_dir():
        there = ", ".join(str(int(path.name[5:])) for path in sorted(directory.glob("iter_*"))) or "none"
        raise UsageError(f"--ckpt-step {number}: {directory} has no such checkpoint", f"there are {there}")
    return directory


def rewind_run(job: RunJob, number: int) -> None:
    """Have the current stage resume from checkpoint `number`.

    Raises:
        UsageError: if it has none of that number.
    """
    stage = next((stage for stage in job.recipe.stages if not finished(job.directory(stage))), None)
    if stage is None:
        raise UsageError(f"--ckpt-step {number}: {job.root} is finished", "give --num-rollout N too")
    if not (job.directory(stage) / "options.json").is_file():
        raise UsageError(f"{job.root} has saved nothing yet", "leave --ckpt-step out")
    with hold_run(job.root):
        rundir = RunDir.latest(job.directory(stage))
        directory = _checkpoints(rundir, read_options(rundir), number)
        write_atomic(directory / CHOSEN, str(number).encode(), mode=0o644)  # if it is damaged, no other is taken
        write_atomic(directory / TRACKER, str(number).encode(), mode=0o644)


# ---- in another layout


def with_layout(job: RunJob, flags: Mapping[str, Any]) -> tuple[RunJob, dict[str, Any]]:
    """The job with these flags, and what changes of the options of its current stage; nothing is written.

    Raises:
        UsageError: for other options than those of LAYOUT, and for what a new run would refuse.
    """
    if other := [(path, value) for path, value in leaves(flags) if _name_of(path) not in LAYOUT]:
        words = shlex.join(flag_words({path[0]: {path[1]: value} if path[1:] else value for path, value in other}))
        raise UsageError(
            f"{words}: a run that resumes keeps this option",
            f"begin another from its weights: hpcrl run {job.recipe.path} --load {job.root} {words}",
        )
    stage = current_stage(job)
    number = job.recipe.stages.index(stage)
    file = job.directory(stage) / "options.json"
    begun = read_options(RunDir(file.parent)) if file.is_file() else job.stages[number]
    given = flags_of(flags, stage.name)
    void = _void(begun.model_copy(update=given), given)
    placed = flags | {f"{stage.name}.{name}" if stage.name else name: value for name, value in void.items()}
    changed = replace(job, overrides=replace_flags(job.overrides, placed))
    given = flags_of(placed, stage.name)
    before, after = job.stages[number], changed.stages[number]
    names = [name for name in Options.model_fields if name in given or getattr(after, name) != getattr(before, name)]
    update = {name: getattr(begun, name) | given[name] if name in TABLES else getattr(after, name) for name in names}
    check_options(begun.model_copy(update=update), given)
    return changed, update


def _name_of(path: tuple[str, ...]) -> str:
    """An option's name, as in a recipe."""
    option = split_name(path[0])[1]
    return option if len(path) == 1 else f"vllm_{path[1]}" if option == "vllm" else path[1]


def current_stage(job: RunJob) -> Any:
    """The stage at which the run is: the last one, if it is finished."""
    left = (stage for stage in job.recipe.stages if not finished(job.directory(stage)))
    return next(left, job.recipe.stages[-1])


def _void(options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of the layout's options that mean nothing in a smaller layout and were not given."""
    names = ["sequence_parallel"] if options.tensor_model_parallel_size == 1 else []
    if options.pipeline_model_parallel_size == 1:
        names += ["num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"]
    names += ["balance_data"] if options.data_parallel_size == 1 else []
    defaults = {name: Options.model_fields[name].default for name in names if name not in given}
    return {name: default for name, default in defaults.items() if getattr(options, name) != default}


@contextlib.contextmanager
def written(job: RunJob, update: Mapping[str, Any]) -> Iterator[None]:
    """Have what `with_layout` found in the run directory from now on; as it was if what is done in this context
    fails."""
    directory = job.directory(current_stage(job))
    begun = msgspec.structs.replace(read_recipe_file(job.root), overrides=job.overrides)
    files = {job.root / RECIPE: msgspec.json.encode(begun)}
    if (file := directory / "options.json").is_file():
        options = read_options(RunDir(directory)).model_copy(update=dict(update))
        files[file] = options.model_dump_json(indent=1).encode()
    before = {path: read_regular(path) for path in files}
    try:
        for path, data in files.items():
            write_atomic(path, data)
        yield
    except BaseException:
        for path, data in before.items():
            write_atomic(path, data)
        raise


_LAYOUT = textwrap.indent(
    textwrap.fill(", ".join(sorted(stage_flag("", name) for name in LAYOUT)), 116, break_on_hyphens=False), "  "
)
USAGE = f"""\
usage: hpcrl resume RUN [--num-rollout N] [--ckpt-step N] [--live-code] [--LAYOUT-OPTION VALUE ...]
                        [--time T] [--chain N] [--site NAME] [--set KEY=VALUE ...]

  RUN                run directory, its name, or its job ID
  --num-rollout N    train to N rollouts in all, also after the run has finished
  --ckpt-step N      resume from this checkpoint, if the last is damaged or diverged
  --live-code        from now on import custom functions from their own directories, not from RUN/code;
                     --no-live-code: from the copies again
  --LAYOUT-OPTION    one of those below, from now on: they change no sample
  --time T           time limit of one attempt: minutes, H:MM:SS or D-HH:MM:SS; only for a run that was submitted
  --chain N          N jobs in a row, as for hpcrl submit
  --site NAME        submit it with the profile of another site; only for a run that was submitted
  --set KEY=VALUE    a key of the site's profile, for this start and later ones; only for a run that was submitted

The run continues from its last checkpoint with its own options: as a job of the same site if it was submitted, else on
this machine. Options of its layout:

{_LAYOUT}"""


def resume(argv: list[str]) -> int:
    """`hpcrl resume RUN`: submit the run again if it was a Slurm job, else resume it here."""
    own_flags = {
        "time": Kind("str"),
        "site": Kind("str"),
        "set": Kind("str", many=True),
        "chain": Kind("int", bounds=">= 1"),
    }
    taken = {"num_rollout", "ckpt_step", "live_code"}
    overrides, own, words = parse_flags(argv, own_flags, only=taken | LAYOUT)
    if len(words) != 1:
        raise UsageError("hpcrl resume takes one run directory", "hpcrl resume --help says what else")
    job = reopen_job(Path(words[0]) if Path(words[0]).exists() else find_run(words[0]).root)
    root, record = job.root, read_job(job.root)
    change = None
    if flags := {name: value for name, value in overrides.items() if name not in taken}:
        job, update = with_layout(job, flags)
        change = partial(written, job, update)
        if record.scheduler == "local":
            refuse_settings(job.stages, local_hosts, packages=True)
    if own and not record.queued:
        raise UsageError(f"--{next(iter(own))} has no effect: {root} was not submitted", "leave it out")
    if "num_rollout" in overrides:
        extend_run(job, overrides["num_rollout"], overrides.get("ckpt_step"))
    if "ckpt_step" in overrides:
        rewind_run(job, overrides["ckpt_step"])
    if all(finished(job.directory(stage)) for stage in job.recipe.stages):
        raise UsageError(f"{root} is finished", f"train on with hpcrl resume {root} --num-rollout N")
    if record.queued:
        if record.site is None:
            raise UsageError(
                f"{root} was started from a script",
                f"submit it again with that directory: sbatch SCRIPT --run-dir {root}",
            )
        say_submitted(*submit_again(job, record, own, overrides.get("live_code"), change() if change else None))
        return 0
    if change:
        with hold_run(root), change():
            print(f"the new settings are in {root}")
    if record.scheduler == "mpirun":
        raise UsageError(f"{root} ran under mpirun", f"hpcrl launch --resume {root} --hostfile FILE")
    from hpcrl.launch.local import run_recipe

    return run_recipe(None, overrides, root)
