"""What a Slurm cluster wants to be told besides: the keys of a site's profile that only Slurm knows, and their place in
srun.

Invariant: an option that the batch script sets itself cannot be given a second time through `extra`.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from hpcrl.launch.site import ComponentProfile, SiteProfile

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


class SlurmComponent(ComponentProfile):
    """The nodes of one component; None is left to Slurm's default."""

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
    def _extra_is_not_ours(self) -> SlurmComponent:
        for name in self.extra:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise ValueError(f"extra.{name} is not the name of an sbatch option; write it long, without the dashes")
            if name in OURS:
                raise ValueError(
                    f"extra.{name} is set by hpcrl; " + (f"use {OURS[name]}" if OURS[name] else "leave it out")
                )
        return self


class SlurmSite(SiteProfile):
    """A Slurm cluster.  docs/sites.md explains the keys; sites/default.toml holds them all."""

    qos: str | None = Field(None, description="quality of service")
    reservation: str | None = Field(None, description="reservation")
    after: str | None = Field(
        None,
        pattern=r"^\d+(:\d+)*$",
        description="numbers of jobs that must have ended well first, with colons (--after)",
    )
    gpu_flag: Literal["gpus-per-node", "gres", "none"] = Field(
        "gpus-per-node", description="how GPUs are requested at the site; none: whole nodes come with theirs"
    )
    mark: bool = Field(True, description="put the run's identity into the job's comment; false where the site reads it")
    srun: list[str] = Field([], description="arguments of every srun, such as --cpu-bind=cores")
    trainer: SlurmComponent = Field(default_factory=SlurmComponent, description="the nodes of the trainer ranks")
    engine: SlurmComponent = Field(default_factory=SlurmComponent, description="the nodes of the engines")
    rollout: SlurmComponent = Field(
        default_factory=SlurmComponent, description="the node of the rollout process, if it has its own"
    )
    sandbox: SlurmComponent = Field(
        default_factory=SlurmComponent, description="the nodes of --sandbox-on nodes, which need no GPU"
    )

    @model_validator(mode="after")
    def _srun_takes_options(self) -> SlurmSite:
        for word in self.srun:
            if not word.startswith("-"):
                raise ValueError(f"srun: {word} is not an option; write --name=value as one word")
        return self

    def again(self) -> SlurmSite:
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
