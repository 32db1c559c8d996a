"""What a conversion holds while it writes one tensor of all experts of a layer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from threading import Lock

import torch

from hpcrl.models.convert.to_hf import Conversion, read_tensors
from hpcrl.models.family import Rule
from hpcrl.models.files.hf_writer import TensorHeader
from hpcrl.models.slicing import Shapes

X = "model.layers.0.mlp.experts"
EXPERTS = 6


@dataclass
class Held:
    """A checkpoint whose tensors say how many of them are in memory."""

    alive: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    most: int = 0

    def read(self, key: str, at: tuple[int, ...]) -> torch.Tensor:
        found = torch.full((4, 3), float(at[0]))
        self.alive.append(weakref.ref(found))
        self.most = max(self.most, sum(one() is not None for one in self.alive))
        return found


def test_one_expert_is_held_at_a_time() -> None:
    held = Held()
    parts = tuple(
        Conversion("w2", (n,), Rule("w2", "same", (name,)), (TensorHeader(name, torch.float32, (4, 3)),))
        for n in range(EXPERTS)
        for name in [f"{X}.{n}.down_proj.weight"]
    )
    job = Conversion(
        f"{X}.down_proj", (), None, (TensorHeader(f"{X}.down_proj", torch.float32, (EXPERTS, 4, 3)),), parts
    )
    (found,) = read_tensors(job, held, None, Shapes(1, 1, 1, 8, 1), Lock())  # type: ignore[arg-type]
    assert torch.equal(found, torch.arange(EXPERTS).float().view(-1, 1, 1).expand(-1, 4, 3))
    assert held.most <= 2
