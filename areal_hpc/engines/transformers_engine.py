"""Generation engine on a transformers model: continuous batching, interruptible between two tokens.

One forward per step serves everything: the newest token of every running row, and the prompts of rows that start in
this step, laid end to end. So filling a freed slot costs no extra forward. KV entries cover all tokens of a row but
the newest; when weights change they are dropped and computed anew from prompt + tokens so far (paper section 4.1).

Departures from AReaL: the swap happens inside the engine, so nothing is aborted, resubmitted or sampled twice; the
version tag and the log-prob are written where the token is drawn; and a sample's tokens depend on its seed, prompt
and the weights alone. On a CPU with one thread that holds bit for bit, because batches are never smaller than
`MIN_ROWS` and key lengths are multiples of `KEY_STEP`: below these, MKL and SDPA pick other summation orders.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_hpc import models
from areal_hpc.engines.base import Completion, Request, Swap
from areal_hpc.engines.kv_cache import MIN_ROWS, KVCache, StepAttention
from areal_hpc.sampling import sample, uniforms
from areal_hpc.trajectory import Key

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNIFORM_BLOCK = 64


@dataclass(slots=True)
class Running:
    """What the engine remembers of one running sample besides its arrays."""

    request: Request
    serial: int
    started_s: float
    interruptions: int = 0


class Rows:
    """Running samples as rows 0 .. n - 1 of fixed arrays; a freed row is filled by moving the last one into it.

    tokens, logprobs, versions: [num_slots, max_len], by absolute position, prompt first; length (tokens so far), prompt
    (tokens of it), limit (tokens allowed): [num_slots].
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.tokens = np.empty((num_slots, max_len), np.int32)
        self.logprobs = np.empty((num_slots, max_len), np.float32)
        self.versions = np.empty((num_slots, max_len), np.int32)
        self.length, self.prompt, self.limit = (np.zeros(num_slots, np.int64) for _ in range(3))
        self.uniforms = np.empty((num_slots, UNIFORM_BLOCK), np.float64)
        self.running: list[Running] = []

    def __len__(self) -> int:
        return len(self.running)

    def start(self, running: Running) -> int:
        row, request = len(self.running), running.request
        size = len(request.prompt)
        self.tokens[row, :size] = request.prompt
        self.length[row] = self.prompt[row] = size
        self.limit[row] = size + request.max_new_tokens
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

    def completion(self, row: int, ended: bool, now: float) -> Completion:
        run, response = self.running[row], slice(self.prompt[row], self.length[row])
        return Completion(
            key=run.request.key,
            tokens=self.tokens[row, response].copy(),
            logprobs=self.logprobs[row, response].copy(),
            versions=self.versions[row, response].copy(),
            finish="eos" if ended else "length",
            interruptions=run.interruptions,
            started_s=run.started_s,
            finished_s=now,
        )

    def release(self, row: int) -> int:
        """Free a row; returns the row that was moved into it (itself if it was the last)."""
        last = len(self) - 1
        size = self.length[last]
        for matrix in (self.tokens, self.logprobs, self.versions):
            matrix[row, :size] = matrix[last, :size]
        self.uniforms[row] = self.uniforms[last]
        for vector in (self.length, self.prompt, self.limit):
            vector[row] = vector[last]
        self.running[row] = self.running[last]
        self.running.pop()
        return last


