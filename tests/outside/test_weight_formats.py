"""The format of weights of examples/plugins answers as the same model with dequantised weights."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import PluginManager, WeightFormatSpec

FILE = Path(__file__).parents[2] / "examples" / "plugins" / "rows8.py"
PROMPTS = ([5, 9, 200, 31, 7], [40, 41, 42])
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def write_pair(plain, folder):
    """Writes two copies of a checkpoint: one in the format, one with its weights dequantised."""
    manager = PluginManager.load(plugins=(), files=[FILE])
    (spec,) = manager.provided(WeightFormatSpec)
    module = __import__(spec.factory.partition(":")[0])
    coded, floats, settings = {}, {}, None
    for key, tensor in load_file(plain / "model.safetensors").items():
        if "_proj.weight" not in key:
            coded[key] = floats[key] = tensor
            continue
        stored, settings = module.quantise(tensor)
        coded |= {key.removesuffix(".weight") + suffix: own for suffix, own in stored.items()}
        floats[key] = module.decode({"codes": stored[".codes"], "scales": stored[".row_scales"]})
        floats[key] = floats[key].rows(0, len(tensor))
    config = json.loads((plain / "config.json").read_text())
    for name, values in (("coded", coded), ("floats", floats)):
        shutil.copytree(plain, folder / name)
        save_file(values, folder / name / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = settings
    (folder / "coded" / "config.json").write_text(json.dumps(config))
    return folder / "coded", folder / "floats"


def tokens_of(folder, **options):
    with LLM(str(folder), dtype="float32", quiet=True, **options) as llm:
        return [out.outputs.token_ids for out in llm.generate(list(PROMPTS), PARAMS)]


@pytest.mark.full
def test_a_format_of_one_file(tiny_folder, tmp_path, caplog):
    plain = tiny_folder("qwen2", hidden_size=64, num_attention_heads=4)
    coded, floats = write_pair(plain, tmp_path)
    expected = tokens_of(floats)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        assert tokens_of(coded, plugins=[str(FILE)]) == expected
    assert "12 weights stay in few bits" in caplog.text
    assert tokens_of(coded, plugins=[str(FILE)], native_kernels=False) == expected
    with pytest.raises(CheckpointError, match=r"says that 'rows8' quantised .* supported: auto-r"):
        LLM(str(coded), quiet=True)
