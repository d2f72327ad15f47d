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
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_hpc import models
from areal_hpc.engines.base import Begun, Completion, Finish, Request, Swap
from areal_hpc.engines.kv_cache import MIN_ROWS, KVCache, StepAttention
from areal_hpc.engines.rows import Rows, Running
from areal_hpc.sampling import sample
from areal_hpc.trajectory import Key

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersEngine:
    """An `Engine` on one device; see `areal_hpc.engines.base` for the promises.

    Args:
        model: a decoder from `models.load_model`; the engine owns it and overwrites its weights.
        num_slots: samples decoded side by side.
        max_len: most tokens of one sample, prompt included; a request that might exceed it is refused.
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
        self._num_slots, self._max_len = num_slots, max_len
        self._eos = np.array(sorted(eos_ids), np.int64)
        self._interrupt, self._prefill_tokens = interrupt, prefill_tokens
        self._rows, self._cache = Rows(num_slots, max_len), KVCache(num_slots, max_len)
        self._waiting: deque[Request] = deque()
        self._keys: set[Key] = set()
        self._num_started = 0
        self._done: list[Completion] = []
        self._kept_aside: tuple[int, list[tuple[str, Tensor]]] | None = None
        self._swap: Swap | None = None

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._done)

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
        for request in requests:
            if finish := self._finished(request):
                self._done.append(request.ended(finish, time.monotonic()))
            else:
                self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Fill free slots, decode one token for every running sample, return those that finished, oldest first.

        Raises:
            FloatingPointError: the weights give logits that are not finite.
        """
        prompts, copies = self._start_waiting()
        done, self._done = self._done, []
        self._keys.difference_update(completion.key for completion in done)
        if not self._rows:
            return done
        logits = self._forward(prompts, copies, decode=True)
        drawn = torch.from_numpy(self._rows.next_uniforms()).to(self._device)
        temperatures = torch.from_numpy(self._rows.temperature[: len(self._rows)]).to(self._device)
        tokens, logprobs = (x.cpu().numpy() for x in sample(logits, drawn, temperatures))
        if not np.isfinite(logprobs).all():
            bad = self._rows.running[int(np.flatnonzero(~np.isfinite(logprobs))[0])].request.key
            raise FloatingPointError(f"policy version {self.version} gives logits that are not finite (sample {bad})")
        self._rows.append(tokens, logprobs, self.version)
        done += self._collect(np.isin(tokens, self._eos))
        self._swap_if_idle()
        return done

    def partials(self) -> dict[Key, Begun]:
        """All samples that have begun and are not returned by `step` yet: copies, and nothing is disturbed."""
        now = time.monotonic()
        running = {run.request.key: self._rows.begun(row, now) for row, run in enumerate(self._rows.running)}
        waiting = {request.key: request.begun for request in self._waiting if len(request.begun.tokens)}
        return running | waiting | {completion.key: completion.begun for completion in self._done}

    def cancel(self, keys: Iterable[Key]) -> int:
        """Forget samples that wait or run, keys not in flight ignored. Returns how many were forgotten."""
        unwanted = self._keys & set(keys)
        self._waiting = deque(request for request in self._waiting if request.key not in unwanted)
        self._done = [completion for completion in self._done if completion.key not in unwanted]
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
        if not 0 <= request.temperature < float("inf"):
            raise ValueError(f"{where}: temperature {request.temperature} is not finite, or negative")
        if not 0 <= request.seed < 1 << 63:
            raise ValueError(f"{where}: seed {request.seed} is not in 0 .. 2^63 - 1")
        begun = request.begun
        if not len(begun.tokens) == len(begun.logprobs) == len(begun.versions):
            raise ValueError(f"{where}: its beginning has not as many log-probs and versions as tokens")
        if len(begun.tokens) and not 0 <= begun.tokens.min() <= begun.tokens.max() < vocab:
            raise ValueError(f"{where}: its beginning has token ids outside 0 .. {vocab - 1}")

    def _finished(self, request: Request) -> Finish | None:
        """Why there is nothing to do for a request: its beginning is all of it."""
        begun = request.begun.tokens
        if np.isin(begun[request.given :][-1:], self._eos).any():
            return "eos"
        if request.stop is not None and len(begun) > request.given and request.stop(begun):
            return "stop"
        return "length" if len(begun) >= request.max_new_tokens else None

    def _start_waiting(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Give free rows to waiting samples. Returns the rows to prefill and (source, target) rows to copy.

        A row that was interrupted or had begun before is no source: its prompt's entries were computed within a longer
        sequence and may differ in the last bit.
        """
        prompts: list[int] = []
        copies: list[tuple[int, int]] = []
        if self._kept_aside or not self._waiting or not self.num_free:
            return prompts, copies
        now, budget, gated = time.monotonic(), self._prefill_tokens, []
        sources = {run.request.key[0]: row for row, run in enumerate(self._rows.running) if run.is_source}
        while self._waiting and self.num_free:
            request = self._waiting.popleft()
            if request.earliest_version > self.version:
                gated.append(request)
                continue
            running = Running.of(request, self._num_started, now, self.version)
            source = sources.get(request.key[0]) if running.is_source else None
            shared = source is not None and self._rows.running[source].request.prompt == request.prompt
            size = len(request.prompt) + len(request.begun.tokens)
            budget -= 0 if shared else size - 1
            if budget < 0 and prompts:
                self._waiting.appendleft(request)
                break
            row = self._rows.start(running)
            self._num_started += 1
            if size > 1:
                copies.append((source, row)) if source is not None and shared else prompts.append(row)
            if running.is_source:
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
        rows, now, stopped = self._rows, time.monotonic(), self._rows.stopped()
        finished = np.flatnonzero(ended | stopped | (rows.length[: len(rows)] >= rows.limit[: len(rows)])).tolist()
        finished.sort(key=lambda row: rows.running[row].serial)
        completions = [
            rows.completion(row, "eos" if ended[row] else "stop" if stopped[row] else "length", now) for row in finished
        ]
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
