"""WeightFormatSubject: a format as the checks see it, with samples that it has quantised."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import PluginManager, WeightFormatSpec, hookimpl
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped, attributed, demand
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.quantized.reading import QuantizedFile, readable_files
from mmdeploy_llm.weights.tensor_file import TensorFile

Tensors = Mapping[str, Tensor]
Settings = Mapping[str, Any]
Quantise = Callable[[Tensor], tuple[Tensors, Settings]]
Reference = Callable[[Tensors, Settings], Tensors]

NAME = "model.layers.0.mlp.up_proj"
SHAPES = ((64, 64), (48, 160), (33, 72), (7, 50), (1, 64), (256, 256))
GIVE_QUANTISE = (
    "give `quantise`, which returns the tensors of a weight by suffix and the settings, in the "
    "spec or in the test class"
)
MAX_FOLDER_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Quantised weights. weight: what was quantised into `key`; None for those of a folder."""

    name: str
    tensors: Tensors
    settings: Settings
    weight: Tensor | None = None
    key: str = f"{NAME}.weight"


@dataclass(kw_only=True)
class WeightFormatSubject:
    """A format to check; see WeightFormatConformance for the fields."""

    spec: WeightFormatSpec
    quantise: Quantise | None = None
    folder: Path | None = None
    reference: Reference | None = None
    error: float = 0.1
    shapes: Sequence[tuple[int, int]] = SHAPES
    ignores_unknown_settings: bool = False

    @cached_property
    def manager(self) -> PluginManager:
        """A manager that has this format only."""
        manager = PluginManager()
        specs = (self.spec,)
        plugin = SimpleNamespace(provide_weight_formats=hookimpl(lambda: specs))
        manager.register(plugin, f"of {self.spec.name}")
        return manager

    @cached_property
    def quantiser(self) -> Quantise:
        """The function that quantises a weight. Raises CheckSkipped without one."""
        if self.quantise is not None:
            return self.quantise
        if self.spec.quantise is None:
            raise CheckSkipped(GIVE_QUANTISE)
        with attributed(f"importing {self.spec.quantise!r}", "correct `quantise` of the spec"):
            return imported(self.spec.quantise)  # type: ignore[no-any-return]

    def quantised(self, weight: Tensor, name: str = NAME) -> Sample | None:
        """Returns a weight in the format; None where the format has no weights of its shape."""
        try:
            with attributed("quantise(weight)", "it takes float32 [n, k]"):
                try:
                    parts, settings = self.quantiser(weight.clone())
                except ValueError:
                    return None
        except CheckFailed as failure:
            raise CheckFailed(f"{failure}, and raises ValueError for a shape it has not") from None
        tensors = {f"{name}{suffix}": own.contiguous().clone() for suffix, own in parts.items()}
        shape = " x ".join(map(str, weight.shape))
        return Sample(
            name=shape, tensors=tensors, settings=settings, weight=weight, key=f"{name}.weight"
        )

    @cached_property
    def quantised_samples(self) -> Sequence[Sample]:
        """A sample for each shape that the format has. Raises CheckSkipped without `quantise`."""
        found = [self.quantised(random_weight(shape)) for shape in self.shapes]
        samples = [sample for sample in found if sample is not None]
        demand(samples, f"quantise raises ValueError for each of {self.shapes}; give `shapes`")
        return samples

    @cached_property
    def samples(self) -> Sequence[Sample]:
        """The samples of `quantise`, and the folder."""
        own = [] if self.folder is None else [self._of_folder(self.folder)]
        if self.folder is not None and self.quantise is None and self.spec.quantise is None:
            return own
        return [*self.quantised_samples, *own]

    @property
    def sample(self) -> Sample:
        """The first of the samples."""
        return self.samples[0]

    def _of_folder(self, folder: Path) -> Sample:
        paths = find_weights(folder)
        if sum(path.stat().st_size for path in paths) > MAX_FOLDER_BYTES:
            raise CheckSkipped(f"{folder} is too large to be copied; give a tiny checkpoint")
        tensors = {key: own for path in paths for key, own in load_file(path).items()}
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return Sample(
            name="the folder", tensors=tensors, settings=config.get("quantization_config") or {}
        )

    @contextmanager
    def opened(
        self, tensors: Tensors, settings: Settings, *, num_files: int = 1, file: Any = None
    ) -> Iterator[Sequence[TensorFile]]:
        """Opens files with these tensors as a model sees them. file: instead of SafetensorsFile."""
        names = list(tensors)
        with TemporaryDirectory() as place, ExitStack() as stack:
            files = []
            for number in range(num_files):
                path = Path(place) / f"model-{number}.safetensors"
                save_file({name: tensors[name] for name in names[number::num_files]}, path)
                files.append(stack.enter_context((file or SafetensorsFile)(path)))
            config = SimpleNamespace(quantization_config=dict(settings))
            yield readable_files(files, config, self.manager)

    def read(self, tensors: Tensors, settings: Settings, *, num_files: int = 1) -> Tensors:
        """Returns all tensors that a model sees, by key."""
        with self.opened(tensors, settings, num_files=num_files) as files:
            return {key: whole(file, key) for file in files for key in file.entries}

    def weights(self, sample: Sample) -> Tensors:
        """Returns the weights that the format finds in a sample. Raises CheckFailed when it cannot
        read it."""
        advice = "read what `quantise` and other programs write"
        with (
            attributed(f"reading the sample {sample.name}", advice),
            self.opened(sample.tensors, sample.settings) as files,
        ):
            found = [file for file in files if isinstance(file, QuantizedFile)]
            demand(found, f"of {', '.join(sample.tensors)} the format finds no weight")
            return {key: whole(file, key) for file in found for key in file.entries}

    def outcome(self, tensors: Tensors, settings: Settings, sample: Sample) -> str | None:
        """Reads a sample that was changed. Returns the message of its CheckpointError, "" when it
        is read as before, None when it is read as something else. Raises CheckFailed for another
        exception."""
        before = self.weights(sample)
        try:
            after = self.read(tensors, settings)
        except CheckpointError as error:
            return str(error)
        except Exception as error:
            raise CheckFailed(
                f"it raises {type(error).__name__}: {error}; raise CheckpointError, check with "
                "stored.parts, stored.check, stored.matrix and read_settings"
            ) from error
        same = all(key in after and equal(before[key], after[key]) for key in before)
        return "" if same else None


def random_weight(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Returns a weight of random values as large as those of models; each row has its own range."""
    generator = torch.Generator().manual_seed(seed)
    n, k = shape
    ranges = 0.5 + torch.rand(n, 1, generator=generator)
    weight: Tensor = torch.randn(n, k, generator=generator) * ranges / k**0.5
    return weight


def whole(file: TensorFile, key: str) -> Tensor:
    """Reads a tensor in the dtype of its entry."""
    out = torch.empty(file.entries[key].shape, dtype=file.entries[key].dtype)
    file.read_into(key, out, first_value=0, transpose=False)
    return out


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same values."""
    return one.shape == other.shape and one.dtype is other.dtype and torch.equal(one, other)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Returns the error of a tensor, relative to the size of what it should be."""
    size = float(wanted.float().norm()) or 1.0
    return float((found.float() - wanted.float()).norm()) / size
