"""Log lines that anybody can cause: the first of them, then one a minute that says how many there were.

    log.addFilter(FewLines(lambda record: record.levelno == logging.WARNING))

Invariant: what is not such a line is left as it is; no such line brings a traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from hpcrl.toolbox.signs import LastSign

#: lines that are written; seconds between two that count the others
FIRST, EVERY = 100, 60.0


class FewLines(logging.Filter):
    """Lets few of the records pass that `caused` says a stranger has caused."""

    def __init__(self, caused: Callable[[logging.LogRecord], bool]) -> None:
        super().__init__()
        self._caused = caused
        self._written = self._dropped = 0
        self._counted = LastSign()

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._caused(record):
            return True
        reason = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + (f": {str(reason).splitlines()[0]}" if str(reason or "") else "")
        record.exc_info = record.exc_text = None
        record.args = ()
        record.msg = text[:200]
        if self._written < FIRST:
            self._written += 1
            return True
        self._dropped += 1
        if not self._counted.due(EVERY):
            return False
        record.msg = f"{record.msg} (one of {self._dropped} like it since the last that was written)"
        self._dropped = 0
        return True
