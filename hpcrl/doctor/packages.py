"""Whether the installed packages are those that pyproject.toml asks for.

Invariant: versions come from the packages' metadata; nothing that is checked is imported.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hpcrl.utils.check_results import Finding
from hpcrl.utils.installed import version
from hpcrl.utils.untrusted_files import read_given

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
MEND = "see docs/install.md"


def requirements() -> list[str]:
    """hpcrl's requirements, extras marked as in metadata; of the installed package, or of pyproject.toml next to it."""
    try:
        return importlib.metadata.requires("hpcrl") or []
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads(read_given(PYPROJECT))["project"]
    lines = list(project["dependencies"])
    for extra, items in project["optional-dependencies"].items():
        lines += [f'{item}; extra == "{extra}"' for item in items]
    return lines


def check_packages(
    roles: bool, installed: Callable[[str], str | None] = version, lines: Iterable[str] | None = None
) -> Iterator[Finding]:
    """Every package that does not fit, or one line that all do.

    Args:
        roles: also what trainer and engines need; for them a misfit is a warning, since a login node may have less than
            the nodes have.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Finding(
            "warn", "", "the package packaging is not installed: versions were not compared", "pip install packaging"
        )
        return
    parsed = [Requirement(line) for line in (requirements() if lines is None else lines)]
    torch = installed("torch")
    # the CPU builds are marked in torch's version; the wheels of the registry are CUDA builds
    kinds = ("roles", "cpu" if torch and torch.endswith("+cpu") else "gpu") if roles else ()
    wrong = 0
    for extra in ("", *kinds):
        for need in parsed:
            if need.name == "hpcrl" or not _applies(need, extra):
                continue
            found = installed(need.name)
            if found and need.specifier.contains(found, prereleases=True):
                continue
            wrong += 1
            state = f"is {found}" if found else "is not installed"
            yield Finding("warn" if extra else "fail", "", f"{need.name} {state}, {need.specifier} is needed", MEND)
    if not wrong:
        shown = ", ".join(
            f"{name} {found}" for name in ("torch", "vllm", "megatron-core") if (found := installed(name))
        )
        yield Finding("ok", "", f"packages fit pyproject.toml{f' ({shown})' if shown and roles else ''}")


def _applies(need: object, extra: str) -> bool:
    marker = need.marker  # type: ignore[attr-defined]
    if marker is None:
        return extra == ""
    return marker.evaluate({"extra": extra}) and (extra == "" or not marker.evaluate({"extra": ""}))
