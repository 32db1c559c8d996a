"""The step of a rehearsal with real tensors of the CPU, and the bytes that torch's allocator has given out in it: what a
rehearsal's count is held against (tests/rehearsal/test_real_memory.py).

    counted = on_fake_device(count, options, rank)
    allocated = run_ranks(n, allocate, options)[rank]

Both take the same functions of the trainer through the same phases, with the choices that Megatron and hpcrl make on a
CPU; attention is torch's flash kernel for CPUs on both sides.  `allocate` knows nothing of how `count` counts: torch's
profiler records every call of the allocator.  Left out is what gloo copies for a collective, which NCCL has no use for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._C._profiler import _EventType

from hpcrl.config.options import Options
from hpcrl.rehearsal.batch import micro_batches, rehearsed

GLOO = ("c10d::", "gloo:")  #: operations within which gloo makes copies


def count(options: Options, rank: int) -> dict[str, int]:
    """Phase -> the most bytes at once, as a rehearsal of that rank counts them."""
    from hpcrl.rehearsal import one_rank
    from hpcrl.rehearsal.device import FakeDevice, join
    from hpcrl.rehearsal.live_bytes import DeviceBytes
    from hpcrl.trainer.megatron.capabilities import Machine

    lengths = micro_batches(options)
    small = rehearsed(options, lengths)
    no_gpu = mock.patch.object(Machine, "here", staticmethod(lambda: Machine(False, frozenset())))
    with FakeDevice(()) as device, DeviceBytes(device) as live, attention(), no_gpu:
        answering = partial(one_rank.others_answer, device)
        one_rank.take_step(small, lengths, partial(join, small, rank), live.phase, answering, lambda: live.now)
    return live.peaks


def allocate(options: Options) -> dict[str, int]:
    """Phase -> the most bytes at once that this rank of several had from torch's allocator."""
    from hpcrl.rehearsal import one_rank
    from hpcrl.trainer import parallel_state

    lengths = micro_batches(options)
    small = rehearsed(options, lengths)
    spans: list[tuple[str, int, int]] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begun = time.time_ns()
        yield
        spans.append((name, begun, time.time_ns()))

    recorded = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    joined = partial(parallel_state.initialize, small)
    with recorded as profile, attention():
        one_rank.take_step(small, lengths, joined, phase, lambda *_: nullcontext(), lambda: 0)
    return peaks(list(calls_of(profile.profiler.kineto_results.experimental_event_tree())), spans)


def calls_of(roots: list[Any]) -> Iterator[tuple[int, int]]:
    """(when, bytes that were taken, or given back) of each call of the allocator, in order, but for gloo's."""
    found = []
    left = [(root, False) for root in roots]
    for event, inside in left:
        left += [(child, inside or event.name.startswith(GLOO)) for child in event.children]
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, inside))
    copies: set[int] = set()
    for when, place, size, inside in sorted(found):
        if size > 0 and inside:
            copies.add(place)
        elif size < 0 and place in copies:
            copies.remove(place)
        else:
            yield when, size


def peaks(calls: list[tuple[int, int]], spans: list[tuple[str, int, int]]) -> dict[str, int]:
    """Phase -> the most bytes at once within its spans.

    Args:
        calls: (when, bytes that were taken, or given back) of the allocator, in order.
        spans: (phase, from, to).
    """
    found: dict[str, int] = {}
    for name, begun, ended in spans:
        now = sum(size for when, size in calls if when < begun)
        most = now
        for when, size in calls:
            if begun <= when <= ended:
                now += size
                most = max(most, now)
        found[name] = max(found.get(name, 0), most)
    return found


@contextmanager
def attention() -> Iterator[None]:
    """Within, attention is the kernel that torch has for CPUs, whatever the device is."""

    def attend(query: Any, key: Any, value: Any, is_causal: bool = False, scale: Any = None, **more: Any) -> Any:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if more.pop("enable_gqa", False):
            groups = query.size(-3) // key.size(-3)
            key = key.repeat_interleave(groups, -3)
            value = value.repeat_interleave(groups, -3)
        return flash(query, key, value, 0.0, is_causal, attn_mask=more.get("attn_mask"), scale=scale)[0]

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend):
        yield
