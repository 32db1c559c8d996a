"""Options of where sandboxes are, and how many."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.sections import Base, opt


class SandboxOptions(Base):
    """sandboxes: where the commands of agents run (docs/agents.md)"""

    sandbox_on: Literal["rollout", "engines", "nodes"] = opt(
        "rollout",
        "on the rollout process's machine; on a share of the cores of every engine's; or on nodes of their own, a "
        "component of the job",
    )
    sandbox_num_nodes: int | None = opt(None, "nodes of their own, with --sandbox-on nodes; default: 1", ge=1)
    sandbox_kind: Literal["auto", "unshare", "bwrap", "apptainer"] | None = opt(
        None,
        "who makes their namespaces; auto: the first of the others that can; default: what HPCRL_SANDBOX_KIND says "
        "where they are, or auto",
    )
