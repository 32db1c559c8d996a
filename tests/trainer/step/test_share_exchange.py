"""A share reaches every rank of its replica whole, encoded by nobody but the rollout process; alone, it moves
nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.transport.share_format import decode, encode
from tests.support.ranks import run_ranks
from tests.support.shares import same, share

pytestmark = pytest.mark.process

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2 cp2": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
    "dp2 cp2": (4, {"context_parallel_size": 2}),
    "dp2 pp2": (4, {"pipeline_model_parallel_size": 2}),
}


def exchange_on_rank(opts: Options) -> tuple[bool, bool, list[int]]:
    """(whether what arrived is what was fetched, was the fetched object itself, [encodings, decodings,
    collectives])."""
    import torch.distributed as dist

    from hpcrl.trainer import parallel_state, rollout_calls

    ranks = parallel_state.initialize(opts)
    exchange = rollout_calls.ShareExchange(ranks)
    fetched = decode([bytes(frame) for frame in encode(share(3, seed=ranks.dp_rank, answers=(5, 1, 801)))])
    mine = fetched if exchange.fetches else None
    counts = [0, 0, 0]

    def counted(number: int, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[number] += 1
            return function(*args, **kwargs)

        return call

    rollout_calls.encode = counted(0, encode)
    rollout_calls.decode = counted(1, decode)
    dist.broadcast = counted(2, dist.broadcast)
    found = exchange.exchange(mine)
    return same(found, fetched), found is fetched, list(counts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_get_the_fetched_bytes(layout: str) -> None:
    """Every rank of a replica gets what was fetched, and nothing is encoded again."""
    n, sizes = LAYOUTS[layout]
    found = run_ranks(n, exchange_on_rank, Options(actor_num_gpus_per_node=n, **sizes))
    assert all(whole for whole, _, _ in found)
    fetching = [counts for _, itself, counts in found if itself]
    assert fetching == [[0, 0, 2]] * (n // 2 if layout.startswith("dp2") else 1)
    assert all(counts == [0, 1, 2] for _, itself, counts in found if not itself)


def test_single_rank_uses_the_share_as_is() -> None:
    """Without peers the fetched share is used as it is."""
    found = run_ranks(2, exchange_on_rank, Options(actor_num_gpus_per_node=2))
    assert found == [(True, True, [0, 0, 0])] * 2


def test_a_share_that_was_made_here_is_encoded_once() -> None:
    """As in tests and benches that have no queue."""
    found = run_ranks(2, made_on_rank, Options(actor_num_gpus_per_node=2, context_parallel_size=2))
    assert found == [True, True]


def made_on_rank(opts: Options) -> bool:
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.rollout_calls import ShareExchange

    exchange = ShareExchange(parallel_state.initialize(opts))
    found = exchange.exchange(share(1) if exchange.fetches else None)
    return found is not None and same(found, share(1))
