"""Where torch and vLLM read what others send, they read it by the list."""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from hpcrl.errors import HpcrlError
from hpcrl.transport.pickles.torch_patches import QUEUES, refuse_foreign_pickles, refuse_foreign_pickles_of_vllm
from hpcrl.transport.pickles.values import Refused
from tests.support.ranks import run_ranks
from tests.transport.pickles.examples import attacks, plain


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, and torch as it was afterwards."""
    from torch.distributed import distributed_c10d
    from torch.distributed.checkpoint import filesystem

    for module, name in ((distributed_c10d, "_unpickler"), (distributed_c10d, "_pickler"), (filesystem, "pickle")):
        monkeypatch.setattr(module, name, getattr(module, name))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def vllms(alone: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's modules that send objects, as an engine of ours has them."""
    from vllm.distributed import parallel_state, utils
    from vllm.distributed.device_communicators import shm_broadcast

    for module in (parallel_state, utils, shm_broadcast):
        monkeypatch.setattr(module, "pickle", module.pickle)
    monkeypatch.setattr(shm_broadcast.MessageQueue, "recv", staticmethod(shm_broadcast.MessageQueue.recv))
    refuse_foreign_pickles_of_vllm()
    return parallel_state, utils, shm_broadcast


def test_torchs_object_collectives_read_by_the_list(alone: None, tmp_path: Path) -> None:
    from torch.distributed import distributed_c10d

    made, found = tmp_path / "made", [None]
    refuse_foreign_pickles()
    dist.all_gather_object(found, {"plain": torch.ones(2)})
    assert torch.equal(found[0]["plain"], torch.ones(2))
    with pytest.raises(Refused, match="not on hpcrl's list"):
        dist.all_gather_object(found, attacks(made)["mkdir"])
    data = torch.frombuffer(bytearray(pickle.dumps(attacks(made)["mkdir"])), dtype=torch.uint8)
    with pytest.raises(pickle.UnpicklingError):
        distributed_c10d._tensor_to_object(data, data.numel(), None)
    assert not made.exists()


def gather(made: str) -> list[str]:
    """What two ranks come to: an error of one of them, and then a pickle that a stranger in its place sends."""
    from torch.distributed import distributed_c10d

    refuse_foreign_pickles()
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), []
    values: list[Any] = [OSError(28, "disk full") if rank else np.arange(3)]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, values[0])
    said += [str(found[0].tolist()), repr(found[1])]
    if rank:
        distributed_c10d._pickler = pickle.Pickler
    try:
        dist.all_gather_object(found, attacks(Path(made))["mkdir"] if rank else 1)
    except Refused as error:
        said.append(error.what)
    return said


@pytest.mark.process
def test_ranks_refuse_what_a_stranger_sends(tmp_path: Path) -> None:
    said = run_ranks(2, gather, str(tmp_path / "made"))
    assert said[0] == said[1] == ["[0, 1, 2]", "OSError('[Errno 28] disk full')", said[0][2]]
    assert "posix.mkdir" in said[0][2]
    assert not (tmp_path / "made").exists()


def test_torch_does_not_obey_metadata(alone: None, tmp_path: Path) -> None:
    """Its own reader of checkpoints, which Megatron-core's is made from."""
    from torch.distributed.checkpoint import FileSystemReader

    made = tmp_path / "made"
    refuse_foreign_pickles()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(attacks(made)["mkdir"]))
    with pytest.raises(Refused, match=r"posix\.mkdir"):
        FileSystemReader(tmp_path).read_metadata()
    assert not made.exists()
    good = next(value for value in plain() if isinstance(value, Metadata))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(good))
    assert FileSystemReader(tmp_path).read_metadata().state_dict_metadata == good.state_dict_metadata


