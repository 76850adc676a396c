"""Builds a model on the meta device and streams a checkpoint into it.

    factory(config) on "meta" --> checked plan: key -> target --> allocate --> read in place

Nothing is read before the whole plan has been checked: every key is used, every value of every
parameter is filled exactly once, and all shapes are equal.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import (
    CheckpointError,
    ConfigError,
    MMDeployLLMError,
    ModelNotSupportedError,
    PluginContractError,
)
from mmdeploy_llm.hooks import Checkpoint, PluginManager
from mmdeploy_llm.kernels.cpu import LargePages
from mmdeploy_llm.system.sharding import Share
from mmdeploy_llm.weights.gguf.header import read_headers
from mmdeploy_llm.weights.gguf.lookup import Tables
from mmdeploy_llm.weights.gguf.reading import GGUFFile
from mmdeploy_llm.weights.gguf.tower import TowerFile
from mmdeploy_llm.weights.quantized.reading import readable_files
from mmdeploy_llm.weights.tensor_file import TensorFile

from .bounds import bounded_building
from .files import LOADABLE, SafetensorsFile
from .find import find_weights
from .kept import CanKeep, Kept, hold, kept_weights, packed_bytes
from .map import Target
from .shard import Read
from .streaming import NUM_READERS, PackModule, can_pack_early, done_in_order, read_all

logger = logging.getLogger(__name__)


def dtype_of(module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a module's parameter in a model of `dtype`: float32 for those that its
    attribute `fp32_parameters` names, and in float16 for those of `fp32_parameters_of_float16`."""
    wide = getattr(module, "fp32_parameters", ())
    if dtype is torch.float16:
        wide = (*wide, *getattr(module, "fp32_parameters_of_float16", ()))
    return torch.float32 if name in wide else dtype


LoadFormat = Literal["auto", "safetensors", "dummy"]
MAX_NAMED = 10  # keys listed in one error message
DUMMY_SCALE = 0.02
CODED_AHEAD_BYTES = 2**24  # of codes that may be read before earlier ones are packed


# Reduces a whole model on the meta device to one rank's shard, see system.sharding.shards.
Split = Callable[[nn.Module], Mapping[str, Share]]


