"""The step of a rehearsal with real tensors of the CPU, and the bytes that torch's allocator has given out in it: what a
rehearsal's count is held against (tests/planning/rehearsal/test_real_memory.py).

    counted = on_fake_device(count, options, rank)
    allocated = run_ranks(n, allocate, options)[rank]

Both take the same functions of the trainer through the same phases, with the choices that Megatron and hpcrl make on a
CPU; attention is torch's flash kernel for CPUs on both sides.  `allocate` knows nothing of how `count` counts: torch's
profiler records every call of the allocator.  Left out is what gloo copies for a collective, which NCCL has no use for.
The profiler does not see what gloo's own threads give back, so none of them is left to be the last to hold a tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.utils._pytree import tree_leaves

from hpcrl.config.options import Options
from hpcrl.planning.rehearsal.batch import micro_batches, rehearsed
from hpcrl.utils.waiting import Deadline, poll

GLOO = ("c10d::", "gloo:")  #: operations within which gloo makes copies
COLLECTIVES = ("allreduce", "allgather", "all_gather_single", "reduce_scatter", "reduce_scatter_single", "broadcast")


def count(options: Options, rank: int) -> dict[str, int]:
    """Phase -> the most bytes at once, as a rehearsal of that rank counts them."""
    from hpcrl.planning.rehearsal import one_rank
    from hpcrl.planning.rehearsal.device import FakeDevice, join
    from hpcrl.planning.rehearsal.live_bytes import DeviceBytes
    from hpcrl.trainer.megatron.capabilities import Machine

    lengths = micro_batches(options)
    small = rehearsed(options, lengths)
    no_gpu = mock.patch.object(Machine, "here", staticmethod(lambda: Machine(False, frozenset())))
    with FakeDevice(()) as device, DeviceBytes(device) as live, attention(), no_gpu:
        answering = partial(one_rank.others_answer, device)
        one_rank.take_step(small, lengths, partial(join, small, rank), live.phase, answering)
    return live.peaks


def allocate(options: Options) -> dict[str, int]:
    """Phase -> the most bytes at once that this rank of several had from torch's allocator."""
    from hpcrl.planning.rehearsal import one_rank
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
    with recorded as profile, attention(), gloo_lets_go():
        one_rank.take_step(small, lengths, joined, phase, lambda *_: nullcontext())
    return peaks(list(calls_of(profile.profiler.kineto_results.experimental_event_tree())), spans)


def calls_of(roots: list[Any]) -> Iterator[tuple[int, int]]:
    """(when, bytes that were taken, or given back) of each call of the allocator, in order, but for gloo's."""
    found = []
    left = [(root, False) for root in roots]
    for event, inside in left:
        left += [(child, inside or event.name.startswith(GLOO)) for child in event.children]
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, inside))
    counted: dict[int, int] = {}  # place -> bytes
    for when, place, size, inside in sorted(found):
        if place in counted:  # given back, here or unseen
            yield when, -counted.pop(place)
        if size > 0 and not inside:
            counted[place] = size
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


class Done(dist.Work):
    """A collective that is over."""

    def wait(self, *_: Any) -> bool:
        return True


@contextmanager
def gloo_lets_go() -> Iterator[None]:
    """Within, when a collective's call returns it is over, and only its caller holds its tensors."""

    def waiting(stock: Callable[..., Any]) -> Callable[..., Any]:
        def collective(group: Any, *args: Any, **named: Any) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
            holders = [holders_of(tensor) for tensor in tensors]
            stock(group, *args, **named).wait()
            poll(partial(let_go, tensors, holders), Deadline(60), 0.0005)
            return Done()

        return collective

    def holders_of(tensor: torch.Tensor) -> int:  # of its memory: gloo has views of it
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    def let_go(tensors: list[torch.Tensor], holders: list[int]) -> bool | None:
        return all(holders_of(tensor) <= n for tensor, n in zip(tensors, holders, strict=True)) or None

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist.ProcessGroup, name, waiting(getattr(dist.ProcessGroup, name))))
        yield


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
