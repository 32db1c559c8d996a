"""Site profiles: what a cluster wants to be told, in one TOML file a site.

    scheduler = "slurm"
    account = "myproject"
    time = "12:00:00"
    [trainer]
    gpus_per_node = 4

What every scheduler needs is here; the keys of one of them are in the subclass of `SiteProfile` that it names (its
`profile`).

Invariants: a Site is frozen and whole; an unknown key, a value of the wrong type, a control character or a placeholder
that was not filled in is one UsageError naming the file and the key.  Values are data: code that writes them into a
script quotes them.  Only `setup` holds shell.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpcrl.config.recipe import Recipe
from hpcrl.config.setting_names import nearest, spell
from hpcrl.config.value_types import Kind
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.container import Container
from hpcrl.launch.nodes_of_site import fitted_nodes
from hpcrl.launch.scheduler_names import DEFAULT, find_scheduler
from hpcrl.shipped_files import shipped
from hpcrl.untrusted_files import parse_toml, read_given

#: `<your account>`: what an example leaves to its reader
PLACEHOLDER = re.compile(r"<[A-Za-z](?:[A-Za-z0-9 ,.'_-]*[A-Za-z0-9])?>")
_SPAN = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


def minutes(text: str) -> int:
    """A length of time as whole minutes, rounded up: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        UsageError: for another form, and for zero, which schedulers take for no limit at all.
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