def build_model(
    factory: Callable[[Any], Any],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    split: Split | None = None,
    memory: LargePages | None = None,
    can_keep: CanKeep | None = None,
    plugins: PluginManager | None = None,
    new_packer: Callable[[nn.Module], PackModule] | None = None,
) -> Any:
    """Builds `factory(checkpoint.config)` and loads its weights; eval mode, no gradients.

    Parameters get `dtype` or float32, see dtype_of. A module with non-persistent buffers computes
    them in `init_buffers(device)`.
    load_format: "auto" reads the other files that the checkpoint names, else safetensors files;
        "safetensors" only these; "dummy" reads no file and fills small random values,
        always the same.
    split: under tensor parallelism, reduces the model to this rank's shard; only the shard is read.
    memory: allocator for weights on the CPU; None allocates with torch on `device`.
    can_keep: which weights of few bits stay as they are until the kernels pack them; None: all are
        dequantised.
    plugins: whose formats are read; None: those that are installed.
    new_packer: returns what packs modules: those in few bits, with which a model's checks of its
        weights multiply, and on a CPU others while more are read; None: nothing is packed here.
    Raises CheckpointError when the checkpoint does not fit the model.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(f"load_format must be auto, safetensors or dummy, got {load_format!r}")
    model: Any = on_meta(factory, checkpoint)
    whole = {name: tuple(param.shape) for name, param in model.named_parameters()}
    with ExitStack() as stack:
        is_dummy = load_format == "dummy"
        files = () if is_dummy else _open(model, checkpoint, load_format, stack, plugins)
        reads = [] if is_dummy else _plan(model, files, whole)
        shares = split(model) if split is not None else {}
        kept = {} if can_keep is None else kept_weights(model, reads, can_keep, whole, shares)
        empty = partial(torch.empty, device=device) if memory is None else memory.empty
        _materialize(model, dtype, empty, kept)
        if is_dummy:
            _fill_dummy(model, whole, shares)
        else:
            own = [read for read in reads if read.name not in kept]
            pack = new_packer(model) if new_packer else None
            early = pack if device.type == "cpu" and can_pack_early(model) else None
            read_all(model, own, whole, shares, early, kept)
            _hold(model, kept, memory, pack)
    init_buffers(model, device)
    return model.eval()


def on_meta(factory: Callable[[Any], Any], checkpoint: Checkpoint) -> nn.Module:
    """Builds `factory(checkpoint.config)` without memory for its weights."""
    with torch.device("meta"), bounded_building():
        model = factory(checkpoint.config)
    if not isinstance(model, nn.Module):
        raise PluginContractError(
            f"a model factory must return a torch.nn.Module, got {type(model).__name__}"
        )
    return model


def _open(
    model: nn.Module,
    checkpoint: Checkpoint,
    load_format: LoadFormat,
    stack: ExitStack,
    plugins: PluginManager | None,
) -> Sequence[TensorFile]:
    """Returns the files of a checkpoint, ready to be read. stack: closes them."""
    if checkpoint.model_file is not None and load_format != "safetensors":
        return [stack.enter_context(checkpoint.model_file.open_weights())]
    if checkpoint.gguf_files and load_format != "safetensors":
        return _open_gguf(model, checkpoint, stack)
    paths = find_weights(checkpoint.folder)
    files = [stack.enter_context(SafetensorsFile(path)) for path in paths]
    return readable_files(files, checkpoint.config, plugins)


def _open_gguf(model: nn.Module, checkpoint: Checkpoint, stack: ExitStack) -> Sequence[TensorFile]:
    params = dict(model.named_parameters())

    def has_key(key: str) -> bool:
        targets = _targets(model, key) or ()  # by the end of a key a model may find any name
        return bool(targets) and all(target.name in params for target in targets)

    tables, text = Tables.named(checkpoint.gguf_tables), read_headers(checkpoint.gguf_files)
    found: list[TensorFile] = []
    found.append(stack.enter_context(GGUFFile(text, tables.model(text), has_key)))
    if checkpoint.gguf_tower is not None:
        header = read_headers([checkpoint.gguf_tower])
        tower = TowerFile(header, tables.tower(header), has_key)
        found.append(stack.enter_context(tower))
    return found


def _plan(
    model: nn.Module, files: Sequence[TensorFile], shapes: Mapping[str, tuple[int, ...]]
) -> list[Read]:
    pieces: list[Read] = []
    surplus: list[str] = []
    unused: list[str] = []
    for file in files:
        for key in file.entries:
            targets = _targets(model, key)
            if targets is None:
                surplus.append(key)
                continue
            pieces += [_piece(file, key, target, shapes) for target in targets]
            if not targets:
                unused.append(key)
    if unused:
        shown = ", ".join(unused[:MAX_NAMED])
        logger.info("the model does not use %d tensors of the checkpoint: %s", len(unused), shown)
    _raise_if(surplus, "the model has no parameters for these keys of the checkpoint", files)
    _check_coverage(pieces, shapes, files)
    return pieces


def _targets(model: nn.Module, key: str) -> Sequence[Target] | None:
    declared: Any = model
    targets: Sequence[Target] | None = declared.weight_targets(key)
    return targets


def _piece(
    file: TensorFile, key: str, target: Target, shapes: Mapping[str, tuple[int, ...]]
) -> Read:
    """Returns the read that fills `target`. Raises CheckpointError when the shapes differ."""
    if target.name not in shapes:
        raise PluginContractError(f"weight_targets({key!r}) names no parameter: {target.name!r}")
    if file.entries[key].dtype not in LOADABLE:
        raise CheckpointError(
            f"{key} in {file.path} has dtype {_dtype_name(file, key)}, and {target.name} needs "
            "floats: either the weights are quantised and config.json has no quantization_config "
            "that says how, or it does not name this layer"
        )
    stored, into = file.entries[key].shape, _run(shapes[target.name], target.index, target.rows)
    if target.other_rows is not None and stored[:1] != into.shape[:1]:
        into = _run(shapes[target.name], target.index, target.other_rows)
    source = _Run(first=0, shape=())
    if _has_index(stored, target):
        source = _run(stored, target.source_index, target.source)
    wanted = into.shape
    transpose = source.shape != wanted if target.transpose is None else target.transpose
    expected = (*wanted[:-2], *wanted[:-3:-1]) if transpose else wanted  # last two axes swapped
    if source.shape != expected:
        raise CheckpointError(
            f"{key} in {file.path} has shape {list(stored)}, but {target.name} needs "
            f"{list(expected)}: config.json and the weights do not belong together"
        )
    return Read(
        file=file,
        key=key,
        name=target.name,
        start=into.first,
        shape=wanted,
        first_value=source.first,
        transpose=transpose,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Values of a tensor that follow each other, from value number `first` on. shape: of them."""

    first: int
    shape: tuple[int, ...]


def _run(shape: tuple[int, ...], index: int | None, rows: slice | None) -> _Run:
    """Returns the values of a tensor of `shape` at one index of its first axis, and of these some
    rows. None takes all.

    The last axis is contiguous, so both leave one run. With shape [E, n, k], index e, rows a:b:

        value   0          e n k    (e n + a) k      (e n + b) k    (e + 1) n k          E n k
                |  ......  |  rows < a  |== the run ==|  rows >= b  |  .................  |
                           |<-------------- index e -------------->|
    """
    first = 0
    if index is not None:
        first, shape = index * math.prod(shape[1:]), shape[1:]
    if rows is not None and shape:
        begin, end, _ = rows.indices(shape[0])
        first, shape = first + begin * math.prod(shape[1:]), (end - begin, *shape[1:])
    return _Run(first=first, shape=shape)


