"""Runs as Slurm jobs: the batch script, what sbatch says of it, and its submission through submitit.

One template renders what `hpcrl submit` sends and what a person edits.  Invariants: every value from options or a site
reaches the shell quoted; a name that the template uses and that was not given is an error; the same request renders the
same text.  sbatch decides whether a job is taken; what it would accept and let wait for ever is judged by
hpcrl/launch/slurm/partitions.py.  `sbatch --test-only` decides nothing: it also refuses what only has to wait, such as
for a node that is drained now.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jinja2

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.allocation_request import AllocationRequest, Component
from hpcrl.launch.job import run_dir_of
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.slurm.job_script import BatchScript, ScriptVerdict, Submission, batch_python
from hpcrl.launch.slurm.squeue import MARK, NAME, call
from hpcrl.run.process import run_command
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.plain_text import CONTROL, strip_control
from hpcrl.utils.shipped_files import shipped
from hpcrl.utils.untrusted_files import read_given

# ---- the batch script

WHAT = {
    "trainer": "Megatron ranks",
    "engine": "vLLM engines",
    "rollout": "the rollout process, without a GPU",
    "sandbox": "sandboxes",
}


def render(script: BatchScript, request: AllocationRequest, site: SiteProfile) -> str:
    """The text of the batch script."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["q"] = _one_word
    environment.filters["expanded"] = _expanded
    _refuse_inherited(request, site)
    template = environment.from_string(read_given(shipped("sbatch/job.sbatch.j2")))
    names = {
        "title": strip_control(" ".join(script.title.split())),
        "summary": strip_control(script.summary, lines=True),
        "components": [_component(script, request, site, index) for index in range(len(request.components))],
        "setup": site.setup,
        "modules": site.modules,
        "env": list(site.env.items()),
        "python": site.python or script.python,
        "scratch": site.scratch,
        "tasks": script.tasks,
        "launch_timeout": f"{site.launch_timeout:g}",
        "shared_nodes": site.shared_nodes,
        "margin": request.margin,
        "requeue": site.requeue,
        "max_requeues": site.max_requeues if site.requeue else 0,
        "spares": request.spares,
        "command": script.command,
    }
    return template.render(names)


def _one_word(value: Any) -> str:
    """A value as one word of a shell's line."""
    return shlex.quote(_printable(str(value)))


def _expanded(value: str) -> str:
    """A value as one word of a shell's line, in which $NAME and ${NAME} are expanded and nothing else."""
    return '"' + re.sub(r'["`\\]|\$(?![A-Za-z_]|\{[A-Za-z_]\w*\})', r"\\\g<0>", _printable(value)) + '"'


def _printable(text: str) -> str:
    """`text`; UsageError if it holds what would end a line of the script, or be obeyed by a terminal that shows it."""
    if CONTROL.search(text) or "\n" in text:
        raise UsageError(f"{text!r} holds a control character, and would be part of a batch script", "leave it out")
    return text


def _component(script: BatchScript, request: AllocationRequest, site: SiteProfile, index: int) -> dict[str, Any]:
    component = request.components[index]
    group = index if len(request.components) > 1 else None
    what = "trainer ranks and engines" if request.layout == "homogeneous" else WHAT[component.name]
    return {
        "what": f"{what}, {component.nodes} node{'s' if component.nodes > 1 else ''}",
        "options": [
            _directive(x)
            for x in (*(_job(script, request, site) if index == 0 else ()), *component_options(component, site))
        ]
        + ["no-kill"] * request.outlives_nodes,
        "slots": component.slots,
        "step": shlex.join(step(component, group, site, script, request.outlives_nodes)),
    }


def _job(script: BatchScript, request: AllocationRequest, site: SiteProfile) -> Iterator[str]:
    """The options of the job as a whole, which only the first component carries."""
    yield f"job-name={script.name}{NAME}"  # squeue shows the first eight letters: the recipe's, not ours
    if script.identity and site.mark:
        yield f"comment={MARK}{script.identity}"
    if script.follows:
        yield f"dependency=afterany:{script.follows}"
    elif site.after:
        yield from (f"dependency=afterok:{site.after}", "kill-on-invalid-dep=yes")
    yield f"time={site.time}"
    folder, name = os.path.split(script.output)  # in the file's name alone % is ours: %j
    yield f"output={os.path.join(folder.replace('%', '%%'), name)}"
    yield "open-mode=append"
    yield f"signal=B:USR1@{request.margin}"
    yield script.requeue if site.requeue else "no-requeue"


