"""LogitsProcessors: the logits processors of plugins, one instance of each that requests use.

    params ---> the processors that the engine lists, where the request gives an argument of theirs
           ---> then those that the request names, in its order
    step   ---> logits of all requests whose n-th processor is the same ---> one call of it

A processor that raises, or returns anything but finite logits and -inf, fails the requests that it
was computing for, and no other: a call for several of them is repeated for each alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.errors import ConfigError, PluginContractError, PluginError, RequestError
from mmdeploy_llm.hooks import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcessorSpec,
    LogitsRow,
    PluginManager,
)
from mmdeploy_llm.hooks.names import error_text, listing, normalise
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.values.params import SamplingParams

logger = logging.getLogger(__name__)

# FastDeploy's processors and arguments that are options of SamplingParams here.
COUNTERPARTS = {
    "thinkingbudgetlogitsprocessor": "use SamplingParams(reasoning_max_tokens=...) instead",
    "thinking_budget": "use SamplingParams(reasoning_max_tokens=...) instead",
    "think_stop_sentence": "reasoning_max_tokens ends the reasoning with the parser's end marker",
}
BY_PATH = "processors are not imported by path: a plugin provides them by name"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltProcessor:
    """A processor that was built. name: of processor and plugin, for messages."""

    spec: LogitsProcessorSpec
    processor: LogitsProcessor
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveProcessor:
    """A processor at work for one request."""

    built: BuiltProcessor
    row: LogitsRow


class LogitsProcessors:
    """Finds, builds and starts the processors that requests use. Thread-safe.

    listed: names of the processors that a request switches on by giving one of their arguments.
    Raises ConfigError for an unknown one, PluginError for one that cannot be built.
    """

    def __init__(
        self, plugins: PluginManager, context: LogitsContext, listed: Sequence[str] = ()
    ) -> None:
        self._plugins = plugins
        self._context = context
        self._lock = threading.Lock()
        self._built: dict[str, BuiltProcessor] = {}  # by normalised name or alias
        self._listed = tuple(self._get(name) for name in listed)

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError for unknown processors and for arguments that are unknown or wrong,
        PluginError when a processor cannot be built or its check fails."""
        used = self._used(params)
        self._check_names(params, used)
        for built in used:
            try:
                built.processor.check(_arguments(built, params))
            except (ValueError, TypeError) as error:
                raise RequestError(
                    f"logits processor {built.spec.name!r}: {error}; correct logits_processors_args"
                ) from error
            except FAULTS as error:
                raise PluginError(
                    f"logits processor {built.name} failed to check its arguments: "
                    f"{error_text(error)}"
                ) from error

    def start(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: list[int]
    ) -> tuple[ActiveProcessor, ...]:
        """Returns the processors of a request that starts, or starts again after a preemption.
        They see the tokens that the caller appends to `output_token_ids`. Raises PluginError."""
        active = []
        for built in self._used(params):
            row = LogitsRow(
                arguments=_arguments(built, params),
                prompt_token_ids=prompt_token_ids,
                output_token_ids=output_token_ids,
            )
            try:
                row.state = built.processor.start(row)
            except FAULTS as error:
                raise PluginError(
                    f"logits processor {built.name} failed to start: {error_text(error)}"
                ) from error
            active.append(ActiveProcessor(built=built, row=row))
        return tuple(active)

    def _used(self, params: SamplingParams) -> list[BuiltProcessor]:
        """Returns the request's processors in order, each once."""
        given = params.logits_processors_args.keys()
        used = [built for built in self._listed if given & set(built.spec.arguments)]
        try:
            used += [self._get(name) for name in params.logits_processors]
        except ConfigError as error:
            raise RequestError(str(error)) from error
        return list({built.name: built for built in used}.values())

    def _check_names(self, params: SamplingParams, used: Iterable[BuiltProcessor]) -> None:
        """Raises RequestError for arguments that no processor of the request takes."""
        known = [name for built in used for name in built.spec.arguments]
        for name in params.logits_processors_args:
            if name in known:
                continue
            takers = [
                spec.name for spec in self._plugins.logits_processors if name in spec.arguments
            ]
            hint = f"name {listing(takers)} in logits_processors" if takers else "leave it out"
            raise RequestError(
                f"logits_processors_args has {name!r}, which no logits processor of this request "
                f"takes (they take: {listing(known)}); {COUNTERPARTS.get(name, hint)}"
            )

    def _get(self, name: str) -> BuiltProcessor:
        """Returns the processor of this name, built now if it was not. Raises ConfigError for an
        unknown name, PluginError when it cannot be built."""
        key = normalise(name)
        with self._lock:
            if key not in self._built:
                spec = self._find(name)
                self._built[key] = self._built.get(normalise(spec.name)) or self._build(spec)
                self._built[normalise(spec.name)] = self._built[key]
            return self._built[key]

    def _find(self, name: str) -> LogitsProcessorSpec:
        try:
            return self._plugins.logits_processor(name)
        except ConfigError as error:
            hint = COUNTERPARTS.get(name.lower().replace("_", ""), BY_PATH if ":" in name else "")
            raise ConfigError(f"{error}\n{hint}" if hint else str(error)) from error

    def _build(self, spec: LogitsProcessorSpec) -> BuiltProcessor:
        processor = self._plugins.build(spec, self._context)
        name = f"{spec.name!r} of plugin {self._plugins.owner(spec)!r}"
        return BuiltProcessor(spec=spec, processor=processor, name=name)


