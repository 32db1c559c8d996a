"""Site profiles: what a Slurm cluster wants to be told, its place in sbatch and srun.

    account = "myproject"
    time = "12:00:00"
    [trainer]
    gpus_per_node = 4

Invariants: a profile is frozen and whole; an option that the batch script sets itself cannot be given a second time
through `extra`.  Values are data: code that writes them into a script quotes them.  Only `setup` holds shell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.launch.container import Container
from hpcrl.launch.site_nodes import fitted_nodes

_SPAN = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


def minutes(text: str) -> int:
    """A length of time as whole minutes, rounded up: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        UsageError: for another form, and for zero, which Slurm takes for no limit at all.
    """
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise UsageError(f"time {text}: not a time limit", "write minutes, H:MM:SS or D-HH:MM:SS")
    days, a, b, c = (int(part or 0) for part in found.groups())
    if found["d"] is not None:
        seconds = ((days * 24 + a) * 60 + b) * 60 + c
    elif found["c"] is not None:
        seconds = (a * 60 + b) * 60 + c
    else:
        seconds = a * 60 + b
    if seconds == 0:
        raise UsageError(
            f"time {text}: a run needs a time limit to save before", "give the longest that the partition allows"
        )
    return -(-seconds // 60)


def _time(text: str) -> str:
    try:
        minutes(text)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return text


#: sbatch options that the rendered script sets itself -> how to say it instead ("": not at all)
OURS = {
    **dict.fromkeys(("time", "exclusive", "requeue"), "the key of that name at the top"),
    **dict.fromkeys(("account", "qos", "reservation"), "the key of that name, at the top or of the component"),
    **dict.fromkeys(("dependency", "kill-on-invalid-dep"), "--after, or the key after at the top"),
    **dict.fromkeys(("no-requeue",), "requeue = false at the top"),
    **dict.fromkeys(("partition", "constraint", "mem"), "the key of that name of the component"),
    **dict.fromkeys(("gpus-per-node", "gres", "gpus", "gpus-per-task"), "gpus_per_node and gpu_type"),
    **dict.fromkeys(("cpus-per-task",), "cpus_per_node"),
    **dict.fromkeys(("signal",), "signal_margin"),
    **dict.fromkeys(("array",), "a loop around hpcrl submit, a job for each run"),
    **dict.fromkeys(("exclude",), "exclude, a list at the top"),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "--actor-num-nodes and --rollout-num-gpus"),
    **dict.fromkeys(
        (
            "chdir",
            "comment",
            "error",
            "export",
            "hetjob",
            "job-name",
            "open-mode",
            "output",
            "parsable",
            "test-only",
            "wrap",
        ),
        "",
    ),
}


class ComponentProfile(BaseModel):
    """What one component of the job asks for, on each of its nodes; None is left to Slurm's default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    gpus_per_node: int | None = Field(
        None,
        ge=0,
        description="GPUs that a node has; None: as many as the options ask for; 0: it has none, slots are processes",
    )
    cpus_per_node: int | None = Field(
        None,
        ge=1,
        description="processors that a node gives to the job, as Slurm counts them: hardware threads where "
        "cores have several and the job is not kept to one of each",
    )
    mem: str | None = Field(None, pattern=r"^\d+[KMGT]?$", description='memory a node, such as "64G"; "0" is all of it')
    partition: str | None = Field(
        None, description="Slurm partition; of several, with commas, the first that can start the job"
    )
    account: str | None = Field(None, description="the project that pays for these nodes; None: the one at the top")
    qos: str | None = Field(None, description="quality of service of these nodes; None: the one at the top")
    reservation: str | None = Field(None, description="reservation of these nodes; None: the one at the top")
    constraint: str | None = Field(None, description="node features, as sbatch --constraint takes them")
    gpu_type: str | None = Field(None, pattern=r"^[\w.-]+$", description="the type in --gpus-per-node=TYPE:N")
    extra: dict[str, str | int | bool] = Field(
        {}, description="further sbatch options, without dashes; true: without a value"
    )

    @model_validator(mode="after")
    def _extra_is_not_ours(self) -> ComponentProfile:
        for name in self.extra:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise ValueError(f"extra.{name} is not the name of an sbatch option; write it long, without the dashes")
            if name in OURS:
                raise ValueError(
                    f"extra.{name} is set by hpcrl; " + (f"use {OURS[name]}" if OURS[name] else "leave it out")
                )
        return self


