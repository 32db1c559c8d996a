"""Settings of slime's MIS example: the file that --custom-config-path names becomes options, or is refused by name."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hpcrl.algorithms.corrections import mis
from hpcrl.algorithms.interface import TokenBatch
from hpcrl.config.options import Options
from hpcrl.config.recipe import resolve_stages
from hpcrl.config.slime.arguments import Translation, translate
from hpcrl.config.slime.verbatim import PLACES, recipe_of
from hpcrl.errors import UsageError
from tests.algorithms.batches import over_ranks, random_samples, token_batch
from tests.algorithms.test_losses import parts_of
from tests.config.slime.test_arguments import BASE

FUNCTION = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
#: as slime's own file has them
SETTINGS: dict[str, Any] = {
    "use_tis": True,
    "use_rs": True,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": 1.0e-4,
    "tis_batch_normalize": True,
}


def words(path: Path, settings: Any) -> list[str]:
    path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
    return ["--use-tis", "--custom-config-path", str(path), "--custom-tis-function-path", FUNCTION]


def translated(path: Path, settings: Any) -> Translation:
    return translate([*BASE.split(), *words(path, settings)])


def test_the_file_becomes_options(tmp_path: Path) -> None:
    given = [*BASE.split(), *words(tmp_path / "mis.yaml", SETTINGS)]
    [options] = resolve_stages(recipe_of(given, {}), {}, PLACES)
    assert options.custom_tis_function_path == "mis" and options.use_tis and options.use_rs
    assert (options.tis_clip, options.tis_clip_low, options.rs_veto_threshold) == (2.0, 0.5, 1e-4)
    assert options.custom_config_path is None and options.tis_batch_normalize
    [line] = [line for line in translate(given).lines if line.flag == "custom-config-path"]
    assert line.reading.outcome == "translated" and "--tis-clip 2.0 --tis-clip-low 0.5" in line.text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tis_batch_normalize": "yes"}, "neither true nor false"),
        ({"mis_level": "token", "max_turns": 4}, "max_turns, mis_level: not settings of MIS"),
        ({"use_tis": False}, "use_tis: false leaves no correction"),
        ({"tis_upper_bound": None}, "tis_upper_bound is missing"),
        ({"rs_veto_threshold": "1e-4"}, "not a number above 0; YAML needs a dot"),
        ({"use_rs": "yes please"}, "neither true nor false"),
        ({"tis_level": "word"}, "--tis-level"),
    ],
)
def test_what_there_is_not_is_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    found = translated(tmp_path / "mis.yaml", SETTINGS | change)
    assert any(said in str(error) for error in found.wrong), found.wrong


@pytest.mark.parametrize("said", [False, None])
@pytest.mark.parametrize("more", ["", "--get-mismatch-metrics"])
def test_what_is_not_turned_on_corrects_nothing(tmp_path: Path, said: bool | None, more: str) -> None:
    """Without --use-tis, a file that does not say use_tis: true only measures in slime, and so it does here."""
    settings = {name: value for name, value in SETTINGS.items() if name != "use_tis"} | (
        {} if said is None else {"use_tis": said}
    )
    given = [word for word in words(tmp_path / "mis.yaml", settings) if word != "--use-tis"]
    found = translate([*BASE.split(), *given, *more.split()])
    assert not found.wrong and found.values == translate(BASE.split()).values
    [reading] = [line.reading for line in found.lines if line.flag == "custom-config-path"]
    assert reading.outcome == "needless" and "--use-tis" in reading.why


def test_settings_of_another_correction(tmp_path: Path) -> None:
    """A file of settings that is not MIS's leaves --get-mismatch-metrics what it is: a correction of the loss."""
    (tmp_path / "own.yaml").write_text("x: 1\n")
    more = f"--get-mismatch-metrics --custom-tis-function-path my.fn --custom-config-path {tmp_path}/own.yaml"
    found = translate([*BASE.split(), *more.split()]).values
    assert found["use_tis"] and found["custom_tis_function_path"] == "my.fn"


def test_the_file_alone_turns_it_on(tmp_path: Path) -> None:
    given = [word for word in words(tmp_path / "mis.yaml", SETTINGS) if word != "--use-tis"]
    found = translate([*BASE.split(), *given])
    assert found.values["use_tis"] is True and found.values["tis_batch_normalize"] is True


