"""One tensor for all experts of a layer, and single ones: each expert has its own rows, whatever order names come in."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpcrl.errors import DataError
from hpcrl.models.files.safetensors_files import listing
from hpcrl.models.files.stacked_experts import ExpertsApart, put, single, stacks

X = "model.layers.0.mlp.experts"


def test_single_experts_are_parts_of_the_files(tmp_path: Path) -> None:
    stack, down = torch.arange(12 * 6 * 4.0).view(12, 6, 4), torch.arange(12 * 4 * 3.0).view(12, 4, 3)
    norm = torch.ones(4)
    held = {f"{X}.gate_up_proj": stack, f"{X}.down_proj": down, "model.norm.weight": norm}
    save_file(held, tmp_path / "model.safetensors")
    names = single(listing(tmp_path))
    assert len(names) == 12 * 3 + 1 and names[f"{X}.11.up_proj.weight"].shape == (3, 4)
    with ExitStack() as opened:
        files = ExpertsApart(tmp_path, opened, {name: entry.file for name, entry in names.items()})
        found = {name: files.tensor(name) for name in sorted(names)}  # expert 10 before expert 2
        assert files.read == stack.nbytes + down.nbytes + norm.nbytes
    assert torch.equal(found[f"{X}.2.gate_proj.weight"], stack[2, :3])
    assert torch.equal(found[f"{X}.10.up_proj.weight"], stack[10, 3:])
    assert torch.equal(found["model.norm.weight"], norm)
    for name, singles in stacks(list(found)):
        if name in (f"{X}.gate_up_proj", f"{X}.down_proj"):
            made = torch.empty_like(held[name])
            for one in reversed(singles):
                put(made, one, found[one])
            assert torch.equal(made, held[name])
        else:
            assert singles == [name] == ["model.norm.weight"]


@pytest.mark.parametrize("shape", [(6, 4), (2, 5, 4)])
def test_a_stack_that_cannot_be_cut_is_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_file({f"{X}.gate_up_proj": torch.ones(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=f"{X}.gate_up_proj of model.safetensors is"):
        single(listing(tmp_path))
