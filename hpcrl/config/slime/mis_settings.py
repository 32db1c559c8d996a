"""Settings of slime's MIS example (examples/train_infer_mismatch_helper/mis.yaml) as options of hpcrl's.

Invariant: what is written computes the weights and rejections that slime's example computes from the same file; a
setting that has no counterpart is refused by its name, and never left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.custom_settings import read_yaml
from hpcrl.errors import UsageError

FLAG = "--custom-config-path"
#: setting of slime's -> our option
WEIGHTS = {
    "tis_level": "tis-level",
    "tis_mode": "tis-mode",
    "tis_upper_bound": "tis-clip",
    "tis_lower_bound": "tis-clip-low",
}
#: the same, of those that slime reads with use_rs alone
REJECTION = {
    name: name.replace("_", "-") for name in ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")
}
SWITCHES = ("use_tis", "use_rs", "tis_batch_normalize")


def reads_as_mis(path: str) -> bool:
    """Whether a function's path is that of slime's example, or hpcrl's name of the same."""
    example = path.rpartition(".")[2] in ("compute_mis_weights", "compute_mis_weights_with_cp")
    return path == "mis" or (path.startswith("examples.") and example)


def mis_flags(path: str, asked: bool) -> tuple[str, ...]:
    """The command line that says what the YAML file at `path` says; () if slime corrects nothing with it.

    Args:
        asked: whether --use-tis is given, which the file's own use_tis overrides in slime.

    Raises:
        UsageError: if it cannot be read, or holds something else than settings of MIS that hpcrl has.
    """
    found = read_yaml(Path(path), FLAG)
    if not isinstance(found, dict):
        raise UsageError(f"{FLAG} {path} is not a table of names and values")
    if not found.get("use_tis", asked) and not asked:
        return ()
    _check(found, path)
    given = {name: value for name, value in found.items() if value is not None}
    if given["tis_mode"] != "truncate" and "tis_lower_bound" not in given:
        given["tis_lower_bound"] = 1.0 / given["tis_upper_bound"]  # as slime's example does
    words = ["--use-tis"]
    for name, flag in WEIGHTS.items():
        words += [f"--{flag}", str(given[name])] if name in given else []
    if given.get("use_rs"):
        words.append("--use-rs")
        for name, flag in REJECTION.items():
            words += [f"--{flag}", str(given[name])] if name in given else []
    return (*words, *(["--tis-batch-normalize"] if given.get("tis_batch_normalize") else []))


def _check(found: Mapping[Any, Any], path: str) -> None:
    where = f"{FLAG} {path}"
    if unknown := [str(name) for name in found if name not in (*WEIGHTS, *REJECTION, *SWITCHES)]:
        raise UsageError(
            f"{where}: {', '.join(unknown)}: not settings of MIS that hpcrl has",
            "remove it; settings of other custom functions belong in [custom] of the recipe",
        )
    for name in SWITCHES:
        if not isinstance(found.get(name, False), bool | None):
            raise UsageError(f"{where}: {name} is neither true nor false")
    if not found.get("use_tis", True):
        raise UsageError(f"{where}: use_tis: false leaves no correction, and --use-tis is given", "leave --use-tis out")
    needed = [*(name for name in WEIGHTS if name != "tis_lower_bound"), *(["rs_level"] if found.get("use_rs") else [])]
    if missing := [name for name in needed if found.get(name) is None]:
        raise UsageError(f"{where}: {', '.join(missing)} is missing", "slime's example needs it too")
    for name in ("tis_upper_bound", "tis_lower_bound", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"):
        value = found.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise UsageError(f"{where}: {name}: {value} is not a number above 0", "YAML needs a dot in it: 1.0e-4")
