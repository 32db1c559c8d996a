"""Options of where sandboxes are, and how many."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.sections import Base, opt


class SandboxOptions(Base):
    """sandboxes: where the commands of agents run (docs/agents.md)"""

    sandbox_on: Literal["rollout", "engines", "nodes"] = opt(
        "rollout",
        "machine of the rollout process; a share of the cores of every engine's machine; or separate nodes, a "
        "component of the job",
    )
    sandbox_num_nodes: int | None = opt(None, "separate nodes, with --sandbox-on nodes; default: 1", ge=1)
    sandbox_kind: Literal["auto", "unshare", "bwrap", "apptainer"] | None = opt(
        None,
        "program that makes their namespaces; auto: the first that works; default: HPCRL_SANDBOX_KIND on their "
        "machine, or auto",
    )
