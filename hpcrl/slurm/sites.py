"""Site profiles: what a cluster wants to be told, in one TOML file a site.

    account = "myproject"
    time = "12:00:00"
    [trainer]
    partition = "gpu"
    gpus_per_node = 4

Invariants: a Site is frozen and whole; an unknown key, a value of the wrong type, a control character or a placeholder
that nobody filled in is one UsageError naming the file and the key.  Values are data: whoever writes them into a script
quotes them.  Only `setup` holds shell.
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpcrl.config.recipe import Recipe
from hpcrl.config.setting_names import nearest, spell
from hpcrl.config.value_types import Kind
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.container import Container
from hpcrl.run.shipped_files import shipped

COMPONENTS = ("trainer", "engine", "rollout")
#: `<your account>`: what an example leaves to its reader
PLACEHOLDER = re.compile(r"<[A-Za-z](?:[A-Za-z0-9 ,.'_-]*[A-Za-z0-9])?>")
#: sbatch options that the rendered script sets itself -> how to say it instead ("": not at all)
OURS = {
    **dict.fromkeys(("account", "qos", "reservation", "time", "exclusive", "requeue"), "the key of that name at the top"),
    **dict.fromkeys(("no-requeue",), "requeue = false at the top"),
    **dict.fromkeys(("partition", "constraint", "mem"), "the key of that name of the component"),
    **dict.fromkeys(("gpus-per-node", "gres", "gpus", "gpus-per-task"), "gpus_per_node and gpu_type"),
    **dict.fromkeys(("cpus-per-task",), "cpus_per_node"),
    **dict.fromkeys(("signal",), "signal_margin"),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "--actor-num-nodes and --rollout-num-gpus"),
    **dict.fromkeys(
        ("array", "chdir", "error", "hetjob", "job-name", "open-mode", "output", "parsable", "test-only", "wrap"), ""
    ),
}
_SPAN = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


def minutes(text: str) -> int:
    """Slurm's time as whole minutes, rounded up: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S (man sbatch, --time).

    UsageError for another form, and for zero, with which Slurm means no limit at all.
    """
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise UsageError(f"time {text}: not a time of Slurm's", "write minutes, H:MM:SS or D-HH:MM:SS")
    days, a, b, c = (int(part or 0) for part in found.groups())
    if found["d"] is not None:
        seconds = ((days * 24 + a) * 60 + b) * 60 + c
    elif found["c"] is not None:
        seconds = (a * 60 + b) * 60 + c
    else:
        seconds = a * 60 + b
    if seconds == 0:
        raise UsageError(f"time {text}: a run needs a time limit to save before", "give the longest that the partition allows")
    return -(-seconds // 60)


def _time(text: str) -> str:
    try:
        minutes(text)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return text


class ComponentProfile(BaseModel):
    """What one component of the job asks for, on each of its nodes; None is left to Slurm's default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    partition: str | None = Field(None, description="Slurm partition")
    constraint: str | None = Field(None, description="node features, as sbatch --constraint takes them")
    gpus_per_node: int | None = Field(
        None, ge=0, description="GPUs that a node has; None: as many as the options ask for; 0: it has none, slots are processes"
    )
    gpu_type: str | None = Field(None, pattern=r"^[\w.-]+$", description="the type in --gpus-per-node=TYPE:N")
    cpus_per_node: int | None = Field(None, ge=1, description="CPU cores that a node gives to the job")
    mem: str | None = Field(None, pattern=r"^\d+[KMGT]?$", description='memory a node, such as "64G"; "0" is all of it')
    extra: dict[str, str | int | bool] = Field({}, description="further sbatch options, without dashes; true: without a value")

    @model_validator(mode="after")
    def _extra_is_not_ours(self) -> ComponentProfile:
        for name in self.extra:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise ValueError(f"extra.{name} is no name of an sbatch option; write it long, without the dashes")
            if name in OURS:
                raise ValueError(f"extra.{name} is set by hpcrl; " + (f"use {OURS[name]}" if OURS[name] else "leave it out"))
        return self


