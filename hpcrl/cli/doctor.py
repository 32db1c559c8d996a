"""`hpcrl doctor`: is everything there that a run needs, before it burns an hour.

On the login node: Slurm, run directory, packages, model.  With --nodes a short job of the same shape as the run
looks at the nodes as well (hpcrl/launch/node_checks/all_nodes.py).

Invariant: one line for each thing looked at, with its hint; the exit status is 1 if any of them fails; nothing stays
behind but what the user asked for.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.cli.awaited_job import run_job, short_script
from hpcrl.cli.recipe_argument import choose_recipe
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, load_recipe, resolve_stages
from hpcrl.config.value_types import Kind
from hpcrl.doctor import directories, packages
from hpcrl.doctor.box_kinds import check_kinds
from hpcrl.errors import DataError, HpcrlError, UsageError, parts_of
from hpcrl.launch.allocation_request import AllocationRequest, Component, make_request, nodes_are_alike
from hpcrl.launch.node_checks.all_nodes import NodesJob, NodeStep, show
from hpcrl.launch.node_checks.gpu_needs import check_gpu_needs, needs
from hpcrl.launch.preflight import NOTHING, HostView, absent, begins_with, made_by_run, refuse_settings, same_packages
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.site_file import FLAGS, find_profile, from_flags
from hpcrl.launch.slurm.partitions import judge_request, responds
from hpcrl.launch.slurm.squeue import ECHOES
from hpcrl.launch.slurm.submission import sight_of
from hpcrl.launch.slurm.submit import SECONDS, test_only
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.planning.memory.report import taken_on_host
from hpcrl.rollout.prompts import first_rows
from hpcrl.run.gpu_environment import gpus_are_here
from hpcrl.run.rundir import read_if_whole, write_atomic
from hpcrl.utils.check_results import Finding, failed
from hpcrl.utils.waiting import Deadline

USAGE = """\
usage: hpcrl doctor [RECIPE.toml] [--site SITE] [--run-dir DIR] [--nodes] [--option value ...]

Checks this login node for the needs of the recipe: Slurm and the site's partitions, the run directory, packages, the
model. One line each; the exit status is 1 if anything fails. A Slurm that does not answer is a failure with --site,
$HPCRL_SITE, --time, --layout, --set or --nodes, else a warning.

  --site SITE      site profile, a name or a path (default: $HPCRL_SITE, or the built-in one)
  --time, --layout, --set KEY=VALUE ...    as for hpcrl submit
  --nodes          also submit a short job of the run's shape that checks the nodes: the run directory seen from
                   each, network, ports, clocks, versions, GPUs and what they need, host memory
  --wait SECONDS   limit of that job from submission to its end (default: 900)
  --help           this text

It also takes the options of hpcrl run. Without a recipe it checks only the site and this node."""
OWN = {
    **FLAGS,
    "nodes": Kind("bool"),
    "wait": Kind("float"),
}
WAIT = 900.0  #: seconds
LIMIT = "15:00"  #: the short job's time limit


@dataclass(frozen=True)
class Case:
    """What is looked at.

    Attributes:
        stages: resolved options of each stage, none without a recipe.
        directory: of the run to be.
        asked: whether the user has named a site or wants a job; if not, this may be a machine without a cluster.
    """

    site: SiteProfile
    stages: tuple[Options, ...]
    directory: Path
    recipe: Recipe | None = None
    asked: bool = True

    def sight(self) -> HostView:
        """What this machine can see of the run's: what `hpcrl submit` takes it to see."""
        return sight_of(self.site, self.recipe, str(self.directory)) if self.recipe else NOTHING

    def request(self) -> AllocationRequest:
        """The allocation of the run; without a recipe one node of each component that the site describes, or two that
        are alike."""
        if self.stages:
            return make_request(self.stages, self.site)
        if self.site.layout != "heterogeneous" and nodes_are_alike(self.site):
            all_nodes = self.site.trainer
            both = Component("trainer", 2, all_nodes.gpus_per_node or 0, all_nodes.cpus_per_node)
            return AllocationRequest("homogeneous", (both,), margin=60)
        named = [name for name in ("trainer", "engine", "rollout", "sandbox") if self.site.describes(name)]
        parts = [(name, getattr(self.site, name)) for name in named or ["trainer"]]
        return AllocationRequest(
            self.site.layout or "heterogeneous",
            tuple(Component(n, 1, c.gpus_per_node or 0, c.cpus_per_node) for n, c in parts),
            margin=60,
        )


