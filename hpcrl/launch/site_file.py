"""Site profiles as files: one TOML file a site, found by name, changed by --set.

Invariant: an unknown key, a value of the wrong type, a control character or a placeholder that was not filled in is one
UsageError naming the file and the key.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpcrl.config.setting_names import nearest, spell
from hpcrl.config.value_types import Kind
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.site import SiteProfile, minutes
from hpcrl.utils.shipped_files import shipped
from hpcrl.utils.untrusted_files import parse_toml, read_given

#: `<your account>`: what an example leaves to its reader
PLACEHOLDER = re.compile(r"<[A-Za-z](?:[A-Za-z0-9 ,.'_-]*[A-Za-z0-9])?>")


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
    for key, value in (overrides or {}).items():
        values = _put(values, key, value)
    return _make(values, where, overrides or ())


def apply(site: SiteProfile, overrides: Mapping[str, Any]) -> SiteProfile:
    """The site with values replaced by dotted key, such as {"trainer.partition": "gpu"}; text is read as the type
    needs."""
    values = site.model_dump(exclude_unset=True)
    where = f"site {site.name}"
    for key, value in overrides.items():
        values = _put(values, key, value)
    return _make(values, where)


def saved_site(values: Mapping[str, Any]) -> SiteProfile:
    """The site of a job.json.

    Raises:
        UsageError: if it cannot be read.
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


def _put(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`values` with one dotted key replaced; text for a key of another type is read as TOML."""
    path = key.split(".")
    model: type[BaseModel] | None = SiteProfile
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
    place[path[-1]] = _settle(path, value)
    return trial


def _settle(path: list[str], value: Any) -> Any:
    """Text as the field's own type: itself where text fits and no switch does, else what TOML makes of it."""
    switch = value in ("true", "false") and _fits(path, value == "true")
    if not isinstance(value, str) or (_fits(path, value) and not switch):
        return value
    try:
        return parse_toml(f"v = {value}")["v"]
    except (ValueError, RecursionError):
        return value  # the check of the whole names what is wrong with it


def _fits(path: list[str], value: Any) -> bool:
    """Whether a value's type is right at a dotted key."""
    nested: Any = value
    for part in reversed(path):
        nested = {part: nested}
    try:
        SiteProfile.model_validate(nested)
    except ValidationError as error:
        return all(not problem["type"].endswith("_type") for problem in error.errors())
    return True


def _make(values: dict[str, Any], where: str, given: Container[str] = ()) -> SiteProfile:
    """A checked Site of a file's values.

    Args:
        given: keys whose values came from the command line.
    """
    _check_keys(values, SiteProfile, where)
    for key, text in _texts(values):
        if any(ord(char) < 32 or ord(char) == 127 for char in text):
            raise UsageError(
                f"{where}: {key} holds a control character: {spell(text)}", "write it on one line, without tabs"
            )
        if found := PLACEHOLDER.search(text):
            raise UsageError(f"{where}: {key} is still the placeholder {found[0]}", f"copy the file and fill in {key}")
    try:
        return SiteProfile.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        where = "--set" if key in given else where
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
