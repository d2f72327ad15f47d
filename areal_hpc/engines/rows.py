"""Running samples of an engine that decodes token by token, as rows of fixed arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_hpc.engines.base import Begun, Completion, Finish, Request
from areal_hpc.sampling import uniforms

UNIFORM_BLOCK = 64


@dataclass(slots=True)
class Running:
    """What the engine remembers of one running sample besides its arrays."""

    request: Request
    serial: int
    started_s: float
    interruptions: int

    @classmethod
    def of(cls, request: Request, serial: int, now: float, version: int) -> Running:
        """A sample that starts or goes on now, with the weights of `version`."""
        return cls(request, serial, now - request.begun.spent_s, request.interruptions(version))

    @property
    def is_source(self) -> bool:
        """Its prompt's KV entries were computed with nothing behind them."""
        return not self.interruptions and not len(self.request.begun.tokens)


class Rows:
    """Running samples as rows 0 .. n - 1 of fixed arrays; a freed row is filled by moving the last one into it.

    tokens, logprobs, versions: [num_slots, max_len], by absolute position, prompt first; length (tokens so far), prompt
    (tokens of it), limit (tokens allowed), temperature: [num_slots].
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.tokens = np.empty((num_slots, max_len), np.int32)
        self.logprobs = np.empty((num_slots, max_len), np.float32)
        self.versions = np.empty((num_slots, max_len), np.int32)
        self.length, self.prompt, self.limit = (np.zeros(num_slots, np.int64) for _ in range(3))
        self.temperature = np.zeros(num_slots, np.float32)
        self.uniforms = np.empty((num_slots, UNIFORM_BLOCK), np.float64)
        self.running: list[Running] = []

    def __len__(self) -> int:
        return len(self.running)

    def start(self, running: Running) -> int:
        """Take the next row; KV entries of all its tokens but the newest are up to the caller."""
        row, request, begun = len(self.running), running.request, running.request.begun
        size, drawn = len(request.prompt), len(begun.tokens)
        self.tokens[row, :size] = request.prompt
        response = slice(size, size + drawn)
        self.tokens[row, response] = begun.tokens
        self.logprobs[row, response], self.versions[row, response] = begun.logprobs, begun.versions
        self.prompt[row], self.length[row] = size, size + drawn
        self.limit[row], self.temperature[row] = size + request.max_new_tokens, request.temperature
        if drawn % UNIFORM_BLOCK:
            self.uniforms[row] = uniforms(request.seed, drawn - drawn % UNIFORM_BLOCK, UNIFORM_BLOCK)
        self.running.append(running)
        return row

    def next_uniforms(self) -> NDArray[np.float64]:
        """The number of every row's own stream that decides its next token, float64 [n]."""
        n = len(self)
        drawn = self.length[:n] - self.prompt[:n]
        for row in np.flatnonzero(drawn % UNIFORM_BLOCK == 0):
            self.uniforms[row] = uniforms(self.running[row].request.seed, int(drawn[row]), UNIFORM_BLOCK)
        return self.uniforms[np.arange(n), drawn % UNIFORM_BLOCK]

    def append(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int) -> None:
        n = len(self)
        at = (np.arange(n), self.length[:n])
        self.tokens[at], self.logprobs[at], self.versions[at] = tokens, logprobs, version
        self.length[:n] += 1

    def stopped(self) -> NDArray[np.bool_]:
        """[n]: whether the newest token of a row ends it by its request's own rule."""
        stop = np.zeros(len(self), np.bool_)
        for row, run in enumerate(self.running):
            if run.request.stop is not None:
                stop[row] = run.request.stop(self.tokens[row, self.prompt[row] : self.length[row]])
        return stop

    def completion(self, row: int, finish: Finish, now: float) -> Completion:
        run, response = self.running[row], slice(self.prompt[row], self.length[row])
        return Completion(
            key=run.request.key,
            tokens=self.tokens[row, response].copy(),
            logprobs=self.logprobs[row, response].copy(),
            versions=self.versions[row, response].copy(),
            finish=finish,
            interruptions=run.interruptions,
            started_s=run.started_s,
            finished_s=now,
        )

    def begun(self, row: int, now: float) -> Begun:
        """A copy of what the row has so far."""
        run, response = self.running[row], slice(self.prompt[row], self.length[row])
        return Begun(
            tokens=self.tokens[row, response].copy(),
            logprobs=self.logprobs[row, response].copy(),
            versions=self.versions[row, response].copy(),
            interruptions=run.interruptions,
            spent_s=now - run.started_s,
        )

    def release(self, row: int) -> int:
        """Free a row; returns the row that was moved into it (itself if it was the last)."""
        last = len(self) - 1
        size = self.length[last]
        for matrix in (self.tokens, self.logprobs, self.versions):
            matrix[row, :size] = matrix[last, :size]
        self.uniforms[row] = self.uniforms[last]
        for vector in (self.length, self.prompt, self.limit, self.temperature):
            vector[row] = vector[last]
        self.running[row] = self.running[last]
        self.running.pop()
        return last
