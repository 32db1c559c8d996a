"""Real ranks on two hosts: what is in memory is the state, bit for bit, and survives the loss of either host."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from tests.support.ranks import run_ranks
from tests.support.tiny import make_model
from tests.trainer.checkpoint.test_save_load import losses, options
from tests.trainer.step.test_invariance import VOCAB, start

pytestmark = pytest.mark.process

HOSTS = ["a", "b"]
DISK, MEMORY, END = 2, 3, 5  #: rollouts of the checkpoint on disk, of the copy, of all


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    return make_model(tmp_path_factory.mktemp("model") / "dense", tied=True, vocab_size=VOCAB, **sizes)


def train(opts: Options, root: Path) -> list[float]:
    """Train, save, train, copy, train; the losses after the checkpoint."""
    from hpcrl.trainer.checkpoint import writers
    from hpcrl.trainer.checkpoint.memory_copies import MemoryCopies
    from hpcrl.trainer.checkpoint.save_load import Position, save

    policy = start(opts)
    ranks = policy.ranks
    losses(policy, opts, DISK)
    save(policy, ranks, root / "disk", Position(DISK, DISK, {"prompt": DISK}), "run")
    after = losses(policy, opts, MEMORY - DISK)
    copies = MemoryCopies(policy, ranks, root / HOSTS[ranks.rank], HOSTS, "run", 0, 1, 1)
    if ranks.rank == 1:
        copies._send = partial(sent_late, copies._send)
    assert copies.start_copy(Position(MEMORY, MEMORY, {"prompt": MEMORY}))
    assert not copies.start_copy(Position(END, END, {})), "one is on its way"
    after += losses(policy, opts, END - MEMORY)  # changes the weights while they are written
    if copies._pending.writer is not None:
        copies._pending.writer.wait(60.0)  # so that the sending alone is late
    copies._patience = 0.0 if ranks.rank else 0.5
    copies.settle(END)
    assert copies.newest == 0 and not copies.start_copy(Position(END, END, {})), (
        "it is waited for no longer than may be"
    )
    MAY_SEND.set()
    copies._pending.late, copies._patience = False, 60.0
    copies.settle(END)
    assert copies.newest == MEMORY, "what a later step would make the newest but one is waited for"
    assert copies.spent()["perf/memory_copy_time"] > 0 == copies.spent()["perf/memory_copy_time"]
    if ranks.rank == 0:
        copies._write_position = full
    assert copies.start_copy(Position(END, END, {}))
    copies.finish()
    here = root / HOSTS[ranks.rank]
    assert copies.newest == MEMORY and not (here / f"{END}").exists(), "what fails is left out, and not left there"
    vars(copies).pop("_write_position", None)
    if ranks.rank == 1:
        writers.write_files = lambda *_: threading.Event().wait()
    assert copies.start_copy(Position(END, END, {}))
    copies._patience = 1.0
    copies.settle(END)
    copies.finish()
    assert copies._pending is None and copies.newest == MEMORY
    assert not (here / f"{END}").exists(), "a writer that waits for ever is given up"
    return after


#: set once rank 0 has waited in vain for rank 1, which sends only then
MAY_SEND = threading.Event()


def sent_late(send: Callable[[Any], None], pending: object) -> None:
    MAY_SEND.wait(60)
    send(pending)


def full(_: object) -> None:
    raise HpcrlError("no room")


def again(opts: Options, root: Path, run_id: str) -> tuple[int, Any, list[float]]:
    """(rollouts, position of the data, losses) of a run that starts again."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint.from_memory import bring_to_disk
    from hpcrl.trainer.checkpoint.resume import restore
    from hpcrl.trainer.megatron import model as models

    policy = models.build(opts, parallel_state.initialize(opts))
    ranks = policy.ranks
    bring_to_disk(ranks, root / HOSTS[ranks.rank], HOSTS, root / "disk", run_id)
    at, *_ = restore(policy, ranks, opts, root / "disk", "run")
    return at.rollout_id, at.data, losses(policy, opts, END - at.rollout_id)


def kept(_: Path) -> None:
    """All hosts are there."""


def host_lost(root: Path) -> None:
    """One host with all that was in its memory."""
    shutil.rmtree(root / "a")
    (root / "a").mkdir()


def own_cut(root: Path) -> None:
    """A part on its own host is cut: that of the partner is taken."""
    _cut(root / "a" / str(MEMORY) / "rank-00000")


def both_cut(root: Path) -> None:
    """A part is cut in both places: the disk is taken."""
    for host in HOSTS:
        _cut(root / host / str(MEMORY) / "rank-00001")


def chosen(root: Path) -> None:
    """The user has named the checkpoint on disk."""
    (root / "disk" / "ckpt_step.txt").write_text(str(DISK))


def _cut(directory: Path) -> None:
    file = max(directory.glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1000])


def test_copies_survive_ranks_and_a_host(tmp_path: Path, model: Path) -> None:
    """The newest complete step is agreed on: memory where all parts are whole in one place or the other, else disk; the
    losses are those of a run that nothing happened to, bit for bit."""
    opts = options(model, 2)
    (tmp_path / "kept").mkdir()
    answers = run_ranks(2, train, opts, tmp_path / "kept", timeout=200)
    wanted = answers[0]
    assert answers[1] == wanted
    cases: list[tuple[Callable[[Path], None], str, int]] = [
        (host_lost, "run", MEMORY),
        (own_cut, "run", MEMORY),
        (both_cut, "run", DISK),
        (chosen, "run", DISK),
        (kept, "another", DISK),
        (kept, "run", MEMORY),
    ]
    for number, (damage, run_id, step) in enumerate(cases):
        root = tmp_path / f"case-{number}"
        shutil.copytree(tmp_path / "kept", root)
        damage(root)
        found = run_ranks(2, again, opts, root, run_id, timeout=200)
        for at, data, after in found:
            assert (at, data) == (step, {"prompt": step}), damage.__doc__
            assert after == wanted[step - DISK :], damage.__doc__
