"""The numbers of a translated run next to those of slime's own functions, for each set of flags that changes a gradient.

Where SLIME_CHECKOUT names a checkout of slime's, its functions are run here; else the numbers that they gave when they
were recorded (record_numbers.py).  Both go through the translation: flags as a script has them, options as the run has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from hpcrl.algorithms.advantages import compute_advantages
from hpcrl.algorithms.loss import compute_loss, divides_by_tokens
from hpcrl.config.options import AlgorithmOptions, OffPolicyOptions, Options
from hpcrl.config.slime.arguments import translate
from tests.algorithms.batches import Sample, columns, rollout_batch, token_batch
from tests.config.slime.record_numbers import FILE, SEEDS
from tests.config.slime.slime_functions import CASES, MIS_CASES, SlimeLoss, flags_of, samples_of, slime_arguments

RECORDED = json.loads(FILE.read_text())
ALL = {**CASES, **MIS_CASES}
CHECKOUT = os.environ.get("SLIME_CHECKOUT", "")
checkout = pytest.mark.skipif(not CHECKOUT, reason="SLIME_CHECKOUT names no checkout of slime's")
#: slime's name of a metric -> ours, where a correction of ours has another
OURS = {"mis_catastrophic_seq_fraction": "rs_catastrophic_seq_fraction"}


def options_of(case: str, folder: Path) -> Options:
    """What the translation makes of the flags, of those options that a loss reads."""
    words = flags_of(case)
    if ALL[case] is not None:
        file = folder / "mis.yaml"
        file.write_text(yaml.safe_dump(ALL[case]))
        words = [str(file) if word == "mis.yaml" else word for word in words]
    found = translate(["--ref-load", "/m", "--normalize-advantages", *words])
    assert not found.wrong, found.wrong
    names = {*AlgorithmOptions.model_fields, *OffPolicyOptions.model_fields}
    return Options(**{name: value for name, value in found.values.items() if name in names})


def ours(options: Options, samples: Sequence[Sample]) -> tuple[float, list[float], dict[str, float]]:
    """(loss, gradient, report) of the run that `options` describe."""
    mask = columns(samples, "mask").bool()
    logprobs = columns(samples, "logprobs")[mask].clone().requires_grad_()
    tokens = token_batch(samples, logprobs)
    if divides_by_tokens(options):
        tokens = replace(tokens, weights=torch.ones_like(tokens.weights))
    tokens = replace(tokens, trainer=tokens.old)  # as slime has it: the trainer's own pass before the update
    found = compute_loss(tokens, options)
    (gradient,) = torch.autograd.grad(found.total, logprobs)
    sums = found.report.means | {k: total for k, (total, _) in found.report.counted.items() if k.startswith("mis_")}
    return float(found.total.detach()), gradient.tolist(), {k: float(v) for k, v in sums.items()}


def compare(case: str, folder: Path, samples: Sequence[Sample], theirs: dict[str, Any]) -> None:
    loss, gradient, report = ours(options_of(case, folder), samples)
    assert loss == pytest.approx(theirs["loss"], rel=1e-6, abs=1e-7)
    np.testing.assert_allclose(gradient, theirs["gradient"], rtol=1e-6, atol=1e-7)
    same = {name: OURS.get(name, name) for name in theirs["report"] if OURS.get(name, name) in report}
    assert {"loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"} <= set(same)
    if "tis" in case:
        assert "ois" in same
    for name, mine in same.items():
        if name == "opsm_clipfrac":  # slime's divides by all samples' tokens, masked ones among the counted
            continue
        assert report[mine] == pytest.approx(theirs["report"][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_a_translated_loss_is_the_recorded_one(case: str, number: int, tmp_path: Path) -> None:
    compare(case, tmp_path, samples_of(SEEDS[number]), RECORDED["cases"][case][number])


@checkout
@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("seed", range(5))
def test_a_translated_loss_is_slimes(case: str, seed: int, tmp_path: Path) -> None:
    """Its own functions, run here."""
    samples = samples_of(seed)
    loss, gradient, report = SlimeLoss(Path(CHECKOUT))(slime_arguments(case, ALL[case]), samples)
    compare(case, tmp_path, samples, {"loss": loss, "gradient": gradient, "report": report})


def test_every_case_is_recorded() -> None:
    """With where it comes from."""
    assert set(RECORDED["cases"]) == set(ALL)
    assert RECORDED["from"]["commit"] and RECORDED["from"]["functions"]
    assert {len(rows) for rows in RECORDED["cases"].values()} == {len(SEEDS)}


ESTIMATED = [case for case in CASES if "reinforce" in case]


@checkout
@pytest.mark.parametrize("case", ESTIMATED)
@pytest.mark.parametrize("seed", range(5))
def test_a_translated_advantage_is_slimes(case: str, seed: int, tmp_path: Path) -> None:
    """Of whole masks, since hpcrl's steps are the trained tokens (docs/algorithms.md); before whitening."""
    samples = [sample for sample in samples_of(seed) if sample.length]
    for sample in samples:
        sample.mask[:] = True
    theirs = SlimeLoss(Path(CHECKOUT)).advantages(slime_arguments(case, None), samples)
    o = options_of(case, tmp_path).model_copy(
        update={"normalize_advantages": False, "disable_rewards_normalization": True}
    )
    found = compute_advantages(rollout_batch(samples), o)
    np.testing.assert_allclose(found.advantages.numpy(), np.concatenate(theirs), rtol=1e-5, atol=1e-6)
