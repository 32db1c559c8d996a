"""One rollout ahead: what a run that goes on learns from is what it had sampled, with the weights that it has no
more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.errors import HpcrlError
from hpcrl.rollout.batch_assembly import Rollout, ages, check_staleness
from hpcrl.rollout.generation.generated_ahead import FOLDER, GeneratedAhead
from hpcrl.sample import Sample
from tests.rollout.generation.test_batch_generator import Attempt, FakeSampler
from tests.support.ledger_account import account

VALUES: dict[str, Any] = {"loop": "async", "deterministic_mode": True, "save_interval": 1}


class Ahead(Attempt):
    """The generator of --loop async with --deterministic-mode."""

    def __init__(
        self, path: Path, rollout: int = 0, state: Any = None, sampler: FakeSampler | None = None, **values: Any
    ) -> None:
        super().__init__(path, sampler or FakeSampler(), rollout, state, **(VALUES | values))
        self.ahead = GeneratedAhead(self.options, self.store, self.rundir, self.generator)
        self.ahead.start_run(rollout)

    async def made(self, rollout_id: int) -> tuple[Rollout, Any]:
        """As the loop has it: sampled with the weights of before the rollout before it; what a snapshot after it
        says."""
        made = await self.ahead.make(rollout_id, max(0, rollout_id - 1), rollout_id)
        check_staleness(made.rollout.samples(), rollout_id, self.options.staleness_bound)
        assert self.store.ledger.holds()
        return made.rollout, self.store.state(rollout_id)

    def trained(self, rollout_id: int, saved: int = 0) -> None:
        self.store.train(rollout_id, saved)
        self.ahead.prune(rollout_id, saved)


def said(rollout: Rollout) -> list[Any]:
    return [
        (
            s.group_index,
            s.response_index,
            s.array("tokens").tolist(),
            s.array("versions").tolist(),
            s.reward,
            s.metadata,
        )
        for s in rollout.samples()
    ]


@pytest.mark.parametrize("filtered", [False, True])
def test_prefetched_rollout_from_disk(tmp_path: Path, filtered: bool) -> None:
    """A rollout that was generated ahead is taken from disk."""
    more = {"dynamic_sampling_filter_path": "check_reward_nonzero_std"} if filtered else {}

    async def run() -> None:
        path = tmp_path / "run"
        first = Ahead(path, **more)
        found, states = [], []
        for rollout_id in range(4):
            rollout, state = await first.made(rollout_id)
            found.append(said(rollout))
            states.append(state)
            if rollout_id:
                first.trained(rollout_id - 1, saved=max(0, rollout_id - 1))
        # the checkpoint after rollout 1; rollouts 2 and 3 were made
        second = Ahead(path, 2, states[1], **more)
        assert [file.name for file in sorted((path / FOLDER).iterdir())] == ["00000002.made"], (
            "3 is of a history that is no more"
        )
        rollout, state = await second.made(2)
        assert said(rollout) == found[2] and rollout.version == 1 and not second.sampler.asked
        assert state == states[2]
        second.trained(2, saved=2)
        again, state = await second.made(3)
        assert said(again) == found[3] and state == states[3]
        second.trained(3, saved=2)
        accounts = account(path)
        assert not accounts.wrong and accounts.trained == 16

    asyncio.run(run())


def test_files_that_no_restart_can_ask_for_are_gone(tmp_path: Path) -> None:
    async def files(**values: Any) -> list[str]:
        attempt = Ahead(tmp_path / f"run{len(values)}", **values)
        await attempt.made(0)
        for rollout_id in range(6):
            await attempt.made(rollout_id + 1)
            attempt.trained(rollout_id, saved=4 if rollout_id > 3 else 0)
        return [file.stem for file in sorted((attempt.rundir.root / FOLDER).iterdir())]

    assert asyncio.run(files()) == ["00000004", "00000005", "00000006"], (
        "the checkpoint of version 4 goes on with rollout 4"
    )
    assert asyncio.run(files(save_interval=None)) == ["00000006"]
    in_memory = asyncio.run(files(save_interval=None, non_persistent_save_interval=1))
    assert "00000005" in in_memory, "a copy in memory goes on with a rollout that is trained by now"


def test_foreign_or_damaged_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file of another history, or a damaged one, is left out."""

    async def run() -> None:
        path = tmp_path / "run"
        first = Ahead(path)
        _, state = await first.made(0)
        await first.made(1)
        (path / FOLDER / "00000001.made").write_bytes(b"\x81")
        second = Ahead(path, 1, state)
        await second.made(1)
        assert len(second.sampler.asked) == 12
        third = Ahead(path, 1, state)
        made = await third.ahead.make(1, 0, 5)
        assert made.rollout.version == 0 and len(third.sampler.asked) == 12, (
            "it was made for a trainer at another version"
        )

    asyncio.run(run())
    assert "rollout is made again" in (said := capfd.readouterr().err) and "to another history" in said


def test_what_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    class Odd(FakeSampler):
        async def make(self, asked: Any) -> Any:
            found = await super().make(asked)
            found[0].metadata = {"x": object()}
            return found

    with pytest.raises(HpcrlError, match="rollout 0.*restart: TypeError"):
        asyncio.run(Ahead(tmp_path / "run", sampler=Odd()).made(0))


def test_the_ages_of_tokens() -> None:
    def aged(*versions: int) -> Sample:
        return Sample(versions=np.asarray(versions, np.int32))

    found = ages([aged(3, 3), aged(1, 2)], 3)
    shares = {"staleness/share/0": 0.5, "staleness/share/1": 0.25, "staleness/share/2": 0.25}
    assert found == shares | {"staleness/tokens/0": 2, "staleness/tokens/1": 1, "staleness/tokens/2": 1}
    assert ages([aged(0)], 20)["staleness/share/8+"] == 1
