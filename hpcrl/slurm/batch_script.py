"""The batch script: one template for what `hpcrl submit` sends and what a person edits.

Invariant: every value from options or a site reaches the shell quoted; a name that the template uses and nobody gave is
an error; the same request renders the same text.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from hpcrl.launch.job_request import Component, Request
from hpcrl.launch.submission import Script
from hpcrl.shipped_files import shipped
from hpcrl.slurm.site import SlurmSite
from hpcrl.slurm.squeue import MARK, NAME

WHAT = {"trainer": "Megatron ranks", "engine": "vLLM engines", "rollout": "the rollout process, without a GPU"}


def render(script: Script, request: Request, site: SlurmSite) -> str:
    """The text of the batch script."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    template = environment.from_string(shipped("sbatch/job.sbatch.j2").read_text())
    names = {
        "title": _one_line(script.title),
        "summary": script.summary,
        "components": [_component(script, request, site, index) for index in range(len(request.components))],
        "setup": site.setup,
        "modules": site.modules,
        "env": list(site.env.items()),
        "python": site.python or script.python,
        "scratch": site.scratch,
        "tasks": script.tasks,
        "margin": request.margin,
        "requeue": site.requeue,
        "max_requeues": site.max_requeues if site.requeue else 0,
        "command": script.command,
    }
    return template.render(names)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _component(script: Script, request: Request, site: SlurmSite, index: int) -> dict[str, Any]:
    component = request.components[index]
    what = "trainer ranks and engines" if request.layout == "homogeneous" else WHAT[component.name]
    return {
        "what": f"{what}, {component.nodes} node{'s' if component.nodes > 1 else ''}",
        "options": [
            _directive(x) for x in (*(_job(script, request, site) if index == 0 else ()), *_options(component, site))
        ],
        "slots": component.slots,
        "step": shlex.join(step(component, index if len(request.components) > 1 else None, site, script)),
    }


def _job(script: Script, request: Request, site: SlurmSite) -> Iterator[str]:
    """The options of the job as a whole, which only the first component carries."""
    yield f"job-name={script.name}{NAME}"  # squeue shows the first eight letters: the recipe's, not ours
    if script.identity and site.mark:
        yield f"comment={MARK}{script.identity}"
    if script.follows:
        yield f"dependency=afterany:{script.follows}"
    elif site.after:
        yield from (f"dependency=afterok:{site.after}", "kill-on-invalid-dep=yes")
    yield f"time={site.time}"
    folder, name = os.path.split(script.output)
    yield f"output={os.path.join(folder.replace('%', '%%'), name)}"  # in the file's name alone % is ours: %j
    yield "open-mode=append"
    yield f"signal=B:USR1@{request.margin}"
    yield "requeue" if site.requeue else "no-requeue"


def _options(component: Component, site: SlurmSite) -> Iterator[str]:
    """The options of one component; those of partition and account hold for it alone."""
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
    return f"{name}{equals}{shlex.quote(value)}" if equals else name


def step(component: Component, group: int | None, site: SlurmSite, script: Script) -> list[str]:
    """The srun that starts a component's tasks, up to the program."""
    tasks = max(component.slots, 1) if script.tasks == "slots" else 1
    words = [
        "srun",
        "--unbuffered",
        "--input=none",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--overlap",
        "--cpu-bind=none",
        "--export=ALL",
    ]
    if group is not None:
        words.append(f"--het-group={group}")
    words += [f"--nodes={component.nodes}", f"--ntasks={component.nodes * tasks}", f"--ntasks-per-node={tasks}"]
    if component.cpus:  # srun does not take it from sbatch in Slurm 22.05 to 23.02
        words.append(f"--cpus-per-task={max(component.cpus // tasks, 1)}")
    if gpus := site.gpus(component.name, component.slots):
        words.append(f"--{gpus}")
    more, command = site.wrap(["bash", str(Path(script.launch) / "task.sh")], script.mounts)
    return [*words, *more, *command]