def _has_index(stored: tuple[int, ...], target: Target) -> bool:
    """Whether a stored tensor has the index, and as many of them, that a target asks for."""
    if target.source_index is None:
        return True
    num_sources = stored[0] if stored else 0
    return target.source_index < num_sources and target.num_sources in (None, num_sources)


def _dtype_name(file: TensorFile, key: str) -> str:
    return str(file.entries[key].dtype).removeprefix("torch.")


def _check_coverage(
    pieces: Iterable[Read],
    shapes: Mapping[str, tuple[int, ...]],
    files: Sequence[TensorFile],
) -> None:
    """Raises CheckpointError unless exactly one read fills every value of every parameter."""
    by_name: dict[str, list[Read]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.name].append(piece)
    missing, twice = [], []
    for name, shape in shapes.items():
        end, has_gap = 0, False  # reads in order: one that begins before `end` overlaps the last
        for piece in sorted(by_name[name], key=lambda piece: piece.start):
            if piece.start < end:
                twice.append(f"{piece.key} (for {name})")
            has_gap |= piece.start > end
            end = max(end, piece.start + piece.size)
        if has_gap or end != math.prod(shape):
            missing.append(f"{name} (some values)" if by_name[name] else name)
    _raise_if(missing, "the checkpoint holds no values for these parameters", files)
    _raise_if(twice, "these keys fill values that another key fills too", files)


def _raise_if(names: Sequence[str], what: str, files: Sequence[TensorFile]) -> None:
    if names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise CheckpointError(
            f"{what}: {', '.join(names[:MAX_NAMED])}{more} (read from {files[0].path.parent}, "
            f"{len(files)} file(s)). Check that config.json and the weights belong together"
        )


def _materialize(
    model: nn.Module, dtype: torch.dtype, empty: Callable[..., Tensor], kept: Container[str]
) -> None:
    """Replaces the meta parameters by tensors that `empty` allocates, with undefined values; those
    in `kept` by placeholders without rows."""
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            own, shape = dtype_of(module, name, dtype), list(param.shape)
            if f"{path}.{name}" in kept:
                shape[-2] = 0
            setattr(module, name, nn.Parameter(empty(shape, dtype=own), requires_grad=False))


def _hold(
    model: nn.Module,
    kept: Mapping[str, Kept],
    memory: LargePages | None,
    pack: PackModule | None,
) -> None:
    """Reads weights in few bits, and packs each module once all of its are there."""
    empty = torch.empty if memory is None else memory.empty
    units = {name: empty(own.units_shape, dtype=torch.int32) for name, own in kept.items()}

    def hold_one(name: str) -> int:
        return hold(model, name, kept[name], units.pop(name)).num_bytes

    def size_of(name: str) -> int:
        return kept[name].num_bytes

    left, sizes = Counter(name.rpartition(".")[0] for name in kept), Counter[str]()
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights") as pool:
        for name, own in done_in_order(pool, hold_one, kept, size_of, CODED_AHEAD_BYTES):
            path = name.rpartition(".")[0]
            sizes[path] += own
            left[path] -= 1
            if pack is not None and not left[path]:
                module = model.get_submodule(path)
                pack(path, module)
                sizes[path] = packed_bytes(module) or sizes[path]
    if kept:
        logger.info("%d weights stay in few bits: %.2f GB", len(kept), sizes.total() / 1e9)


def _fill_dummy(
    model: nn.Module, whole: Mapping[str, tuple[int, ...]], shares: Mapping[str, Share]
) -> None:
    for name, param in sorted(model.named_parameters()):
        values = param.data if name not in shares else param.new_empty(whole[name])
        generator = torch.Generator(param.device).manual_seed(values.numel())
        least = 0.0 if name.endswith("running_var") else -DUMMY_SCALE  # a variance
        values.uniform_(least, DUMMY_SCALE, generator=generator)
        if name in shares:
            param.data.copy_(shares[name].take(values))


def init_buffers(model: nn.Module, device: torch.device) -> None:
    """Has each module compute the buffers that no checkpoint holds."""
    for module in model.modules():
        init = getattr(module, "init_buffers", None)
        if callable(init):
            _call(init, device, type(module).__name__)
    meta = [name for name, buffer in model.named_buffers() if _is_meta(buffer)]
    if meta:
        raise PluginContractError(
            f"buffers without values: {', '.join(meta[:MAX_NAMED])}; their module needs a method "
            "init_buffers(device) that computes them"
        )


def _call(init: Callable[[torch.device], object], device: torch.device, owner: str) -> None:
    """Raises ModelNotSupportedError for whatever the code of a plugin or of transformers raises."""
    try:
        init(device)
    except (MMDeployLLMError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelNotSupportedError(
            f"{owner} cannot run with this config.json and these weights: "
            f"{type(error).__name__}: {error}"
        ) from error


def _is_meta(buffer: Tensor) -> bool:
    return buffer.device.type == "meta"
