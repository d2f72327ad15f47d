"""The two ends of a weight broadcast that carries nothing and takes its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.config import SimulationConfig
from areal_hpc.simulation.clock import Clock


def broadcast_s(settings: SimulationConfig) -> float:
    """Simulated seconds from the first byte sent to the last one received."""
    return settings.model_bytes / settings.broadcast_bytes_per_s


@dataclass(frozen=True, slots=True)
class Sent:
    """An update that has left; real seconds, as everything in the log."""

    version: int
    num_bytes: int
    snapshot_s: float
    broadcast_s: float


class SimulatedSender:
    """A `Sender`."""

    def __init__(self, settings: SimulationConfig, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._under_way: Sent | None = None
        self._leaves_s = 0.0
        self.last: Sent | None = None

    def publish(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Waits first until the update before has left, then for publish_s."""
        self.wait()
        settings, began_s = self._settings, self._clock.now()
        self._clock.sleep_until(began_s + settings.publish_s)
        takes_s = settings.publish_s + broadcast_s(settings)
        self._leaves_s = began_s + takes_s
        publish_s, takes_s = self._clock.real(settings.publish_s), self._clock.real(takes_s)
        self._under_way = Sent(version, settings.model_bytes, publish_s, takes_s)

    def hold(self, version: int, tensors: Mapping[str, Any]) -> None:
        raise NotImplementedError("a simulated broadcast cannot be torn")

    def regroup(self, members: Sequence[int], generation: int) -> None:
        raise NotImplementedError("a simulated broadcast has no group")

    def poll(self) -> bool:
        if self._under_way is not None and self._clock.now() >= self._leaves_s:
            self.last, self._under_way = self._under_way, None
        return self._under_way is None

    def wait(self) -> None:
        if not self.poll():
            self._clock.sleep_until(self._leaves_s)
            self.poll()


@dataclass(frozen=True, slots=True)
class Nothing:
    """A complete set of no weights."""

    version: int
    receive_s: float
    tensors: Mapping[str, Any] = field(default_factory=dict)


class SimulatedReceiver:
    """A `Receiver`: the controller announces a version when it has been sent, so it takes broadcast_s from there."""

    def __init__(self, settings: SimulationConfig, clock: Clock) -> None:
        self._clock, self._takes_s = clock, broadcast_s(settings)
        self._arriving: tuple[int, float] | None = None

    def begin(self, version: int) -> None:
        if self._arriving is not None:
            raise ValueError(f"version {self._arriving[0]} is still arriving, cannot begin version {version}")
        self._arriving = (version, self._clock.now() + self._takes_s)

    def regroup(self, members: Sequence[int], generation: int) -> None:
        raise NotImplementedError("a simulated broadcast has no group")

    def poll(self) -> Nothing | None:
        if self._arriving is None or self._clock.now() < self._arriving[1]:
            return None
        version, self._arriving = self._arriving[0], None
        return Nothing(version, self._clock.real(self._takes_s))
