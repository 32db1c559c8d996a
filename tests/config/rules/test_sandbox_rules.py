"""Options of sandboxes together: what cannot be, and what would do nothing."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options, inert
from hpcrl.errors import UsageError
from hpcrl.launch.preflight import refuse_settings
from hpcrl.plan import Host
from hpcrl.sandbox.kinds import AUTO, PROGRAMS

GRPO = {
    "hf_checkpoint": "m",
    "prompt_data": "p.jsonl",
    "num_rollout": 2,
    "rollout_num_gpus": 1,
    "actor_num_gpus_per_node": 1,
    "rm_type": "math",
    "label_key": "label",
    "n_samples_per_prompt": 4,
}
OWN = GRPO | {"custom_generate_function_path": "mine.generate"}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (GRPO | {"sandbox_on": "nodes"}, "--sandbox-on has no effect.*no custom function"),
        (OWN | {"sandbox_num_nodes": 2}, "--sandbox-num-nodes has no effect.*--sandbox-on nodes"),
        (OWN | {"sandbox_on": "nodes", "spares": 1}, "--sandbox-on nodes with --spares 1"),
        (
            OWN
            | {
                "sandbox_on": "engines",
                "rollout_num_gpus": 0,
                "rollout_external_engine_addrs": ["h:1"],
                "rollout_external_engine_keys": "k",
            },
            "--sandbox-on engines: .*no engine",
        ),
    ],
)
def test_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_options(Options(**values))


def test_refused_together() -> None:
    """Also where they are of different stages, which share the hosts."""
    stages = [Options(**(GRPO | {"spares": 1})), Options(**(OWN | {"sandbox_on": "nodes"}))]
    with pytest.raises(UsageError, match="--sandbox-on nodes with --spares 1"):
        refuse_settings(stages, lambda _: [Host("a", 4), Host("b", 0)], packages=False)
    refuse_settings(stages[1:], lambda _: [Host("a", 4), Host("b", 0)], packages=False)


@pytest.mark.parametrize(
    "values",
    [
        {"sandbox_on": "nodes", "sandbox_num_nodes": 2},
        {"sandbox_on": "engines"},
        {"sandbox_on": "engines", "spares": 1},
    ],
)
def test_allowed(values: dict[str, Any]) -> None:
    check_options(Options(**(OWN | values)))


def test_nothing_is_sampled() -> None:
    """Without effect, and no node is asked for."""
    o = Options(**(OWN | {"sandbox_on": "nodes", "load_debug_rollout_data": "d"}))
    assert inert(o)["sandbox_on"] == "nothing is sampled" and o.own_sandbox_hosts == 0


def test_every_kind_can_be_chosen() -> None:
    (kinds, _) = get_args(Options.model_fields["sandbox_kind"].annotation)
    assert set(get_args(kinds)) == {AUTO, *PROGRAMS}