#: sbatch resets these options for each component of a heterogeneous job (src/common/slurm_opt.c: reset_each_pass). Any
#: other option of a component also holds for the next one, unless that sets it too
NOT_INHERITED = frozenset({
    "constraint", "contiguous", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task",
    "distribution", "exclusive", "extra-node-info", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "hint", "licenses", "mail-type", "mail-user", "mem-bind", "mem-per-cpu",
    "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu",
    "ntasks-per-node", "ntasks-per-socket", "overcommit", "oversubscribe", "partition", "sockets-per-node",
    "spread-job", "switches", "thread-spec", "threads-per-core", "tmp", "tres-bind", "tres-per-task", "use-min-nodes",
})  # fmt: skip


def _refuse_inherited(request: AllocationRequest, site: SiteProfile) -> None:
    """Raise UsageError where a component would get an option of one before it that it does not have itself."""
    givers: dict[str, str] = {}
    for component in request.components:
        name = component.name
        own = {option.partition("=")[0] for option in component_options(component, site)} - NOT_INHERITED
        for option in sorted(givers.keys() - own):
            key = f"extra.{option}" if option in getattr(site, givers[option]).extra else option
            raise UsageError(
                f"{givers[option]}.{key} is set and {name}.{key} is not: sbatch would take it over for {name}",
                f"set {name}.{key}, too",
            )
        givers |= dict.fromkeys(own, name)


def component_options(component: Component, site: SiteProfile) -> Iterator[str]:
    """The options of one component."""
    wish = getattr(site, component.name)
    for name in ("account", "qos", "reservation"):
        if value := getattr(wish, name) or getattr(site, name):
            yield f"{name}={value}"
    for name in ("partition", "constraint", "mem"):
        if value := getattr(wish, name):
            yield f"{name}={value}"
    yield f"nodes={component.nodes}"
    yield "ntasks-per-node=1"
    if component.cpus:
        yield f"cpus-per-task={component.cpus}"
    if gpus := site.gpus(component.name, component.slots):
        yield gpus
    if site.exclusive:
        yield "exclusive"
    if site.exclude:
        yield f"exclude={','.join(site.exclude)}"
    for name, value in wish.extra.items():
        if value is not False:
            yield name if value is True else f"{name}={value}"


def _directive(option: str) -> str:
    """An option as sbatch reads it from a comment: its words are split as a shell would, without expansion."""
    name, equals, value = option.partition("=")
    return f"{name}{equals}{_one_word(value)}" if equals else name


def step(
    component: Component, group: int | None, site: SiteProfile, script: BatchScript, outlives: bool = False
) -> list[str]:
    """The srun that starts a component's tasks, up to the program."""
    tasks = max(component.slots, 1) if script.tasks == "slots" else 1
    words = [
        "srun",
        "--unbuffered",
        "--input=none",
        f"--kill-on-bad-exit={0 if outlives else 1}",  # a host that was left out, or is spare, may end as it likes
        "--wait=0",
        "--overlap",
        "--cpu-bind=none",
        "--export=ALL",
    ]
    if script.tasks != "slots":  # a task is no rank: none of the plugins' servers is needed on the nodes
        words.append("--mpi=none")
    if outlives:  # a node that is lost does not end the tasks on the others
        words.append("--no-kill")
    if group is not None:
        words.append(f"--het-group={group}")
    words += [f"--nodes={component.nodes}", f"--ntasks={component.nodes * tasks}", f"--ntasks-per-node={tasks}"]
    if component.cpus:  # srun does not take it from sbatch in Slurm 22.05 to 23.02
        words.append(f"--cpus-per-task={max(component.cpus // tasks, 1)}")
    if gpus := site.gpus(component.name, component.slots):
        words.append(f"--{gpus}")
    more, command = site.wrap(["bash", str(Path(script.launch) / "task.sh")], script.mounts)
    return [*words, *more, *command]


SECONDS = 60.0  #: that sbatch may take
OUTPUT = "job-%j.out"
SCRIPT = "job.sbatch"  #: its name in a run directory
#: what submitit calls in the job, by name: that process may submit the run again through this module
RUN = "hpcrl.launch.slurm.batch_process:run_directory"
JOB_ID = "\0"  #: stands for the job's number in a path, which cannot hold it
_FEWER = "wait for jobs to end; sacctmgr show qos and show assoc have the limits"
_SHORTER = "ask for less with --time; see sinfo -o '%P %l'"
#: what sbatch says -> what a user can do about it; its sentence on a limit for submission speaks of time limits too
HINTS = {
    "invalid partition": "name a partition with --set trainer.partition=... engine.partition=...; see sinfo",
    "node configuration is not available": "ask for fewer nodes or GPUs, less time, memory or cores; "
    "see sinfo -o '%P %l %s %D %G %c %m'",
    "node count": "ask for fewer nodes, or a larger partition",
    "submitjob": _FEWER,
    "wallduration": _SHORTER,
    "job submit limit": _FEWER,
    "time limit": _SHORTER,
    "account": "name your account with --set account=...; see sacctmgr show assoc user=$USER",
    "qos": "see sacctmgr show qos",
}