def main(argv: Sequence[str]) -> int:
    """`hpcrl doctor ...`; returns the exit status."""
    overrides, given, words = parse_flags(argv, OWN)
    site = from_flags(given)
    recipe = load_recipe(choose_recipe(words, None, "hpcrl doctor")) if words else None
    asked = bool(given.keys() & {*FLAGS, "nodes"} or os.environ.get("HPCRL_SITE"))
    case = Case(site, *_stages(recipe, site.options(recipe, overrides) if recipe else overrides), recipe, asked)
    findings = []
    for finding in login(case, find_profile(given.get("site") or os.environ.get("HPCRL_SITE") or "default")):
        findings.append(finding)
        show([finding])
    if given.get("nodes") and failed(findings):
        print("hpcrl: the nodes were not checked: fix the failures above first", file=sys.stderr)
    elif given.get("nodes"):
        found = nodes(case, given.get("wait", WAIT))
        findings += found
        show(found)
    count = {level: sum(finding.level == level for finding in findings) for level in ("ok", "warn", "fail")}
    print(f"{count['ok']} ok, {count['warn']} to look at, {count['fail']} failed")
    return 1 if failed(findings) else 0


def _stages(recipe: Recipe | None, overrides: dict[str, Any]) -> tuple[tuple[Options, ...], Path]:
    """(options of each stage, run directory): placeholders of the run stay, since it is not there yet."""
    name = recipe.name if recipe else "hpcrl"
    values = {**(recipe.values if recipe else {}), **overrides}
    given = values.get("run_dir") or Options.model_fields["run_dir"].default
    directory = Path(given.format(name=name, time=time.strftime("%Y%m%d-%H%M%S", time.gmtime()))).absolute()
    if recipe is None:
        return (), directory
    places = {"run": str(directory), "prepared": str(directory / "prepared")}
    return resolve_stages(recipe, overrides, places), directory


# ---- the login node


def login(case: Case, profile: Path | None) -> Iterator[Finding]:
    """Everything that can be known here."""
    site = case.site
    yield Finding("ok", "", f"site {site.name}: {profile or 'built in'}")
    # with another interpreter or image on the nodes, packages here are those of the command alone
    same = site.python in (None, sys.executable) and site.container.kind == "none"
    yield from packages.check_packages(roles=same)
    if same:
        yield from check_gpu_needs(needs(case.stages) if gpus_are_here() else ())
    yield check_kinds({options.sandbox_kind for options in case.stages if options.sandbox_kind})
    try:
        request = case.request()
    except UsageError as error:
        yield Finding("fail", "", error.what, error.hint)
        request = None
    if request is not None:
        yield from _slurm(case, request)
    models = sorted({options.hf_checkpoint for options in case.stages if options.hf_checkpoint})
    several = request is None or sum(component.nodes for component in request.components) > 1
    found = [path for path in models if not Path(path).is_relative_to(case.directory)]
    yield from directories.check_storage(
        case.directory, several, max((directories.total(Path(path)) for path in found), default=0)
    )
    yield from _settings(case, request)
    for path in (path for path in found if Path(path).exists() or not case.sight().files):
        yield from directories.check_model_directory(path)
    yield from first_rows.findings(case.stages)
    yield from _begins_with(case)
    yield from _image(site)


def _settings(case: Case, request: AllocationRequest | None) -> Iterator[Finding]:
    """What `hpcrl submit` would refuse of the options."""
    if request is None:
        return
    try:
        refuse_settings(case.stages, lambda _: request.hosts(), same_packages(case.site))
    except UsageError as error:
        yield from (Finding("fail", "", part.what, part.hint) for part in parts_of(error))


def _begins_with(case: Case) -> Iterator[Finding]:
    """What the run begins with and `hpcrl submit` would miss here."""
    yield from (Finding("fail", "", error.what, error.hint) for error in absent(case.stages, case.sight()))
    if case.recipe is not None:
        paths = dict.fromkeys(path for options in case.stages for _, path in begins_with(options))
        for path in (path for path in paths if made_by_run(case.recipe, str(case.directory), path)):
            yield Finding("ok", "", f"{path} will be created by the run")


