"""A family that one of the suites leaves out is found here: what a new one must have, and who has not got it yet."""

from __future__ import annotations

import ast

import pytest

from hpcrl.models.family import registry
from tests.documents.texts import REPO
from tests.support import families

#: a family of the same layers under another name -> the one whose tests hold for it, and the test that shows the rest
UNDER_ANOTHER_NAME = {
    "kimi_k2": ("deepseek_v3", "tests/models/test_family_parity.py"),
    "mimo": ("qwen2", "tests/trainer/step/test_further_tokens.py"),
    "qwen3_5": ("qwen3_5_text", "tests/models/test_family_parity.py"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "tests/models/test_family_parity.py"),
}
#: what is shown of every family -> the file that takes its models from families.SIZES
SUITES = {
    "logits, gradients, layouts, packed rows, weights both ways": "tests/models/test_family_parity.py",
    "memory against what Megatron allocates": "tests/planning/memory/test_device_bytes.py",
    "operations against what torch counts": "tests/planning/formulas/test_flops.py",
    "what a GPU would wait for": "tests/trainer/step/test_host_waits.py",
    "the shipped recipes' settings": "tests/trainer/test_shipped_recipes.py",
    "every rank of a layout": "tests/trainer/megatron/test_fake_device.py",
    "bf16 on a GPU": "tests/trainer/megatron/test_gpu.py",
}
#: what else is shown of a family -> the file that names it
PLACES = {
    "engine": ("tests/engine/test_engine_families.py", '"{}"'),
    "twin": ("tests/support/twins.py", '"{}"'),
    "published": ("tests/support/published_models.py", '"{}"'),
    "page": ("docs/models.md", "`{}`"),
}
NO_GUIDE = ["llama", "qwen2", "qwen3_moe"]
#: not shown of a family, and why; in its own suite the count of operations leaves the gated delta nets out
MISSING = {
    **{("twin", kind): "no guide is of this model" for kind in NO_GUIDE},
    ("twin", "qwen3_5_text"): "published in a wrapper, qwen3_5",
    ("twin", "qwen3_5_moe_text"): "published in a wrapper, qwen3_5_moe",
    ("published", "qwen3_5_text"): "published in a wrapper, qwen3_5",
    ("published", "qwen3_5_moe_text"): "published in a wrapper, qwen3_5_moe",
}


def taken(path: str) -> bool:
    """Whether a test file goes over families.SIZES."""
    tree = ast.parse((REPO / path).read_text())
    imported = any(
        isinstance(node, ast.ImportFrom) and node.module == "tests.support.families" and
        any(name.name == "SIZES" for name in node.names)
        for node in ast.walk(tree)
    )  # fmt: skip
    return imported or any(
        isinstance(node, ast.Attribute) and node.attr == "SIZES" and ast.unparse(node.value) == "families"
        for node in ast.walk(tree)
    )


def test_each_has_two_sizes() -> None:
    assert set(registry()) == set(families.SIZES) | set(UNDER_ANOTHER_NAME)
    for name, (like, shown) in UNDER_ANOTHER_NAME.items():
        assert like in families.SIZES and f'"{name}"' in (REPO / shown).read_text(), name


@pytest.mark.parametrize("suite", SUITES)
def test_each_suite_takes_all(suite: str) -> None:
    assert taken(SUITES[suite])


def test_each_is_served_and_described() -> None:
    """By an engine of vLLM's that is updated, a twin of a guide, a published config.json, and the page; or it is said
    here why not."""
    named = {name: like for name, (like, _) in UNDER_ANOTHER_NAME.items()}
    lacking = set()
    for what, (path, quoted) in PLACES.items():
        text = (REPO / path).read_text()
        for kind in registry():
            if not any(
                quoted.format(name) in text
                for name in (kind, *(named.get(kind, kind),) * (what not in ("page", "twin")))
            ):
                lacking.add((what, kind))
    assert lacking == set(MISSING), lacking ^ set(MISSING)
