"""Checks what is computed with a format's weights: products in few bits, and a model's logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    Experts,
    Linear,
    MoEConfig,
    RotaryConfig,
)
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.testing.models.base import CheckSkipped, attributed, demand
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.load import build_model
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm.weights.quantized.reading import QuantizedFile

from .subject import WeightFormatSubject, distance, random_weight

ROUNDING = 0.01  # scales in few bits have the precision of bfloat16
PRODUCT_ROUNDING = 0.02
SIZES = (64, 256)  # of models; a format may have weights of larger groups only
NUM_ROWS = (1, 5, 70)
PROMPT = (3, 14, 15, 9, 2, 6, 5)


def few_bits_equal_dequantised_weights(subject: WeightFormatSubject) -> str:
    """A weight that may stay in few bits has the values of the dequantised one."""
    num = 0
    for sample in subject.samples:
        weights = subject.weights(sample)
        with subject.opened(sample.tensors, sample.settings) as files:
            for file, key in _coded(files):
                advice = "its GroupedMatrix must fit its layout: bits, group_size, codes"
                with attributed(f"sample {sample.name}: {key} in few bits", advice):
                    values = file.read_coded(key).dequantize()
                error = distance(values, weights[key])
                demand(
                    error <= ROUNDING,
                    f"sample {sample.name}: {key} in few bits differs by {error:.2g} of its size "
                    "from the dequantised weight; look at zeros, groups and bits of its layout",
                )
                num += 1
    _demand_layouts(num)
    return f"{num} weights"


def products_equal_dequantised_weights(subject: WeightFormatSubject) -> str:
    """The kernels' product with a weight in few bits equals that with the dequantised one."""
    kernels, num = _kernels(), 0
    for sample in subject.samples:
        weights = subject.weights(sample)
        with subject.opened(sample.tensors, sample.settings) as files:
            for file, key in _coded(files):
                layout, weight = file.layout(key), weights[key].float()
                assert layout is not None
                if not kernels.can_pack_coded(layout, weight.shape):
                    continue
                packed = kernels.pack_coded(file.read_coded(key).in_units(), rounds=False)
                for num_rows in NUM_ROWS:
                    x = random_weight((num_rows, weight.shape[1]))
                    error = distance(packed.product(x, None), x @ weight.T)
                    demand(
                        error <= PRODUCT_ROUNDING,
                        f"sample {sample.name}: {num_rows} rows times {key} in few bits differ by "
                        f"{error:.2g} from the product with the dequantised weight",
                    )
                num += 1
    _demand_layouts(num, "the kernels can multiply by: groups of a multiple of 16, or whole rows")
    return f"{num} weights"


def logits_equal_dequantised_weights(subject: WeightFormatSubject) -> str:
    """A small model with fused layers, experts and a tied head has the logits of the same model
    with dequantised weights: the same bits where its weights are dequantised too."""
    with TemporaryDirectory() as place:
        folders = _write(subject, Path(place))
        if folders is None:
            raise CheckSkipped(f"quantise has no weights for models of {SIZES}; larger groups")
        coded, floats, settings = folders
        advice = "see what the other checks say"
        with attributed("loading a model in the format", advice):
            wanted = _logits(_load(subject, floats, {}))
            found = _logits(_load(subject, coded, settings))
        demand(
            torch.equal(found, wanted),
            f"the logits differ by {distance(found, wanted):.2g} from those of the model with "
            "dequantised weights",
        )
        try:
            kernels = _kernels()
        except CheckSkipped as reason:
            return str(reason)
        with attributed("loading a model whose weights stay in few bits", advice):
            model = _load(subject, coded, settings, kernels)
            num = sum(getattr(module, "is_coded", False) for module in model.modules())
            install_kernels(model, kernels)
            error = distance(_logits(model), wanted)
        demand(
            error <= PRODUCT_ROUNDING,
            f"with {num} weights in few bits the logits differ by {error:.2g} from those of the "
            "model with dequantised weights",
        )
        return f"{num} matrices in few bits"


def _demand_layouts(num: int, which: str = "may stay in few bits") -> None:
    if not num:
        raise CheckSkipped(
            f"there is no weight that {which}; give `layout` where codes are integers of 4 or 8 "
            "bits, or 8-bit floats, with scales for groups of columns"
        )


