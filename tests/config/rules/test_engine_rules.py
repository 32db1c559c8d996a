"""What engines that somebody else has started need of the options, and where one is said to be."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.rules.layout import split_address
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import UsageError
from hpcrl.plan import local_hosts, make_plan
from tests.support.options import GRPO

THERE = {"rollout_num_gpus": None, "rollout_external_engine_addrs": ["10.0.0.5:8100", "[::1]:8100"]}
KEYS = {"rollout_external_engine_keys": "/keys"}


def test_a_run_may_have_no_engine_but_these() -> None:
    options = Options(**(GRPO | THERE | KEYS))
    check_options(options)
    plan = make_plan(options, local_hosts(options), "run")
    assert (plan.engines, plan.external, plan.engine_count) == ((), ("10.0.0.5:8100", "[::1]:8100"), 2)
    assert plan.table().splitlines()[2].split() == ["engine", "0", "10.0.0.5:8100", "external"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (THERE, "without --rollout-external-engine-keys"),
        (THERE | KEYS | {"rollout_external_engine_addrs": ["a:1", "a:1"]}, "a:1 is given twice"),
        (THERE | KEYS | {"rollout_external_engine_addrs": ["node7"]}, "write HOST:PORT"),
        (THERE | KEYS | {"weight_transfer": "shm"}, "shm does not reach"),
        (THERE | KEYS | {"colocate": True}, "exclude each other"),
        (KEYS, "--rollout-external-engine-keys has no effect here: --rollout-external-engine-addrs is not given"),
        (THERE | KEYS | {"rollout_external_engine_addrs": []}, "needs engines"),
    ],
)
def test_what_does_not_go_is_said(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_options(Options(**(GRPO | values)))


@pytest.mark.parametrize("text", ["", "a", "a:0", "a:65536", "a:b", "http://a:1", "::1:80", "a b:1", "a:1/x", ":1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="address of an engine"):
        split_address(text)
    assert split_address("[fe80::1]:80") == ("fe80::1", 80) and split_address("n.x.org:65535") == ("n.x.org", 65535)
