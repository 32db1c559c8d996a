"""Two sets of weights change places bit for bit, with a few bytes on the device; one follows the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrl.trainer.megatron import host_memory
from hpcrl.trainer.megatron.host_memory import HostWeights, weights
from tests.support.live_bytes import LiveBytes


def policy(dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 64) -> Any:
    """What HostWeights needs of a model: two chunks with parameters and a saved buffer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chunks = [
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width)).to(dtype) for _ in range(2)
        ]
        chunks[0].register_buffer("bias_of_experts", torch.randn(5))
    return SimpleNamespace(modules=tuple(chunks), part="model", of_adapters=False)


def numbers(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in weights(model).items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def filled(model: Any, other: dict[str, torch.Tensor]) -> HostWeights:
    """A second set with the numbers of `other`."""

    def fill() -> None:
        for name, value in weights(model).items():
            value.copy_(other[name])

    return HostWeights(model, fill)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_set_is_active_inside(dtype: torch.dtype) -> None:
    """The second set is active inside, and the first before and after."""
    model, second = policy(dtype), numbers(policy(dtype, seed=1))
    first = numbers(model)
    held = filled(model, second)
    assert equal(numbers(model), first)
    for _ in range(2):
        with held.swapped_in():
            assert equal(numbers(model), second)
        assert equal(numbers(model), first)
    with pytest.raises(RuntimeError, match="a pass failed"), held.swapped_in():
        raise RuntimeError("a pass failed")
    assert equal(numbers(model), first)


def test_swap_needs_one_piece_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapping needs only one piece of memory on the device."""
    model = policy(width=512)
    second = numbers(policy(seed=1, width=512))
    held = filled(model, second)
    size = sum(value.nbytes for value in weights(model).values())
    monkeypatch.setattr(host_memory, "PIECE", 4096)
    with LiveBytes() as live, held.swapped_in():
        pass
    assert equal(numbers(model), numbers(policy(width=512)))
    assert live.peak <= 4096 < size / 500
    assert sum(value.nbytes for value in held.values.values()) == size


def test_the_counterpart_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same name in the other set, be there addresses or not: on a device without any all are 0."""
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 0)
    model = policy()
    flat = torch.zeros(8)
    model.modules[1][1].weight = torch.nn.Parameter(flat[:4])  # two in one memory, as Megatron's buffers
    model.modules[1][1].bias = torch.nn.Parameter(flat[4:])
    other = {name: torch.full_like(value, number) for number, (name, value) in enumerate(numbers(model).items())}
    second = filled(model, other)
    for name, weight in weights(model).items():
        assert torch.equal(second.counterpart(weight), other[name]), name


def test_following_all_the_way_is_a_copy() -> None:
    model = policy(torch.bfloat16)
    held = filled(model, numbers(policy(torch.bfloat16, seed=1)))
    held.follow()
    first = numbers(model)
    for value in weights(model).values():
        value.zero_()
    with held.swapped_in():
        assert equal(numbers(model), first)


def test_what_was_stored_is_the_same_again() -> None:
    model = policy(torch.bfloat16)
    held = filled(model, numbers(policy(torch.bfloat16, seed=1)))
    held.follow()
    kept = {name: value.clone() for name, value in held.values.items()}
    assert {value.dtype for value in kept.values()} == {torch.bfloat16, torch.float32}
    again = HostWeights(model)
    for name, value in kept.items():
        again.values[name].copy_(value)
    again.follow()
    held.follow()
    with held.swapped_in():
        one = numbers(model)
    with again.swapped_in():
        assert equal(numbers(model), one)
