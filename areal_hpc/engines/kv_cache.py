"""Keys and values of running samples, and the attention of one engine step over them.

On a CPU with one thread a row's results do not depend on the other rows, bit for bit: batches are never smaller than
`MIN_ROWS` tokens and key lengths are multiples of `KEY_STEP`. Below these, MKL and SDPA pick other summation orders.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from areal_hpc.models import PackedAttention

MIN_ROWS = 16
KEY_STEP = 32


class KVCache:
    """Keys and values of every slot, [num_slots, capacity, kv_heads, head_dim] per layer, made at first use.

    Capacity grows by half when a row outgrows it, up to max_len, so memory follows the longest response seen.
    Unused entries are zero, never uninitialised: a masked NaN would still poison the attention sum.
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.num_slots, self.max_len, self.capacity = num_slots, _round_up(max_len, KEY_STEP), 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens."""
        if length <= self.capacity:
            return
        self.capacity = min(self.max_len, _round_up(max(length, self.capacity * 3 // 2), KEY_STEP))
        for layer, (key, value) in self.layers.items():
            self.layers[layer] = (self._grown(key), self._grown(value))

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer; the first call's [T, kv_heads, head_dim] tensors set type and place."""
        if index not in self.layers:
            self.layers[index] = (self._empty(key), self._empty(value))
        return self.layers[index]

    def move_row(self, source: int, target: int, length: int) -> None:
        for key, value in self.layers.values():
            key[target, :length] = key[source, :length]
            value[target, :length] = value[source, :length]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros((self.num_slots, self.capacity, *like.shape[1:]))

    def _grown(self, old: Tensor) -> Tensor:
        new = self._empty(old[0])
        new[:, : old.shape[1]] = old
        return new


class StepAttention:
    """The `Attend` of one forward over [1, T] tokens: one newest token per decoding row, whole prompts, filler.

    In every layer the prompts' keys and values go to the cache first, then rows that share another row's prompt copy
    its entries, then the newest tokens are added; these attend to their rows, the prompts to themselves.
    """

    def __init__(self, cache: KVCache, kernel: str, device: torch.device) -> None:
        self.cache, self.kernel, self.device = cache, kernel, device
        self.num_decode = 0
        self.prompts: PackedAttention | None = None
        self.copies: tuple[Tensor, Tensor, int] | None = None

    def decode(self, positions: NDArray[np.int64]) -> None:
        """Rows 0 .. len(positions) - 1 each add one token at `positions` and see everything up to it."""
        self.num_decode, self.num_keys = len(positions), _round_up(int(positions.max()) + 1, KEY_STEP)
        self.at = (torch.arange(self.num_decode, device=self.device), self._place(positions))
        hidden = torch.arange(self.num_keys, device=self.device) > self.at[1][:, None]
        self.bias = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, float("-inf"))[:, None, None]

    def prefill(self, rows: NDArray[np.int64], lengths: list[int], positions: NDArray[np.int64]) -> None:
        """`rows[i]` gets the next `lengths[i]` tokens, at `positions` [sum of lengths]."""
        self.prompts = PackedAttention(lengths, self.kernel, self.device)
        self.prompts_at = (self._place(np.repeat(rows, lengths)), self._place(positions))

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Rows `targets` take over the first `length` entries of rows `sources`."""
        self.copies = (torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device), length)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        n = self.num_decode
        outputs = []
        keys, values = self.cache.layer(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        if self.prompts is not None:
            end = n + len(self.prompts_at[0])
            q, k, v = query[:, :, n:end], key[:, :, n:end], value[:, :, n:end]
            keys[self.prompts_at], values[self.prompts_at] = k[0].transpose(0, 1), v[0].transpose(0, 1)
            outputs.append(self.prompts(layer, q, k, v, scale))
        if self.copies is not None:
            sources, targets, length = self.copies
            keys[targets, :length], values[targets, :length] = keys[sources, :length], values[sources, :length]
        if n:
            keys[self.at], values[self.at] = key[0, :, :n].transpose(0, 1), value[0, :, :n].transpose(0, 1)
            outputs.insert(0, self._decode(query[0, :, :n], keys, values, scale))
        filler = query.shape[2] - sum(part.shape[1] for part in outputs)
        if filler:
            outputs.append(query.new_zeros(1, filler, query.shape[1], query.shape[3]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """query [H, n, D] -> [1, n, H, D]; the query heads of one key head are that head's query rows."""
        heads, n, dim = query.shape
        query = query.transpose(0, 1).reshape(n, keys.shape[2], heads // keys.shape[2], dim)
        k, v = keys[:n, : self.num_keys].transpose(1, 2), values[:n, : self.num_keys].transpose(1, 2)
        bias = self.bias.to(query.dtype)
        return F.scaled_dot_product_attention(query, k, v, attn_mask=bias, scale=scale).reshape(1, n, heads, -1)

    def _place(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
