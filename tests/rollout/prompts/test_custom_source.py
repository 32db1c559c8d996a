"""Prompts from a class of the user's: what it may give, what is kept of it for a restart, and what it cannot be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.rollout.inputs import RolloutInputs
from hpcrl.rollout.prompts.custom_source import MOST_DROPPED, CustomSource
from hpcrl.rollout.prompts.first_rows import look_at
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile, read_training
from hpcrl.rollout.prompts.prompt_source import Group, PromptSource
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from tests.rollout.generation.test_batch_generator import PARTIAL, Attempt, FakeSampler, numbers, slow
from tests.rollout.prompts.test_prompt_files import model, tokenizer
from tests.support.ledger_account import account
from tests.support.options import GRPO

__all__ = ["model", "tokenizer"]
HERE = "tests.rollout.prompts.test_custom_source"
ROWS: list[Any] = [
    {"input": "1+1=", "label": "2", "metadata": {"from": "a"}},
    {"input": [{"role": "user", "content": "1+2="}], "label": 3},
    "1+3=",
    [{"role": "system", "content": "add"}, {"role": "user", "content": "1+4="}],
]


class Counting:
    """Prompts "0", "1", ...: `options.name`, if there is one, is what is wrong with it."""

    calls = 0  #: of all objects: what a class whose prompts depend on more than its state looks at

    def __init__(self, options: Options) -> None:
        self.given = 0
        self.how = options.name

    def row(self, number: int) -> Any:
        return {"input": str(number), "label": str(number)}

    def take(self, count: int) -> list[Any]:
        type(self).calls += 1
        rows = [self.row(number) for number in range(self.given, self.given + count)]
        self.given += count
        return rows

    def state(self) -> Any:
        return {"given": self.given}

    def restore(self, state: Any) -> None:
        self.given = state["given"]


class Listed(Counting):
    def row(self, number: int) -> Any:
        return ROWS[number % len(ROWS)]

    def __len__(self) -> int:
        return 10


class Chance(Counting):
    """Gives others each time it is asked."""

    def row(self, number: int) -> Any:
        return f"{number}.{Counting.calls}.{Chance.calls}"


class Spoilt(Counting):
    def take(self, count: int) -> Any:
        rows = super().take(count)
        changes: dict[str, Callable[[], Any]] = {
            "few": lambda: rows[1:],
            "nothing": lambda: None,
            "number": lambda: [*rows[:-1], {"input": 7, "label": "1"}],
            "object": lambda: [*rows[:-1], {"input": object()}],
            "key": lambda: [*rows[:-1], {"prompt": "1"}],
            "label": lambda: [*rows[:-1], {"input": "1", "metadata": {"rm_type": "math"}}],
            "type": lambda: [*rows[:-1], {"input": "1", "label": "1", "metadata": {"rm_type": "f1"}}],
            "long": lambda: [*rows[:-1], {"input": "1" * 99, "label": "1"}],
            "empty": lambda: [*rows[:-1], {"input": "", "label": "1"}],
            "raises": lambda: rows[count],
        }
        return changes[str(self.how)]()


class Numbered(Counting):
    rm_types = ("f1",)

    def row(self, number: int) -> Any:
        return {"input": str(number), "label": "1", "metadata": {"rm_type": "f1"}}

    def metrics(self) -> Any:
        return {"given": self.given, "data/half": 0.5} if self.how != "wrong" else {"a": "text"}


class Without:
    def __init__(self, options: Options) -> None: ...


class Async(Counting):
    async def take(self, count: int) -> Any: ...


def own(tokenizer: Tokenizer, called: str, **values: Any) -> CustomSource:
    options = Options(**({"data_source_path": f"{HERE}.{called}"} | values))
    return CustomSource(options, tokenizer, load_own("data_source_path", f"{HERE}.{called}"))


def json_of(state: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(state))


def plain(groups: list[Group]) -> list[Any]:
    return [(g.number, g.prompt.raw, g.prompt.tokens.tolist(), g.prompt.label, g.prompt.metadata) for g in groups]


# ---- what it gives


def test_its_rows_are_those_of_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = own(tokenizer, "Listed", apply_chat_template=True)
    taken = [*source.next_groups(3), *source.next_groups(2)]
    assert [group.number for group in taken] == [0, 1, 2, 3, 4]
    rows = [row if isinstance(row, dict) else {"input": row} for row in ROWS]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = read_training(Options(prompt_data=str(tmp_path / "p.jsonl"), apply_chat_template=True), tokenizer)
    assert plain(taken[:4]) == plain([Group(number, prompt) for number, prompt in enumerate(file.prompts)])
    assert tokenizer.decode(taken[2].prompt.tokens) == "<|user|>1+3=<|end|><|assistant|>"
    assert taken[4].prompt.where == f"--data-source-path {HERE}.Listed, prompt 5"
    assert source.length() == 10 and own(tokenizer, "Counting").length() is None
    assert source.metrics() == {"data/dropped": 0.0}


def test_too_long_prompts_are_replaced(tokenizer: Tokenizer) -> None:
    """Prompts that are too long are dropped, and others are requested."""
    source = own(tokenizer, "Counting", rollout_max_prompt_len=1)
    assert [group.prompt.raw for group in source.next_groups(10)] == [str(n) for n in range(10)]
    with pytest.raises(DataError, match=f"{MOST_DROPPED}.*row are longer than.*1 tokens; raise"):
        source.next_groups(1)
    assert source.metrics() == {"data/dropped": float(MOST_DROPPED)}


def test_its_numbers_are_logged_and_its_rewards_named(tokenizer: Tokenizer) -> None:
    source = own(tokenizer, "Numbered", rm_type="math", label_key="label")
    assert source.next_groups(2)[1].prompt.metadata == {"rm_type": "f1"} and source.file().types.keys() == {"f1"}
    assert source.metrics() == {"data/dropped": 0.0, "data/given": 2.0, "data/half": 0.5}
    with pytest.raises(HpcrlError, match=r"metrics\(\), metric 'a', returned 'text'"):
        own(tokenizer, "Numbered", name="wrong").metrics()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("few", ": take(4) returned list of 3, expected a list of 4"),
        ("nothing", ": take(4) returned NoneType, expected a list of 4"),
        ("number", ", prompt 4: the prompt is neither text nor a list of chat messages but"),
        ("object", ", prompt 4 returned {"),
        ("key", ", prompt 4: no key"),
        ("label", ", prompt 4: no key 'label'"),
        ("type", ", prompt 4: metadata rm_type is 'f1', which the class's"),
        ("empty", ", prompt 4: the prompt is empty"),
        ("raises", ": take(4) raised IndexError: list index out of range (test_custom_source.py:"),
    ],
)
def test_what_it_gives_is_checked(tokenizer: Tokenizer, how: str, words: str) -> None:
    values = {"rm_type": "math", "label_key": "label", "rollout_max_prompt_len": 50}
    with pytest.raises(HpcrlError) as caught:
        own(tokenizer, "Spoilt", name=how, **values).next_groups(4)
    assert str(caught.value).startswith(f"--data-source-path {HERE}.Spoilt{words}")


def test_what_is_no_source(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="declare it: def take"):
        load_own("data_source_path", f"{HERE}.Without")
    with pytest.raises(UsageError, match="Async has no .* take"):
        own(tokenizer, "Async")


# ---- a restart


def test_a_restart_goes_on_with_the_same_prompts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What waits is in the checkpoint, with its tokens on disk; what came after it the class gives again, as it
    likes."""

    async def run() -> None:
        one = Attempt(tmp_path / "run", FakeSampler(slow(1, 4)), source=own(tokenizer, "Chance"), **PARTIAL)
        first, _, state = await one.step(0, 0)
        given = {asked.group.number: asked.group for asked in one.sampler.asked}
        waiting = [number for number in given if number not in numbers(first)]
        assert waiting == [1, 4] and [number for number, _, _ in json_of(state)["rows"]] == waiting
        rollout, _, later = await one.step(1, 1)
        ledger = later["ledger"]
        assert [number for number, _, _ in later["rows"]] == sorted([*ledger["buffer"], *ledger["bank"]])
        after = {
            asked.group.number: asked.group.prompt.raw for asked in one.sampler.asked if asked.group.number > max(given)
        }
        one.store.close()

        calls = Chance.calls
        # groups 8 and 9 end only when the batch is full, so that 1 and 4 are in it, however slow the machine is
        few = FakeSampler(lambda asked: None if asked.group.number > 7 else 0.0)
        again = Attempt(
            tmp_path / "run", few, source=own(tokenizer, "Chance"), rollout=1, state=json_of(state), **PARTIAL
        )
        assert plain(again.source.again([1, 4, 99])) == plain([given[number] for number in (1, 4)])
        assert again.source.again([4])[0].prompt.where == f"--data-source-path {HERE}.Chance, prompt 5"
        rollout, _, _ = await again.step(1, 1)
        seen = {group.number: group for group in (*rollout.groups, *(asked.group for asked in again.sampler.asked))}
        assert numbers(rollout) == [1, 4, 6, 7]
        assert plain([seen[number] for number in (1, 4)]) == plain([given[number] for number in (1, 4)])
        new = {asked.group.number: asked for asked in again.sampler.asked if asked.group.number in after}
        assert new and Chance.calls > calls
        assert all(asked.group.prompt.raw != after[number] and not asked.partial for number, asked in new.items()), (
            "what an earlier attempt has left on disk of another prompt is not gone on with"
        )
        found = account(tmp_path / "run")
        assert not found.wrong and again.store.ledger.holds()

    asyncio.run(run())


