"""The budgets of media: `image_tokens` and `video_tokens`, of an engine, a prompt or an item."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor
from mmdeploy_llm.messages import MEDIA_KINDS, MediaItem
from mmdeploy_llm.values.options.budget import A_BUDGET, TokenBudget, is_budget
from mmdeploy_llm.values.options.config import EngineConfig

MAX_KEPT = 64  # processors of different budgets of one kind


def resolved(budget: TokenBudget | None, processor: MediaProcessor) -> int | None:
    """Returns the tokens of a budget; None for "full", and for "auto" where the processor's plugin
    names no number: the checkpoint's own rule holds."""
    if budget == "auto":
        return processor.auto_tokens
    return None if budget is None or budget == "full" else budget


def budgets_of(config: EngineConfig) -> dict[str, TokenBudget]:
    """Returns the budgets of an engine by kind."""
    return {"image": config.image_tokens, "video": config.video_tokens}


class Budgets:
    """Chooses the processor of an item by its budget. Safe for use from several threads.

    processors: by kind, within the engine's budgets. budgets: these by kind; one that is not named
    is "full".
    """

    def __init__(
        self, processors: Mapping[str, MediaProcessor], budgets: Mapping[str, TokenBudget]
    ) -> None:
        self._processors = processors
        self._tokens = {
            kind: resolved(budgets.get(kind), processor) for kind, processor in processors.items()
        }
        self._numbers = {kind: one for kind, one in budgets.items() if isinstance(one, int)}
        self._made: dict[tuple[str, int], MediaProcessor] = {}
        self._lock = threading.Lock()

    def of(self, item: MediaItem) -> tuple[MediaProcessor, MediaItem]:
        """Returns the processor of an item, and the item without its budget.

        Raises MediaError for a wrong budget, and for one above the engine's.
        """
        names = [name for name in names_of(item.kind) if name in item.options]
        return self._chosen(item, names) if names else (self._processors[item.kind], item)

    def _chosen(self, item: MediaItem, names: list[str]) -> tuple[MediaProcessor, MediaItem]:
        """Returns the same of an item with options of these names."""
        processor, allowed = self._processors[item.kind], self._tokens.get(item.kind)
        rest = {name: value for name, value in item.options.items() if name not in names}
        own = replace(item, options=rest)
        name = names[0]
        if len(names) > 1:
            raise MediaError(f"{names[0]} and {names[1]} are one option; remove one")
        budget = _checked(name, item.options[name])
        tokens = resolved(budget, processor)
        if budget == "auto" and allowed is not None and tokens is not None:
            tokens = min(tokens, allowed)
        if allowed is not None and (tokens is None or tokens > allowed):
            raise MediaError(
                f"{name} = {budget!r} of one prompt or {item.kind} is above the engine's "
                f"{allowed}; raise it in LLM({item.kind}_tokens=...)"
            )
        if tokens is None:
            return processor, own
        try:
            return self._limited(item.kind, tokens), own
        except ConfigError as error:
            if budget == "auto":  # the family cannot keep to it: its own rule holds
                return processor, own
            raise MediaError(str(error)) from error

    def check(self, item: MediaItem, made: MediaInput) -> None:
        """Raises MediaError for an item that its plugin has given more tokens than the number that
        is the engine's budget."""
        allowed = self._numbers.get(item.kind)
        if allowed is not None and made.num_tokens > allowed:
            processor = self._processors[item.kind]
            raise MediaError(
                f"media processor {type(processor).__name__} (plugin {type(processor).__module__}) "
                f"gave the {item.kind} {made.num_tokens} tokens; {item.kind}_tokens allows "
                f"{allowed}"
            )

    def _limited(self, kind: str, tokens: int) -> MediaProcessor:
        with self._lock:
            found = self._made.get((kind, tokens))
        if found is not None:
            return found
        made = self._processors[kind].with_budget(tokens)
        with self._lock:
            if len(self._made) < MAX_KEPT:
                self._made[kind, tokens] = made
        return made


def names_of(kind: str) -> tuple[str, ...]:
    """Returns the names of a budget among the options of an item; a prompt's video_tokens has lost
    its prefix there."""
    return (f"{kind}_tokens", "tokens") if kind in MEDIA_KINDS else ()


def _checked(name: str, value: Any) -> TokenBudget:
    """Returns a budget. Raises MediaError for anything else."""
    if not is_budget(value):
        raise MediaError(f"{name} must be {A_BUDGET}, got {value!r:.80}")
    return value
