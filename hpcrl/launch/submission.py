"""A recipe as one job of a scheduler: the allocation that holds every stage, its submission, and its submission again.

Invariants: the hosts that a Request will bring, in the order that it brings them, hold the plan of every stage.  What
can be known to fail is refused before anything is submitted; what is submitted is, as text, in the run directory.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, resolve_stages
from hpcrl.errors import HpcrlError, UsageError, raise_together
from hpcrl.launch.job import RunJob, begin_job, directory_of, held, reopen_job
from hpcrl.launch.preflight import NOTHING, HostView, absent, made_by_run, refuse_settings, same_packages
from hpcrl.launch.restarts import broken_hosts, later_jobs, margin
from hpcrl.launch.scheduler import (
    AllocationRequest,
    Component,
    Scheduler,
    Submission,
    SubmittedJob,
    can_submit,
    load_scheduler,
)
from hpcrl.launch.site import SiteProfile, from_flags, minutes, saved_site
from hpcrl.plan import Host, make_plan
from hpcrl.prompt_files.early_look import look_at
from hpcrl.run.job_files import JobFile, write_job
from hpcrl.run.queued_job import JobKey
from hpcrl.run.rundir import RunDir
from hpcrl.shipped_files import shipped
from hpcrl.weights.route import TransportConditions, transfer_obstacle

CPUS_PER_SLOT = 8  #: cores a node gives for each GPU where the profile does not say
ROLLOUT_CPUS = 8  #: cores of the rollout process on a separate node
FLOOR = 180  #: seconds before the time limit at which a run saves, until its own steps have been measured
STARTUP = 120  #: seconds that a run needs before its first step, at the very least


# ---- what to ask for


def make_request(stages: Sequence[Options], site: SiteProfile, margin: int | None = None) -> AllocationRequest:
    """The smallest allocation of the site's layout in which every stage has its plan; no node in it is idle in all of
    them.

    Args:
        margin: measured in an earlier attempt; None: the site's, or else a floor.

    Raises:
        UsageError: names what does not fit.
    """
    layout = (
        "homogeneous"
        if any(o.colocate for o in stages) or _one_node_holds(stages, site)
        else site.layout or "heterogeneous"
    )
    components = _homogeneous(stages, site) if layout == "homogeneous" else _used(stages, _heterogeneous(stages, site))
    if len(components) == 1 and components[0].name == "trainer" and any(o.num_engines for o in stages):
        layout = "homogeneous"
    margin = site.signal_margin or max(margin or 0, FLOOR, *(int(o.stop_timeout) for o in stages))
    request = AllocationRequest(layout, tuple(components), margin)
    for options in stages:
        make_plan(options, request.hosts(), "request")
        _check_transfer(options, site)
    limit = 60 * minutes(site.time)
    if limit < margin + STARTUP:
        raise UsageError(
            f"--time {site.time} is too short: a run needs {STARTUP} s to start "
            f"and {margin} s to save before the limit",
            f"ask for {-(-(margin + STARTUP) // 60)} minutes or more",
        )
    return request


def _check_transfer(options: Options, site: SiteProfile) -> None:
    """Raise UsageError for a way of the weights that needs GPUs where the site's slots are processes."""
    way = options.weight_transfer
    nowhere = TransportConditions(cpu=True, one_host=True, colocate=True)
    if site.trainer.gpus_per_node == 0 and way != "auto" and transfer_obstacle(way, nowhere):
        raise UsageError(
            f"--weight-transfer {way} needs GPUs, and the site has none (trainer.gpus_per_node = 0)", "use auto"
        )


def _one_node_holds(stages: Sequence[Options], site: SiteProfile) -> bool:
    """Whether one of the trainer's nodes is known to hold every stage, and the site asks for nothing else.

    Known: `trainer.gpus_per_node` says what a node has.  Asks: for a layout, for a node of the rollout process's own,
    or for other nodes for engines than for trainers.
    """
    apart = site.describes("engine") and site.engine != site.trainer
    if site.layout or apart or site.describes("rollout") or not site.trainer.gpus_per_node:
        return False
    return _hold(stages, [Host("node-0", site.trainer.gpus_per_node)])


def _hold(stages: Sequence[Options], hosts: list[Host]) -> bool:
    """Whether every stage has its plan on these hosts, each of the trainer's nodes a host."""
    try:
        for options in stages:
            make_plan(options, hosts, "request")
    except UsageError:
        return False
    return max((o.actor_num_nodes for o in stages if not o.debug_rollout_only), default=0) <= len(hosts)


