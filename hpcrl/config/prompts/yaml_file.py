"""A YAML file that an option names.  Invariant: plain values alone are read, and an error names the option and the
file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.careful_files import read_given
from hpcrl.errors import UsageError


def read_yaml(path: Path, flag: str) -> Any:
    """What it holds.  UsageError if it cannot be read, or is no YAML."""
    import yaml

    try:
        return yaml.safe_load(read_given(path))
    except OSError as error:
        raise UsageError(f"cannot read {flag} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} is not YAML: {' '.join(str(error).split())}") from error