class Site(BaseModel):
    """A cluster, as a run sees it.  docs/sites.md explains the keys; sites/default.toml holds them all."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field("default", pattern=r"^[\w.-]+$", description="the profile's name")
    account: str | None = Field(None, description="the project that pays")
    qos: str | None = Field(None, description="quality of service")
    reservation: str | None = Field(None, description="reservation")
    time: Annotated[str, AfterValidator(_time)] = Field("24:00:00", description="time limit of one attempt, D-HH:MM:SS")
    layout: Literal["heterogeneous", "homogeneous"] = Field(
        "heterogeneous", description="one heterogeneous job, or one ordinary job split by node range"
    )
    gpu_flag: Literal["gpus-per-node", "gres"] = Field("gpus-per-node", description="how the site wants GPUs asked for")
    rank_launcher: Literal["torchrun", "ranks"] | None = Field(
        None, description="as --rank-launcher, for a site where srun should start every rank itself; None: the recipe's"
    )
    interface: str | None = Field(
        None, pattern=r"^[\w.-]+$", description="network of sockets, gloo and NCCL: an interface, or how its name begins"
    )
    modules: list[str] = Field([], description="modules to load, in order")
    setup: list[str] = Field([], description="shell lines before anything else of ours, on every node")
    env: dict[str, str] = Field({}, description="environment of all processes")
    srun: list[str] = Field([], description="arguments of every srun, such as --mpi=none")
    container: Container = Field(default_factory=Container, description="the container that the processes run in")
    trainer: ComponentProfile = Field(default_factory=ComponentProfile, description="the nodes of the trainer ranks")
    engine: ComponentProfile = Field(default_factory=ComponentProfile, description="the nodes of the engines")
    rollout: ComponentProfile = Field(
        default_factory=ComponentProfile, description="the node of the rollout process, if it has its own"
    )
    exclusive: bool = Field(False, description="whole nodes")
    requeue: bool = Field(True, description="go on by requeueing after time limit, preemption or a failed node")
    max_requeues: int = Field(20, ge=0, description="how often at most")
    signal_margin: int | None = Field(None, ge=60, description="seconds before the time limit to save; None: measured")
    scratch: str | None = Field(None, pattern=r"^(/|\$\w+)", description="node-local directory; $NAME is expanded on the node")
    python: str | None = Field(None, description="the interpreter on the nodes; None: the one of the login node")

    @model_validator(mode="after")
    def _names(self) -> Site:
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"env.{name} is no name of an environment variable")
        for word in self.srun:
            if not word.startswith("-"):
                raise ValueError(f"srun: {word} is no option; write --name=value as one word")
        return self

    def options(self, recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """`overrides` with the options that this site sets and neither recipe nor flags do."""
        mine = {"interface": self.interface, "rank_launcher": self.rank_launcher}
        said = {*recipe.values, *overrides, *(name for stage in recipe.stages for name in stage.values)}
        return {**{name: value for name, value in mine.items() if value is not None and name not in said}, **overrides}

    def gpus(self, component: str, count: int) -> str | None:
        """The sbatch option that asks for `count` GPUs a node of a component, without dashes; None for none."""
        if not count or getattr(self, component).gpus_per_node == 0:  # nodes without GPUs: slots are processes
            return None
        kind = getattr(self, component).gpu_type
        wanted = f"{kind}:{count}" if kind else str(count)
        return f"gpus-per-node={wanted}" if self.gpu_flag == "gpus-per-node" else f"gres=gpu:{wanted}"

    def wrap(self, command: list[str], mounts: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        """(arguments for srun, command) to run `command` as this site wants it; `mounts`: what the run needs besides."""
        more, command = self.container.wrap(command, mounts, tuple(self.env))
        return [*self.srun, *more], command


# ---- reading


def load_site(name_or_path: str | None = None, overrides: Mapping[str, Any] | None = None) -> Site:
    """The profile of that path or name, with `overrides` by dotted key; None: $HPCRL_SITE, or else "default".

    A name is NAME.toml in one of `folders()`.  "default" needs no file.  UsageError names file and key.
    """
    name = name_or_path or os.environ.get("HPCRL_SITE") or "default"
    file = find_profile(name)
    where = str(file) if file else f"site {name}"
    values = _read(file) if file else {}
    values.setdefault("name", file.stem if file else name)
    for key, value in (overrides or {}).items():
        values = _put(values, key, value)
    return _make(values, where)


def apply(site: Site, overrides: Mapping[str, Any]) -> Site:
    """The site with values replaced by dotted key, such as {"trainer.partition": "gpu"}; text is read as the type needs."""
    values = site.model_dump(exclude_unset=True)
    for key, value in overrides.items():
        values = _put(values, key, value)
    return _make(values, f"site {site.name}")


#: a command's own flags that `from_flags` reads
FLAGS = {"site": Kind("str"), "time": Kind("str"), "layout": Kind("str"), "set": Kind("str", many=True)}


def from_flags(given: Mapping[str, Any], base: Site | None = None) -> Site:
    """The site of a command's own flags: --site (or `base`), with --set KEY=VALUE ..., --time and --layout."""
    changes: dict[str, Any] = {}
    for text in given.get("set", []):
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected KEY=VALUE", "such as --set trainer.partition=gpu")
        changes[key] = value
    changes |= {key: given[key] for key in ("time", "layout") if key in given}
    return apply(base, changes) if base else load_site(given.get("site"), changes)