# ---- texts


def run_script(submission: Submission, command: str) -> str:
    """The script of a run whose batch process is `command`."""
    script = submission.script(command, str(submission.job.root / "logs" / OUTPUT))
    if submission.site.requeue and len(submission.request.components) == 1 and _expedites():
        script = replace(script, requeue="requeue=expedite")
    return render(script, submission.request, submission.site)


def _expedites() -> bool:
    """Whether a job of this cluster that loses a node can be the next to start: Slurm 25.11 or newer, and enabled; else
    sbatch would refuse the job."""
    config = call(["scontrol", "show", "config"])
    if config.code or "enable_expedited_requeue" not in config.out:
        return False
    found = re.search(r"(\d+)\.(\d+)", call(["sbatch", "--version"]).out)
    return found is not None and (int(found[1]), int(found[2])) >= (25, 11)


def preview_script(submission: Submission) -> str:
    """The script with the command that submitit would write into it."""
    python, folder = batch_python(submission.site), str(submission.job.root / "submitit")
    return run_script(submission, f"{shlex.quote(python)} -u -m submitit.core._submit {shlex.quote(folder)}")


def script_by_hand(submission: Submission, words: Sequence[str]) -> str:
    """The script for a person; the run directory is the one that was given, the job's number in place of the time in
    it.  Words that follow the script's name are options too, and count after its own."""
    recipe = submission.job.recipe
    root = _quoted(run_dir_of(recipe, submission.job.overrides).format(name=recipe.name, time=JOB_ID))
    inside = (
        submission.site.container.kind != "none"
    )  # then HPCRL_PYTHON is the image's, and this process runs outside of it
    python = shlex.quote(batch_python(submission.site)) if inside else '"$HPCRL_PYTHON"'
    command = f'{python} -m hpcrl.launch.slurm.batch_process {shlex.join(words)} --run-dir {root} "$@"'
    return render(submission.script_by_hand(command, "hpcrl-%j.out"), submission.request, submission.site)


def _quoted(text: str) -> str:
    """A text as one word for a shell, with the job's number in place of JOB_ID."""
    parts = [re.sub(r'(["$`\\])', r"\\\1", _printable(part)) for part in text.split(JOB_ID)]
    return '"' + "$SLURM_JOB_ID".join(parts) + '"'


# ---- submission


def test_only(script: str, seconds: float) -> ScriptVerdict:
    """What `sbatch --test-only` says of a script, within so many seconds."""
    answer = run_command(["sbatch", "--test-only"], seconds, script, _outside_of_jobs())
    said = " ".join((answer.err + answer.out).split()).replace("sbatch: ", "")
    # an account, partition, QOS or feature that is not there is refused by sbatch too, with the same words
    return ScriptVerdict(answer.code == 0, said, _hint(said), never="invalid" in said.lower())


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
    from hpcrl.launch.slurm.het_executor import of_another_job

    drop = of_another_job(os.environ)
    return {name: value for name, value in os.environ.items() if name not in drop}


def send(submission: Submission) -> Any:
    """Submit the run through submitit, its folder RUN/submitit, its script RUN/job.sbatch; returns submitit's job."""
    from hpcrl.launch.slurm.het_executor import ANSWER, FailedJobError, HetSlurmExecutor

    root = submission.job.root

    def text(command: str) -> str:
        found = run_script(submission, command)
        write_atomic(root / SCRIPT, found.encode())
        return found

    try:
        executor = HetSlurmExecutor(root / "submitit", text, python=shlex.quote(batch_python(submission.site)))
    except RuntimeError as error:
        raise HpcrlError(f"submitit: {error}") from error
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where submitit repeats sbatch's words
            return executor.submit(resolve_name(RUN), str(root))
    except FailedJobError as error:
        raise _refused(str(error) or f"no answer within {ANSWER} s; see squeue before you submit it again") from error
    except BaseException:
        if executor.sent:  # but what its job begins with could not be written
            call(["scancel", executor.sent])
        raise


def send_script(file: Path) -> str:
    """Submit a script as it is; the job's number."""
    answer = run_command(["sbatch", "--parsable", str(file)], SECONDS, env=_outside_of_jobs())
    if answer.code:
        raise _refused(answer.err or answer.last_output)
    return answer.out.strip().partition(";")[0]