def _used(stages: Sequence[Options], components: list[Component]) -> list[Component]:
    """The components without nodes that no stage uses: engines may fit next to the trainer ranks, where nodes have more
    GPUs."""
    request = AllocationRequest("heterogeneous", tuple(components), 0)
    used = {host for options in stages for host in make_plan(options, request.hosts(), "request").hosts}
    counts = {c.name: sum(f"{c.name}-{i}" in used for i in range(c.nodes)) for c in components}
    return [msgspec.structs.replace(c, nodes=counts[c.name]) for c in components if counts[c.name]]


def _heterogeneous(stages: Sequence[Options], site: SiteProfile) -> list[Component]:
    training = [o for o in stages if not o.debug_rollout_only]
    found = []
    if training:
        each = max(o.actor_num_gpus_per_node for o in training)
        nodes = max(o.actor_num_nodes for o in training)
        found.append(_component(site, "trainer", nodes, site.trainer.gpus_per_node or each))
    wanted = max((o.num_engines * o.rollout_num_gpus_per_engine for o in stages), default=0)
    if wanted:
        found.append(_component(site, "engine", *_engine_nodes(stages, site, wanted)))
    if site.describes("rollout"):
        found.append(Component("rollout", 1, 0, site.rollout.cpus_per_node or ROLLOUT_CPUS))
    return found


