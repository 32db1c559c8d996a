"""`hpcrl submit`: a recipe as one Slurm job, and once more where it stopped.

Invariant: what can be known to fail is refused before anything is submitted; what is submitted lies, as text, in the run
directory.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, load_recipe, resolve_stages
from hpcrl.config.value_types import Kind
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.job import Job, begin_job, directory_of, held, reopen_job
from hpcrl.launch.restart_policy import margin
from hpcrl.plan import make_plan
from hpcrl.run.job_file import JobFile, write_job
from hpcrl.run.rundir import RunDir
from hpcrl.run.shipped_files import shipped
from hpcrl.slurm.batch_script import Script, render
from hpcrl.slurm.job_request import FLOOR, Request, make_request
from hpcrl.slurm.sites import FLAGS, Site, from_flags, load_site

USAGE = """\
usage: hpcrl submit RECIPE.toml [--site NAME] [--time T] [--layout L] [--set KEY=VALUE ...] [--option value ...]
       hpcrl submit RECIPE.toml --dry-run       print the plan, the script and the command; submit nothing
       hpcrl submit RECIPE.toml --print         print the script alone, for you to edit and give to sbatch

  --site NAME        profile of the cluster: sites/NAME.toml, or a path; default $HPCRL_SITE
  --time T           time limit of one attempt, as sbatch takes it
  --layout L         heterogeneous (trainer, engine and rollout nodes as components of one job) or homogeneous (one
                     ordinary job, its nodes divided by the plan)
  --set KEY=VALUE    a key of the profile, such as --set trainer.partition=gpu engine.partition=gpu account=abc

Options are those of hpcrl run. One job is submitted; it trains to the end, over as many requeues as that takes."""

OWN = {
    **FLAGS,
    "dry-run": Kind("bool"),
    "print": Kind("bool"),
    "help": Kind("bool"),
}


def submit(argv: list[str]) -> int:
    """The command."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    overrides, own, words = parse_flags(argv, OWN)
    if len(words) != 1:
        raise UsageError(f"{len(words)} recipes given", "name one: hpcrl submit RECIPE.toml [--option value ...]")
    recipe = load_recipe(words[0])
    recipe = replace(recipe, name=overrides.get("name", recipe.name))
    site = from_flags(own)
    overrides = site.options(recipe, overrides)
    stages = _stages(recipe, overrides)
    request = make_request(stages, site)
    if own.get("print"):
        print(_by_hand(recipe, words[0], overrides, stages, request, site), end="")
        return 0
    if own.get("dry-run"):
        _show(recipe, overrides, stages, request, site)
        return 0
    job, submitted = _submit(recipe, overrides, site)
    _say(job, submitted, stages, request)
    return 0


def submit_recipe(recipe: str | Path, site: str | None = None, **options: Any) -> Any:
    """Submit a recipe from Python; returns submitit's job: job_id, state, stdout(), result() (the run's summary), cancel().

    options: by name, such as run_dir="runs/one", num_rollout=10.  Errors as those of `hpcrl submit`.
    """
    profile = load_site(site)
    loaded = load_recipe(recipe)
    return _submit(loaded, profile.options(loaded, options), profile)[1]


def _submit(recipe: Recipe, overrides: dict[str, Any], site: Site) -> tuple[Job, Any]:
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch is not here", "submit from a login node of the cluster; hpcrl run needs no Slurm")
    stages = _stages(recipe, overrides)
    request = make_request(stages, site)
    _check_place(directory_of(recipe, overrides), request)
    _check_partitions(site, request)
    job = begin_job(recipe, overrides, lambda _: request.hosts())
    try:
        return job, _send(job, stages, request, site)
    except BaseException:
        shutil.rmtree(job.root, ignore_errors=True)  # nothing runs, so nothing is to be found later
        raise