def test_without_any_left_over_the_next_prompts_follow(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def run() -> None:
        one = Attempt(tmp_path / "run", FakeSampler(), source=own(tokenizer, "Counting"))
        await one.step(0, 0)
        _, _, state = await one.step(1, 1)
        assert state["rows"] == [] and state["own"] == {"given": 8}
        again = Attempt(tmp_path / "run", FakeSampler(), rollout=2, state=state, source=own(tokenizer, "Counting"))
        rollout, _, _ = await again.step(2, 2)
        assert [(group.number, group.prompt.raw) for group in rollout.groups] == [(n, str(n)) for n in (8, 9, 10, 11)]

    asyncio.run(run())


def test_a_position_of_another_source_is_refused(tokenizer: Tokenizer) -> None:
    state = own(tokenizer, "Counting").state()
    with pytest.raises(
        DataError, match=f"position is that of {HERE}.Counting, not of --data-source-path {HERE}.Listed"
    ):
        own(tokenizer, "Listed").restore(state)
    with pytest.raises(DataError, match="that of prompt files"):
        own(tokenizer, "Listed").restore({"epoch": 0, "offset": 0, "next_group": 0, "file": {}})
    with pytest.raises(
        DataError, match=f"position is that of --data-source-path {HERE}.Counting, not of --prompt-data"
    ):
        PromptSource(PromptFile(Path("p.jsonl"), (Prompt(0, np.zeros(1, np.int32)),), 0, ""), 0, False).restore(state)
    with pytest.raises(DataError, match="data position is damaged"):
        own(tokenizer, "Counting").restore({"source": f"{HERE}.Counting", "rows": 3})
    with pytest.raises(HpcrlError, match=r"restore\(\) raised KeyError: 'given'"):
        own(tokenizer, "Counting").restore(state | {"own": {}})


# ---- in a run


def test_how_long_a_run_is(model: Path) -> None:
    def work(name: str, **values: Any) -> RolloutInputs:
        base = {"hf_checkpoint": str(model), "loss_type": "sft_loss", "label_key": "label", "rollout_batch_size": 4}
        options = Options(**(base | {"data_source_path": f"{HERE}.{name}"} | values))
        return RolloutInputs(SimpleNamespace(options=options, plan=SimpleNamespace(engine_count=0)))  # type: ignore[arg-type]

    assert work("Listed", num_epoch=3).total == 6 and work("Counting", num_rollout=5).total == 5
    found = work("Counting", num_rollout=5)
    assert isinstance(found.source, CustomSource) and found.source.next_groups(1)[0].prompt.target.tolist()[-1] == 1  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="say how many prompts.*--num-rollout, or the class a __len__"):
        work("Counting", num_epoch=3)
    with pytest.raises(
        DataError, match=f"--data-source-path {HERE}.Listed has 10 prompts, fewer than --rollout-batch-size 16"
    ):
        work("Listed", num_epoch=3, rollout_batch_size=16)


def test_no_prompt_file_is_needed(tmp_path: Path) -> None:
    """A custom source needs no prompt file and orders its prompts itself."""
    (tmp_path / "own.jsonl").write_text("a form of its own\n")
    look_at([Options(data_source_path="m.C", prompt_data=str(tmp_path / "own.jsonl"))])
    values = {name: value for name, value in GRPO.items() if name != "prompt_data"}
    check_options(Options(**values, data_source_path="m.C"))
    with pytest.raises(
        UsageError, match="--rollout-shuffle has no effect here: --data-source-path orders its prompts itself"
    ):
        check_options(Options(**values | {"data_source_path": "m.C", "rollout_shuffle": True}))
