"""The share of accepted drafts, from the engines' counters."""

from __future__ import annotations

import asyncio

from hpcrl.config.options import Options
from hpcrl.rollout.engines.load import AcceptedDrafts, counts_in

TEXT = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="policy"}} {checked}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="policy"}} 1.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="policy"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="policy"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="policy",position="0"}} 99.0
"""


def test_counters_are_summed_over_labels() -> None:
    assert counts_in(TEXT.format(checked="9.0", drafted="20.0", accepted="5.0")) == (10, 20, 5)
    assert counts_in(TEXT.partition("vllm:spec_decode_num_accepted_tokens_total")[0]) is None


def test_a_share_is_of_one_rollout() -> None:
    """An engine that is silent at either end, or came meanwhile, counts nothing; without drafts there is no number."""
    said: dict[int, str | None] = {}

    async def texts() -> dict[int, str]:
        return {number: text for number, text in said.items() if text is not None}

    drafts = AcceptedDrafts(texts, Options(vllm={"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}))
    said |= {0: TEXT.format(checked=10, drafted=20, accepted=20), 1: TEXT.format(checked=1, drafted=2, accepted=2)}
    asyncio.run(drafts.start_rollout())
    assert asyncio.run(drafts.measures()) == {}
    said |= {0: TEXT.format(checked=20, drafted=40, accepted=25), 1: None}
    told = {"rollout/spec_accept_rate": 0.25, "rollout/spec_accept_length": 1.5}
    assert asyncio.run(drafts.measures()) == told
    said[2] = TEXT.format(checked=999, drafted=2000, accepted=1500)
    assert asyncio.run(drafts.measures()) == told, "what it counted for another run is not this rollout's"
    asyncio.run(drafts.start_rollout())
    said |= {0: None, 1: TEXT.format(checked=500, drafted=900, accepted=900)}
    assert asyncio.run(drafts.measures()) == {}, "engine 1 was silent at the beginning"
    said[2] = TEXT.format(checked=1009, drafted=2020, accepted=1505)
    assert asyncio.run(drafts.measures()) == told
    assert asyncio.run(AcceptedDrafts(texts, Options()).measures()) == {}
