"""Runs as Slurm jobs: their scripts, what sbatch says of them, and their submission through submitit.

Invariant: sbatch decides whether a job is taken; what it would take and let wait for ever is judged by
hpcrl/slurm/partitions.py. `sbatch --test-only` decides nothing: it also refuses what only has to wait, such as for a
node that is drained now.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe
from hpcrl.config.setting_names import nearest
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.job import run_dir_of
from hpcrl.launch.scheduler import Verdict
from hpcrl.launch.site import load_site
from hpcrl.launch.submission import Submission, batch_python, submit_new
from hpcrl.run.command import ask
from hpcrl.slurm.submit import render

SECONDS = 60.0  #: that sbatch may take
OUTPUT = "job-%j.out"
JOB_ID = "\0"  #: stands for the job's number in a path, which cannot hold it
#: what sbatch says -> what a user can do about it
HINTS = {
    "invalid partition": "name a partition with --set trainer.partition=... engine.partition=...; see sinfo",
    "node configuration is not available": "ask for fewer nodes or GPUs, less time, memory or cores; see sinfo -o '%P %l %s %D %G %c %m'",
    "node count": "ask for fewer nodes, or a larger partition",
    "time limit": "ask for less with --time; see sinfo -o '%P %l'",
    "account": "name your account with --set account=...; see sacctmgr show assoc user=$USER",
    "qos": "see sacctmgr show qos",
}


def submit_recipe(
    recipe: str | Path,
    site: str | None = None,
    *,
    time: str | None = None,
    layout: str | None = None,
    set: Mapping[str, Any] | None = None,
    chain: int = 1,
    **options: Any,
) -> Any:
    """Submit a recipe from Python; returns submitit's job: job_id, state, stdout(), result() (the run's summary),
    cancel().

    site, time, layout, chain: as the flags of `hpcrl submit`; set: keys of the profile, such as {"trainer.partition":
    "gpu"}; options: those of the run by name, such as run_dir="runs/one", num_rollout=10.  Errors as those of `hpcrl
    submit`.
    """
    changes = dict(set or {}) | {
        key: value for key, value in {"time": time, "layout": layout}.items() if value is not None
    }
    profile = load_site(site, changes)
    if profile.scheduler != "slurm":
        raise UsageError(f"site {profile.name}: its scheduler is {profile.scheduler}", "name a site of Slurm's")
    loaded = load_recipe(recipe)
    wrong = [name for name in options if name not in Options.model_fields]
    if wrong:
        near = nearest(wrong[0], [name.replace("_", "-") for name in Options.model_fields])
        raise UsageError(
            f"{wrong[0]} is no option", f"did you mean {near.replace('-', '_')}?" if near else "see docs/options.md"
        )
    return submit_new(loaded, profile.options(loaded, options), profile, chain)[1][0]


# ---- texts


def run_script(submission: Submission, command: str) -> str:
    """The script of a run whose batch process is `command`."""
    script = submission.script(command, str(submission.job.root / "logs" / OUTPUT))
    return render(script, submission.request, submission.site)


def preview_script(submission: Submission) -> str:
    """The script with the command that submitit would write into it."""
    place = shlex.quote(str(submission.job.root / "submitit"))
    return run_script(submission, f"{shlex.quote(batch_python(submission.site))} -u -m submitit.core._submit {place}")


def script_by_hand(submission: Submission, words: Sequence[str]) -> str:
    """The script for a person; the run directory is the one that was given, the job's number in place of the time in
    it."""
    recipe = submission.job.recipe
    root = _quoted(run_dir_of(recipe, submission.job.overrides).format(name=recipe.name, time=JOB_ID))
    inside = (
        submission.site.container.kind != "none"
    )  # then HPCRL_PYTHON is the image's, and this process runs outside of it
    python = shlex.quote(batch_python(submission.site)) if inside else '"$HPCRL_PYTHON"'
    command = f"{python} -m hpcrl.slurm.batch_process {shlex.join(words)} --run-dir {root}"
    return render(submission.script_by_hand(command, "hpcrl-%j.out"), submission.request, submission.site)


def _quoted(text: str) -> str:
    """A text as one word for a shell, with the job's number in place of JOB_ID."""
    return '"' + re.sub(r'(["$`\\])', r"\\\1", text).replace(JOB_ID, "$SLURM_JOB_ID") + '"'


# ---- submission


def test_only(script: str) -> Verdict:
    """What `sbatch --test-only` says of a script."""
    answer = ask(["sbatch", "--test-only"], SECONDS, script, _outside_of_jobs())
    said = " ".join((answer.err + answer.out).split()).replace("sbatch: ", "")
    # an account, partition, QOS or feature that is not there is refused by sbatch too, with the same words
    return Verdict(answer.code == 0, said, _hint(said), never="invalid" in said.lower())


def _hint(said: str) -> str:
    """What a user can do about what sbatch says."""
    return next(
        (hint for words, hint in HINTS.items() if words in said.lower()), "see sinfo, and the script with --dry-run"
    )


def _refused(said: str) -> UsageError:
    """The error for a job that sbatch did not take, from its stderr."""
    words = " ".join(said.split()).replace("sbatch: ", "").replace("error: ", "")
    return UsageError(f"Slurm refuses this job: {words}", _hint(words))


def _outside_of_jobs() -> dict[str, str]:
    """Our environment, less what a job around us has put there."""
    from hpcrl.slurm.het_executor import of_another_job

    drop = of_another_job(os.environ)
    return {name: value for name, value in os.environ.items() if name not in drop}


def send(submission: Submission) -> Any:
    """Submit the run through submitit, its folder RUN/submitit, its script RUN/job.sbatch; returns submitit's job."""
    from hpcrl.slurm.batch_process import run_directory
    from hpcrl.slurm.het_executor import ANSWER, FailedJobError, HetSlurmExecutor

    root = submission.job.root

    def text(command: str) -> str:
        script = run_script(submission, command)
        (root / "job.sbatch").write_text(script)
        return script

    try:
        executor = HetSlurmExecutor(root / "submitit", text, python=shlex.quote(batch_python(submission.site)))
    except RuntimeError as error:
        raise HpcrlError(f"submitit: {error}") from error
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where submitit repeats sbatch's words
            return executor.submit(run_directory, str(root))
    except FailedJobError as error:
        raise _refused(str(error) or f"no answer within {ANSWER} s; see squeue before you submit it again") from error


def send_script(file: Path) -> str:
    """Submit a script as it is; the job's number."""
    answer = ask(["sbatch", "--parsable", str(file)], SECONDS, env=_outside_of_jobs())
    if answer.code:
        raise _refused(answer.err or answer.said)
    return answer.out.strip().partition(";")[0]
