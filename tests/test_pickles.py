"""Pickles of others: what is read, and that nothing that they name is called."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import traceback
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorProperties

from hpcrl.errors import DataError
from hpcrl.model_files.torch_dist import TorchDist
from hpcrl.pickles import Refused, read_plain, refuse_foreign_pickles


class Calls:
    """Pickled, a call of `what` with these arguments."""

    def __init__(self, what: Callable[..., Any], *args: Any) -> None:
        self.call = (what, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def attacks(made: Path) -> dict[str, Any]:
    """Each makes a directory when it is unpickled freely."""
    inner = io.BytesIO()
    torch.save(Calls(os.mkdir, str(made)), inner)
    return {
        "mkdir": Calls(os.mkdir, str(made)),
        "deep": {"plan": [(1, OrderedDict(a=Calls(os.mkdir, str(made))))]},
        "eval": Calls(builtins.eval, f"__import__('os').mkdir({str(made)!r})"),
        "exec": Calls(builtins.exec, f"open({str(made)!r}, 'w')"),
        "torch": Calls(torch.storage._load_from_bytes, inner.getvalue()),
        "torch.load": Calls(torch.load, io.BytesIO(inner.getvalue()), None, None),
        "hub": Calls(torch.hub.load, "x", "y"),
    }


def plain() -> list[Any]:
    error = RuntimeError("disk full")
    stack = traceback.extract_stack(limit=2)
    return [
        {"a": [1, 2.5, "x", b"y", None, True, (1, 2)], 3: {4}, "r": range(3), "s": slice(1, 2)},
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        OrderedDict(a=torch.float32, b=torch.Size([1, 2]), c=torch.strided),
        np.arange(4, dtype=np.float32),
        np.random.get_state(),
        Namespace(a=1),
        MetadataIndex("weight", torch.Size([0, 1])),
        TensorProperties(dtype=torch.bfloat16),
        (error, stack),
    ]


@pytest.mark.parametrize("protocol", [4, 5])
def test_what_ranks_send_one_another_is_read(protocol: int) -> None:
    for value in plain():
        found = read_plain(io.BytesIO(pickle.dumps(value, protocol)))
        assert repr(found) == repr(value)
    parameter = read_plain(io.BytesIO(pickle.dumps(torch.nn.Parameter(torch.ones(2)), protocol)))
    assert torch.equal(parameter, torch.ones(2))


@pytest.mark.parametrize("name", ["mkdir", "deep", "eval", "exec", "torch", "torch.load", "hub"])
def test_nothing_that_a_pickle_names_is_called(name: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    data = pickle.dumps(attacks(made)[name])
    with pytest.raises((Refused, pickle.UnpicklingError)):
        read_plain(io.BytesIO(data))
    assert not made.exists()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch.distributed import distributed_c10d

    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torchs_object_collectives_do_not_obey(alone: None, tmp_path: Path) -> None:
    made, found = tmp_path / "made", [None]
    refuse_foreign_pickles()
    dist.all_gather_object(found, {"plain": torch.ones(2)})
    assert torch.equal(found[0]["plain"], torch.ones(2))
    with pytest.raises(Refused, match=r"names posix.mkdir, which is no plain value"):
        dist.all_gather_object(found, Calls(os.mkdir, str(made)))
    assert not made.exists()


def test_a_checkpoints_metadata_is_not_obeyed(tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "iter_0000001"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Calls(os.mkdir, str(made))))
    with pytest.raises(DataError, match=r"\.metadata is not what Megatron writes.* posix.mkdir"):
        TorchDist(path)
    assert not made.exists()
    good = Metadata({"rng": BytesStorageMetadata()}, storage_data={})
    (path / ".metadata").write_bytes(pickle.dumps(good))
    assert TorchDist(path).holds("rng")
