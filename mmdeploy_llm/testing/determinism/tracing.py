"""Trace: records the rows that go into and come out of every module of a model, to find the first
operation whose results differ between two runs of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.request import MediaInput
from mmdeploy_llm.values.plan import ScheduledTokens

MAX_CAUSES = 5
OTHERS = -1  # stands for requests without a name
NO_MODULE = "no module: the log-probabilities, or the choice of tokens"

Key = tuple[object, int]  # (request and token) or (media item and row)


class Trace:
    """Digests of the rows that the modules of one model compute, by operation and by what the row
    belongs to. Only `watching` writes it."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._keys: list[Key] = []  # of the rows of this call
        self._sampled: list[Key] = []  # of the rows of logits
        self._items: Sequence[MediaInput] = ()
        self._digests: dict[str, dict[Key, int]] = {}  # operations in the order of their first call

    def begin(self, scheduled: Sequence[ScheduledTokens], owners: Mapping[str, int]) -> None:
        """Names the rows of the next step. owners: request id -> what it is called in all runs;
        the others are not compared."""
        self._keys = [
            (owners.get(item.request_id, OTHERS), token)
            for item in scheduled
            for token in range(item.start, item.start + item.num_tokens)
        ]
        self._sampled = [
            (owners.get(item.request_id, OTHERS), item.start + item.num_tokens - 1)
            for item in scheduled
            if item.samples
        ]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records calls of the model's modules in the block."""
        model, hooks = self._model, []
        encode: Any = getattr(model, "encode_media", None)
        logits = model.logits
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.ModuleList):
                hooks.append(module.register_forward_pre_hook(self._before(name)))
                hooks.append(module.register_forward_hook(self._after(name)))

        def watched_encode(items: Sequence[MediaInput]) -> Any:
            self._items = items
            try:
                return encode(items)
            finally:
                self._items = ()

        def watched_logits(hidden: Tensor) -> Tensor:
            self._note("the output head: input", hidden, self._sampled)
            found: Tensor = logits(hidden)
            self._note("the output head", found, self._sampled)
            return found

        model.logits = watched_logits
        if encode is not None:
            model.encode_media = watched_encode
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name in ("logits", "encode_media"):
                vars(model).pop(name, None)

    def causes(self, alone: Trace) -> tuple[str, ...]:
        """Returns the first operations whose rows differ from those of `alone`, in the order of the
        forward pass: of each media item at any of its rows, else of each request at its first token
        that differs."""
        first: dict[object, tuple[int, int]] = {}  # owner -> (token, index of the operation)
        names = list(self._digests)
        for index, name in enumerate(names):
            other = alone._digests.get(name, {})
            for (owner, row), digest in self._digests[name].items():
                if other.get((owner, row), digest) != digest:
                    place = (0 if isinstance(owner, str) else row, index)
                    first[owner] = min(first.get(owner, place), place)
        media = {owner for owner in first if isinstance(owner, str)}
        found = sorted({index for owner, (_, index) in first.items() if owner in (media or first)})
        return tuple(names[index] for index in found[:MAX_CAUSES]) or (NO_MODULE,)

    def _before(self, name: str) -> Any:
        def note(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self._note(f"what leads to {name}", args[0] if args else None, self._keys)

        return note

    def _after(self, name: str) -> Any:
        def note(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
            self._note(name, out[0] if isinstance(out, tuple) else out, self._keys)

        return note

    def _note(self, operation: str, x: Any, keys: Sequence[Key]) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
            return
        if self._items:
            keys = _rows_of_media(self._items, x.shape[0])
        if len(keys) != x.shape[0]:
            return
        rows = x.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()
        digests = self._digests.setdefault(operation, {})
        for key, row in zip(keys, rows, strict=True):
            digests[key] = hash(row.tobytes())


def _rows_of_media(items: Sequence[MediaInput], num_rows: int) -> list[Key]:
    """Names the rows of a media encoder, of which each item has a share by its tokens; [] where the
    rows are not divided so."""
    total = sum(item.num_tokens for item in items)
    if num_rows % total:
        return []
    each = num_rows // total
    return [(item.key, row) for item in items for row in range(item.num_tokens * each)]
