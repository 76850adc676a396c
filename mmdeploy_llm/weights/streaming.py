"""Reads weights in the order of their files, and packs each module as soon as all of it is there,
while the next ones are read: a model that is rounded never needs memory for all that its files
hold.

    reads --NUM_READERS threads--> parameters, AHEAD_BYTES of them at most --this thread--> packed
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from torch import Tensor, nn
from tqdm import tqdm

from mmdeploy_llm.system.sharding import Share

from .files import SafetensorsFile
from .quantized.reading import Selection
from .shard import Read, fill, fill_share

logger = logging.getLogger(__name__)

NUM_READERS = 2  # page faults of the target memory take as long as reading the file
AHEAD_BYTES = 2**26  # that may be read before what was read earlier is packed
PIECE_BYTES = 2**24  # of larger reads, which several threads share
PROGRESS_BYTES = 2 * 2**30  # a progress bar is shown for a larger checkpoint
OWN_PACKAGES = ("mmdeploy_llm", "mmdeploy_llm_plugins")

Item = TypeVar("Item")
Result = TypeVar("Result")

# Packs a module, with its path; does nothing to one that has nothing to pack.
PackModule = Callable[[str, nn.Module], object]


def can_pack_early(model: nn.Module) -> bool:
    """Whether no module needs its weights, as they were read, once all are there: those of this
    package compute their buffers without them, which is not known of others."""
    if not getattr(model, "is_cacheable", True):
        return False
    inits = (getattr(type(module), "init_buffers", None) for module in model.modules())
    return all(init is None or init.__module__.split(".")[0] in OWN_PACKAGES for init in inits)


def read_all(
    model: nn.Module,
    reads: Sequence[Read],
    whole: Mapping[str, tuple[int, ...]],
    shares: Mapping[str, Share],
    pack: PackModule | None = None,
    kept: Collection[str] = (),
) -> None:
    """Fills parameters. whole, shares: see build_model. pack: see PackModule; None: packs nothing.
    kept: parameters that come later; their modules are not packed."""
    params: dict[str, Tensor] = {name: param.data for name, param in model.named_parameters()}

    def fill_one(read: Read) -> None:
        if read.name not in shares:
            fill(read, params[read.name])
        elif read.name in params:
            fill_share(read, params[read.name], shares[read.name], whole[read.name])

    # Casting uses all cores, so one reader is enough when dtypes differ.
    is_as_stored = all(
        read.file.entries[read.key].dtype is params[read.name].dtype
        for read in reads
        if read.name in params
    )
    num_readers = NUM_READERS if is_as_stored else 1
    modules = {} if pack is None else dict(model.named_modules())
    if pack is not None:
        reads = [piece for read in reads for piece in _pieces(read, is_whole=read.name in shares)]
    left = Counter(_owner(read.name) for read in reads)
    left.update(map(_owner, kept))  # which are never done here
    with ThreadPoolExecutor(num_readers, thread_name_prefix="weights") as pool:
        done = done_in_order(pool, fill_one, reads, _size, None if pack is None else AHEAD_BYTES)
        for read, _ in _progress(done, sum(map(_size, reads))):
            owner = _owner(read.name)
            left[owner] -= 1
            module = None if left[owner] else modules.get(owner)
            if pack is not None and module is not None:
                for name, _ in module.named_parameters(prefix=owner, recurse=False):
                    params.pop(name, None)
                pack(owner, module)


def _pieces(read: Read, *, is_whole: bool) -> Iterator[Read]:
    """Yields the parts of a large read, by rows, where a file stores the values as they are."""
    size = _size(read)
    is_stored = isinstance(read.file, SafetensorsFile | Selection) and not read.transpose
    if is_whole or not is_stored or len(read.shape) < 2 or size <= PIECE_BYTES:
        yield read
        return
    num_rows, row = read.shape[0], math.prod(read.shape[1:])
    step = max(1, PIECE_BYTES * num_rows // size)
    for first in range(0, num_rows, step):
        yield replace(
            read,
            start=read.start + first * row,
            first_value=read.first_value + first * row,
            shape=(min(step, num_rows - first), *read.shape[1:]),
        )


def _owner(name: str) -> str:
    """Returns the path of the module that has a parameter."""
    return name.rpartition(".")[0]


def _size(read: Read) -> int:
    """Returns the bytes of a read in its file."""
    return read.size * read.file.entries[read.key].dtype.itemsize


def done_in_order(
    pool: ThreadPoolExecutor,
    run: Callable[[Item], Result],
    items: Iterable[Item],
    size_of: Callable[[Item], int],
    ahead: int | None = AHEAD_BYTES,
) -> Iterator[tuple[Item, Result]]:
    """Yields items in their order with what `run` returns of each. ahead: bytes, by size_of, that
    may be read or waiting at a time, or one item that is larger; None: all. Raises what a run
    raised."""
    begun: deque[tuple[Item, Future[Result]]] = deque()
    size = 0
    try:
        for item in items:
            while begun and ahead is not None and size + size_of(item) > ahead:
                size -= size_of(begun[0][0])
                yield _first(begun)
            begun.append((item, pool.submit(run, item)))
            size += size_of(item)
        while begun:
            yield _first(begun)
    finally:  # one has failed
        for _, future in begun:
            future.cancel()


def _first(begun: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    """Waits for the first item and takes it. Raises what its run raised."""
    item, future = begun.popleft()
    return item, future.result()


def _progress(done: Iterator[tuple[Read, None]], total: int) -> Iterator[tuple[Read, None]]:
    logger.info("reading %.2f GB of weights", total / 1e9)
    bar = tqdm(
        total=total, unit="B", unit_scale=True, desc="weights", disable=total < PROGRESS_BYTES
    )
    with bar:
        for read, result in done:
            yield read, result
            bar.update(_size(read))
