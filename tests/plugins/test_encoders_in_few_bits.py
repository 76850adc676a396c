"""Models with encoders of their own, with weights in few bits: their logits are those of
transformers with the weights that the codes stand for."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.values.options.weight_formats import FORMATS
from mmdeploy_llm.weights.folder import read_checkpoint

pytestmark = pytest.mark.full
FAMILIES = (
    *(
        "blip",
        "canary",
        "cohere_asr",
        "florence2",
        "git",
        "kosmos2_5",
        "mllama",
        "moonshine",
        "moonshine_streaming",
        "pix2struct",
        "pp_formulanet",
        "t5gemma2",
    ),
    *("vision_encoder_decoder", "whisper"),
)
GRIDS = ((1, 4, 4),)


class Rounding:
    """Stands for kernels: leaves each weight in the values that its codes stand for."""

    def __init__(self, kernels):
        self._kernels = kernels

    def pack(self, weight, quantization):
        if quantization is not None:
            own = FORMATS[quantization]
            size = min(own.group_size or weight.shape[1], weight.shape[1])
            coded = self._kernels.round_codes(weight.contiguous(), own.bits, size)
            weight.copy_(coded.dequantize())


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load()


def made(plugins, folder):
    """Returns the spec and a new model of a folder."""
    checkpoint = read_checkpoint(folder)
    spec = plugins.model_for(checkpoint.config.architectures)
    return spec, build(spec, folder, checkpoint.config, torch.float32)


def rounded_copy(plugins, kernels, plain, folder, quantization):
    """Writes the checkpoint with the values of its codes."""
    _, model = made(plugins, plain)
    install_kernels(model, Rounding(kernels), quantization)
    values = dict(model.named_parameters())
    tensors = load_file(plain / "model.safetensors")
    for key in tensors:
        for target in model.weight_targets(key) or ():
            found = values[target.name].data
            found = found if target.rows is None else found[target.rows]
            found = (found.T if target.transpose else found).clone().contiguous()
            if target.source is None:
                tensors[key] = found
            else:
                tensors[key][target.source] = found
    shutil.copytree(plain, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(plugins, folder, kernels, quantization, prompt):
    spec, model = made(plugins, folder)
    install_kernels(model, kernels, quantization)
    runner = DenseRunner(model, has_atomic_media=spec.atomic_media)
    return runner.run(runner.add(*prompt))


# Those that round the rows of products, too, are near to it.
@pytest.mark.few_in_ci(12)
@pytest.mark.parametrize(
    ("quantization", "atol"),
    [("int4wo", 1e-3), ("int8wo", 1e-3), ("int8", 1.0), ("int4", 1.0), ("int8a8", 1.0)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_rounded_weights(
    plugins, kernels, tiny_folder, transformers_of, tmp_path, family, quantization, atol
):
    plain = tiny_folder(family)
    rounded = rounded_copy(plugins, kernels, plain, tmp_path / "rounded", quantization)
    prompt = make_prompt(read_checkpoint(plain).config, GRIDS)
    expected = transformers_of(rounded).logits(*prompt)
    found = logits(plugins, plain, kernels, quantization, prompt)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
    others = transformers_of(plain).logits(*prompt)
    assert (others - expected).abs().max() > 5e-3, "weights are rounded"