@pytest.mark.parametrize(("text", "said"), [("- a", "not a table"), ("a: [", "is not YAML"), (None, "No such file")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    given = words(tmp_path / "mis.yaml", text or "")
    if text is None:
        (tmp_path / "mis.yaml").unlink()
    with pytest.raises(UsageError, match=f"--custom-config-path .*{said}"):
        recipe_of([*BASE.split(), *given], {})


def test_another_functions_settings_are_its_own(tmp_path: Path) -> None:
    given = ["--custom-config-path", str(tmp_path / "own.yaml"), "--custom-generate-function-path", "mine.generate"]
    assert translate(given).values["custom_config_path"] == str(tmp_path / "own.yaml")


def of_slime(tokens: TokenBatch, s: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(weights, kept) of each token as slime's example defines them, with its defaults, in Python's floats."""
    high = s["tis_upper_bound"]
    low = s["tis_lower_bound"] or 1 / s["tis_upper_bound"]
    weights, kept = [], []
    for sample in sorted(set(tokens.sample.tolist())):
        logs = [
            float(d)
            for d, of in zip(tokens.trainer - tokens.rollout, tokens.sample.tolist(), strict=True)
            if of == sample
        ]
        level = {
            "token": logs,
            "sequence": [math.fsum(logs)] * len(logs),
            "geometric": [math.fsum(logs) / len(logs)] * len(logs),
        }
        ratio, rejection = (
            [math.exp(max(-20.0, min(20.0, x))) for x in level[s[name]]] for name in ("tis_level", "rs_level")
        )
        caps = {"truncate": (0.0, high), "clip": (low, high), "mask": (0.0, math.inf)}[s["tis_mode"]]
        weights += [max(caps[0], min(caps[1], k)) for k in ratio]
        least = s["rs_lower_bound"] or low
        most = s["rs_upper_bound"] or high
        vetoed = bool(s["use_rs"] and s["rs_veto_threshold"] and min(logs) < math.log(s["rs_veto_threshold"]))
        for k, r in zip(ratio, rejection, strict=True):
            inside = s["tis_mode"] != "mask" or low <= k <= high
            kept.append(float(inside and not vetoed and (not s["use_rs"] or least <= r <= most)))
    if s["tis_batch_normalize"]:
        owner = tokens.sample.tolist()
        rows = [[w for w, of in zip(weights, owner, strict=True) if of == n] for n in range(tokens.samples)]
        whole = [math.fsum(row) / max(len(row), 1) for row in rows]
        by_token = math.fsum(weights) / max(len(weights), 1)
        mean = by_token if s["tis_level"] == "token" else math.fsum(whole) / len(whole)
        weights = [w / mean for w in weights]
    return weights, kept


LEVELS = ("token", "sequence", "geometric")


@pytest.mark.parametrize(
    ("mode", "level", "rejects"), [*itertools.product(("truncate", "clip", "mask"), LEVELS, (True, False))]
)
def test_the_numbers_are_slimes_whatever_is_left_out(tmp_path: Path, mode: str, level: str, rejects: bool) -> None:
    draw = random.Random(f"{mode} {level} {rejects}")
    for seed in range(6):
        settings = SETTINGS | {"tis_mode": mode, "tis_level": level, "use_rs": rejects, "rs_level": draw.choice(LEVELS)}
        settings |= {
            name: draw.choice([None, value]) for name, value in (("tis_lower_bound", 0.7), ("rs_lower_bound", 0.8))
        }
        settings["tis_batch_normalize"] = level != "geometric" and draw.random() < 0.5
        settings |= {"rs_upper_bound": draw.choice([None, 1.3]), "rs_veto_threshold": draw.choice([None, 0.5])}
        found = translated(tmp_path / "mis.yaml", settings)
        assert not found.wrong, found.wrong
        options = Options(
            **{k: v for k, v in found.values.items() if k.startswith(("tis_", "rs_", "use_rs", "use_tis"))}
        )
        tokens = token_batch(random_samples(seed))
        correction = mis.correct(tokens, options)
        weights, kept = of_slime(tokens, settings)
        torch.testing.assert_close(
            correction.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=1e-12
        )
        assert correction.kept.tolist() == kept


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_context_parallel_ranks_share_the_mean(level: str) -> None:
    """A micro-batch whose samples lie on three ranks is normalised as on one."""
    samples = random_samples(5)
    o = Options(use_tis=True, custom_tis_function_path="mis", tis_level=level, tis_batch_normalize=True)
    tokens = token_batch(samples)
    whole = mis.correct(tokens, o)
    assert float(whole.report["mis_batch_norm_factor"][0]) != 1
    place = torch.arange(len(tokens.sample)) % 3

    def one(rank: int, total: Any) -> torch.Tensor:
        def over_sample(values: torch.Tensor) -> torch.Tensor:
            return total(values.new_zeros(len(values), tokens.samples).index_add(1, mine.sample, values))

        mine = parts_of(tokens, place == rank, sum_over_sample=over_sample)
        return mis.correct(mine, o).weights

    for rank, weights in enumerate(over_ranks(one, 3)):
        torch.testing.assert_close(weights, whole.weights[place == rank])


def test_weights_of_zero_are_not_divided() -> None:
    """A batch whose weights are all next to nothing, or that holds no token, keeps them."""
    tokens = token_batch(random_samples(5))
    o = Options(use_tis=True, custom_tis_function_path="mis", tis_batch_normalize=True)
    far = replace(tokens, trainer=tokens.rollout - 30)
    assert mis.correct(far, o).weights.tolist() == pytest.approx([math.exp(-20.0)] * len(tokens.sample))
    assert mis.correct(parts_of(tokens, tokens.sample < 0), o).weights.numel() == 0
