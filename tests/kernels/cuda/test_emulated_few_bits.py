"""LLM(device="cuda") with weights in few bits on the emulated card: checkpoints that are quantised,
and those that are rounded while they are loaded. The CPU's tokens are compared with those of
transformers in tests/weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file as read_file
from safetensors.torch import save_file

from mmdeploy_llm import LLM

PRODUCTS = {"_few_rows", "_dequantize", "_round_rows", "_scale_sums", "aten::_int_mm"}
# Rows of embeddings are dequantised.
OF_INT8 = {"_round_rows", "aten::_int_mm", "_scale_sums", "_dequantize"}


@pytest.fixture(scope="module")
def whole(load_file):
    """Loads test_emulated.py, which tests a whole LLM."""
    return load_file("kernels/cuda/test_emulated.py")


@pytest.mark.full
@pytest.mark.parametrize("eager", [pytest.param(True, marks=pytest.mark.long), False])
def test_weights_of_few_bits(folder_of, whole, new_card, tmp_path, caplog, eager):
    """A checkpoint in 4 bits stays so on the card."""
    prompts, chosen = whole.texts(4), [whole.params(0)] * 4
    folder = folder_of("qwen3", head_dim=16, num_hidden_layers=2)
    with LLM(model=folder, device="cpu", quantization="int4", dtype="bfloat16") as llm:
        llm.save(tmp_path / "int4")
    with LLM(model=str(tmp_path / "int4"), device="cpu", **whole.OPTIONS) as llm:
        expected = whole.results(llm, prompts, chosen)
    card = new_card()
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        llm = LLM(model=str(tmp_path / "int4"), device="cuda", enforce_eager=eager, **whole.OPTIONS)
    with llm:
        outputs = whole.results(llm, prompts, chosen)
    whole.check(outputs, expected)
    assert "weights stay in few bits" in caplog.text
    assert "dequantised" not in caplog.text
    assert bool(sum(graph.num_replays for graph in card.graphs)) != eager


# How far log-probabilities may be apart, and the launches of many rows. The CPU rounds activations
# in all products of int8, int4 and int4a8, CUDA in some of int8 and int4a8.
ROUNDED = {
    "int8wo": (1e-4, {"_dequantize"}),
    "int4": (0.1, {"_dequantize"}),
    "int4wo": (1e-4, {"_dequantize"}),
    "int8": (0.1, OF_INT8),
    "int4a8": (0.1, {"_dequantize", "aten::_int_mm"}),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "quantization",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "int4")) for name in ROUNDED],
)
def test_rounded_while_loading(folder_of, on_cpu, whole, new_card, caplog, quantization):
    """Prompts of few rows and of many, which other products compute."""
    within, of_many = ROUNDED[quantization]
    prompts, chosen = whole.texts(5)[2:], [whole.params(0, prompt_logprobs=0)] * 3
    folder = folder_of("qwen3", head_dim=16, num_hidden_layers=2)
    options = {**whole.OPTIONS, "quantization": quantization, "max_num_seqs": 2}
    expected = on_cpu(folder, prompts, chosen, **options)
    card = new_card()
    with LLM(model=folder, device="cuda", **options) as llm:
        card.launches.clear()
        outputs = whole.results(llm, prompts, chosen)
    whole.check(outputs, expected, within=within)
    assert {"_few_rows"} | of_many <= {*card.launches}
    assert ("_dequantize" in card.launches) is ("_dequantize" in of_many)
    assert sum(graph.num_replays for graph in card.graphs) > 0
    assert "in the model's dtype" not in caplog.text


@pytest.mark.full
def test_experts_are_not_rounded(folder_of, whole, new_card, caplog):
    prompts, chosen = whole.texts(3), [whole.params(0)] * 3
    folder = folder_of("ernie4_5_moe", head_dim=16, num_hidden_layers=2)
    new_card()
    with LLM(
        model=folder, device="cuda", enforce_eager=True, quantization="wint4", **whole.OPTIONS
    ) as llm:
        whole.results(llm, prompts, chosen)
    assert "quantization = 'int4wo' leaves" in caplog.text
    assert "experts: this device has no products" in caplog.text


def stored(kind, name, weight):
    """Returns the tensors of a layer in 8 bits, and its values as they are read."""
    if kind == "fp8 blocks":
        rows, columns = (-(-size // 32) for size in weight.shape)
        scales = torch.rand(rows, columns) + 0.5
        spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
        codes = (weight / spread[: weight.shape[0], : weight.shape[1]]).to(torch.float8_e4m3fn)
        return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}
    if kind == "fp8 rows":
        scales = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scales).to(torch.float8_e4m3fn)
    else:
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round().to(torch.int8)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}


def settings(kind):
    if kind == "fp8 blocks":
        return {"quant_method": "fp8", "weight_block_size": [32, 32]}
    own = "float" if kind == "fp8 rows" else "int"
    weights = {"num_bits": 8, "type": own, "strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{own}-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def write_stored(kind, plain, folder):
    """Copies a checkpoint with its decoder layers in 8 bits."""
    shutil.copytree(plain, folder)
    torch.manual_seed(0)
    tensors = {}
    for key, weight in read_file(f"{plain}/model.safetensors").items():
        is_linear = "_proj.weight" in key
        own = stored(kind, key.removesuffix(".weight"), weight) if is_linear else {key: weight}
        tensors.update(own)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings(kind)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "quantization", "within", "of_many"),
    [
        pytest.param("fp8 blocks", None, 1e-4, {"_dequantize"}, marks=pytest.mark.full),
        ("fp8 rows", None, 1e-4, {"_dequantize"}),
        pytest.param("int8 rows", "int8", 0.1, OF_INT8, marks=pytest.mark.full),
    ],
)
def test_checkpoints_in_8_bits(
    folder_of, whole, new_card, tmp_path, caplog, kind, quantization, within, of_many
):
    """They stay so; integers are multiplied by rounded activations on request."""
    prompts, chosen = whole.texts(5)[2:], [whole.params(0)] * 3
    folder = tmp_path / "stored"
    write_stored(kind, folder_of("qwen3", head_dim=16, num_hidden_layers=1), folder)
    options = {**whole.OPTIONS, "quantization": quantization}
    with LLM(model=str(folder), device="cpu", **options) as llm:
        expected = whole.results(llm, prompts, chosen)
    card = new_card()
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        llm = LLM(model=str(folder), device="cuda", enforce_eager=True, **options)
    with llm:
        outputs = whole.results(llm, prompts, chosen)
    whole.check(outputs, expected, within=within)
    assert "4 weights stay in few bits" in caplog.text
    assert "dequantised" not in caplog.text
    assert {"_few_rows"} | of_many == PRODUCTS & {*card.launches}