def submit_again(root: Path, record: JobFile, own: dict[str, Any]) -> int:
    """Submit a run once more, with the site of its job.json and what the flags `own` change of it."""
    job = reopen_job(root)
    _check_gone(record, root)
    with held(job.root):
        pass
    site = from_flags(own, Site.model_validate(record.site))
    stages = list(job.stages)
    measured = max(margin(RunDir(job.directory(stage)), FLOOR) for stage in job.recipe.stages)
    request = make_request(stages, site, int(measured))
    _say(job, _send(job, stages, request, site), stages, request)
    return 0


def _check_gone(record: JobFile, root: Path) -> None:
    """UsageError if the run's job is still queued or running."""
    done = subprocess.run(
        ["squeue", "--noheader", "--format=%T|%k", f"--job={record.job_id}"], capture_output=True, text=True, timeout=30
    )
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        state, _, comment = line.partition("|")
        if comment.strip() == f"hpcrl:{record.identity}":
            raise UsageError(f"{root}: its job {record.job_id} is {state.lower()}", "hpcrl cancel it first, or wait")


def _stages(recipe: Recipe, overrides: dict[str, Any]) -> list[Options]:
    places = {"run": "{run}", "prepared": "{run}/prepared"}
    return list(resolve_stages(recipe, overrides, places))


# ---- texts


def _summary(stages: list[Options], request: Request) -> str:
    """The plan of the stage that needs most, with stand-ins for the nodes that Slurm will give."""
    largest = max(stages, key=lambda o: o.world_size + o.engine_gpus)
    return make_plan(largest, request.hosts(), "plan").table()


def _script(job: Job, stages: list[Options], request: Request, site: Site, command: str) -> Script:
    return Script(
        name=job.recipe.name,
        title=f"{job.recipe.name}: one run of hpcrl as one {request.layout} job",
        summary=_summary(stages, request),
        command=command,
        output=str(job.root / "logs" / "job-%j.out"),
        launch=str(job.root / "launch"),
        comment=f"hpcrl:{job.identity}",
        mounts=(str(job.root),),
        tasks=_tasks(stages),
        python=site.python or (sys.executable if site.container.kind == "none" else "python3"),
    )


def _batch_python(site: Site) -> str:
    """The interpreter of the batch process, which calls srun and so runs outside of any container."""
    return shlex.quote(site.python if site.python and site.container.kind == "none" else sys.executable)


def _tasks(stages: list[Options]) -> str:
    return "slots" if stages[0].rank_launcher == "ranks" else "hosts"


def _by_hand(recipe: Recipe, path: str, overrides: dict[str, Any], stages: list[Options], request: Request, site: Site) -> str:
    """The script for a person: paths as they were given, relative to where sbatch is called."""
    words = [path, *(f"--{k.replace('_', '-')}={_word(v)}" for k, v in overrides.items() if k not in ("run_dir",))]
    command = f'"$HPCRL_PYTHON" -m hpcrl.slurm.batch_process {shlex.join(words)} --run-dir "runs/{recipe.name}-$SLURM_JOB_ID"'
    script = Script(
        name=recipe.name,
        title=f"{recipe.name}: one run of hpcrl as one {request.layout} job; edit it, then: sbatch THIS_FILE",
        summary=_summary(stages, request),
        command=command,
        output="hpcrl-%j.out",
        launch="launch",
        tasks=_tasks(stages),
    )
    return render(script, request, site)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _show(recipe: Recipe, overrides: dict[str, Any], stages: list[Options], request: Request, site: Site) -> None:
    """The plan, the script, the command, and what sbatch --test-only says where there is one."""
    job = Job(recipe, overrides, directory_of(recipe, overrides), "IDENTITY")
    print(_summary(stages, request))
    command = f"{_batch_python(site)} -u -m submitit.core._submit {shlex.quote(str(job.root / 'submitit'))}"
    text = render(_script(job, stages, request, site, command), request, site)
    place = shlex.quote(str(job.root / "job.sbatch"))
    print(f"\n{text}\n# nothing was written; hpcrl submit would write this script and call:\n# sbatch {place}")
    if shutil.which("sbatch"):
        _check_partitions(site, request)
        print(f"# sbatch --test-only says: {_test_only(text)}")


