"""Finds the key that a checkpoint of transformers has for a tensor of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .library import known_keys

# Whether the model has a parameter for a key of a checkpoint.
HasKey: TypeAlias = Callable[[str], bool]

NUMBER = re.compile(r"\.(\d{1,5})(?=\.)")  # of a layer, in a name
# What ends a name in GGUF -> what may end the key. A parameter that is no weight of a module, such
# as a vector of scales, has neither ending; a linear layer with bounds has its weight one deeper.
ENDINGS: Mapping[str, tuple[str, ...]] = {
    "weight": (".weight", "", ".linear.weight"),
    "bias": (".bias", "_bias", ""),
    "input_max": (".input_max",),
    "input_min": (".input_min",),
    "output_max": (".output_max",),
    "output_min": (".output_min",),
}
PREFIXES = ("model.", "")  # the package leaves it out of some keys
STACK, EXPERT = ".experts.", ".experts.{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The key of a tensor. is_stack: whether the tensor stacks experts, which have keys of their
    own: `text` has "{}" for the number of one."""

    text: str
    is_stack: bool = False


class Names:
    """The names of one architecture.

    own: names -> keys that win over those of the package `gguf`; see TextModel.names.
    """

    def __init__(self, architecture: str, own: Mapping[str, str], has_key: HasKey) -> None:
        self._keys = {**known_keys(architecture), **{name: (key,) for name, key in own.items()}}
        self._has_key = has_key

    def key(self, name: str, number: int | None = None) -> Key | None:
        """Returns the key of the tensor `name`: the first one that the model has, None without one.
        number: of the layer in the key, where it is not that in the name."""
        layer = NUMBER.search(name)
        if layer is not None and number is None:
            number = int(layer[1])
        for text in self._possible(name):
            whole = text.replace("{bid}", str(number))
            if self._has_key(whole):
                return Key(text=whole)
            stack = whole.replace(STACK, EXPERT)
            if stack != whole and self._has_key(stack.format(0)):
                return Key(text=stack, is_stack=True)
        return None

    def _possible(self, name: str) -> Iterator[str]:
        """Yields the keys that the tables have for a name, with "{bid}" for the layer."""
        for shown in dict.fromkeys((name, NUMBER.sub(".{bid}", name, count=1))):
            stem, _, ending = shown.rpartition(".")
            for base, endings in ((shown, ("",)), (stem, ENDINGS.get(ending, ()))):
                for text in self._keys.get(base, ()):
                    for prefix in PREFIXES:
                        if not (prefix and text.startswith(prefix)):
                            yield from (f"{prefix}{text}{end}" for end in endings)
