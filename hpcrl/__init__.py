"""hpcrl: reinforcement-learning post-training of language models as a plain batch job.

    import hpcrl
    run = hpcrl.run("recipe.toml", num_rollout=20)      # also hpcrl.submit, hpcrl.open, hpcrl.init: hpcrl/api.py

Invariant: importing this imports nothing else; the API comes when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["OpenRun", "__version__", "init", "open", "run", "submit"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """A name of the API; `hpcrl.run` is the package of that name, which can be called (hpcrl/run/__init__.py)."""
    if name == "run":
        return importlib.import_module("hpcrl.run")
    if name in __all__:
        return getattr(importlib.import_module("hpcrl.api"), name)
    raise AttributeError(f"module hpcrl has no attribute {name}")