# ---- submission


def _check_partitions(site: Site, request: Request) -> None:
    """UsageError if a partition cannot hold its component, which might else be accepted and wait for ever."""
    from hpcrl.slurm.partitions import fits

    if bad := [finding for finding in fits(site, request.components) if finding.level == "fail"]:
        raise UsageError(bad[0].what, bad[0].hint)


def _check_place(root: Path, request: Request) -> None:
    """A note if other nodes may not see the run directory; they say so for certain when the job starts."""
    from hpcrl.doctor.storage import file_system

    parent = next(path for path in (root, *root.parents) if path.exists())
    several = sum(c.nodes for c in request.components) > 1
    finding = file_system(parent, Path("/proc/mounts").read_text(encoding="utf-8", errors="replace"), several)
    if finding.level != "ok":
        print(f"hpcrl: note: {finding.what}; {finding.hint}", file=sys.stderr)


def _test_only(text: str) -> str:
    """What `sbatch --test-only` says of a script.  UsageError if it refuses."""
    done = subprocess.run(["sbatch", "--test-only"], input=text, capture_output=True, text=True, timeout=60)
    said = " ".join((done.stderr + done.stdout).split()).replace("sbatch: ", "")
    if done.returncode:
        raise UsageError(f"Slurm refuses this job: {said}", _hint_for(said))
    return said


def _hint_for(said: str) -> str:
    """What a user can do about sbatch's refusal."""
    hints = {
        "invalid partition": "name a partition with --set trainer.partition=... engine.partition=...; see sinfo",
        "node configuration is not available": "ask for fewer nodes or GPUs, less time, memory or cores; see sinfo -o '%P %l %s %D %G %c %m'",
        "node count": "ask for fewer nodes, or a larger partition",
        "time limit": "ask for less with --time; see sinfo -o '%P %l'",
        "account": "name your account with --set account=...; see sacctmgr show assoc user=$USER",
        "qos": "see sacctmgr show qos",
    }
    low = said.lower()
    return next((hint for words, hint in hints.items() if words in low), "see sinfo, and the script with --dry-run")


def _send(job: Job, stages: list[Options], request: Request, site: Site) -> Any:
    """Submit the job through submitit; returns submitit's job."""
    from hpcrl.slurm.batch_process import run_directory

    shutil.copytree(shipped("launch"), job.root / "launch", dirs_exist_ok=True)
    executor = make_executor(job, stages, request, site)
    submitted = executor.submit(run_directory, str(job.root))
    components = [msgspec.to_builtins(c) for c in request.components]
    write_job(
        job.root,
        job.identity,
        "slurm",
        submitted.job_id,
        script=str(job.root / "job.sbatch"),
        components=components,
        site=site.model_dump(),
    )
    return submitted


def _say(job: Job, submitted: Any, stages: list[Options], request: Request) -> None:
    print(f"job {submitted.job_id}\nrun directory: {job.root}\n\n{_summary(stages, request)}")
    print(f"\nhpcrl status {job.root}\nhpcrl watch {job.root}")


def make_executor(job: Job, stages: list[Options], request: Request, site: Site) -> Any:
    """The submitit executor of a run: its folder is RUN/submitit, its script RUN/job.sbatch.

    UsageError if `sbatch --test-only` refuses the script: a component too large for its partition would wait for ever.
    """
    from hpcrl.slurm.het_executor import HetSlurmExecutor

    def text(command: str) -> str:
        script = render(_script(job, stages, request, site, command), request, site)
        _test_only(script)
        (job.root / "job.sbatch").write_text(script)
        return script

    try:
        return HetSlurmExecutor(job.root / "submitit", text, python=_batch_python(site))
    except RuntimeError as error:
        raise HpcrlError(f"submitit: {error}") from error
