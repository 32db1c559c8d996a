"""Packages in place of wandb, trackio, mlflow and pandas, for processes: they write down every call."""

from __future__ import annotations

from pathlib import Path

from tests.support.runs import REPO

STAND_IN = """\
import os, sys, time
from pathlib import Path
FOLDER = Path(os.environ["CALLS"])
class Anything:
    url = dir = run_id = experiment_id = "there"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **more: self.call(name, given, more)
    def call(self, name, given, more):
        if __name__ == os.environ.get("PACKAGES_BROKEN"):
            raise ConnectionError("no network")
        with (FOLDER / "calls").open("a") as file:
            file.write(f"{name} {given} {more}\\n")
        while os.environ.get("CALLS_WAIT") and name in ("log", "log_metrics") and not (FOLDER / "continue").exists():
            time.sleep(0.02)
        return [] if name == "search_runs" else self
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
made = Anything()
made.info = made
__getattr__ = made.__getattr__
"""


def stand_ins(folder: Path, *names: str, waits: bool = False) -> dict[str, str]:
    """The environment of a process that finds these packages; their calls are in folder/calls.

    Args:
        waits: a call with metrics waits until there is folder/continue.
    """
    for name in names:
        (folder / "packages" / name).mkdir(parents=True, exist_ok=True)
        (folder / "packages" / name / "__init__.py").write_text(STAND_IN)
    found = {"PYTHONPATH": f"{REPO}:{folder / 'packages'}", "CALLS": str(folder)}
    return found | ({"CALLS_WAIT": "1"} if waits else {})
