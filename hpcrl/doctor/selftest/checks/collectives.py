"""Every collective that training uses, between all ranks, with every value compared.

Values differ by rank, place and round, so that a part that comes from the wrong rank, place or round shows; sizes reach
over those at which NCCL changes its protocol (LL, LL128, Simple), since silent corruption has been seen in one alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.doctor.selftest.registry import Check, CheckContext, Outcome

if TYPE_CHECKING:
    import torch

SIZES = {"cuda": (1_000, 60_000, 1_000_000, 40_000_000), "cpu": (1_000, 200_000)}  #: elements
ROUNDS = {"cuda": 5, "cpu": 2}
CYCLE = 61  #: prime: a shift by any block shows


def pattern(rank: int, size: int, turn: int, device: torch.device) -> torch.Tensor:
    """[size] float32 of small whole numbers, exact in every sum of thousands of ranks."""
    import torch

    return ((torch.arange(size, device=device) + 7 * rank + 13 * turn) % CYCLE).float()


def work(place: CheckContext) -> Outcome:
    """Each collective in each size.  What is wrong is kept to the end: a rank that left would hang the others."""
    done, wrong = 0, ""
    for turn in range(ROUNDS[place.device.type]):
        for size in SIZES[place.device.type]:
            whole = -(-size // place.world) * place.world
            name = one_round(place, whole, turn)
            wrong = wrong or (name and f"rank {place.rank}: {name} of {whole} floats gives wrong values (round {turn})")
            done += 1
    if wrong:
        return Outcome("failed", f"{wrong}; on Slingshot NCCL_PROTO=^LL128 has been the fix")
    return Outcome(
        "passed", f"6 collectives over {place.world} ranks, {done} times, every value right", {"ranks": place.world}
    )


def one_round(place: CheckContext, size: int, turn: int) -> str:
    """The first collective with a wrong value, "" if there is none."""
    import torch
    import torch.distributed as dist

    world = place.world
    rank = place.rank
    device = place.device
    every = [pattern(r, size, turn, device) for r in range(world)]
    mine = every[rank]
    total = torch.stack(every).sum(0)
    part = size // world
    here = slice(rank * part, (rank + 1) * part)
    found = mine.clone()
    dist.all_reduce(found)
    right = {"all-reduce": torch.equal(found, total)}
    gathered = torch.empty(world * size, device=device)
    dist.all_gather_into_tensor(gathered, mine)
    right["all-gather"] = torch.equal(gathered, torch.cat(every))
    if device.type == "cuda":  # gloo has none
        scattered = torch.empty(part, device=device)
        dist.reduce_scatter_tensor(scattered, mine)
        right["reduce-scatter"] = torch.equal(scattered, total[here])
    sent = torch.empty(size, device=device)
    dist.all_to_all_single(sent, mine)
    right["all-to-all"] = torch.equal(sent, torch.cat([each[here] for each in every]))
    source = turn % world
    found = mine.clone()
    dist.broadcast(found, source)
    right["broadcast"] = torch.equal(found, every[source])
    if world > 1:
        received = torch.empty(size, device=device)
        ring = [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world)]
        for request in dist.batch_isend_irecv(ring):
            request.wait()
        right["send and receive"] = torch.equal(received, every[(rank - 1) % world])
    return next((name for name, good in right.items() if not good), "")


CHECK = Check("collectives between all ranks give the right values", 20, "ranks", work, ("torch",))
