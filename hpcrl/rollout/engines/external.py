"""Engines that the run has not started (--rollout-external-engine-addrs): found at their addresses, and watched.

For such an engine this is what a supervisor is for one of ours, and speaks as one does (`run/engine_files.py`): it is
up, it has ended. The run cannot start it again; but once it answers again, within --attempts, that is another
incarnation of it, and it gets the weights before it is asked.

Invariants: nothing is started and nothing ended; every wait has a deadline, except for the return of an engine that has
ended, which are not waited for.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from hpcrl.config.rules.layout import ADDRS, KEYS, split_address
from hpcrl.engine.membership.http import CORE, HEALTH, LATE, REFUSED, SILENT, Address, answer, realm_of
from hpcrl.errors import DeadlineError, UsageError
from hpcrl.rollout.async_tasks import cancel
from hpcrl.rollout.engines.membership import EngineMembership
from hpcrl.run.engine_files import EngineEnd, tell_end
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.role import RoleContext, say
from hpcrl.transport.auth import borrowed_key

POLL = 1.0  #: seconds between two questions whether it lives
NAME = "policy"  #: what the engines of hpcrl call their model


async def keep_engines(membership: EngineMembership, context: RoleContext) -> None:
    """Keep the registry true, and watch the engines that no other process does; as `EngineMembership.keep`."""
    first = len(context.plan.engines)
    found = [ExternalEngine(context, first + number, text) for number, text in enumerate(context.plan.external)]
    tasks = [asyncio.create_task(work) for work in (membership.keep(), *(engine.keep() for engine in found))]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


class ExternalEngine:
    """One of them.

    Attributes:
        address: HOST:PORT, as the user gave it.
    """

    def __init__(self, context: RoleContext, index: int, address: str) -> None:
        self._rundir = context.rundir
        self._options = context.options
        self._index = index
        self._address = address
        self._at = Address(*split_address(address), "")
        self._name = f"engine-{index} at {address}"

    async def keep(self) -> None:
        """Tell its incarnations until it has ended once too often.

        Raises:
            DeadlineError: if it does not answer when the run begins, UsageError if what answers is not an engine for
                this run.
        """
        for incarnation in range(self._options.engine_restarts + 1):
            peer = await self._come_up(incarnation)
            publish(self._rundir, peer, self._index)
            say(f"{self._name} answers" + (" again" if incarnation else ""))
            why = await self._watch()
            again = incarnation < self._options.engine_restarts
            end = EngineEnd(host=self._address, incarnation=incarnation, why=why, again=again, time=time.time())
            tell_end(self._rundir, self._index, end)

    async def find(self) -> EnginePeer:
        """What it is, once it answers; as `keep` finds it when the run begins."""
        return await self._come_up(0)

    async def _come_up(self, incarnation: int) -> EnginePeer:
        begun = time.monotonic()
        limit = self._options.engine_start_timeout
        while True:
            status, realm = await self._knock()
            if status == 200:
                break
            if not incarnation and time.monotonic() > begun + limit:
                raise DeadlineError(
                    f"{self._name} did not answer within --engine-start-timeout {limit:.0f} s "
                    f"({self._describe_status(status)})",
                    "is it served, and is this its address on the run's network?",
                )
            await asyncio.sleep(POLL)
        _, models = await answer(self._at, "/v1/models", 60.0)
        try:
            model = next(entry for entry in models["data"] if entry["id"] == NAME)
            length = int(model["max_model_len"])
        except (TypeError, KeyError, StopIteration, ValueError):
            raise UsageError(
                f"{ADDRS}: {self._name} is not an engine of hpcrl: it does not serve {NAME!r}",
                "start it with hpcrl engines serve",
            ) from None
        return EnginePeer(
            host=self._at.host,
            port=self._at.port,
            model_len=length,
            incarnation=incarnation,
            key_name=realm,
        )

    async def _knock(self) -> tuple[int, str]:
        """(status of its health, the realm of its key); the request carries that key, and no other.

        Raises:
            UsageError: if it does not take the key.
        """
        status, realm = await realm_of(self._at)
        if status != 401:
            return status, ""  # no listener, or one that asks for no key and gets none
        self._at = replace(self._at, key=borrowed_key(self._rundir, self._index, realm))
        status, _ = await answer(self._at)
        if status == 401 and (await realm_of(self._at))[1] == realm:  # else it was served again meanwhile
            raise UsageError(
                f"{self._name} does not take the keys of {KEYS}", "give the directory that it was served with"
            )
        return status, realm

    async def _watch(self) -> str:
        """Why this incarnation has ended."""
        patience = self._options.rollout_health_check_timeout
        heard = time.monotonic()
        while True:
            health, _ = await answer(self._at)
            if health not in (200, SILENT):
                return f"{self._name} has died: {self._describe_status(health)}"
            core, said = await answer(self._at, CORE) if health == 200 else (SILENT, None)
            if core == LATE:
                return (
                    f"{self._name} hangs: its engine core has been busy with {(said or {}).get('error', 'a call')} "
                    "(--update-timeout)"
                )
            if core > 0:
                heard = time.monotonic()
            if time.monotonic() - heard > patience:
                return f"{self._name} hangs: no sign of life for {patience:.0f} s (--rollout-health-check-timeout)"
            await asyncio.sleep(POLL)

    @staticmethod
    def _describe_status(status: int) -> str:
        return (
            "there is no listener"
            if status == REFUSED
            else "no answer"
            if status == SILENT
            else f"{HEALTH} answers {status}"
        )
