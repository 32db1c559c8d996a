"""What hpcrl remembers of the machine and its files in one process, forgotten after each test.

A function with a `functools.cache` would otherwise tell a test what the machine was like in an earlier one: that a
program was in PATH, say.

Invariant: every function of hpcrl with a cache is in one of the two tables (tests/test_caches.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

#: functions that look at PATH, users, the environment, or files that a test may change: cleared after each test
FORGOTTEN = {
    "hpcrl.sandbox.harbor.rows": ("_read",),
    "hpcrl.rollout.slime_names.helpers": ("load_tokenizer",),
    "hpcrl.sandbox.kinds": ("_python", "_bounds", "_root"),
}
#: functions whose result depends on their arguments and on what is installed alone
KEPT = {
    "hpcrl.config.dataclass_fields": ("locate", "_module", "read_fields"),
    "hpcrl.config.passthrough": ("settings", "spellings", "_preferred"),
    "hpcrl.config.plugin_names": ("algorithm_files",),
    "hpcrl.config.setting_names": ("own",),
    "hpcrl.engine.params.experts": ("unpacking",),
    "hpcrl.planning.formulas.adapters": ("_matrices",),
    "hpcrl.transport.pickles.plain": ("look_up",),
    "hpcrl.planning.rehearsal.device": ("_short",),
    "hpcrl.rollout.endpoint.call_forms": ("forms", "form_of"),
    "hpcrl.rollout.slime_names.helpers": ("_loop",),
    "hpcrl.config.slime.arguments": ("verdicts", "other_defaults", "_document"),
    "hpcrl.config.slime.script_notes": ("model_families",),
    "hpcrl.utils.plugins": ("_names", "_parsed"),
    "hpcrl.trainer.megatron.delta_net_layer": ("_context_places",),
}


@pytest.fixture(autouse=True)
def machine_forgotten() -> Iterator[None]:
    """What the test has had remembered is forgotten after it."""
    yield
    for module, names in FORGOTTEN.items():
        if found := sys.modules.get(module):
            for name in names:
                getattr(found, name).cache_clear()
