"""The batch of a rehearsal: in one optimizer step the longest micro-batches that the options allow, as many as are
under way at once in the pipeline, and the shortest.

Invariants: every data-parallel rank gets micro-batches of the same lengths, so that ranks of a stage do the same; each
sample is one that the run could have made.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs, routing
from hpcrl.models.family import Config
from hpcrl.planning.formulas.activations import longest_sample, tokens_per_gpu
from hpcrl.sample import Sample
from hpcrl.transport.share_format import SampleBatch, Share
from hpcrl.utils.sample_parts import COMPLETED

SHORTEST = 2  #: tokens: one of prompt, one of response


def micro_batches(options: Options) -> list[list[int]]:
    """Lengths of the samples of each micro-batch of a data-parallel rank, the longest micro-batches first."""
    pp = options.pipeline_model_parallel_size
    count = max(2, pp + 1)
    count += -count % options.micro_batch_multiple
    each = 2 if needs(options).pairs else 1
    return [_longest(options, each)] * (count - 1) + [[SHORTEST] * each]


def _longest(options: Options, each: int) -> list[int]:
    """Samples of one length, and one that fills up what is left."""
    limit = max(SHORTEST, tokens_per_gpu(options) * options.context_parallel_size)
    sample = min(limit, max(SHORTEST, longest_sample(options)))
    if not options.use_dynamic_batch_size:
        return [sample] * max(each, options.micro_batch_size)
    if limit < sample * each:
        return [max(SHORTEST, limit // each)] * each
    whole, rest = divmod(limit, sample)
    found = [sample] * whole + ([rest] if rest >= SHORTEST else [])
    return found[: len(found) // each * each]


def rehearsed(options: Options, lengths: list[list[int]]) -> Options:
    """The options of one optimizer step over such micro-batches."""
    samples = sum(map(len, lengths)) * options.data_parallel_size
    each = math.gcd(samples, options.n_samples_per_prompt)
    return options.model_copy(
        update={
            "num_steps_per_rollout": 1,
            "global_batch_size": None,
            "n_samples_per_prompt": each,
            "rollout_batch_size": samples // each,
        }
    )


def share_of(options: Options, config: Config, lengths: list[list[int]], dp_rank: int) -> Share:
    """What data-parallel rank `dp_rank` gets, of options that `rehearsed` gave."""
    flat = [length for micro in lengths for length in micro]
    ranks = options.data_parallel_size
    each = options.n_samples_per_prompt
    of_all = [_sample(options, config, length, number, each) for number, length in enumerate(flat * ranks)]
    batch = SampleBatch.from_samples(of_all)
    rows = range(dp_rank * len(flat), (dp_rank + 1) * len(flat))
    local = iter(range(len(flat)))
    micro = [[next(local) for _ in each_one] for each_one in lengths]
    trained = int(batch.loss_mask.sum(dtype=np.int64))
    own = np.asarray(rows, np.int32)
    return Share(0, 0, batch.select(list(rows)), [micro], [len(of_all)], [trained], table=batch.rows, own=own)


def _sample(options: Options, config: Config, length: int, number: int, each: int) -> Sample:
    prompt = 1 if length == SHORTEST else max(1, length - options.rollout_max_response_len)
    answer = length - prompt
    extra: dict[str, Any] = {}
    if routing(options) == "engine":
        layers = config.get("num_hidden_layers", 1)
        chosen = config.get("num_experts_per_tok", 1)
        extra["rollout_routed_experts"] = np.resize(np.arange(chosen, dtype=np.uint8), (length, layers, chosen))
    if needs(options).teacher and not needs(options).teacher_model:
        extra["teacher_log_probs"] = np.full(answer, -0.25, np.float32)
    return Sample(
        group_index=number // each,
        response_index=number % each,
        tokens=np.zeros(length, np.int32),
        response_length=answer,
        loss_mask=np.ones(answer, np.uint8),
        rollout_log_probs=np.full(answer, -0.25, np.float32),
        versions=np.zeros(answer, np.int32),
        reward=float(number % 3),
        baseline=0.0,
        status=COMPLETED,
        **extra,
    )
