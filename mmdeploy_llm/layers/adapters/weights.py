"""Makes the changes of modules from the tensors of a PEFT folder; every tensor must be known.

    base_model.model.PATH.lora_A.weight            [r, in]        B: [out, r]; B's bias: [out]
    base_model.model.PATH.lora_embedding_A         [r, vocab]     B: [hidden, r]
    base_model.model.PATH.lora_magnitude_vector    [out]          DoRA
    base_model.model.PATH.token_adapter.trainable_tokens_delta    rows of an embedding
    base_model.model.PATH.weight, .bias            takes the place of the model's

The adapter's name may follow what begins with lora_. A stacked parameter [E, out, in] of experts
has A [E * r, in] and B [out, r * E], whose last axis goes over ranks, then experts; where two
parameters of a module are changed, ".base_layer" follows the PATH of the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.files import LOADABLE
from mmdeploy_llm.weights.tensor_file import Entry

from .adapter import LowRank, TokenRows
from .config import LoraConfig, is_saved

PREFIX = "base_model.model."
BASE = ".base_layer"
TOKENS = "token_adapter.trainable_tokens_delta"
KEY = re.compile(
    r"(?P<path>.+)\.(?P<part>lora_(?:embedding_)?[AB]|lora_magnitude_vector|"
    rf"{re.escape(TOKENS)})(?:\.(?P<name>(?!weight$|bias$)[^.]+))?(?P<bias>\.bias)?(?:\.weight)?"
)
SAVED_COPY = re.compile(r"\.modules_to_save\.([^.]+)\.")
EMBEDDINGS = ("embed_tokens", "lm_head")  # PEFT saves these where it cannot know them
STACKS = ("gate_up_proj", "down_proj")  # parameters of experts, in their order

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a file. changes: those of the parts of a change, by path and part."""

    changes: Mapping[str, Mapping[str, str]]
    tokens: Mapping[str, str]
    saved: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Names what a change belongs to. is_stack: whether to a stacked parameter."""

    path: str
    keys: Mapping[str, str]
    rank: int
    scale: float
    is_stack: bool


def sort_keys(keys: Iterable[str], config: LoraConfig) -> Keys:
    """Returns what the keys are. Raises CheckpointError for one that is not known."""
    changes: dict[str, dict[str, str]] = {}
    tokens: dict[str, str] = {}
    saved: dict[str, str] = {}
    names = set()
    for key in keys:
        short = key.removeprefix(PREFIX)
        found, copy = KEY.fullmatch(short), SAVED_COPY.search(short)
        name = found["name"] if found else copy[1] if copy else None
        if name is not None:
            names.add(name)
        if found is None:
            place, part = saved, SAVED_COPY.sub(".", short).replace(f"{BASE}.", ".")
            _check_saved(key, part, config)
        elif found["part"] == TOKENS:
            place, part = tokens, found["path"]
        else:
            place = changes.setdefault(found["path"], {})
            part = found["part"] + (found["bias"] or "")
        if part in place:
            raise CheckpointError(f"the adapter holds {key} twice, also as {place[part]}")
        place[part] = key
    if len(names) > 1:
        raise CheckpointError(
            f"the file holds several adapters, {', '.join(sorted(names))}: save each in a folder "
            "of its own"
        )
    return Keys(changes=changes, tokens=tokens, saved=saved)


def _check_saved(key: str, path: str, config: LoraConfig) -> None:
    """Raises CheckpointError for a tensor that no setting explains."""
    module, _, leaf = path.rpartition(".")
    is_known = (
        any(is_saved(name, path) for name in config.modules_to_save or ())
        or (config.bias != "none" and leaf == "bias")
        or (leaf == "weight" and module.rpartition(".")[2] in EMBEDDINGS)
    )
    if not is_known or ".lora_" in path:
        raise CheckpointError(
            f"the adapter holds {key}, which is no part of a LoRA that is known here, nor of a "
            "module that modules_to_save names"
        )


def sites_of(keys: Keys, config: LoraConfig) -> Sequence[Site]:
    """Returns the changes by what they belong to. Raises CheckpointError for modules that the
    config does not name: PEFT would leave their tensors out."""
    raw = list(keys.changes)
    modules = dict(zip(raw, config.targeted(raw), strict=True))
    names: dict[str, str] = {}  # the parameter of a raw path, where there is one
    for path in raw:
        bare = path.removesuffix(BASE)
        is_head = config.ensure_weight_tying and bare.rpartition(".")[2] in EMBEDDINGS
        if not modules[path] and not is_head:
            names[path] = _parameter(bare, path != bare, f"{bare}{BASE}" in raw, config)
    owners = {
        path: f"{path.removesuffix(BASE)}.{names[path]}" if path in names else path for path in raw
    }
    scales = config.scales(list(owners.values()))
    return [
        Site(
            path=owners[path].removesuffix(".weight"),
            keys=keys.changes[path],
            rank=scales[owners[path]][0],
            scale=scales[owners[path]][1],
            is_stack=names.get(path, "weight") != "weight",
        )
        for path in raw
    ]


def _parameter(path: str, is_inner: bool, has_inner: bool, config: LoraConfig) -> str:
    """Returns the name of the parameter of module `path` that the adapter changes."""
    module = path.rpartition(".")[2]
    targets = [each.rpartition(".") for each in config.target_parameters or ()]
    own = {leaf for parent, _, leaf in targets if parent and f".{path}".endswith(f".{parent}")}
    found = own or {leaf for parent, _, leaf in targets if not parent}
    ordered = [name for name in STACKS if name in found] if len(found) > 1 else [*found]
    if not found:
        raise CheckpointError(
            f"the adapter holds tensors of {path}, which target_modules, with what it excludes, "
            "does not name: PEFT leaves them out"
        )
    if len(ordered) != 1 + (is_inner or has_inner) or len(ordered) != len(found):
        raise CheckpointError(
            f"target_parameters names {', '.join(sorted(found))} of {module}, and which of them "
            f"the tensors of {path} change is not known here; {', '.join(STACKS)} are served"
        )
    return ordered[0] if is_inner else ordered[-1]


def change_of(site: Site, entries: Mapping[str, Entry], config: LoraConfig, read: Read) -> LowRank:
    """Returns the change of a site. Raises CheckpointError with tensor, found and expected."""
    keys, is_embedding = site.keys, "lora_embedding_A" in site.keys
    middle = "embedding_" if is_embedding else ""
    expected = {f"lora_{middle}A", f"lora_{middle}B"}
    expected |= {"lora_magnitude_vector"} if config.use_dora else set()
    expected |= {"lora_B.bias"} if config.lora_bias and not is_embedding else set()
    if expected != keys.keys():
        raise CheckpointError(
            f"the adapter holds {', '.join(sorted(keys))} of {site.path}; expected: "
            f"{', '.join(sorted(expected))}"
        )
    a_key, b_key = keys[f"lora_{middle}A"], keys[f"lora_{middle}B"]
    (rows, *inner), (out, *columns) = (entries[key].shape or (0,) for key in (a_key, b_key))
    count = max(1, rows // site.rank) if site.is_stack else 1
    size = site.rank * count
    if rows != size or not inner:
        raise _shape_error(a_key, entries, f"({size}, in)")
    if not columns or columns[0] != size or any(each != 1 for each in columns[1:]):
        raise _shape_error(b_key, entries, f"(out, {size})")
    one = {part: keys[part] for part in expected - {f"lora_{middle}A", f"lora_{middle}B"}}
    for key in one.values():
        if entries[key].shape not in ((out,), (1, out), (1, out, 1, 1)):
            raise _shape_error(key, entries, f"({out},)")
    a, b = read(a_key).flatten(1), read(b_key).flatten(1)
    if site.is_stack:
        a = a.view(count, site.rank, -1)
        b = b.view(out, site.rank, count).permute(2, 0, 1).contiguous()
    extra = {part: read(key).flatten() for part, key in one.items()}
    bias = extra.get("lora_B.bias")
    return LowRank(
        a=a,
        b=b,
        scale=site.scale,
        bias=None if bias is None else bias * site.scale,
        magnitude=extra.get("lora_magnitude_vector"),
    )


def tokens_of(
    keys: Keys, entries: Mapping[str, Entry], config: LoraConfig, read: Read
) -> Mapping[str, TokenRows]:
    """Returns the rows of embeddings that take the place of the model's."""
    given = config.trainable_token_indices or {}
    by_name = given if isinstance(given, dict) else dict.fromkeys(EMBEDDINGS[:1], given)
    if not isinstance(given, dict) and len(keys.tokens) == 1:
        by_name = {next(iter(keys.tokens)): given}
    found = {}
    for path, key in keys.tokens.items():
        ids = next((by_name[x] for x in by_name if f".{path}".endswith(f".{x}")), None)
        if ids is None:
            raise CheckpointError(f"the adapter holds {key}, which trainable_token_indices lacks")
        if len(entries[key].shape) != 2 or entries[key].shape[0] != len(ids):
            raise _shape_error(key, entries, f"({len(ids)}, hidden)")
        found[path] = TokenRows(ids=torch.tensor(ids), rows=read(key))
    missing = [name for name in by_name if not any(f".{x}".endswith(f".{name}") for x in found)]
    if missing:
        raise CheckpointError(f"the adapter lacks the rows of {missing[0]} that its config names")
    return found


def check_entry(key: str, entry: Entry) -> None:
    """Raises CheckpointError for a tensor that is no array of floats."""
    if entry.dtype not in LOADABLE or 0 in entry.shape:
        raise CheckpointError(
            f"{key} of the adapter has the shape {entry.shape} and dtype {entry.dtype}; expected: "
            "floats of 16 bits or more. An empty one was saved without gathering its shards"
        )


def _shape_error(key: str, entries: Mapping[str, Entry], expected: str) -> CheckpointError:
    return CheckpointError(
        f"{key} of the adapter has the shape {tuple(entries[key].shape)}, expected {expected} by "
        "its config"
    )
