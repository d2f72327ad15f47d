"""The run log of an attempt, from its creation until every rank has said farewell."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_hpc.exits import RunError
from areal_hpc.messages import ActivityReport, Event

if TYPE_CHECKING:
    from typing_extensions import Self

    from areal_hpc.comm import Received
    from areal_hpc.desk import Desk
    from areal_hpc.runlog_writer import RunLogWriter

log = logging.getLogger("areal_hpc")


class OpenLog:
    """Keeps the log open beyond the run: what ranks have done up to Stop they tell afterwards. `with` closes it.

    Attributes:
        desk: writes down what they tell, once there is one.
    """

    writer: RunLogWriter | None = None
    desk: Desk | None = None

    def create(self, path: Path, attributes: Mapping[str, Any], *, tokens: bool = False) -> RunLogWriter:
        """The log itself; raises as RunLogWriter does."""
        from areal_hpc.runlog_writer import RunLogWriter  # here: only the controller needs HDF5

        self.writer = RunLogWriter(path, attributes=attributes, tokens=tokens)
        return self.writer

    def take(self, received: Received) -> None:
        """A message that came after the run; only reports and events still say anything. One that the log does not take
        is said, not raised: the farewells of the others are waited for."""
        if self.desk is None or not isinstance(received.message, (ActivityReport, Event)):
            return
        try:
            self.desk.handle(received)
        except ValueError as error:
            _say(f"rank {received.source}: its last {type(received.message).__name__} is not in the log: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the log. How the run ended is known and written by now, so a failure is said, not raised."""
        try:
            if self.writer is not None:
                self.writer.close()
        except RunError as error:
            _say(error.reason)


def _say(reason: str) -> None:
    log.error("%s", reason)
    print(f"areal-hpc: {reason}", file=sys.stderr, flush=True)
