"""Which spellings of --vllm-speculative-config draft with the model's own layers, with other weights, or with none."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options
from hpcrl.config.rules.sampling import check_draft_layers, drafts_of_files
from hpcrl.errors import UsageError
from tests.support.options import GRPO

HERE = "/models/mimo"
COUNT = {"num_speculative_tokens": 1}
OWN = COUNT | {"method": "mtp"}


def options(**setting: Any) -> Options:
    values = {"hf_checkpoint": HERE, "mtp_num_layers": 1, "vllm": {"speculative_config": setting}}
    return Options(**(GRPO | values))


@pytest.mark.parametrize("method", ["mimo_mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"])
def test_older_names_are_refused(method: str) -> None:
    with pytest.raises(UsageError, match=f'"{method}" is vLLM.*write "method": "mtp"'):
        check_options(options(**COUNT, method=method))
    check_options(options(**OWN))


@pytest.mark.parametrize(
    ("setting", "own", "kept", "told"),
    [
        (OWN, True, True, "--mtp-num-layers 1"),
        (OWN | {"model": None}, True, True, "--mtp-num-layers 1"),
        (OWN | {"model": f"{HERE}/"}, True, True, "--mtp-num-layers 1"),
        (OWN | {"model": "/models/other"}, False, True, "/models/other"),
        (COUNT | {"method": "eagle3", "model": "/models/eagle"}, False, True, "/models/eagle"),
        (COUNT | {"model": "/models/small"}, False, True, "/models/small"),
        (COUNT | {"method": "ngram"}, False, False, None),
        (COUNT | {"model": "ngram"}, False, False, None),
        ({}, False, False, None),
    ],
)
def test_what_engines_draft_with(setting: dict[str, Any], own: bool, kept: bool, told: str | None) -> None:
    """Whether updates bring it, whether a sleeping engine keeps it, and what is said if no update does."""
    found = options(**setting)
    assert (found.refreshes_drafts, found.drafts_with_weights) == (own, kept)
    for layers in (None, 1):
        lines = list(drafts_of_files(setting, layers, HERE))
        assert len(lines) == (told is not None and not (own and layers))
        assert all("no weight update brings" in line and str(told) in line for line in lines)
    if own:
        with pytest.raises(UsageError, match="method.*has no layers that"):
            check_draft_layers(found, {"model_type": "mimo"})
    else:
        check_draft_layers(found, {"model_type": "mimo"})