def process(logits: Tensor, used: Sequence[Sequence[ActiveProcessor]]) -> dict[int, str]:
    """Applies the processors to float32 logits [R, V], in place. used: [R], the processors of each
    row. Returns row -> why its processor failed; the row then keeps the logits before it."""
    failures: dict[int, str] = {}
    used = [_next(own) for own in used]
    for position in range(max(map(len, used))):
        groups: dict[str, dict[int, ActiveProcessor]] = {}
        for row, own in enumerate(used):
            if position < len(own) and row not in failures:
                groups.setdefault(own[position].built.name, {})[row] = own[position]
        for group in groups.values():
            failures |= _apply(logits, group)
    return failures


def _next(used: Sequence[ActiveProcessor]) -> Sequence[ActiveProcessor]:
    """Returns the processors of a row's next token: those that choose it alone, else all."""
    return [one for one in used if len(one.row.output_token_ids) < one.row.num_before] or used


def _apply(logits: Tensor, group: Mapping[int, ActiveProcessor]) -> dict[int, str]:
    """Applies one processor to the rows that use it; returns row -> why it failed."""
    rows, built = list(group), next(iter(group.values())).built
    index = to_device(np.array(rows), logits.device)
    own = logits.index_select(0, index)
    try:
        found = built.processor.apply(own, [group[row].row for row in rows])
        _check_result(found, own)
        is_wrong = ~(found.amax(dim=1) < torch.inf)  # which NaN is not either
    except FAULTS as error:
        if len(rows) > 1:
            return {
                failed: reason
                for row in rows
                for failed, reason in _apply(logits, {row: group[row]}).items()
            }
        logger.warning("logits processor %s failed", built.name, exc_info=error)
        return {rows[0]: f"logits processor {built.name} failed: {error_text(error)}"}
    wrong = is_wrong.nonzero()[:, 0].tolist()
    if wrong:  # these rows stay as they were
        found = torch.where(is_wrong[:, None], logits[index], found)
    logits.index_copy_(0, index, found)
    return {
        rows[at]: f"logits processor {built.name} returned logits that are NaN or +inf"
        for at in wrong
    }


def _check_result(found: Any, given: Tensor) -> None:
    """Raises PluginContractError unless `found` is a tensor like `given`."""
    if not isinstance(found, Tensor):
        raise PluginContractError(f"it returned a {type(found).__name__}; return the logits")
    for name in ("shape", "dtype", "device"):
        returned, wanted = getattr(found, name), getattr(given, name)
        if returned != wanted:
            raise PluginContractError(
                f"it returned logits of {name} {returned}; return {wanted}, as it was given"
            )


def _arguments(built: BuiltProcessor, params: SamplingParams) -> dict[str, Any]:
    given = params.logits_processors_args
    return {name: given[name] for name in built.spec.arguments if name in given}
