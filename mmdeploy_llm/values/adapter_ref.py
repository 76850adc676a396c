"""AdapterRef and LoRARequest: an adapter as the rooms know it, and as vLLM's callers name one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """One version of an adapter: its name, and the files that it is read from when it is needed.

    name: as the caller gave it. folder: where its files lie.
    key: of the name and the content of the files, so that the same name with other files has
        another one.
    num_bytes: the memory that it takes in the model's dtype.
    rank: the largest of its low-rank changes. num_modules: matrices that it changes.
    has_media: whether it changes what encodes media.
    """

    name: str
    folder: str
    key: str
    num_bytes: int
    rank: int = 0
    num_modules: int = 0
    has_media: bool = False


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter as callers of vLLM name it: a name, a number, which has no meaning here, and its
    folder or its id on the hub."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


# What a call takes: a name or a request for all prompts, or one for each, None for the model alone.
AnyAdapter = str | LoRARequest | Sequence[str | LoRARequest | None] | None
