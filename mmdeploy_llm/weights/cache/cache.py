"""WeightCache: one model's file in the cache of weights, read at its next start and written after
its first."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.kernels import Kernels
from mmdeploy_llm.kernels.cpu import BuildError, LargePages
from mmdeploy_llm.kernels.packed_pairs import PackedPairs
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.system.processes import finalize_here
from mmdeploy_llm.weights.load import Split, init_buffers, on_meta

from . import folder
from .file import planned_size, read, stays_in_file, write
from .record import NotKeptError, Record, fill, has_buffers, record

logger = logging.getLogger(__name__)

MAX_WAIT = 10.0  # seconds that the end of the program waits for the file to be whole


class WeightCache:
    """Restores a model from its file, or keeps it there. Used by the thread that loads the model;
    a thread of its own writes the file."""

    def __init__(
        self,
        place: Path,
        key: str,
        max_bytes: int,
        min_bytes: int,
        *,
        num_ranks: int = 1,
        num_engines: int = 1,
    ) -> None:
        """place: the folder. key: see source_key. max_bytes: of all files of the folder. min_bytes:
        of a model that is kept. num_ranks, num_engines: that share this machine's memory; a rank
        has a file of its own, engines share one."""
        self._path = place / f"{key}{folder.SUFFIX}"
        self._max_bytes, self._min_bytes = max_bytes, min_bytes
        self._num_ranks, self._num_engines = num_ranks, num_engines
        self._is_usable = True
        self._found: Record | None = None
        self._stop = threading.Event()
        self._writer: threading.Thread | None = None
        self.mapped_bytes = 0  # of the file, which are no memory of this process alone
        self._outside: LargePages | None = None  # of a new model that `room_for` has in files
        self._is_given_back = False  # some of that model's weights

    @property
    def exists(self) -> bool:
        """Whether there is a file, whole or not."""
        return os.path.exists(self._path)  # False too where nobody may look

    @property
    def is_unusable(self) -> bool:
        """Whether the model could not be restored from its file at an earlier start."""
        return os.path.exists(self._path.with_suffix(folder.UNUSABLE))

    def restored(
        self,
        factory: Callable[[Any], Any],
        checkpoint: Checkpoint,
        split: Split | None,
        kernels: Kernels,
        complete: Callable[[nn.Module], object],
    ) -> Any:
        """Builds a model as build_model does, with the weights of its file; None where there is
        none that can be used. complete: adds to the new model what its factory does not make."""
        if not self.exists:
            return None

        def restore(model: nn.Module) -> bool:
            complete(model)
            return self.restore(model, kernels, kernels.memory)

        model = restored_model(factory, checkpoint, torch.device("cpu"), split, restore)
        is_read = self._found is not None
        if model is not None and self.is_complete(model):
            return model
        if is_read:  # whole, and of no use: the model computes something from its weights
            self._is_usable = False
            folder.give_up(self._path)
        self.mapped_bytes = 0
        return None

    @contextmanager
    def room_for(self, num_bytes: int, memory: LargePages) -> Iterator[None]:
        """Has the weights of a new model allocated meanwhile as pages of files, where the memory
        does not hold so many bytes in each process; they are for `keep` and `moved`. It is
        logged."""
        place, free = self._path.parent, free_ram()
        total = self._num_ranks * self._num_engines * num_bytes
        is_cached = self._is_usable and not self.is_unusable
        if total <= free or not memory.has_files or not is_cached:
            yield
            return
        sizes = f"the weights take about {total / 1e9:.2f} GB"
        sizes += f" and this process can have {free / 1e9:.2f}"
        try:
            folder.make_folder(place, total, self._max_bytes)
        except (folder.NoRoomError, OSError, ValueError, BuildError) as error:
            logger.warning("%s; %s cannot take them: %s", sizes, place, error)
            yield
            return
        logger.warning("%s: they are written to %s, which may take minutes", sizes, place)
        with memory.in_files(place):
            self._outside, self._is_given_back, self.mapped_bytes = memory, False, num_bytes
            yield

    def moved(self, model: Any, restored: Callable[[], Any], read: Callable[[], Any]) -> Any:
        """Returns the model that is computed with after `keep`: one that the memory does not hold
        is `restored` from its file once that is whole. Where the file could not be written, which
        is logged, it stays, or is `read` again if some of its weights were given back."""
        if self._outside is None or self._writer is None:
            return model
        self._writer.join()
        self._outside, num_bytes = None, self.mapped_bytes
        found = restored()
        if found is not None:
            return found
        self.mapped_bytes = 0 if self._is_given_back else num_bytes  # `read` counts its own
        return read() if self._is_given_back else model

    def restore(self, model: nn.Module, kernels: object, memory: LargePages | None) -> bool:
        """Fills a model on the meta device from its file; returns False, and leaves it alone, where
        there is none that can be used, which is logged unless there is none."""
        try:
            file, size = folder.open_kept(self._path)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, BuildError) as error:
            return self._refuse(f"{error}. Until then the weights are read from the model's files")
        try:
            total = self._num_ranks * size
            own = None if stays_in_file(total * self._num_engines) else memory
            with closing(file):
                found = read(file, size, self._path.name, own)
            fill(model, found, kernels)
        except (OSError, MemoryError) as error:  # the file may be whole
            return self._refuse(f"{self._path} cannot be read: {error or type(error).__name__}")
        except (NotKeptError, ValueError, KeyError, TypeError) as error:
            with suppress(OSError):
                self._path.unlink()
            then = "cannot be removed" if self.exists else "is written again"
            logger.warning("%s cannot be used and %s: %s", self._path, then, error)
            return False
        self._found = found
        self.mapped_bytes = size if own is None else 0
        logger.info("the weights are those of %s, %.2f GB", self._path, size / 1e9)
        if total > free_ram():
            for module in model.modules():
                if isinstance(module, PackedPairs):
                    module.is_in_file = own is None
            logger.warning(
                "the weights take %.2f GB and this process can have %.2f: what is not in memory is "
                "read from %s whenever it is used, which is slow",
                *(total / 1e9, free_ram() / 1e9, self._path.parent),
            )
        return True

    def _refuse(self, why: str) -> bool:
        self._is_usable = False
        logger.warning("%s", why)
        return False

    def is_complete(self, model: nn.Module) -> bool:
        """Whether a restored model has computed the same buffers as when it was kept. Otherwise the
        model computes some from weights that are packed by now, and is not kept again."""
        assert self._found is not None
        found, self._found = self._found, None
        self._is_usable = has_buffers(model, found)
        return self._is_usable

    def keep(self, model: nn.Module) -> None:
        """Starts to write the model's file, where it is not there yet; the program may go on, and
        waits for it at its end, for seconds. What prevents it is logged."""
        if not self._is_usable or self.exists or self.is_unusable:
            return
        try:
            kept = record(model)
            size = planned_size(kept.tensors)
            if size < self._min_bytes:
                return
            if self._outside is None:  # else these very weights take that room already
                folder.make_folder(self._path.parent, size, self._max_bytes)
        except (NotKeptError, folder.NoRoomError) as error:
            logger.info("the weights are not kept for the next start: %s", error)
        except (OSError, ValueError, BuildError) as error:
            self._refuse(f"the weights are not kept for the next start: {error}")
        else:
            self._start(kept)

    def _start(self, kept: Record) -> None:
        self._writer = threading.Thread(
            target=self._write, args=(kept,), name="weight-cache", daemon=True
        )
        self._writer.start()
        finalize_here(self._writer, _wait, self._writer, self._stop)

    def wait(self) -> None:
        """Waits until the file is written."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, kept: Record) -> None:
        try:
            with folder.new_file(self._path) as file:
                if file is None:  # another process writes it
                    return
                release = None if self._outside is None else self._give_back
                write(file, self._path.name, kept, self._stop.is_set, release)
        except NotKeptError as error:
            logger.info("the weights are not kept for the next start: %s", error)
        except (OSError, BuildError) as error:  # the disk is full
            words = "the weights are not kept for the next start in %s: %s"
            logger.warning(words, self._path.parent, error)
        else:
            for path in folder.make_room(self._path, self._max_bytes):
                logger.info("%s was not used for longest and is removed", path)
            logger.info("the weights are kept for the next start in %s", self._path)

    def _give_back(self, tensor: Tensor) -> None:
        assert self._outside is not None
        self._is_given_back |= self._outside.release(tensor)


def _wait(writer: threading.Thread, stop: threading.Event) -> None:
    """Waits for the writer, and then has it stop."""
    writer.join(MAX_WAIT)
    stop.set()
    writer.join(MAX_WAIT)


def restored_model(
    factory: Callable[[Any], Any],
    checkpoint: Checkpoint,
    device: torch.device,
    split: Split | None,
    restore: Callable[[nn.Module], bool],
) -> Any:
    """Builds `factory(checkpoint.config)` as build_model does, with the weights that `restore`
    gives it; None where that returns False, and where the model cannot be completed without its
    weights in their own layout. split: see build_model."""
    model = on_meta(factory, checkpoint)
    if split is not None:
        split(model)
    if not restore(model):
        return None
    try:
        init_buffers(model, device)
    except ModelNotSupportedError:  # it needs weights that are packed
        return None
    return model.eval()
