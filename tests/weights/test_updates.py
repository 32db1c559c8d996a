"""Which engines an update goes to, and what happens when some end in it: with a registry as it is, and engines made
up."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.engine.membership.broadcast import EngineLost
from hpcrl.engine.membership.registry import Engine, Registry
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.run.rundir import RunDir
from hpcrl.weights.updates import FirstUpdate, Updates

TENSORS = [(f"layer.{i}", object()) for i in range(5)]


class Desk:
    """A queue's client over a registry in this process; what goes through it is what goes over the queue."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return json.loads(json.dumps(getattr(self, method)(**json.loads(json.dumps(params))) or {}))

    def engines(self) -> dict[str, Any]:
        def where(found: Any) -> list[list[Any]]:
            return [[m.index, m.incarnation, "host", 1000 + m.index] for m in found]

        return {
            "update": where(self.registry.to_update()),
            "waiting": where(self.registry.waiting()),
            "starting": [str(m) for m in self.registry.starting()],
            "published": self.registry.published,
        }

    def engines_updated(self, engines: list[list[int]], version: int, alone: bool) -> None:
        who = [(index, incarnation) for index, incarnation in engines]
        (self.registry.joined if alone else self.registry.updated)(who, version)


class Sender:
    """In place of a WeightSender: notes what each engine holds; `end(engines, tensor)` may raise in the middle."""

    def __init__(self, end: Callable[[tuple[Engine, ...], int], None] = lambda *_: None) -> None:
        self.end = end
        self.held: dict[tuple[int, int], int] = {}
        self.tries: list[list[int]] = []

    def connect(self, engines: list[Engine]) -> None:
        self.engines = tuple(engines)

    def publish(self, tensors: Export, version: int) -> dict[str, float]:
        self.tries.append([e.index for e in self.engines])
        try:
            for number, _ in enumerate(tensors.gathered()):
                self.end(self.engines, number)
        finally:
            tensors.finish_update()
        for engine in self.engines:
            self.held[engine.index, engine.incarnation] = version
        return {"perf/update_weights_time": 1.0}

    def close(self) -> None: ...


class Export:
    """The ranks' side of updates: counts how many there were, and how often the other ranks were let go."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def __call__(self) -> Export:
        self.begun += 1
        self.open = True
        return self

    def gathered(self) -> Iterator[Any]:
        yield from TENSORS

    def finish_update(self) -> None:
        self.ended += self.open
        self.open = False


def updates(
    tmp_path: Path, sender: Sender, registry: Registry, seconds: float = 1.0, first: Any = None
) -> tuple[Updates, Export]:
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    made = Updates(
        sender,
        rundir,
        seconds,
        Desk(registry),
        lambda index, incarnation: "key",
        lambda value: json.loads(json.dumps(value)),
        first,
    )  # type: ignore[arg-type]
    return made, Export()


def engines(count: int, up: bool = True, limit: int = 2) -> Registry:
    registry = Registry(limit)
    for index in range(count):
        registry.expect(index, "host")
        if up:
            registry.up(index, 0)
    return registry


def test_engine_death_during_an_update(tmp_path: Path) -> None:
    """It ends the attempt; one that ends between updates comes back, and gets its own."""

    def dies(there: tuple[Engine, ...], number: int) -> None:
        if number == 3:
            raise EngineLost("engine-1 died")

    registry, sender = engines(3), Sender()
    made, export = updates(tmp_path, sender, registry)
    assert made.publish(export, 7) == {"perf/update_weights_time": 1.0}
    registry.ended(1, 0, "died", True)
    registry.up(1, 1)
    assert made.join(export, 7) and sender.tries == [[0, 1, 2], [1]]
    assert [m.state for m in registry.members.values()] == ["serving"] * 3
    assert made.join(export, 7) == {} and len(sender.tries) == 2, "nobody waits: nothing is sent"
    sender.end = dies
    with pytest.raises(PeerError, match="engine-1 died"):
        made.publish(export, 8)
    assert export.begun == export.ended == 3, "the other ranks are let go after each"
    assert registry.published == 7


def test_engines_have_the_base_before_an_adapter(tmp_path: Path) -> None:
    """One that joins gets the weights under its adapter before that."""
    sent: list[tuple[str, list[int]]] = []

    class Named(Sender):
        def __init__(self, name: str) -> None:
            super().__init__(self.note)
            self.name = name

        def note(self, there: tuple[Engine, ...], number: int) -> None:
            if number == 0:
                sent.append((self.name, [engine.index for engine in there]))

    registry, sender, base = engines(2), Named("adapter"), Named("base")
    export, left = Export(), list[bool]()
    first = FirstUpdate(base, export, lambda: left.append(True))  # type: ignore[arg-type]
    made, _ = updates(tmp_path, sender, registry, first=first)
    made.publish(export, 0)
    assert sent == [("base", [0, 1]), ("adapter", [0, 1])] and left == [True]
    registry.ended(1, 0, "died", True)
    registry.up(1, 1)
    sent.clear()
    made.join(export, 0)
    assert sent == [("base", [1]), ("adapter", [1])]
    sent.clear()
    made.publish(export, 1)
    assert sent == [("adapter", [0, 1])] and [m.state for m in registry.members.values()] == ["serving"] * 2


def test_update_without_engines(tmp_path: Path) -> None:
    """With its only engine gone an update is over, and the engine gets it later."""
    registry, sender = engines(1), Sender()
    made, export = updates(tmp_path, sender, registry)
    made.publish(export, 0)
    registry.ended(0, 0, "killed", True)
    assert made.publish(export, 1) == {} and registry.published == 1
    assert made.join(export, 1) == {}
    registry.up(0, 1)
    made.join(export, 1)
    assert sender.held == {(0, 0): 0, (0, 1): 1} and registry.serving()


def test_all_engines_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines are waited for, and one that does not come is named."""
    monkeypatch.setattr("hpcrl.weights.updates.SLACK", 0.0)
    made, _ = updates(tmp_path, Sender(), engines(2, up=False), seconds=0.3)
    with pytest.raises(DeadlineError, match="engine-0.*not come up within 0 s"):
        made.wait()


def test_serving_engines_hold_the_published(tmp_path: Path) -> None:
    """An engine that serves holds what was published, whenever engines end."""
    for seed in range(200):
        (tmp_path / str(seed)).mkdir()
        holds_what_was_published(tmp_path / str(seed), seed)


def holds_what_was_published(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 5)
    registry, lives = engines(count), [0] * count

    def die(index: int) -> None:
        registry.ended(index, lives[index], "killed", True)
        lives[index] += 1
        if chance.random() < 0.7:
            registry.up(index, lives[index])

    sender = Sender()
    made, export = updates(tmp_path, sender, registry)
    for version in range(8):
        made.publish(export, version)
        for _ in range(chance.randint(0, 4)):
            index = chance.randrange(count)
            if registry.members[index].state == "ended":
                registry.up(index, lives[index])
            elif registry.members[index].state == "suspect":
                registry.well(index, lives[index])
            elif chance.random() < 0.3:
                die(index)
            made.join(export, version)
            for m in registry.serving():
                assert sender.held[m.index, m.incarnation] == version == m.version, seed
    assert export.begun == export.ended, seed
