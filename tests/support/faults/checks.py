"""What must hold of a run directory after any fault, against a run with the same options that nobody disturbed.

Invariant: everything is compared bit for bit but times and speeds, and the names that runs give themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import HpcrlError
from hpcrl.models.files.torch_dist import TorchDist
from tests.support.ledger_account import account
from tests.support.runs import metrics, samples

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass
class Reference:
    """An untouched run.  checkpoints: name -> what its files hold."""

    steps: Mapping[int, Mapping[str, float]]
    samples: Mapping[str, bytes]
    checkpoints: Mapping[str, Mapping[str, str]]
    groups: int

    @classmethod
    def of(cls, root: Path) -> Reference:
        found = {path.name: contents(path) for path in (root / "checkpoints").glob("iter_*")}
        return cls(metrics(root), samples(root), found, account(root).trained)


def contents(checkpoint: Path) -> dict[str, str]:
    """file -> what it holds, of all files of a checkpoint; of its record what does not name the run."""
    found = {}
    for path in sorted(checkpoint.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if path.name == ".metadata":  # names directories: of it only what every file must hold is compared
            data = _whole(path.parent).encode()
        if path.name == "hpcrl.json":
            record = json.loads(data)
            data = json.dumps([record["rollout_id"], record["version"], record["data"]]).encode()
        found[str(path.relative_to(checkpoint))] = hashlib.sha256(data).hexdigest()
    return found


def _whole(checkpoint: Path) -> str:
    """The tensors of a checkpoint whose files are all there and long enough; else what is wrong."""
    try:
        return "\n".join(sorted(TorchDist(checkpoint).all))
    except HpcrlError as error:
        return str(error)


def wrong_in(root: Path, reference: Reference, finished: bool = False) -> list[str]:
    """What is not as it must be, one line each."""
    if not (root / "options.json").exists():
        return []  # it was struck before it had begun
    wrong = list(account(root).wrong)
    steps = metrics(root)
    wrong += [f"step {step} differs" for step, row in steps.items() if row != reference.steps.get(step)]
    if list(steps) != list(range(len(steps))):
        wrong.append(f"steps {list(steps)} are not in a row")
    for name, data in samples(root).items():
        if data != reference.samples.get(name):
            wrong.append(f"samples/{name} differs")
    wrong += _checkpoints(root / "checkpoints", reference)
    if finished:
        found = account(root)
        if found.trained != reference.groups:
            wrong.append(f"{found.trained} groups are trained, {reference.groups} of the untouched run")
        for what, ours, theirs in (("steps", steps, reference.steps), ("samples", samples(root), reference.samples)):
            if ours.keys() != theirs.keys():
                wrong.append(f"not all {what} are there")
        wrong += [
            f"{path.relative_to(root)} is left"
            for path in root.rglob(".*")
            if path.name not in (".done", ".metadata")
            and path.relative_to(root).parts[0] != "code"  # the user's, as it was
            and path.is_file()
            and not path.is_symlink()  # submitit leaves links
        ]
    return wrong


def _checkpoints(folder: Path, reference: Reference) -> list[str]:
    wrong, tracker = [], folder / TRACKER
    for path in folder.glob("iter_*"):
        theirs = reference.checkpoints.get(path.name)
        if theirs is None:
            wrong.append(f"{path.name} is a checkpoint that the untouched run has not")
        elif (ours := contents(path)) != theirs:
            names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            wrong.append(f"{path.name} is damaged or differs: {', '.join(names)}")
    if tracker.exists() and not (folder / f"iter_{int(tracker.read_text()):07d}").is_dir():
        wrong.append(f"the tracker names {tracker.read_text()}, which is not there")
    return wrong