def _engine_nodes(stages: Sequence[Options], site: SiteProfile, wanted: int) -> tuple[int, int]:
    """(nodes, slots a node) for `wanted` GPUs of engines; an engine is in one node, or fills several."""
    per_engine = max(o.rollout_num_gpus_per_engine for o in stages if o.num_engines)
    node = site.engine.gpus_per_node or min(wanted, 8)
    if per_engine > node:
        if per_engine % node:
            raise UsageError(
                f"an engine of --rollout-num-gpus-per-engine {per_engine} does not fill nodes of {node} GPUs",
                "choose a multiple, or set engine.gpus_per_node",
            )
        return wanted // node, node
    usable = node // per_engine * per_engine  # what is left on a node is too little for another engine
    return -(-wanted // usable), node


def _homogeneous(stages: Sequence[Options], site: SiteProfile) -> list[Component]:
    """Nodes of one kind; as few as hold every stage."""
    training = [o for o in stages if not o.debug_rollout_only]
    each = max((o.actor_num_gpus_per_node for o in training), default=1)
    actors = max((o.actor_num_nodes for o in training), default=0)
    per_engine = max((o.rollout_num_gpus_per_engine for o in stages if o.num_engines), default=1)
    node = site.trainer.gpus_per_node or max(each, min(per_engine, 8))
    most = actors + max(o.engine_gpus for o in stages)
    for nodes in range(1, most + 1):
        if _hold(stages, [Host(f"node-{i}", node) for i in range(nodes)]):
            return [_component(site, "trainer", nodes, node)]
    raise UsageError(
        f"no number of nodes of {node} GPUs holds this run",
        "set trainer.gpus_per_node of the site, or --rollout-num-gpus-per-engine to divide a node",
    )


def _component(site: SiteProfile, name: str, nodes: int, slots: int) -> Component:
    wish = getattr(site, name)
    cpus = wish.cpus_per_node or (None if site.exclusive else CPUS_PER_SLOT * max(slots, 1))
    return Component(name, nodes, slots, cpus)


# ---- submitting it


def preview(recipe: Recipe, overrides: dict[str, Any], site: SiteProfile, packages: bool = False) -> Submission:
    """What `submit_new` would submit, without a run directory.

    Args:
        packages: whether those of this interpreter count where the site runs it.

    Raises:
        UsageError, DataError: for what cannot run.
    """
    places = {"run": "{run}", "prepared": "{run}/prepared"}
    stages = list(resolve_stages(recipe, overrides, places))
    request = make_request(stages, site)
    refuse_settings(stages, lambda _: request.hosts(), packages and same_packages(site))
    look_at(stages)
    return Submission(RunJob(recipe, overrides, directory_of(recipe, overrides), "IDENTITY"), stages, request, site)


def submit_new(
    recipe: Recipe, overrides: dict[str, Any], site: SiteProfile, chain: int = 1
) -> tuple[Submission, list[SubmittedJob]]:
    """Make a run directory and submit its job, or a chain of them.

    Raises:
        UsageError: for what cannot run, and then nothing is left behind.
    """
    site = chained(site, chain)
    scheduler = load_scheduler(site.scheduler)
    if not can_submit(scheduler):
        program = shlex.split(scheduler.submit_command)[0]
        raise UsageError(
            f"{program} is not here", f"submit from a login node of the cluster; hpcrl run needs no {scheduler.title}"
        )
    shown = preview(recipe, overrides, site)
    refuse_what_does_not_fit(scheduler, shown)
    refuse_absent_files(shown)
    job = begin_job(recipe, overrides, lambda _: shown.request.hosts(), here=False)
    submission = Submission(job, shown.stages, shown.request, site)
    try:
        return submission, _send(scheduler, submission, chain)
    except BaseException:
        shutil.rmtree(job.root, ignore_errors=True)  # nothing runs, so nothing is to be found later
        raise


def refuse_what_does_not_fit(scheduler: Scheduler, submission: Submission) -> None:
    """Raise UsageError if the site cannot hold the job, which the scheduler might else accept and let wait for ever."""
    if bad := [finding for finding in scheduler.fits(submission.request, submission.site) if finding.level == "fail"]:
        raise UsageError(bad[0].what, bad[0].hint)


def refuse_absent_files(shown: Submission) -> None:
    """Raise UsageError for what the run of a `preview` begins with and the login node does not see."""
    raise_together(absent(shown.stages, sight_of(shown.site, shown.job.recipe)))


def sight_of(site: SiteProfile, recipe: Recipe, run: str = "{run}") -> HostView:
    """What the login node can see of the nodes.

    Not what the run makes, or a job that it waits for; nothing where an image has its own paths, or on disks of the
    nodes.

    Args:
        run: the run directory, as paths of the options have it.
    """
    if site.container.kind != "none" or getattr(site, "after", None):
        return NOTHING
    local = site.scratch if site.scratch and site.scratch.startswith("/") else run
    same_code = not site.setup and site.python in (None, sys.executable) and "PYTHONPATH" not in site.env
    return HostView(lambda path: path.startswith(local) or made_by_run(recipe, run, path), same_code)


def chained(site: SiteProfile, chain: int) -> SiteProfile:
    """The site for a chain of so many jobs: none of them is requeued, since the next one continues."""
    return site.model_copy(update={"requeue": False}) if chain > 1 else site


def submit_again(
    root: Path, record: JobFile, own: Mapping[str, Any], chain: int = 1
) -> tuple[Submission, list[SubmittedJob]]:
    """Submit a run once more, with the site of its job.json (`record`) and what the flags `own` change of it.

    Nodes that the run has found broken are left out.
    """
    job = reopen_job(root)
    _check_gone(root, record)
    with held(job.root):
        pass
    site = chained(from_flags(own, saved_site(record.site).again()), chain)
    site = site.model_copy(update={"exclude": [*dict.fromkeys((*site.exclude, *broken_hosts(root)))]})
    stages = list(job.stages)
    measured = max(margin(RunDir(job.directory(stage)), FLOOR) for stage in job.recipe.stages)
    submission = Submission(job, stages, make_request(stages, site, int(measured)), site)
    return submission, _send(load_scheduler(site.scheduler), submission, chain)


def submit_elsewhere(root: Path, record: JobFile) -> str:
    """From the end of the run's own job: another that continues without the hosts that broke; its number.

    Raises:
        UsageError: if there is nothing here to submit with, HpcrlError if it is refused.
    """
    site = saved_site(record.site or {}).again()
    scheduler = load_scheduler(site.scheduler)
    if not can_submit(scheduler):
        raise UsageError(f"{scheduler.submit_command} is not on this node", "submit from a login node")
    site = site.model_copy(update={"exclude": [*dict.fromkeys((*site.exclude, *broken_hosts(root)))]})
    job = reopen_job(root)
    submission = Submission(job, list(job.stages), make_request(job.stages, site), site)
    return _send(scheduler, submission, 1)[0].job_id


def _check_gone(root: Path, record: JobFile) -> None:
    """Raise UsageError if the run's job, or a later one of its chain, is still queued or running."""
    keys = [
        JobKey(name, record.identity, record.submitted, history=False)
        for name in (str(record.job_id), *later_jobs(record))
    ]
    words = load_scheduler(record.scheduler).look(keys).jobs
    for key in keys:
        word = words.get(key)
        if word and word.phase in ("pending", "running"):
            raise UsageError(f"{root}: its job {key.job_id} is {word.word.lower()}", "hpcrl cancel it first, or wait")


def _send(scheduler: Scheduler, submission: Submission, chain: int) -> list[SubmittedJob]:
    """Submit it, `chain` times, each job after the one before; all or none of them stay in the queue."""
    root, jobs = submission.job.root, list[SubmittedJob]()
    shutil.copytree(shipped("launch"), root / "launch", dirs_exist_ok=True)
    try:
        while len(jobs) < chain:
            jobs.append(scheduler.submit(replace(submission, follows=jobs[-1].job_id if jobs else "")))
            write_job(
                root,
                submission.job.identity,
                submission.site.scheduler,
                jobs[0].job_id,
                script=str(root / scheduler.script_file),
                components=[msgspec.to_builtins(component) for component in submission.request.components],
                site=submission.site.model_dump(),
                chain=[job.job_id for job in jobs] if chain > 1 else [],
            )
    except BaseException:
        for job in reversed(jobs):
            with contextlib.suppress(HpcrlError):
                scheduler.cancel(job.job_id)
        raise
    return jobs
