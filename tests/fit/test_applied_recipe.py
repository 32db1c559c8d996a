"""A row as a recipe: keys that change are changed, in place, and nothing else."""

from __future__ import annotations

import difflib
import tomllib

import pytest

from hpcrl.errors import UsageError
from hpcrl.fit.applied_recipe import with_settings

TEXT = """\
# Why it is so.
name = "r"
actor_num_nodes = 1            # one
tensor_model_parallel_size=2
note = "tensor_model_parallel_size = 3"

[megatron]
tensor_model_parallel_size = 9 # not ours

[vllm]
max_num_seqs = 8
"""


def changes(text: str, **settings: object) -> list[str]:
    """The lines that differ."""
    made = with_settings(text, settings)
    return [line for line in difflib.ndiff(text.splitlines(), made.splitlines()) if line[0] in "+-"]


def test_keys_are_changed_in_place() -> None:
    """With their comments; of another table, or in a text, they stay."""
    assert changes(TEXT, actor_num_nodes=4, tensor_model_parallel_size=2) == [
        "- actor_num_nodes = 1            # one",
        "+ actor_num_nodes = 4            # one",
    ]
    assert changes(TEXT, tensor_model_parallel_size=4) == [
        "- tensor_model_parallel_size=2",
        "+ tensor_model_parallel_size=4",
    ]


def test_new_keys_come_after_their_kin() -> None:
    """What is the default anyway is not written."""
    assert changes(TEXT, context_parallel_size=2, colocate=False, expert_model_parallel_size=1) == [
        "+ context_parallel_size = 2"
    ]
    made = with_settings(TEXT, {"context_parallel_size": 2, "vllm": {"data_parallel_size": 8}})
    found = tomllib.loads(made)
    assert found["context_parallel_size"] == 2 and found["vllm"] == {"max_num_seqs": 8, "data_parallel_size": 8}
    assert found["megatron"] == {"tensor_model_parallel_size": 9}


def test_other_places_of_a_key() -> None:
    """The only stage goes before the top; a table that is not there is made; a file may end without a line's end."""
    staged = 'actor_num_nodes = 1\n[[stage]]\nname = "a"\nactor_num_nodes = 2 # here\n'
    assert changes(staged, actor_num_nodes=4) == ["- actor_num_nodes = 2 # here", "+ actor_num_nodes = 4 # here"]
    made = with_settings('name = "r"', {"actor_num_nodes": 4, "vllm": {"data_parallel_size": 2}})
    assert tomllib.loads(made) == {"name": "r", "actor_num_nodes": 4, "vllm": {"data_parallel_size": 2}}


@pytest.mark.parametrize(
    "text", ["vllm.data_parallel_size = 4\n", "vllm = {data_parallel_size = 4}\n", '"colocate" = true\n']
)
def test_what_cannot_be_changed_in_place(text: str) -> None:
    """Dotted keys, inline tables and quoted keys are told, and not broken."""
    with pytest.raises(UsageError, match="line of its own"):
        with_settings(text, {"vllm": {"data_parallel_size": 8}, "colocate": False})
