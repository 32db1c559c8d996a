"""What a store holds, and who waits for what: the rules of torch.distributed's stores as a pure object.

Invariant: an `Ask` gets exactly one `Answer`, at once or when the last key that it waits for appears.
"""

from __future__ import annotations

from collections import defaultdict

from hpcrl.rendezvous.frames import Answer, Ask


class Table:
    """Keys and values, and the wishes that wait for keys.  Members are named by whatever bytes the caller likes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[bytes, Ask]]] = defaultdict(list)

    def take(self, member: bytes, ask: Ask) -> list[tuple[bytes, Answer]]:
        """Do what `member` asks for; the answers that are due now, to it and to whom its keys were awaited by.

        ValueError for an Ask that makes no sense.
        """
        if ask.verb in ("get", "wait"):
            return self._later(member, ask)
        if ask.verb == "count":
            return [(member, Answer(ask.number, amount=len(self.values)))]
        if ask.verb == "check":
            return [(member, Answer(ask.number, amount=int(all(key in self.values for key in ask.keys))))]
        answer = self._change(ask)
        due = [(member, answer)]
        for key in ask.keys:
            if key in self.values:
                for other, waiting in self._waiting.pop(key, []):
                    due += self._later(other, waiting)
        return due

    def _later(self, member: bytes, ask: Ask) -> list[tuple[bytes, Answer]]:
        """The answer if all keys are there; else none, and the wish waits for the first that is not."""
        for key in ask.keys:
            if key not in self.values:
                self._waiting[key].append((member, ask))
                return []
        return [(member, Answer(ask.number, [self.values[key] for key in ask.keys] if ask.verb == "get" else []))]

    def _change(self, ask: Ask) -> Answer:
        if ask.verb == "set":
            self.values.update(zip(ask.keys, ask.values, strict=True))
            return Answer(ask.number)
        (key,) = ask.keys
        if ask.verb == "delete":
            return Answer(ask.number, amount=int(self.values.pop(key, None) is not None))
        if ask.verb == "add":
            total = int(self.values.get(key, b"0")) + ask.amount
            self.values[key] = str(total).encode()
            return Answer(ask.number, amount=total)
        if ask.verb == "append":
            (value,) = ask.values
            self.values[key] = self.values.get(key, b"") + value
            return Answer(ask.number)
        expected, desired = ask.values  # swap
        if key not in self.values and expected:
            return Answer(ask.number, [expected])
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return Answer(ask.number, [self.values[key]])
