"""Which device a rank computes on, and that GPUs which torch cannot use are no reason to go on without a word."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from hpcrl.errors import UsageError
from hpcrl.trainer import parallel_state
from hpcrl.trainer.parallel_state import cuda_is_there, device_index

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch that finds no GPU it can use."""

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.usefixtures("broken")
def test_unusable_gpus() -> None:
    """GPUs that torch cannot use are an error with torch's reason."""
    with pytest.raises(
        UsageError, match=r"\(CUDA_VISIBLE_DEVICES=0,1\), and CUDA 13.0 cannot use them:.*12020"
    ) as found:
        cuda_is_there("0,1")
    assert "\n" not in str(found.value) and "docs/install.md" in str(found.value)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("visible", [None, "", "NoDevFiles"])
def test_a_host_without_gpus_computes_on_its_cpu(visible: str | None) -> None:
    assert cuda_is_there(visible) is False


def test_cpu_build_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build computes on the CPU of any machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda_is_there("0,1") is False


def test_where_cuda_is_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda_is_there(None) is True


def test_a_rank_bound_to_its_own_gpu_finds_it_under_0() -> None:
    assert [device_index(local, 4) for local in range(4)] == [0, 1, 2, 3]
    assert [device_index(local, 1) for local in range(4)] == [0, 0, 0, 0]


def test_a_rank_stays_beside_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's place is what `lspci` and /sys call it."""
    asked: list[tuple[str, Path]] = []
    found = types.SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(
        parallel_state, "bind_beside", lambda device, system: asked.append((device, system)) or frozenset({3})
    )
    assert parallel_state.stay_beside(torch.device("cuda", 2), tmp_path) == {3} and asked == [
        ("0001:3b:00.0", tmp_path)
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    assert parallel_state.stay_beside(torch.device("cuda", 2), tmp_path) == frozenset(), "a build that does not say"