class SiteProfile(BaseModel):
    """A Slurm cluster.  docs/slurm.md explains the keys; sites/default.toml holds them all."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field("default", pattern=r"^[\w.-]+$", description="the profile's name")
    account: str | None = Field(None, description="the project that pays")
    time: Annotated[str, AfterValidator(_time)] = Field("24:00:00", description="time limit of one attempt, D-HH:MM:SS")
    layout: Literal["heterogeneous", "homogeneous"] | None = Field(
        None,
        description="one heterogeneous job, or one ordinary job split by node range; None: ordinary where "
        "trainer.gpus_per_node is set and the engines' nodes are described as the trainers' or not at all",
    )
    rank_launcher: Literal["torchrun", "ranks"] = Field(
        "torchrun", description="torchrun: one task a node, which starts torchrun; ranks: srun starts one task a slot"
    )
    launch_timeout: float = Field(120.0, gt=0, description="seconds until every node must have answered")
    shared_nodes: bool = Field(
        False,
        description="let an engine lie on several nodes of a job that other users may share (docs/security.md); "
        "otherwise that is an error",
    )
    interface: str | None = Field(
        None,
        pattern=r"^[\w.-]+$",
        description="network of sockets, gloo and NCCL: an interface, or how its name begins",
    )
    qos: str | None = Field(None, description="quality of service")
    reservation: str | None = Field(None, description="reservation")
    after: str | None = Field(
        None,
        pattern=r"^\d+(:\d+)*$",
        description="numbers of jobs that must succeed first, with colons (--after)",
    )
    gpu_flag: Literal["gpus-per-node", "gres", "none"] = Field(
        "gpus-per-node", description="how GPUs are requested at the site; none: whole nodes come with theirs"
    )
    mark: bool = Field(True, description="put the run's identity into the job's comment; false where the site reads it")
    srun: list[str] = Field([], description="arguments of every srun, such as --cpu-bind=cores")
    modules: list[str] = Field([], description="modules to load, in order")
    setup: list[str] = Field([], description="shell lines before anything else of hpcrl, on every node")
    env: dict[str, str] = Field({}, description="environment of all processes")
    container: Container = Field(default_factory=Container, description="the container that the processes run in")
    trainer: ComponentProfile = Field(default_factory=ComponentProfile, description="the nodes of the trainer ranks")
    engine: ComponentProfile = Field(default_factory=ComponentProfile, description="the nodes of the engines")
    rollout: ComponentProfile = Field(
        default_factory=ComponentProfile, description="the node of the rollout process, if it has its own"
    )
    sandbox: ComponentProfile = Field(
        default_factory=ComponentProfile, description="the nodes of --sandbox-on nodes, which need no GPU"
    )
    exclusive: bool = Field(False, description="whole nodes")
    exclude: list[str] = Field(
        [], description="nodes to leave out; those that a run finds broken are added for its next start"
    )
    requeue: bool = Field(True, description="resume by requeueing after a time limit, preemption or a failed node")
    max_requeues: int = Field(20, ge=0, description="how often at most")
    signal_margin: int | None = Field(None, ge=60, description="seconds before the time limit to save; None: measured")
    scratch: str | None = Field(
        None, pattern=r"^(/|\$\w+)", description="node-local directory; $NAME is expanded on the node"
    )
    python: str | None = Field(None, description="the interpreter on the nodes; None: the one of the login node")

    @model_validator(mode="after")
    def _names(self) -> Self:
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"env.{name} is not the name of an environment variable")
        return self

    @model_validator(mode="after")
    def _srun_takes_options(self) -> Self:
        for word in self.srun:
            if not word.startswith("-"):
                raise ValueError(f"srun: {word} is not an option; write --name=value as one word")
        return self

    def options(self, recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """`overrides` with the options that this site sets and neither recipe nor flags do, and with the recipe's
        trainers on nodes of its size."""
        said = recipe.options_set(overrides)
        own = {"interface": self.interface} if self.interface is not None and "interface" not in said else {}
        return {**own, **fitted_nodes(recipe, overrides, self.trainer.gpus_per_node), **overrides}

    def again(self) -> Self:
        """What the run waited for has ended."""
        return self.model_copy(update={"after": None})

    def describes(self, component: str) -> bool:
        """Whether the component has a separate partition."""
        return bool(getattr(self, component).partition)

    def gpus(self, component: str, count: int) -> str | None:
        """The sbatch option that asks for `count` GPUs a node of a component, without dashes; None for none."""
        if (
            not count or self.gpu_flag == "none" or getattr(self, component).gpus_per_node == 0
        ):  # 0: slots are processes
            return None
        kind = getattr(self, component).gpu_type
        wanted = f"{kind}:{count}" if kind else str(count)
        return f"gpus-per-node={wanted}" if self.gpu_flag == "gpus-per-node" else f"gres=gpu:{wanted}"

    def wrap(self, command: list[str], mounts: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        """(arguments for srun, command) to run `command` as this site wants it.

        Args:
            mounts: what the run needs besides.
        """
        more, command = self.container.wrap(command, mounts, tuple(self.env))
        return [*self.srun, *more], command
