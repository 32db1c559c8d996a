"""What ranks prove themselves with, and which pairs do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.peer_proof.pairs import WHOLE, is_proved, proved_peers
from hpcrl.peer_proof.proof import ANSWER, NONCE, Place, answer, is_right, new_nonce, pair_key

KEY = pair_key("the run's")
ONE = Place(0, b"host-a:1", new_nonce())
OTHER = Place(1, b"host-b:2", new_nonce())


def test_an_answer_is_right_for_its_pair_alone() -> None:
    """In one direction, between these ranks, addresses and nonces, and with this key."""
    given = answer(KEY, OTHER, ONE)
    assert len(given) == ANSWER
    assert len(ONE.nonce) == NONCE
    assert is_right(given, KEY, ONE, OTHER)
    liars = {
        "another key": (pair_key("another"), ONE, OTHER),
        "reflected": (KEY, OTHER, ONE),
        "another rank": (KEY, ONE, OTHER._replace(rank=2)),
        "another group": (KEY, ONE, OTHER._replace(address=b"host-b:3")),
        "our group is another": (KEY, ONE._replace(address=b"host-a:9"), OTHER),
        "replayed to a later group of ours": (KEY, ONE._replace(nonce=new_nonce()), OTHER),
        "replayed of an earlier one of theirs": (KEY, ONE, OTHER._replace(nonce=new_nonce())),
    }
    assert [why for why, (key, me, peer) in liars.items() if is_right(given, key, me, peer)] == []
    assert not is_right(bytes(ANSWER), KEY, ONE, OTHER)
    assert not is_right(given[:-1], KEY, ONE, OTHER)


def test_parts_of_an_answer_cannot_be_shifted() -> None:
    """What is hashed says where each part ends: a byte moved from one to the next makes another answer."""
    moved = OTHER._replace(address=OTHER.address + OTHER.nonce[:1], nonce=OTHER.nonce[1:])
    assert answer(KEY, OTHER, ONE) != answer(KEY, moved, ONE)


@given(st.integers(2, 3 * WHOLE), st.booleans())
@settings(deadline=None)
def test_pairs_are_symmetric(size: int, whole: bool) -> None:
    """Two ranks agree on whether they are a pair; small groups are proved whole, and no rank is its own peer."""
    peers = {rank: proved_peers(rank, size, whole) for rank in range(size)}
    for rank, mine in peers.items():
        assert rank not in mine
        assert len(set(mine)) == len(mine)
        assert all(rank in peers[peer] for peer in mine)
    if whole or size <= WHOLE:
        assert all(len(mine) == size - 1 for mine in peers.values())


@pytest.mark.parametrize("size", [65, 96, 200, 512])
def test_large_groups_prove_what_collectives_use(size: int) -> None:
    """Rings, binomial trees to any root, dissemination, and everything to and from rank 0; no more than log N."""
    for rank in range(size):
        far = 1
        while far < size:
            assert is_proved(rank, (rank + far) % size, size)
            far *= 2
        assert rank == 0 or is_proved(rank, 0, size)
    assert len(proved_peers(1, size, whole=False)) <= 2 * size.bit_length() + 1