class ComponentProfile(BaseModel):
    """What one component of the job asks for, on each of its nodes; None is left to the scheduler's default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    gpus_per_node: int | None = Field(
        None,
        ge=0,
        description="GPUs that a node has; None: as many as the options ask for; 0: it has none, slots are processes",
    )
    cpus_per_node: int | None = Field(
        None,
        ge=1,
        description="processors that a node gives to the job, as its scheduler counts them: hardware threads where "
        "cores have several and the job is not kept to one of each",
    )
    mem: str | None = Field(None, pattern=r"^\d+[KMGT]?$", description='memory a node, such as "64G"; "0" is all of it')
    extra: dict[str, str | int | bool] = Field(
        {}, description="further options of the scheduler's, by name; true: without a value"
    )


class SiteProfile(BaseModel):
    """A cluster, as a run sees it, whatever schedules its jobs; a scheduler's own keys are in a subclass."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field("default", pattern=r"^[\w.-]+$", description="the profile's name")
    scheduler: str = Field(DEFAULT, description="who starts jobs")
    account: str | None = Field(None, description="the project that pays")
    time: Annotated[str, AfterValidator(_time)] = Field("24:00:00", description="time limit of one attempt, D-HH:MM:SS")
    layout: Literal["heterogeneous", "homogeneous"] | None = Field(
        None,
        description="one heterogeneous job, or one ordinary job split by node range; None: ordinary where "
        "trainer.gpus_per_node is set and the engines' nodes are described as the trainers' or not at all",
    )
    rank_launcher: Literal["torchrun", "ranks"] | None = Field(
        None,
        description="as --rank-launcher, for a site whose job steps should start every rank themselves; None: the "
        "recipe's",
    )
    launch_timeout: float | None = Field(
        None, gt=0, description="as --launch-timeout, for a site whose images take long to start; None: the recipe's"
    )
    interface: str | None = Field(
        None,
        pattern=r"^[\w.-]+$",
        description="network of sockets, gloo and NCCL: an interface, or how its name begins",
    )
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

    def options(self, recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """`overrides` with the options that this site sets and neither recipe nor flags do, and with the recipe's
        trainers on nodes of its size."""
        mine = {name: getattr(self, name) for name in ("interface", "rank_launcher", "launch_timeout")}
        said = recipe.said(overrides)
        own = {name: value for name, value in mine.items() if value is not None and name not in said}
        return {**own, **fitted_nodes(recipe, overrides, self.trainer.gpus_per_node), **overrides}

    def again(self) -> Self:
        """The site for another start of the same run: without what held for the first alone."""
        return self

    def describes(self, component: str) -> bool:
        """Whether it says where the component's nodes come from; a rollout process that it describes gets a node of its
        own."""
        return getattr(self, component) != type(getattr(self, component))()


# ---- reading


def load_site(name_or_path: str | None = None, overrides: Mapping[str, Any] | None = None) -> SiteProfile:
    """The profile of that path or name, with `overrides` by dotted key; None: $HPCRL_SITE, or else "default".

    A name is NAME.toml in one of `folders()`. "default" needs no file.

    Raises:
        UsageError: names file and key.
    """
    name = name_or_path or os.environ.get("HPCRL_SITE") or "default"
    file = find_profile(name)
    where = str(file) if file else f"site {name}"
    values = _read(file) if file else {}
    values.setdefault("name", file.stem if file else name)
    for key, value in _scheduler_first(overrides or {}):
        values = _put(values, key, value, where)
    return _make(values, where)


def apply(site: SiteProfile, overrides: Mapping[str, Any]) -> SiteProfile:
    """The site with values replaced by dotted key, such as {"trainer.partition": "gpu"}; text is read as the type
    needs."""
    values = site.model_dump(exclude_unset=True)
    where = f"site {site.name}"
    for key, value in _scheduler_first(overrides):
        values = _put(values, key, value, where)
    return _make(values, where)


def saved_site(values: Mapping[str, Any]) -> SiteProfile:
    """The site of a job.json.

    Raises:
        UsageError: if it cannot be read, or its scheduler is not here.
    """
    return _make(dict(values), "site in job.json")


#: a command's own flags that `from_flags` reads
FLAGS = {"site": Kind("str"), "time": Kind("str"), "layout": Kind("str"), "set": Kind("str", many=True)}


def from_flags(given: Mapping[str, Any], base: SiteProfile | None = None) -> SiteProfile:
    """The site of a command's own flags: --site (or `base`), with --set KEY=VALUE ..., --time and --layout."""
    changes: dict[str, Any] = {}
    if "time" in given:
        try:
            minutes(given["time"])
        except UsageError as error:
            raise UsageError(f"--{error.what}", error.hint) from None
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
    return [
        *dict.fromkeys(file.stem for folder in folders() if folder.is_dir() for file in sorted(folder.glob("*.toml")))
    ]


def find_profile(name: str) -> Path | None:
    """The file of a profile; None for the built-in "default".

    Raises:
        UsageError: lists what there is.
    """
    if "/" in name or name.endswith(".toml"):
        return Path(name).expanduser()
    for folder in folders():
        if (file := folder / f"{name}.toml").is_file():
            return file
    if name == "default":
        return None
    close = nearest(name, profile_names())
    searched = ", ".join(map(str, folders()))
    raise UsageError(
        f"--site {name}: no {name}.toml in {searched}", f"did you mean {close}?" if close else "give a path"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_given(file))
    except OSError as error:
        raise UsageError(f"cannot read the site profile {file}: {error.strerror}") from error
    except ValueError as error:  # no UTF-8 either
        raise UsageError(f"{file} is not TOML: {error}") from error
    except RecursionError:
        raise UsageError(f"{file} is nested too deep to be a site profile") from None


def _scheduler_first(overrides: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The overrides, that of the scheduler before those of the keys that only it may know."""
    return sorted(overrides.items(), key=lambda item: item[0] != "scheduler")


def _profile(values: Mapping[str, Any], where: str) -> type[SiteProfile]:
    """The model of a profile: what its scheduler adds to the keys of every site."""
    name = values.get("scheduler", DEFAULT)
    if not isinstance(name, str):
        return SiteProfile  # which refuses it
    try:
        return find_scheduler(name)().profile()
    except UsageError as error:
        raise UsageError(f"{where}: {error.what}", error.hint) from None


def _put(values: dict[str, Any], key: str, value: Any, where: str) -> dict[str, Any]:
    """`values` with one dotted key replaced; text for a key of another type is read as TOML."""
    path, site = key.split("."), _profile(values, where)
    model: type[BaseModel] | None = site
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
    place[path[-1]] = _settle(site, key, path, value)
    return trial


def _settle(site: type[SiteProfile], key: str, path: list[str], value: Any) -> Any:
    """Text as the field's own type: itself where text fits and no switch does, else what TOML makes of it."""
    switch = value in ("true", "false") and _fits(site, path, value == "true")
    if not isinstance(value, str) or (_fits(site, path, value) and not switch):
        return value
    try:
        return parse_toml(f"v = {value}")["v"]
    except (ValueError, RecursionError):
        return value  # the check of the whole names what is wrong with it


def _fits(site: type[SiteProfile], path: list[str], value: Any) -> bool:
    """Whether a value's type is right at a dotted key."""
    nested: Any = value
    for part in reversed(path):
        nested = {part: nested}
    try:
        site.model_validate(nested)
    except ValidationError as error:
        return all(problem["type"] not in _TYPE_ERRORS for problem in error.errors())
    return True


_TYPE_ERRORS = {"string_type", "int_type", "bool_type", "list_type", "dict_type", "model_type", "model_attributes_type"}


def _make(values: dict[str, Any], where: str) -> SiteProfile:
    """A checked Site of a file's values."""
    model = _profile(values, where)
    _check_keys(values, model, where)
    for key, text in _texts(values):
        if any(ord(char) < 32 or ord(char) == 127 for char in text):
            raise UsageError(
                f"{where}: {key} holds a control character: {spell(text)}", "write it on one line, without tabs"
            )
        if found := PLACEHOLDER.search(text):
            raise UsageError(f"{where}: {key} is still the placeholder {found[0]}", f"copy the file and fill in {key}")
    try:
        return model.model_validate(values)
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
    return UsageError(
        f"{where}: {shown} is an unknown key",
        f"did you mean {close}?" if close else f"there are {', '.join(model.model_fields)}",
    )


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
