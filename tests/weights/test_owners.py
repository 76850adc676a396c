"""Folders that the libraries which own the formats wrote are loaded by one command.

owners/write.py wrote them; owner.json in each holds hashes of the values that its library reads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli import app
from mmdeploy_llm.testing.tiny import write_tiny

from .owners.write import hash_of
from .readable import tensors_seen

WRITTEN = Path(__file__).parent / "owners"
FOLDERS = ("autoawq", "autoround", "gptqmodel", "llmcompressor", "transformers")
IDS = torch.randint(8, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()


QUICK = ("autoawq", "llmcompressor")


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in FOLDERS]
)
def folder(request, tmp_path):
    """A copy of a folder with the tokenizer of its model."""
    target = tmp_path / request.param
    plain = write_tiny("qwen2", tmp_path / "plain")
    shutil.copytree(WRITTEN / request.param, target)
    for file in (*plain.glob("tokenizer*"), plain / "chat_template.jinja"):
        shutil.copy(file, target)
    return target


def read(folder):
    """Returns all tensors that a model sees, by key."""
    config = transformers.AutoConfig.from_pretrained(folder)
    return tensors_seen(folder / "model.safetensors", config)


@pytest.mark.one_is_quick
def test_values_equal_those_of_the_owner(folder):
    written_by = json.loads((folder / "owner.json").read_text())
    dtype, found = getattr(torch, written_by["dtype"]), read(folder)
    assert written_by["weights"] == {
        key: hash_of(found[key].to(dtype)) for key in written_by["weights"]
    }


def log_probabilities(folder, **options):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), dtype="float32", **options) as llm:
        (out,) = llm.generate([IDS], params)
    return torch.tensor([next(iter(each.values())).logprob for each in out.prompt_logprobs[1:]])


@torch.inference_mode()
def expected_of(folder, tmp_path):
    """Returns those of transformers, with the dequantised weights."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    target = tmp_path / "dequantised"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    weights = {key: weight.float() for key, weight in read(folder).items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    scores = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return scores[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])]


@pytest.mark.full
def test_probabilities_equal_those_of_transformers(folder, tmp_path):
    expected = expected_of(folder, tmp_path)
    found = log_probabilities(folder, native_kernels=False)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    # The kernels multiply with activations in bfloat16.
    assert (log_probabilities(folder) - expected).abs().max() < 0.1


@pytest.mark.full
def test_one_command(folder):
    words = ["generate", "Describe", "--model", str(folder), "--max-tokens", "4"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code in (0, 4), done.output  # 4 tokens cut its answer off