def _coded(files: Any) -> Iterator[tuple[QuantizedFile, str]]:
    for file in files:
        if isinstance(file, QuantizedFile):
            yield from ((file, key) for key in file.entries if file.layout(key) is not None)


def _kernels() -> native.CpuKernels:
    try:
        return native.load()
    except native.BuildError as error:
        raise CheckSkipped(f"there are no C++ kernels here: {error}") from error


class _Model(CausalLM):
    """A dense layer and one with experts."""

    def __init__(self, size: int) -> None:
        moe = MoEConfig(num_experts=2, top_k=2, intermediate_size=size, router="softmax")
        config = DecoderConfig(
            vocab_size=32,
            hidden_size=size,
            intermediate_size=2 * size,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            rotary=RotaryConfig(head_dim=size // 4),
            norm_eps=1e-6,
            is_tied=True,
            moe=moe,
            moe_layers=frozenset({1}),
        )
        super().__init__(config)
        self.weight_map = WeightMap(self)


def _write(
    subject: WeightFormatSubject, place: Path
) -> tuple[Path, Path, Mapping[str, Any]] | None:
    """Writes a model in the format and with dequantised weights. Returns both folders and the
    settings; None where the format has none of its shapes."""
    for size in SIZES:
        found = _tensors(subject, size)
        if found is None:
            continue
        coded, floats, settings = found
        for name, tensors in (("coded", coded), ("floats", floats)):
            (place / name).mkdir()
            save_file(tensors, place / name / "model.safetensors")
        return place / "coded", place / "floats", settings
    return None


def _tensors(subject: WeightFormatSubject, size: int) -> Any:
    coded: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    settings: Mapping[str, Any] = {}
    with torch.device("meta"):
        model = _Model(size)
    for seed, (key, shape, is_quantised) in enumerate(_keys(model)):
        if not is_quantised:
            value = random_weight((shape[0], shape[1] if len(shape) > 1 else 1), seed)
            coded[key] = floats[key] = value.view(shape) + (len(shape) == 1)
            continue
        sample = subject.quantised(
            random_weight((shape[0], shape[1]), seed), key[: -len(".weight")]
        )
        if sample is None:
            return None
        coded |= sample.tensors
        floats[key], settings = subject.weights(sample)[key], sample.settings
    return coded, floats, settings


def _keys(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yields the keys of the model's checkpoint with their shapes, and whether they are
    quantised."""
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        parts: Any = getattr(module, "parts", None)
        if isinstance(module, Experts):
            for part, (name, rows) in module.expert_parts.items():
                num, n, k = module.get_parameter(name).shape
                n = n if rows is None else rows.stop - rows.start
                yield from ((f"{path}.{e}.{part}.weight", (n, k), True) for e in range(num))
        elif parts:
            k = module.get_parameter("weight").shape[1]
            for part, rows in parts.items():
                yield f"{parent}.{part}.weight", (rows.stop - rows.start, k), True
        else:
            for name, value in module.named_parameters(recurse=False):
                yield f"{path}.{name}", tuple(value.shape), isinstance(module, Linear)


def _load(
    subject: WeightFormatSubject,
    folder: Path,
    settings: Mapping[str, Any],
    kernels: native.CpuKernels | None = None,
) -> Any:
    config = SimpleNamespace(quantization_config=dict(settings) or None)
    return build_model(
        lambda _: _Model(_size_of(folder)),
        Checkpoint(folder=folder, config=config),
        torch.float32,
        torch.device("cpu"),
        can_keep=None if kernels is None else kernels.can_pack_coded,
        plugins=subject.manager,
    )


def _size_of(folder: Path) -> int:
    with SafetensorsFile(folder / "model.safetensors") as file:
        return int(file.entries["model.embed_tokens.weight"].shape[1])


def _logits(model: Any) -> Tensor:
    runner = DenseRunner(model)
    return runner.run(runner.add(PROMPT))


CHECKS = (
    few_bits_equal_dequantised_weights,
    products_equal_dequantised_weights,
    logits_equal_dequantised_weights,
)