def _slurm(case: Case, request: AllocationRequest) -> Iterator[Finding]:
    """Whether Slurm answers, can hold the run, and would take its request: limits of accounts, features, GPU
    types."""
    found = list(responds())
    if failed(found) and not case.asked:
        means = "no Slurm answers here: hpcrl run trains without, on this machine; hpcrl submit would fail"
        yield from (Finding("warn", "", each.what, f"{means} ({each.hint})") for each in found)
        return
    if not failed(found):
        found += judge_request(case.site, request)
    yield from found
    if failed(found):
        return
    verdict = test_only(_script(case.site, request, case.directory), SECONDS)
    if verdict.never:
        what = f"Slurm refuses a job like this run's: {verdict.text}"
        yield Finding("fail", "", what, verdict.hint)
    elif not verdict.accepted:
        hint = "a job that can start once other nodes are up is taken, and waits; else " + verdict.hint
        yield Finding("warn", "", f"sbatch --test-only of a job like this run's: {verdict.text}", hint)
    else:
        yield Finding("ok", "", "Slurm takes a job like this run's (sbatch --test-only)")


def _image(site: SiteProfile) -> Iterator[Finding]:
    image = site.container.image
    if image and image.startswith("/") and not Path(image).exists():
        yield Finding("fail", "", f"container.image {image} does not exist", "build or copy it, or name another")
    for mount in site.container.mounts:
        if not Path(source := mount.partition(":")[0]).exists():
            yield Finding("warn", "", f"container.mounts: {source} is not on this node", "it must be on the nodes")


# ---- the nodes


def nodes(case: Case, seconds: float) -> list[Finding]:
    """Submit the short job, wait for it at most `seconds`, and return what it found; its directory is removed."""
    directory = case.directory.parent / f".hpcrl-doctor-{time.strftime('%H%M%S')}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, mode=0o700)
        result = partial(read_if_whole, directory / "findings.json", list[Finding])
        return run_job(job(case, directory), directory, result, Deadline(seconds), "looks at the nodes")
    except HpcrlError as error:
        return [Finding("fail", "", error.what, error.hint)]
    except OSError as error:
        return [Finding("fail", "", f"cannot write {directory}: {error.strerror}", "choose another --run-dir")]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def job(case: Case, directory: Path) -> str:
    """The short job's script, of the run's own shape; puts what it needs into `directory`."""
    request = msgspec.structs.replace(case.request(), margin=60)
    interface = next((options.interface for options in case.stages if options.interface), case.site.interface)
    apart = any(part.name == "engine" for part in request.components)  # else the trainer's nodes have engines too
    steps = []
    for part in request.components:
        gpus = 0 if getattr(case.site, part.name).gpus_per_node == 0 else None
        role = part.name if apart else ""
        wanted = needs(case.stages, role) if part.name in ("trainer", "engine") else None
        memory = max(map(_host_memory, case.stages), default=0.0) if part.name == "trainer" else 0.0
        steps.append(NodeStep(part.name, part.nodes, part.slots, gpus=gpus, needs=wanted, memory=memory))
    todo = NodesJob(
        steps,
        interface,
        echoes=ECHOES,
        seconds=case.site.launch_timeout,
    )
    write_atomic(directory / "job.json", msgspec.json.encode(todo))
    return _script(case.site.model_copy(update={"time": LIMIT, "requeue": False}), request, directory)


def _host_memory(options: Options) -> float:
    """Bytes that the plan takes of a host's memory, 0 where it cannot be estimated."""
    if options.debug_rollout_only or not options.bf16:  # in fp32 it is on CPUs
        return 0.0
    try:
        config = read_config(options.hf_checkpoint or "")
        family = find_family(config, options.hf_checkpoint or "")
    except DataError:
        return 0.0  # told by itself
    return sum(taken_on_host(options, family, config).values())


def _script(site: SiteProfile, request: AllocationRequest, directory: Path) -> str:
    title, module = "hpcrl doctor: looks at the nodes that a run would get", "hpcrl.launch.node_checks.all_nodes"
    return short_script("doctor", title, module, directory, site, request)
