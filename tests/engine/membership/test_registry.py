"""The registry's law, over thousands of random schedules of what supervisors, senders and requests say."""

from __future__ import annotations

import copy
import random

import pytest

from hpcrl.engine.membership.registry import Engine, Registry


class World:
    """Engines as they are, and a registry that hears of it: late, twice, or out of order."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.registry = Registry(limit=self.chance.choice([1, 1, 3]))
        self.count = self.chance.randint(1, 5)
        for index in range(self.count):
            self.registry.expect(index, f"node{index}")
        self.version = -1
        #: of each engine that lives: (incarnation, the version that it really holds)
        self.alive: dict[int, tuple[int, int | None]] = {}
        self.lives = dict.fromkeys(range(self.count), 0)
        self.said: list[tuple[str, tuple]] = []  # for saying it again

    def say(self, event: str, *args: object) -> None:
        self.said.append((event, args))
        getattr(self.registry, event)(*args)

    def step(self) -> None:
        index = self.chance.randrange(self.count)
        incarnation, _ = self.alive.get(index, (-1, None))
        match self.chance.choice(["start", "start", "die", "doubt", "well", "update", "update", "join", "echo"]):
            case "start" if index not in self.alive:
                self.alive[index] = (self.lives[index], None)
                self.say("up", index, self.lives[index])
            case "die" if index in self.alive:
                del self.alive[index]
                self.lives[index] += 1
                if self.chance.random() < 0.5:
                    self.say("suspect", index, incarnation, "a request failed")
                self.say("ended", index, incarnation, "killed", True)
            case "doubt" if index in self.alive:
                self.say("suspect", index, incarnation, "slow")
            case "well" if index in self.alive:
                self.say("well", index, incarnation)
            case "update":
                self.update(self.registry.to_update(), alone=False)
            case "join" if self.registry.published is not None:
                self.update(self.registry.waiting(), alone=True)
            case "echo" if self.said:
                event, args = self.chance.choice(self.said)
                if event not in ("updated", "joined"):
                    getattr(self.registry, event)(*args)

    def update(self, members: list[Engine], alone: bool) -> None:
        """What the sender does, unless one that it chose is dead: that ends the attempt, and with it this registry.

        One that joins alone may be given newer weights than the others have: the trainer may be ahead of them.
        """
        chosen = [(m.index, m.incarnation) for m in members]
        if any(self.alive.get(index, (-1, None))[0] != incarnation for index, incarnation in chosen):
            return
        if alone and not chosen:
            return
        if not alone or self.chance.random() < 0.2:
            self.version += 1
        for index, incarnation in chosen:
            self.alive[index] = (incarnation, self.version)
        getattr(self.registry, "joined" if alone else "updated")(chosen, self.version)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=pytest.mark.soak) for n in range(10, 40))])
def test_only_published_weights_answer(seed: int) -> None:
    """Only engines with the published weights ever answer."""
    for run in range(75):
        world = World(1000 * seed + run)
        before: dict[int, Engine] = {}
        for _ in range(60):
            world.step()
            for index, member in world.registry.members.items():
                old = before.get(index, member)
                assert member.incarnation >= old.incarnation, "lives only grow"
                assert old.state != "gone" or member.state == "gone", "gone is for good"
                if member.state == "serving":
                    assert world.registry.published is not None and member.version >= world.registry.published
                    if world.alive.get(index, (-1, None))[0] == member.incarnation:
                        assert world.alive[index][1] == member.version, "it really holds them"
                assert member not in world.registry.serving() or member not in world.registry.waiting()
            before = {index: copy.copy(member) for index, member in world.registry.members.items()}


def test_all_serve_again_in_the_end() -> None:
    """Whatever has happened, all engines serve again once events cease."""
    for seed in range(200):
        serves_again(World(seed), seed)


def serves_again(world: World, seed: int) -> None:
    for _ in range(60):
        world.step()
    registry = world.registry
    for member in registry.members.values():
        if member.index not in world.alive:
            registry.up(member.index, world.lives[member.index])
        elif member.state == "suspect":
            registry.well(member.index, world.alive[member.index][0])
    world.version += 1
    registry.updated([(m.index, m.incarnation) for m in registry.to_update()], world.version)
    assert {m.state for m in registry.members.values()} <= {"serving", "gone"}, seed
    assert bool(registry.hopeless()) == all(m.state == "gone" for m in registry.members.values()), seed


def one(**values: object) -> Registry:
    registry = Registry(limit=2, **values)  # type: ignore[arg-type]
    registry.expect(0, "a")
    registry.expect(1, "b")
    return registry


def test_a_restarted_engine_waits_for_its_weights() -> None:
    registry = one()
    registry.up(0, 0)
    registry.up(1, 0)
    assert not registry.serving() and len(registry.waiting()) == 2
    registry.updated([(0, 0), (1, 0)], 3)
    registry.ended(0, 0, "killed", True)
    assert [m.index for m in registry.serving()] == [1] and registry.members[0].why == "killed"
    assert registry.members[0].restarts == 0
    registry.up(0, 1)
    assert [m.index for m in registry.serving()] == [1] and [m.index for m in registry.waiting()] == [0]
    assert registry.members[0].restarts == 1
    registry.joined([(0, 1)], 3)
    assert len(registry.serving()) == 2
    registry.ended(0, 0, "an old word", True)
    assert len(registry.serving()) == 2
    registry.up(1, 7)
    registry.expect(2, "c")
    registry.up(2, 9)
    assert [m.restarts for m in registry.members.values()] == [1, 7, 0], "counted from the first of this attempt"


def test_missed_update_stops_serving() -> None:
    """An engine that misses an update does not serve until it has it."""
    registry = one()
    registry.up(0, 0)
    registry.up(1, 0)
    registry.updated([(0, 0), (1, 0)], 0)
    registry.suspect(1, 0, "slow")
    registry.updated([(0, 0)], 1)
    registry.well(1, 0)
    assert registry.members[1].state == "joining"


def test_without_restarts_one_in_doubt_is_gone() -> None:
    registry = Registry(limit=0, trusting=True)
    registry.expect(0, "a")
    registry.up(0, 0)
    assert registry.serving() and not registry.hopeless()
    registry.suspect(0, 0, "died (reset)")
    assert registry.hopeless() == "no engine is left: engine-0 on a died (reset)"
    with pytest.raises(ValueError, match="an engine 0 already"):
        registry.expect(0, "a")
