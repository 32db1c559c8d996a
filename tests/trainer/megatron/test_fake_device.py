"""The device that knows shapes alone (hpcrl/planning/rehearsal/device.py): it sees every wait, and holds every model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.planning.rehearsal import device as fake_device
from tests.support import families
from tests.support.ranks import on_fake_device
from tests.trainer.step.test_invariance import options

pytestmark = pytest.mark.process

#: what a GPU waits for, each a line of a file of its own package, so that the line is found
WAITS = {
    "item": "x.sum().item()",
    "float": "float(x.sum())",
    "tolist": "x[0].tolist()",
    "numpy": "x.cpu().numpy()",
    "if": "bool((x > 0).any())",
    "unique": "torch.unique(x)",
    "mask that is set": "x.__setitem__(x > 0, x.flatten())",
    "number to the device": "torch.tensor(3, device=x.device)",
    "array to the device": "torch.arange(3).to(x.device)",
    "array to the device at leisure": "torch.arange(3).to(x.device, non_blocking=True)",
    "pinned, but blocking": "torch.arange(3).pin_memory().to(x.device)",
    "copy_": "torch.empty(4, 2).copy_(x)",
    "stream": "torch.cuda.Stream().synchronize()",
    "event": "torch.cuda.Event().synchronize()",
    "device": "torch.cuda.synchronize()",
}
GOES_ON = {
    "sum": "x.sum()",
    "number in a tensor": "x.__setitem__((0, 0), 3.0)",
    "mask that is filled": "x.__setitem__(x > 0, 0.0)",
    "where": "torch.where(x > 0, x, 0.0)",
    "new": "torch.full((3,), 2, device=x.device)",
    "pinned": "torch.arange(3).pin_memory().to(x.device, non_blocking=True)",
    "pinned from the start": "torch.empty(3, pin_memory=True).to(x.device, non_blocking=True)",
    "to the host at leisure": "x.to('cpu', non_blocking=True)",
    "host": "torch.arange(3).sum().item()",
}


def waits(directory: str, lines: dict[str, str]) -> dict[str, list[str]]:
    """Of each line of code, the lines that waited."""
    found = {}
    with fake_device.FakeDevice() as device:
        x = torch.ones(4, 2, device=fake_device.device())
        for number, (name, line) in enumerate(lines.items()):
            path = Path(directory, "hpcrl", f"line_{number}.py")
            path.write_text(f"import torch\ndef line(x):\n    return {line}\n")
            place: dict[str, Any] = {}
            exec(compile(path.read_text(), str(path), "exec"), place)
            device.syncs.clear()
            place["line"](x)
            found[name] = [f"{sync.file}:{sync.line} {sync.text}" for sync in device.syncs]
    return found


def test_every_wait_is_seen(tmp_path: Path) -> None:
    """Whatever a GPU would wait for is recorded with its line, and nothing else is."""
    (tmp_path / "hpcrl").mkdir()
    found = on_fake_device(waits, str(tmp_path), WAITS | GOES_ON)
    lines = list(WAITS | GOES_ON)
    for name, line in WAITS.items():
        wanted = f"hpcrl/line_{lines.index(name)}.py:3 return {line}"
        assert found[name] and set(found[name]) == {wanted}, name
    assert {name: found[name] for name in GOES_ON} == {name: [] for name in GOES_ON}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2 sp pp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}),
    "cp2 dp4": (8, {"context_parallel_size": 2}),
}


def held(paths: list[str], layout: str) -> dict[str, tuple[int, set[str]]]:
    """Of each model its bytes of parameters on the last rank, and on which devices they are."""
    from hpcrl.trainer.megatron import model

    found = {}
    n, fields = LAYOUTS[layout]
    for path in paths:
        opts = options(Path(path), n, **fields)
        with fake_device.FakeDevice():
            policy = model.build(opts, fake_device.join(opts, n - 1))
            parameters = [p for module in policy.modules for p in module.parameters()]
            size = sum(
                p.untyped_storage().nbytes() for p in {p.untyped_storage()._cdata: p for p in parameters}.values()
            )
            found[path] = size, {str(p.device) for p in parameters}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_holds_every_family(tmp_path: Path, layout: str) -> None:
    """A policy of every family is built as any rank of a layout, in one process and without a wait for another."""
    paths = [str(families.make(tmp_path / f"{kind}{odd}", kind, odd)) for kind in families.SIZES for odd in (0, 1)]
    for path, (size, where) in on_fake_device(held, paths, layout).items():
        assert size > 50_000 and where == {"acc:0"}, path


def given_back() -> list[int]:
    """Bytes on the device: of a tensor, without its memory, with it again."""
    from hpcrl.planning.rehearsal.live_bytes import DeviceBytes

    with fake_device.FakeDevice() as device, DeviceBytes(device) as live:
        kept = torch.empty(1000, device=fake_device.device())
        found = [live.now]
        for size in (0, 4000):
            kept.untyped_storage().resize_(size)
            found.append(live.now)
    return found


def test_memory_that_is_given_back_counts() -> None:
    """What a recomputation takes from a tensor that stays is free meanwhile."""
    assert on_fake_device(given_back) == [4000, 0, 4000]