def test_a_torch_without_these_places_is_refused(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    from torch.distributed import distributed_c10d

    monkeypatch.delattr(distributed_c10d, "_unpickler")
    with pytest.raises(HpcrlError, match="_unpickler"):
        refuse_foreign_pickles()


@pytest.mark.vllm
def test_what_vllm_unpickles_by_itself(vllms: Any, tmp_path: Path) -> None:
    """Of its own groups and stores."""
    parallel_state, utils, shm_broadcast = vllms
    made = tmp_path / "made"
    for module in (parallel_state, utils):
        metadata = [("x", parallel_state.TensorMetadata("cpu", torch.float32, torch.Size([2]))), ("step", 3)]
        assert module.pickle.loads(module.pickle.dumps(metadata)) == metadata
        handle = shm_broadcast.Handle([1], (1, 2, 3, "psm"), "ipc://a")
        assert module.pickle.loads(module.pickle.dumps(handle)) == handle
        with pytest.raises(pickle.UnpicklingError):
            module.pickle.loads(pickle.dumps(attacks(made)["mkdir"]))
    assert not made.exists()


def messages() -> list[Any]:
    """What the scheduler of an engine, and its workers, send."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    layout = KVCacheConfig(3, [KVCacheTensor(64, ["a"], 8, 8)], [KVCacheGroupSpec(["a"], spec)])
    sampled = LogprobsLists(np.ones((1, 2), np.int32), np.ones((1, 2), np.float32), np.ones(1, np.int32))
    result = ModelRunnerOutput(["r"], {"r": 0}, [[5]], sampled, {}, [])
    params = SamplingParams(logprobs=1, structured_outputs=StructuredOutputsParams(choice=["a"]))
    return [
        ("execute_model", (SchedulerOutput.make_empty(), params), {"lora": LoRARequest("a", 1, "/a")}, None),
        ("take", (GrammarOutput(["r"], np.zeros((1, 4), np.int32)), layout, torch.ones(1 << 19)), {}, 0),
        (WorkerProc.ResponseStatus.SUCCESS, result),
        (WorkerProc.ResponseStatus.SUCCESS, CompilationTimes(1.0, 2.0)),
    ]


@pytest.mark.vllm
def test_what_workers_on_other_hosts_read(vllms: Any, tmp_path: Path) -> None:
    """A queue over TCP brings plain values; a pickle or a function in their place is not obeyed."""
    queues = vllms[2]
    made = tmp_path / "made"
    writer = queues.MessageQueue(n_reader=1, n_local_reader=0, connect_ip="127.0.0.1")
    reader = queues.MessageQueue.create_from_handle(writer.export_handle(), 0)
    waits = threading.Thread(target=writer.wait_until_ready)
    waits.start()
    reader.wait_until_ready()
    waits.join()
    for value in messages():
        writer.enqueue(value)
        assert repr(reader.dequeue(timeout=10)) == repr(value)
    for attack in (attacks(made)["mkdir"], (cloudpickle.dumps(lambda worker: made.mkdir()), (), {}, None)):
        writer.remote_socket.send(pickle.dumps(attack))
        with pytest.raises(Refused):
            reader.dequeue(timeout=10)
    assert not made.exists()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.01)


@pytest.mark.vllm
def test_workers_of_this_host_are_read_as_vllm_reads(vllms: Any) -> None:
    queues = vllms[2]
    writer = queues.MessageQueue(n_reader=1, n_local_reader=1)
    reader = queues.MessageQueue.create_from_handle(writer.export_handle(), 0)
    waits = threading.Thread(target=writer.wait_until_ready)
    waits.start()
    reader.wait_until_ready()
    waits.join()
    for value in (
        *messages(),
        b"x" * (writer.buffer.max_chunk_bytes + 1),
        (np.array(["a"], dtype=object), defaultdict(list)),
    ):
        writer.enqueue(value)
        assert repr(reader.dequeue(timeout=10)) == repr(value)


def test_the_module_of_queues_is_vllms() -> None:
    assert QUEUES.startswith("vllm.")
