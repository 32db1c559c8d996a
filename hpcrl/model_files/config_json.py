"""config.json of a Hugging Face model directory, and the files of JSON beside it.

Invariant: one error text for a file that is missing, unreadable, damaged or no object, with the flag that named the
directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError

CONFIG = "config.json"
_HINT = "name a Hugging Face model directory"


def read_config(directory: str | Path, flag: str = "--hf-checkpoint") -> dict[str, Any]:
    """config.json of `directory`, which `flag` names.  DataError if it is not there or no JSON object."""
    found = read_object(Path(directory), CONFIG, flag)
    if found is None:
        raise DataError(f"{flag} {directory}: no {CONFIG} there", _HINT)
    return found


def read_object(directory: Path, name: str, flag: str = "--hf-checkpoint") -> dict[str, Any] | None:
    """The JSON object in the file `name` of a model directory; None if there is no such file.  DataError if it cannot
    be read."""
    path = directory / name
    try:
        found = json.loads(path.read_bytes())  # which takes Infinity, as some published files have it
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{flag} {directory}: {name} cannot be read: {error.strerror}", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{flag} {directory}: {name} is no JSON: {error}", "download or copy the model again"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{flag} {directory}: {name} holds no JSON object", _HINT)
    return found


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write config.json of a model directory that is being made."""
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
