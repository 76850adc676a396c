"""WindowAttention: attention of models in which some layers have a window, on two block tables.

layer 0  window   blocks of the window's table     those before the window belong to others
layer 1  window
layer 2  all      blocks of the other table        the whole sequence
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from mmdeploy_llm.errors import PluginError
from mmdeploy_llm.forward import (
    Alibi,
    AttentionContext,
    QKRotary,
    RotaryAttention,
    SequenceAttention,
    SequenceRows,
)
from mmdeploy_llm.hooks.objects.attention import AttentionBackend, BatchLayout, KVCache
from mmdeploy_llm.layers.basic.recordings import frame_of


class WindowAttention(AttentionBackend):
    """Computes layers with a window by one backend and the others by another of the same kind: a
    backend may keep the tables of a step. layers: the window of each layer that has one; see
    caches.layer_windows."""

    def __init__(self, new: Callable[[], AttentionBackend], layers: Mapping[int, int]) -> None:
        self._whole, self._windows = new(), new()
        self.layers = layers
        self.name, self.can_capture = self._whole.name, self._whole.can_capture
        self._frames: WeakKeyDictionary[object, FramePair] = WeakKeyDictionary()

    def begin(self, layout: BatchLayout, cache: KVCache) -> WindowContext:
        """Returns the attention of one step."""
        assert layout.windows is not None, "the slots of such a model have tables for windows"
        tables, slots = layout.windows
        own = replace(layout, block_tables=tables, slots=slots, windows=None)
        whole, windows = self._whole.begin(layout, cache), self._windows.begin(own, cache)
        return WindowContext(self, whole, windows)

    def frame_of(self, whole: AttentionContext, windows: AttentionContext) -> FramePair | None:
        """Returns a frame that stays the same object while both contexts keep theirs; None where
        one has none. See forward.FixedAttention."""
        one, two = frame_of(whole), frame_of(windows)
        if one is None or two is None:
            return None
        pair = self._frames.get(one)
        if pair is None or pair.windows is not two:
            pair = self._frames[one] = FramePair(windows=two)
        return pair


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class FramePair:
    """The frames of both contexts of a step, as one. windows: that of the layers with a window."""

    windows: object


class WindowContext:
    """Computes the attention of one step."""

    def __init__(
        self, backend: WindowAttention, whole: AttentionContext, windows: AttentionContext
    ) -> None:
        self._backend = backend
        self._whole, self._windows = whole, windows
        self.frame = backend.frame_of(whole, windows)
        self.can_rotate = getattr(whole, "can_rotate", False)  # as frame_of, in each step

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Alibi | None = None,
        rotary: QKRotary | None = None,
    ) -> Tensor:
        """See forward.RotaryAttention. Raises PluginError for a window that is longer than that of
        the layer's cache."""
        context = self._of(layer, window)
        options: Any = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        options |= {} if alibi is None else {"alibi": alibi}  # which few backends take
        if rotary is None:
            return context.attend(layer, q, k, v, **options)
        assert isinstance(context, RotaryAttention), "can_rotate says so"
        return context.attend(layer, q, k, v, **options, rotary=rotary)

    def causal(self) -> AttentionContext:
        """See forward.AttentionContext."""
        whole, windows = self._whole.causal(), self._windows.causal()
        if whole is self._whole and windows is self._windows:
            return self
        return WindowContext(self._backend, whole, windows)

    @property
    def sequences(self) -> Sequence[SequenceRows]:
        """See forward.SequenceAttention."""
        assert isinstance(self._whole, SequenceAttention), "the backend of such models gives them"
        return self._whole.sequences

    def extend(
        self, sequence: int, layer: int, k: Tensor, v: Tensor, num_kept: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See forward.SequenceAttention. Raises as `attend` does."""
        context = self._of(layer, None if num_kept is None else num_kept + 1)
        assert isinstance(context, SequenceAttention), "the backend of such models gives them"
        return context.extend(sequence, layer, k, v, num_kept)

    def _of(self, layer: int, window: int | None) -> AttentionContext:
        longest = self._backend.layers.get(layer)
        if longest is None:
            return self._whole
        if window is None or window > longest:
            raise PluginError(
                f"layer {layer} keeps the keys of a window of {longest} tokens, as the model's "
                f"`cache` says, but attends over {window or 'all'}; pass that window, or leave it "
                "out of the layer's PagedKV"
            )
        return self._windows
