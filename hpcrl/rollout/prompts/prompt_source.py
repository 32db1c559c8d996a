"""Where the next prompts come from: epochs over a prompt file or a mixture of several, a fixed shuffle in each.

Invariants: the groups that a source hands out are a pure function of the file's content, the seed and how many were
taken before; `state` holds that number, so a source that `restore`s it continues exactly where the other stopped.
Without weights every prompt comes once in an epoch, in slime's order if it is shuffled.  With weights an epoch is as
long as all files together and holds each file's share of it; a file goes through all of its prompts before one of them
comes again, across epochs.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile


def epoch_order(count: int, parts: Sequence[tuple[int, float]], seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """The prompts of an epoch, by number.

    Args:
        parts: (prompts, weight) of each file of a mixture, which lie one after another.
    """
    if not parts:
        return _permutation(count, seed + epoch, shuffle)
    taken = shares(count, [weight for _, weight in parts])
    slots = _slots(taken, seed + epoch, shuffle)
    order = np.zeros(count, np.int64)
    first = 0
    for number, ((size, _), share) in enumerate(zip(parts, taken, strict=True)):
        order[slots == number] = first + _walk(size, epoch * share, share, f"{seed}/{number}", shuffle)
        first += size
    return array("q", order.tobytes())


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """`count` divided in proportion to `weights`, to whole numbers by the largest remainder.

    Raises:
        DataError: if one gets none.
    """
    exact = [count * weight / sum(weights) for weight in weights]
    found = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for i in by_remainder[: count - sum(found)]:
        found[i] += 1
    if 0 in found:
        i = found.index(0)
        raise DataError(
            f"the weight {weights[i]:g} of --prompt-data gives none of an epoch's {count} prompts", "raise it"
        )
    return found


def _permutation(count: int, seed: int | str, shuffle: bool) -> array[int]:
    """Python's shuffle of 0 ... count - 1."""
    order = array("q", range(count))
    if shuffle:
        random.Random(seed).shuffle(order)  # type: ignore[arg-type]
    return order


def _slots(taken: Sequence[int], seed: int, shuffle: bool) -> np.ndarray:
    """int64 [sum of `taken`]: which file each place of the epoch belongs to, shuffled, or spread evenly."""
    files = np.repeat(np.arange(len(taken)), taken)
    if shuffle:
        return files[np.asarray(_permutation(len(files), f"{seed}/files", True))]
    places = np.concatenate([(np.arange(n) + 0.5) / n for n in taken])
    return files[np.lexsort((files, places))]


def _walk(size: int, start: int, count: int, seed: str, shuffle: bool) -> np.ndarray:
    """int64 [count]: the prompts `start` ... of a walk that goes through all `size` of a file again and again."""
    found = []
    while count:
        again, offset = divmod(start, size)
        here = np.asarray(_permutation(size, f"{seed}/{again}", shuffle), np.int64)[offset : offset + count]
        found.append(here)
        start, count = start + len(here), count - len(here)
    return np.concatenate(found)


# ---- the source


@dataclass(frozen=True)
class Group:
    """A prompt that is to get its responses; `number` counts the groups of the whole run."""

    number: int
    prompt: Prompt


class PromptSource:
    """Hands out groups, epoch after epoch."""

    def __init__(self, file: PromptFile, seed: int, shuffle: bool) -> None:
        self.file = file
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = self._offset = self._next = 0
        self._order = self._permutation()

    def _permutation(self) -> Sequence[int]:
        """The order of this epoch: Python's shuffle seeded with seed + epoch, as slime has it."""
        return epoch_order(len(self.file), self.file.parts, self._seed, self._epoch, self._shuffle)

    def next_groups(self, count: int) -> list[Group]:
        """The next `count` groups; an epoch that ends in the middle is followed by the next."""
        groups = []
        for _ in range(count):
            if self._offset == len(self._order):
                self._epoch = self._epoch + 1
                self._offset = 0
                self._order = self._permutation()
            groups.append(Group(self._next, self.file.prompts[self._order[self._offset]]))
            self._offset += 1
            self._next += 1
        return groups

    def metrics(self) -> dict[str, float]:
        """data/epoch: passes over the prompts that are behind, data/dropped: prompts that were too long."""
        return {"data/epoch": self._epoch + self._offset / len(self.file), "data/dropped": float(self.file.dropped)}

    def again(self, numbers: Sequence[int]) -> list[Group]:
        """The groups that were handed out under these numbers, by number."""
        found: list[Group] = []
        other = PromptSource(self.file, self._seed, self._shuffle)
        for number in sorted(numbers):
            epoch, other._offset = divmod(number, len(other._order))
            if epoch != other._epoch:
                other._epoch = epoch
                other._order = other._permutation()
            other._next = number
            found += other.next_groups(1)
        return found

    def state(self, alive: Collection[int] | None = None) -> dict[str, Any]:
        """Where the source stands, as plain JSON.

        Args:
            alive: groups that were handed out and are still needed after it.
        """
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "next_group": self._next,
            "file": {"size": self.file.size, "sha256": self.file.sha256},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: if the file has changed since, or the state is not one.
        """
        if "source" in state:
            raise DataError(
                f"the checkpoint's data position is that of --data-source-path {state['source']}, not of --prompt-data",
                "give the same source, or start a new run with --load",
            )
        try:
            epoch, offset, following = (int(state[key]) for key in ("epoch", "offset", "next_group"))
            size = state["file"]["size"]
            sha256 = state["file"]["sha256"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the checkpoint's data position is damaged: {error!r}", "resume from another checkpoint"
            ) from error
        if (size, sha256) != (self.file.size, self.file.sha256):
            raise DataError(
                f"--prompt-data {self.file.path} has changed since the checkpoint ({size} bytes then, {self.file.size} "
                "now)",
                "put the old file back, or start a new run with --load",
            )
        if epoch < 0 or following < 0 or not 0 <= offset <= len(self.file):
            raise DataError(
                "the checkpoint's data position does not fit the prompt file", "resume from another checkpoint"
            )
        self._epoch = epoch
        self._offset = offset
        self._next = following
        self._order = self._permutation()


def count_rollouts(options: Options, prompts: int, shown: str = "--prompt-data") -> int:
    """--num-rollout, or as many rollouts as --num-epoch passes over `prompts` prompts make (each epoch rounded down).

    Args:
        shown: who has the prompts, for an error.
    """
    if options.num_rollout is not None:
        return options.num_rollout
    if options.num_epoch is None:
        raise UsageError("neither --num-rollout nor --num-epoch is given", "give one of them")
    each = prompts // options.rollout_batch_size
    if each == 0:
        raise DataError(
            f"{shown} has {prompts} prompts, fewer than --rollout-batch-size {options.rollout_batch_size}",
            "lower it, or give --num-rollout instead of --num-epoch",
        )
    return options.num_epoch * each
