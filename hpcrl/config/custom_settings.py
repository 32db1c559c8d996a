"""Settings of the user's own for custom functions: the table `[custom]` of a recipe, and the YAML file of
--custom-config-path.

Invariant: none of them is an option of hpcrl, so no check is bypassed; where a file and the table say the same, the
table counts. Of a YAML file plain values alone are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.utils.untrusted_files import read_given


def with_own_settings(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of options, with what the file at values["custom_config_path"] holds in values["custom"].

    Args:
        known: names of options, which can be no own settings.

    Raises:
        UsageError: if the file cannot be used.
    """
    path = values.get("custom_config_path")
    custom = values.get("custom", {})
    if isinstance(path, str):
        custom = {**_read(Path(path), known), **custom}
    elif not custom:
        return dict(values)
    for name in custom:
        if name in known:
            raise UsageError(f"[custom] {name} is an option of hpcrl's own", f"write {name} outside the table")
    return {**values, "custom": custom}


def _read(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    flag = "--custom-config-path"
    found, shown = read_yaml(path, flag), f"{flag} {path}"
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UsageError(f"{shown} is not a table of names and values")
    for key in found:
        name = key.replace("-", "_")
        if name in known:
            raise UsageError(
                f"{shown}: {key} is an option of hpcrl's own",
                f"write it as --{name.replace('_', '-')} or in the recipe, where it is checked",
            )
    return found


# ---- yaml file

MOST_VALUES = 100_000  #: in one file


def read_yaml(path: Path, flag: str) -> Any:
    """What it holds.

    Raises:
        UsageError: if it cannot be read, or is no YAML.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(read_given(path))
        node = loader.get_single_node()
        if node is None:
            return None
        if _values_in(node, {}) > MOST_VALUES:
            raise UsageError(f"{flag} {path} has more than {MOST_VALUES} values", "aliases (*name) count each time")
        return _built(loader, node)
    except RecursionError:
        raise UsageError(f"{flag} {path} is nested too deep, or contains itself") from None
    except OSError as error:
        raise UsageError(f"cannot read {flag} {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{flag} {path} is not YAML: {' '.join(str(error).split())}") from error


def _built(loader: Any, node: Any) -> Any:
    """The values of a document.

    Raises:
        ValueError: for a malformed value, such as a date that no calendar has.
    """
    try:
        return loader.construct_document(node)
    except (LookupError, AttributeError, TypeError, OverflowError) as error:  # of PyYAML's, for tags such as !!bool x
        raise ValueError(f"a value is not of the kind that its tag says ({type(error).__name__}: {error})") from error


def _values_in(node: Any, seen: dict[int, int]) -> int:
    """How many values a node of YAML stands for, with those of its aliases each time; RecursionError for one that holds
    itself.

    Args:
        seen: the counts of nodes that were met before, by identity.
    """
    if id(node) not in seen:
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        inner = parts if isinstance(node.value, list) else []
        seen[id(node)] = 1 + sum(_values_in(part, seen) for part in inner)
    return seen[id(node)]