class TransformersEngine:
    """An `Engine` on one device; see `areal_hpc.engines.base` for the promises.

    Args:
        model: a decoder from `models.load_model`; the engine owns it and overwrites its weights.
        num_slots: samples decoded side by side.
        max_len: most tokens of one sample, prompt included; a request that might exceed it is refused.
        temperature: of the sampling distribution; 0 is greedy (log-probs are then 0).
        eos_ids: tokens that end a response.
        interrupt: False keeps new weights aside until the running samples have ended on the old ones.
        prefill_tokens: most prompt tokens computed in one forward, so that starting samples cannot stall decoding.
            One longer prompt still goes through alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_len: int,
        temperature: float,
        eos_ids: Sequence[int],
        interrupt: bool = True,
        prefill_tokens: int = 8192,
    ) -> None:
        if num_slots < 1 or max_len < 2 or prefill_tokens < 1:
            raise ValueError(f"num_slots {num_slots}, max_len {max_len}, prefill_tokens {prefill_tokens}: too small")
        if max_len > model.config.max_position_embeddings:
            raise ValueError(f"max_len {max_len} exceeds the model's {model.config.max_position_embeddings} positions")
        models.prepare(model)
        self.version = 0
        self._model, self._device = model.eval(), model.device
        self._num_slots, self._max_len, self._temperature = num_slots, max_len, temperature
        self._eos = np.array(sorted(eos_ids), np.int64)
        self._interrupt, self._prefill_tokens = interrupt, prefill_tokens
        self._rows, self._cache = Rows(num_slots, max_len), KVCache(num_slots, max_len)
        self._waiting: deque[Request] = deque()
        self._keys: set[Key] = set()
        self._num_started = 0
        self._kept_aside: tuple[int, list[tuple[str, Tensor]]] | None = None
        self._swap: Swap | None = None

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        return self._num_slots - len(self._rows)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples; the oldest whose min_version is reached starts first.

        Raises:
            ValueError: a request is malformed, too long, or its key is in flight; none of `requests` is queued then.
        """
        new: set[Key] = set()
        for request in requests:
            self._check(request, new)
            new.add(request.key)
        self._keys |= new
        self._waiting.extend(requests)

    def step(self) -> list[Completion]:
        """Fill free slots, decode one token for every running sample, return those that finished, oldest first.

        Raises:
            FloatingPointError: the weights give logits that are not finite.
        """
        prompts, copies = self._start_waiting()
        if not self._rows:
            return []
        logits = self._forward(prompts, copies, decode=True)
        drawn = torch.from_numpy(self._rows.next_uniforms()).to(self._device)
        tokens, logprobs = (x.cpu().numpy() for x in sample(logits, drawn, self._temperature))
        if not np.isfinite(logprobs).all():
            bad = self._rows.running[int(np.flatnonzero(~np.isfinite(logprobs))[0])].request.key
            raise FloatingPointError(f"policy version {self.version} gives logits that are not finite (sample {bad})")
        self._rows.append(tokens, logprobs, self.version)
        completions = self._collect(np.isin(tokens, self._eos))
        self._swap_if_idle()
        return completions

    def cancel(self, keys: Iterable[Key]) -> int:
        """Forget samples that wait or run, keys not in flight ignored. Returns how many were forgotten."""
        unwanted = self._keys & set(keys)
        self._waiting = deque(request for request in self._waiting if request.key not in unwanted)
        self._free([row for row, run in enumerate(self._rows.running) if run.request.key in unwanted])
        self._keys -= unwanted
        self._swap_if_idle()
        return len(unwanted)

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Swap | None:
        """Swap in a complete set of weights between two tokens; every KV entry is dropped and computed anew.

        With interrupt=False and samples running, the set is copied aside, nothing new starts, and None is returned;
        the step that ends the last sample swaps, after which `take_swap` tells the cost. A newer set replaces one kept
        aside.

        Raises:
            ValueError: version does not rise, or the tensors do not fit the model (nothing is changed then).
        """
        newest = self._kept_aside[0] if self._kept_aside else self.version
        if version <= newest:
            raise ValueError(f"policy versions must rise: have {newest}, got {version}")
        if self._interrupt or not self._rows:
            return self._load(version, tensors)
        given = [(name, tensor.detach().clone()) for name, tensor in tensors]
        models.check_weights(self._model, given)
        self._kept_aside = (version, given)
        return None

    def take_swap(self) -> Swap | None:
        """The swap a `step` or `cancel` made since the last call, if any (interrupt=False only)."""
        swap, self._swap = self._swap, None
        return swap

    def _check(self, request: Request, new: set[Key]) -> None:
        size, budget, vocab = len(request.prompt), request.max_new_tokens, self._model.config.vocab_size
        where = f"sample {request.key}"
        if request.key in self._keys or request.key in new:
            raise ValueError(f"{where} is in flight already")
        if size < 1 or budget < 1:
            raise ValueError(f"{where}: prompt and budget need at least one token, got {size} and {budget}")
        if size + budget > self._max_len:
            raise ValueError(
                f"{where}: prompt of {size} + budget of {budget} tokens exceed max_len {self._max_len}; "
                "shorten the prompt, lower max_new_tokens or raise the engine's max_len"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            raise ValueError(f"{where}: prompt has token ids outside 0 .. {vocab - 1}")
        if not 0 <= request.seed < 1 << 63:
            raise ValueError(f"{where}: seed {request.seed} is not in 0 .. 2^63 - 1")

    def _start_waiting(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Give free rows to waiting samples. Returns the rows to prefill and (source, target) rows to copy.

        A row that was interrupted is no source: its prompt's entries were computed within a longer sequence and may
        differ in the last bit.
        """
        prompts: list[int] = []
        copies: list[tuple[int, int]] = []
        if self._kept_aside or not self._waiting or not self.num_free:
            return prompts, copies
        now, budget, gated = time.monotonic(), self._prefill_tokens, []
        sources = {run.request.key[0]: row for row, run in enumerate(self._rows.running) if not run.interruptions}
        while self._waiting and self.num_free:
            request = self._waiting.popleft()
            if request.min_version > self.version:
                gated.append(request)
                continue
            source = sources.get(request.key[0])
            shared = source is not None and self._rows.running[source].request.prompt == request.prompt
            budget -= 0 if shared else len(request.prompt) - 1
            if budget < 0 and prompts:
                self._waiting.appendleft(request)
                break
            row = self._rows.start(Running(request, self._num_started, now))
            self._num_started += 1
            if len(request.prompt) > 1:
                copies.append((source, row)) if source is not None and shared else prompts.append(row)
            sources.setdefault(request.key[0], row)
        self._waiting.extendleft(reversed(gated))
        return prompts, copies

    @torch.inference_mode()
    def _forward(self, prompts: list[int], copies: Sequence[tuple[int, int]] = (), *, decode: bool) -> Tensor:
        """Compute KV entries of all tokens but the newest of rows `prompts`; logits [n, V] of all rows if `decode`."""
        rows, n = self._rows, len(self._rows) if decode else 0
        last = rows.length[:n] - 1
        attend = StepAttention(self._cache, models.attention_kernel(self._model), self._device)
        tokens, positions = [rows.tokens[np.arange(n), last]], [last]
        if decode:
            self._cache.reserve(int(last.max()) + 1)
            attend.decode(last)
        if prompts:
            lengths = [int(rows.length[row]) - 1 for row in prompts]
            self._cache.reserve(max(lengths))
            tokens += [rows.tokens[row, :size] for row, size in zip(prompts, lengths, strict=True)]
            positions += [np.arange(size) for size in lengths]
            attend.prefill(np.array(prompts), lengths, np.concatenate(positions[1:]))
        if copies:
            sources, targets = zip(*copies, strict=True)
            attend.copy(list(sources), list(targets), int(rows.prompt[list(targets)].max()) - 1)
        filler = np.zeros(max(0, MIN_ROWS - sum(map(len, tokens))), np.int64)
        flat, at = (torch.from_numpy(np.concatenate([*x, filler]).astype(np.int64)) for x in (tokens, positions))
        hidden = models.hidden_states(self._model, flat.to(self._device)[None], at.to(self._device)[None], attend)
        return models.head(self._model, hidden[0, : max(n, MIN_ROWS)])[:n] if decode else hidden

    def _collect(self, ended: NDArray[np.bool_]) -> list[Completion]:
        """Take finished samples out, oldest first."""
        rows, now = self._rows, time.monotonic()
        finished = np.flatnonzero(ended | (rows.length[: len(rows)] >= rows.limit[: len(rows)])).tolist()
        finished.sort(key=lambda row: rows.running[row].serial)
        completions = [rows.completion(row, bool(ended[row]), now) for row in finished]
        self._free(finished)
        self._keys.difference_update(completion.key for completion in completions)
        return completions

    @torch.inference_mode()
    def _free(self, rows: list[int]) -> None:
        for row in sorted(rows, reverse=True):
            moved = self._rows.release(row)
            if moved != row:
                self._cache.move_row(moved, row, int(self._rows.length[row]) - 1)

    def _swap_if_idle(self) -> None:
        if self._kept_aside and not self._rows:
            self._swap, self._kept_aside = self._load(*self._kept_aside), None

    def _load(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Swap:
        started = time.monotonic()
        models.copy_weights(self._model, tensors)
        self.version = version
        self._cache = KVCache(self._num_slots, self._max_len)
        for run in self._rows.running:
            run.interruptions += 1
        sizes = (self._rows.length[: len(self._rows)] - 1).tolist()
        self._cache.reserve(max(sizes, default=0))
        for chunk in _chunks(sizes, self._prefill_tokens):
            self._forward(chunk, decode=False)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Swap(version, time.monotonic() - started, len(sizes), sum(sizes))


def _chunks(sizes: list[int], budget: int) -> list[list[int]]:
    """Indices of sizes > 0, in order, cut where the next would exceed `budget`; a larger one stands alone."""
    chunks: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if size and (not chunks or size > room):
            chunks.append([])
            room = budget
        if size:
            chunks[-1].append(index)
            room -= size
    return chunks