def folders() -> Iterator[Path]:
    """Where profiles are looked for: $HPCRL_SITES (colons between), the user's configuration, hpcrl's own."""
    yield from (Path(part).expanduser() for part in os.environ.get("HPCRL_SITES", "").split(":") if part)
    yield Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "hpcrl" / "sites"
    with contextlib.suppress(HpcrlError):  # an installation without them has the built-in default
        yield shipped("sites")


def profile_names() -> list[str]:
    """The profiles that can be named, in order of `folders`."""
    return [*dict.fromkeys(file.stem for folder in folders() if folder.is_dir() for file in sorted(folder.glob("*.toml")))]


def find_profile(name: str) -> Path | None:
    """The file of a profile; None for the built-in "default".  UsageError lists what there is."""
    if "/" in name or name.endswith(".toml"):
        return Path(name).expanduser()
    for folder in folders():
        if (file := folder / f"{name}.toml").is_file():
            return file
    if name == "default":
        return None
    close = nearest(name, profile_names())
    searched = ", ".join(map(str, folders()))
    raise UsageError(f"--site {name}: no {name}.toml in {searched}", f"did you mean {close}?" if close else "give a path")


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the site profile {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no TOML: {error}") from error


def _put(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`values` with one dotted key replaced; text for a key of another type is read as TOML."""
    path, model = key.split("."), Site
    for depth, part in enumerate(path):
        if model is None:
            break
        if part not in model.model_fields:
            raise _unknown("site", ".".join(path[: depth + 1]), part, model)
        model = _inner(model, part)
    trial: dict[str, Any] = dict(values)
    place = trial
    for part in path[:-1]:
        place[part] = dict(place.get(part) or {})
        place = place[part]
    place[path[-1]] = _settle(key, path, value)
    return trial


def _settle(key: str, path: list[str], value: Any) -> Any:
    """Text as the field's own type: itself where text fits, else what TOML makes of it."""
    if not isinstance(value, str) or _fits(path, value):
        return value
    try:
        return tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return value  # the check of the whole names what is wrong with it


def _fits(path: list[str], value: Any) -> bool:
    """Whether a value's type is right at a dotted key."""
    nested: Any = value
    for part in reversed(path):
        nested = {part: nested}
    try:
        Site.model_validate(nested)
    except ValidationError as error:
        return all(problem["type"] not in _TYPE_ERRORS for problem in error.errors())
    return True


_TYPE_ERRORS = {"int_type", "bool_type", "list_type", "dict_type", "model_type", "model_attributes_type"}


def _make(values: dict[str, Any], where: str) -> Site:
    """A checked Site of a file's values."""
    _check_keys(values, Site, where)
    for key, text in _texts(values):
        if any(ord(char) < 32 or ord(char) == 127 for char in text):
            raise UsageError(f"{where}: {key} holds a control character: {spell(text)}", "write it on one line, without tabs")
        if found := PLACEHOLDER.search(text):
            raise UsageError(f"{where}: {key} is still the placeholder {found[0]}", f"copy the file and fill in {key}")
    try:
        return Site.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "value_error":
            raise UsageError(f"{where}: {key + ': ' if key else ''}{problem['ctx']['error']}") from None
        value = spell(problem["input"])
        raise UsageError(f"{where}: {key} = {value}: {problem['msg'][0].lower()}{problem['msg'][1:]}") from None


def _check_keys(values: Mapping[str, Any], model: type[BaseModel], where: str, above: str = "") -> None:
    for key, value in values.items():
        if key not in model.model_fields:
            raise _unknown(where, f"{above}{key}", key, model)
        inner = _inner(model, key)
        if inner and isinstance(value, Mapping):
            _check_keys(value, inner, where, f"{above}{key}.")


def _inner(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The model of a nested table; None for any other field."""
    kind = model.model_fields[key].annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _unknown(where: str, shown: str, key: str, model: type[BaseModel]) -> UsageError:
    close = nearest(key, model.model_fields)
    return UsageError(f"{where}: {shown} is an unknown key", f"did you mean {close}?" if close else "see sites/default.toml")


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every text in a tree, keys included."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{key}.{name}" if key else str(name)
            yield spell(inner), str(name)
            yield from _texts(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
