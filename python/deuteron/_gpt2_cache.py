"""The KV cache of a patched GPT-2: buffers with spare capacity, so that a step writes only its own rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, List, Optional, Tuple

import torch
from transformers.cache_utils import DynamicLayer

# The smallest buffer. A capacity is compiled for once, so small ones are not worth it.
SMALLEST = 64


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a `DynamicCache` whose keys and values are the first rows of one buffer.

    The buffer is `[2, batch, heads, capacity, width]`. To everyone else this is a `DynamicLayer`: `keys` and `values`
    are views of the buffer. A tensor that is put in their place is kept as it is, and copied to a new buffer by the
    next step.
    """

    _buffer: Optional[torch.Tensor]
    _length: int
    # what was put in place of keys and of values
    _given: List[Optional[torch.Tensor]]

    def __init__(self, **kwargs: Any) -> None:
        self._forget()
        super().__init__(**kwargs)

    @classmethod
    def of(cls, layer: DynamicLayer) -> GrowingLayer:
        """A growing layer with the contents of a plain one."""
        grown: GrowingLayer = cls()
        if layer.get_seq_length() > 0 and layer.keys is not None and layer.values is not None:
            grown.take(layer.keys, layer.values)
        return grown

    @property
    def keys(self) -> Optional[torch.Tensor]:
        return self._part(0)

    @keys.setter
    def keys(self, keys: Optional[torch.Tensor]) -> None:
        self._replace(0, keys)

    @property
    def values(self) -> Optional[torch.Tensor]:
        return self._part(1)

    @values.setter
    def values(self, values: Optional[torch.Tensor]) -> None:
        self._replace(1, values)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Holds these, which may be views."""
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def shape(self) -> Tuple[int, int, int]:
        """Batch, heads and width of the stored keys."""
        given = self._given[0]
        if given is not None:
            return given.shape[0], given.shape[1], given.shape[3]
        buffer = self._buffer
        return (0, 0, 0) if buffer is None else (buffer.shape[1], buffer.shape[2], buffer.shape[4])

    def room(self, rows: int, most: Callable[[], int]) -> torch.Tensor:
        """The buffer with all keys and values so far, grown if it lacks room for the new ones. `most` is the longest sequence."""
        length = self.get_seq_length()
        buffer = self._buffer
        whole = self._given[0] is None and self._given[1] is None
        if whole and buffer is not None and length + rows <= buffer.shape[3]:
            return buffer
        keys, values = self.keys, self.values
        if keys is None or values is None:
            raise ValueError("expected a layer that holds keys and values")
        batch, heads, _, width = keys.shape
        # Zeros: a mask hides the rows that are not written yet, but no mask hides a NaN.
        buffer = keys.new_zeros((2, batch, heads, capacity(length + rows, most()), width), requires_grad=False)
        with torch.no_grad():
            buffer[0, :, :, :length].copy_(keys)
            buffer[1, :, :, :length].copy_(values)
        self._buffer, self._length, self._given = buffer, length, [None, None]
        return buffer

    def grow(self, rows: int) -> None:
        """Counts rows that were written to the buffer."""
        self._length += rows

    def get_seq_length(self) -> int:
        given = self._given[0]
        if given is None:
            return self._length
        return 0 if given.numel() == 0 else given.shape[-2]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove < 0 and self._given[0] is None and self._given[1] is None:
            self._length = max(self._length + tokens_to_remove, 0)
        else:
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self._buffer is not None and self._given[0] is None and self._given[1] is None:
            # One copy of the buffer, instead of one of its rows and one back.
            self._buffer = self._buffer.index_select(1, beam_idx.to(self._buffer.device))
        else:
            super().reorder_cache(beam_idx)

    def reset(self) -> None:
        self._forget()
        self.is_initialized = False
        super().reset()

    def _forget(self) -> None:
        self._buffer, self._length, self._given = None, 0, [None, None]

    def _part(self, which: int) -> Optional[torch.Tensor]:
        given = self._given[which]
        if given is not None or self._buffer is None:
            return given
        return self._buffer[which, :, :, : self._length]

    def _replace(self, which: int, tensor: Optional[torch.Tensor]) -> None:
        if tensor is None:
            self._forget()
        else:
            self._given[which] = tensor


def capacity(rows: int, most: int) -> int:
    """The next power of two for this number of rows, at most the longest sequence."""
    room = max(SMALLEST, 1 << (rows - 1).bit_length())
    return max(rows, min(room, most))


@lru_cache(maxsize=64)
def positions(device: torch.device, batch: int, length: int) -> torch.Tensor:
    """The place of each sequence's next token: `length` for all. The layers of a step share it."""
    with torch.inference_mode(False):
        return torch.full((batch,), length, dtype=torch.int32, device=device)
