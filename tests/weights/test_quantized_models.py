"""A quantised folder generates the tokens of transformers with the dequantised weights."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli import app
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.testing import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer
from mmdeploy_llm.values.options.weight_formats import FORMATS
from mmdeploy_llm.weights.quantized.reading import QuantizedFile

from .packing import awq_tensors, gptq_tensors, grouped, random_codes, words_of

SIZE, WIDE = 8, 32  # columns of a group; the kernels multiply by groups of 16 and its multiples
KEPT = {
    *("awq 32", "gptq 32", "gptq ordered", "packed", "packed ordered", "w8a8"),
    *("fp8", "fp8 by row"),
}
PROMPTS = ([5, 9, 200, 31, 7], [40, 41, 42])
SIZES = {"hidden_size": 64, "num_attention_heads": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def awq(name, shape, random):
    codes, zeros, scales = random_codes(*shape, SIZE, random)
    weight = grouped(codes, zeros, scales, torch.arange(shape[1]) // SIZE)
    return awq_tensors(name, codes, zeros, scales), weight


def gptq(name, shape, random):
    codes, zeros, scales = random_codes(*shape, SIZE, random)
    group_of = (torch.arange(shape[1]) // SIZE)[torch.randperm(shape[1], generator=random)]
    weight = grouped(codes, zeros, scales, group_of)
    return gptq_tensors(name, codes, zeros, scales, group_of), weight


def packed(name, shape, random):
    """compressed-tensors, asymmetric, in groups of 32 columns."""
    codes, zeros, scales = random_codes(*shape, WIDE, random)
    scales = scales.bfloat16()
    weight = grouped(codes, zeros, scales, torch.arange(shape[1]) // WIDE)
    tensors = {
        f"{name}.weight_packed": words_of(codes, 4),
        f"{name}.weight_scale": scales,
        f"{name}.weight_zero_point": words_of(zeros.T, 4).T,
        f"{name}.weight_shape": torch.tensor(shape),
    }
    return tensors, weight


def in_wide_groups(make):
    """Returns the method with groups of 32 columns in a row, which the kernels multiply by."""

    def made(name, shape, random):
        codes, zeros, scales = random_codes(*shape, WIDE, random)
        group_of = torch.arange(shape[1]) // WIDE
        weight = grouped(codes, zeros, scales, group_of)
        if make is awq:
            return awq_tensors(name, codes, zeros, scales), weight
        return gptq_tensors(name, codes, zeros, scales, group_of), weight

    return made


def ordered(make):
    """Returns the method with groups of 32 columns in the order of their importance, which layers
    of the same input share."""

    def made(name, shape, random):
        codes, zeros, scales = random_codes(*shape, WIDE, random)
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(1))
        group_of = (torch.arange(shape[1]) // WIDE)[order]
        if make is gptq:
            weight = grouped(codes, zeros, scales, group_of)
            return gptq_tensors(name, codes, zeros, scales, group_of), weight
        scales = scales.bfloat16()
        tensors = {
            f"{name}.weight_packed": words_of(codes, 4),
            f"{name}.weight_scale": scales,
            f"{name}.weight_zero_point": words_of(zeros.T, 4).T,
            f"{name}.weight_shape": torch.tensor(shape),
            f"{name}.weight_g_idx": group_of.int(),
        }
        return tensors, grouped(codes, zeros, scales, group_of)

    return made


def fp8(name, shape, random):
    codes = (torch.randn(shape, generator=random) / shape[1] ** 0.5).to(torch.float8_e4m3fn)
    n, k = (-(-size // 32) for size in shape)
    scales = torch.rand(n, k, generator=random) + 0.5
    spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[: shape[0], : shape[1]]
    weight = codes.float() * spread
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, weight


def fp8_by_row(name, shape, random):
    codes = (torch.randn(shape, generator=random) / shape[1] ** 0.5).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[0], 1, generator=random) + 0.5
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, codes.float() * scales


def int8(name, shape, random):
    codes = torch.randint(-127, 128, shape, generator=random).to(torch.int8)
    scales = torch.rand(shape[0], 1, generator=random) / (64 * shape[1] ** 0.5)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, codes * scales


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": WIDE, "symmetric": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": PACKED}},
    "ignore": ["lm_head"],
}


def by_row(kind):
    """Returns the settings of compressed-tensors for 8 bits with a scale for each row."""
    weights = {"num_bits": 8, "type": kind, "strategy": "channel"}
    return {
        **COMPRESSED,
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


METHODS = {
    "awq 32": (in_wide_groups(awq), {"quant_method": "awq", "bits": 4, "group_size": WIDE}),
    "gptq 32": (in_wide_groups(gptq), {"quant_method": "gptq", "bits": 4, "group_size": WIDE}),
    "gptq ordered": (
        ordered(gptq),
        {"quant_method": "gptq", "bits": 4, "group_size": WIDE, "desc_act": True},
    ),
    "packed": (packed, COMPRESSED),
    "packed ordered": (ordered(packed), COMPRESSED),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": True}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8 by row": (fp8_by_row, by_row("float")),
    "w8a8": (int8, by_row("int")),
}


LINEAR = re.compile(r"_proj\.weight")


def quantised_pair(folder, method, plain, linear=LINEAR):
    """Writes two copies of the checkpoint `plain`: one whose decoder layers are quantised, one with
    the same weights dequantised."""
    make, settings = METHODS[method]
    random = torch.Generator().manual_seed(0)
    tensors = load_file(plain / "model.safetensors")
    quantised, dequantised = {}, {}
    for key, tensor in tensors.items():
        is_linear = linear.search(key) and tensor.dim() == 2 and "visual" not in key
        if not is_linear:
            quantised[key] = dequantised[key] = tensor
            continue
        stored, weight = make(key.removesuffix(".weight"), tuple(tensor.shape), random)
        quantised.update(stored)
        dequantised[key] = weight.float()
    folders = folder / "quantised", folder / "dequantised"
    for target, values in zip(folders, (quantised, dequantised), strict=True):
        shutil.copytree(plain, target)
        save_file(
            {key: value.contiguous() for key, value in values.items()},
            target / "model.safetensors",
            metadata={"format": "pt"},
        )
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = settings
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders


def tokens_of(folder, **options):
    with LLM(str(folder), dtype="float32", block_size=16, **options) as llm:
        return [out.outputs.token_ids for out in llm.generate(list(PROMPTS), PARAMS)]


def prompt_scores(folder, prompt, quantization):
    """Returns the log-probability of each token of the prompt but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), dtype="float32", quantization=quantization) as llm:
        (out,) = llm.generate([prompt], params)
    scores = [next(iter(each.values())).logprob for each in out.prompt_logprobs[1:]]
    return torch.tensor(scores)


@pytest.fixture
def reference_tokens(transformers_of):
    """reference_tokens(folder) -> what transformers generates for PROMPTS."""

    def generated(folder):
        reference = transformers_of(folder)
        return [reference.generate(prompt, PARAMS.max_tokens) for prompt in PROMPTS]

    return generated


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name not in ("awq 32", "fp8", "w8a8")))
        for name in METHODS
    ],
)
def test_tokens(reference_tokens, tiny_folder, tmp_path, method, caplog):
    plain = tiny_folder("qwen2", **SIZES)
    quantised, dequantised = quantised_pair(tmp_path, method, plain)
    expected = reference_tokens(dequantised)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        assert tokens_of(quantised) == expected
    # q, k and v in one, o, gate and up in one, down: in each of three layers.
    assert ("12 weights stay in few bits" in caplog.text) == (method in KEPT)
    assert tokens_of(quantised, native_kernels=False) == expected


@pytest.mark.full
@pytest.mark.parametrize("method", ["awq 32", "gptq 32", "packed", "fp8"])
def test_one_command_answers_from_a_quantised_folder(tiny_folder, tmp_path, method):
    folder, _ = quantised_pair(tmp_path, method, tiny_folder("qwen2", **SIZES))
    words = ["generate", "Describe", "--model", str(folder), "--max-tokens", "4"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


@pytest.mark.full
@pytest.mark.parametrize(
    "method", ["awq 32", *(pytest.param(name, marks=pytest.mark.full) for name in ("awq", "fp8"))]
)
def test_experts(reference_tokens, tiny_folder, tmp_path, method, caplog):
    plain = tiny_folder("qwen3_moe", head_dim=16, moe_intermediate_size=32)
    quantised, dequantised = quantised_pair(tmp_path, method, plain)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        assert tokens_of(quantised) == reference_tokens(dequantised)
    assert ("weights stay in few bits" in caplog.text) == (method in KEPT)


@pytest.mark.full
def test_activations_are_rounded_on_request(tiny_folder, tmp_path):
    """The weights stay as they are stored; log-probabilities show that x was rounded."""
    plain = tiny_folder("qwen2", **SIZES)
    folder, _ = quantised_pair(tmp_path, "packed", plain)
    found = [prompt_scores(folder, list(range(5, 60)), each) for each in (None, "int4")]
    difference = (found[0] - found[1]).abs().max()
    assert 1e-5 < difference < 0.3


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, "int8wo", "int8"])
def test_floats_of_8_bits_are_rounded_again_only_to_other_formats(
    tiny_folder, tmp_path, quantization, caplog
):
    plain = tiny_folder("qwen2", **SIZES)
    quantised, dequantised = quantised_pair(tmp_path, "fp8", plain)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        found = tokens_of(quantised, quantization=quantization)
    assert ("12 weights stay in few bits" in caplog.text) == (quantization is None)
    if quantization is not None:
        assert found == tokens_of(dequantised, quantization=quantization)


def test_floats_of_8_bits_that_are_no_numbers(tiny_folder, tmp_path):
    folder, _ = quantised_pair(tmp_path, "fp8", tiny_folder("qwen2", **SIZES))
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.down_proj.weight"
    tensors[key].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{key} .* no numbers \(NaN\)"):
        LLM(str(folder))


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["int4wo", "int8wo"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_head_and_embeddings_in_8_bits(
    tiny_folder, transformers_of, tmp_path, is_tied, quantization
):
    """Both are rounded while loading, and held once where they share a weight: log-probabilities
    are those of transformers with the weights that the codes stand for."""
    plain = tiny_folder("qwen2", **SIZES, tie_word_embeddings=is_tied)
    rounded = tmp_path / "rounded"
    shutil.copytree(plain, rounded)
    tensors, kernels = load_file(plain / "model.safetensors"), native.load()
    for key, tensor in tensors.items():
        layout = FORMATS[quantization if "_proj.weight" in key else "int8wo"]
        if tensor.dim() == 2:
            size = min(layout.group_size, tensor.shape[1])
            tensors[key] = kernels.round_codes(tensor.float(), layout.bits, size).dequantize()
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    prompt = list(range(5, 60))
    scores = transformers_of(rounded).logits(prompt).log_softmax(-1)
    expected = scores[torch.arange(54), torch.tensor(prompt[1:])]
    found = prompt_scores(plain, prompt, quantization)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (prompt_scores(plain, prompt, None) - expected).abs().max() > 1e-3


@pytest.mark.few_in_ci(6)
@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("Olmo2ForCausalLM", "packed"),
        ("StableLmForCausalLM", "gptq 32"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                *(("StableLmForCausalLM", method) for method in METHODS if method != "gptq 32"),
                ("Olmo2ForCausalLM", "gptq ordered"),
                ("GPTNeoForCausalLM", "packed"),  # one sequence after the other
                ("ProphetNetForCausalLM", "w8a8"),  # all of a sequence at each step
            )
        ),
    ],
)
def test_a_model_of_transformers(
    reference_tokens, tmp_path, load_file, architecture, method, caplog
):
    """Its trials multiply by weights in few bits too, which are packed before they run."""
    census = load_file("plugins/transformers_any/census/census.py")
    config, tokenizer = census.config_of(architecture), make_tokenizer("qwen2")
    plain = write_checkpoint(config, tmp_path / "plain", tokenizer=tokenizer)
    quantised, dequantised = quantised_pair(tmp_path, method, plain)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        found = tokens_of(quantised, blocked_plugins=("olmo", "decoders"))
    assert found == reference_tokens(dequantised)
    assert ("weights stay in few bits" in caplog.text) == (method in KEPT)


@pytest.mark.full
@pytest.mark.parametrize(
    "method", ["packed", *(pytest.param(each, marks=pytest.mark.full) for each in ("gptq", "w8a8"))]
)
def test_heads_in_one_matrix(tiny_folder, tmp_path, monkeypatch, method, caplog):
    """Each matrix is decoded once, though its rows go to many places of the model's."""
    read = Counter()
    original = QuantizedFile.read_coded

    def counted(self, key, out=None):
        read[key] += 1
        return original(self, key, out)

    monkeypatch.setattr(QuantizedFile, "read_coded", counted)
    plain = tiny_folder("gpt_neox", **SIZES)
    quantised, dequantised = quantised_pair(
        tmp_path, method, plain, re.compile(r"(query_key_value|dense\w*)\.weight$")
    )
    expected = tokens_of(dequantised)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        assert tokens_of(quantised) == expected
    assert ("weights stay in few bits" in caplog.text) == (method in KEPT)
    assert {*read.values()} == ({1} if method in KEPT else set())


@pytest.mark.full
def test_orders_of_fused_layers_that_differ(
    reference_tokens, tiny_folder, tmp_path, caplog, monkeypatch
):
    """Those layers are dequantised, others stay in few bits: o and down in each of three layers."""

    def made(name, shape, random):
        codes, zeros, scales = random_codes(*shape, WIDE, random)
        group_of = (torch.arange(shape[1]) // WIDE)[torch.randperm(shape[1], generator=random)]
        weight = grouped(codes, zeros, scales, group_of)
        return gptq_tensors(name, codes, zeros, scales, group_of), weight

    monkeypatch.setitem(METHODS, "gptq ordered", (made, METHODS["gptq ordered"][1]))
    plain = tiny_folder("qwen2", **SIZES)
    quantised, dequantised = quantised_pair(tmp_path, "gptq ordered", plain)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        assert tokens_of(quantised) == reference_tokens(dequantised)
    assert "6 weights stay in few bits" in caplog.text
    assert "6 weights of few bits are dequantised" in caplog.text


# A rank has half of the columns of o, 32, and of down, 48; ordered, these are of all groups. It
# prints what it keeps.
SHARDS = {"awq 32": 9, "gptq ordered": 6, "packed": 9, "w8a8": 12, "gptq": 0}


# Words of columns, and words whose order the ranks share; the others are cut alike.
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            name, marks=pytest.mark.full if name in ("packed", "gptq ordered") else pytest.mark.long
        )
        for name in SHARDS
    ],
)
def test_two_ranks(reference_tokens, tiny_folder, tmp_path, method, capfd, caplog):
    plain = tiny_folder("qwen2", **SIZES)
    quantised, dequantised = quantised_pair(tmp_path, method, plain)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        found = tokens_of(quantised, tensor_parallel_size=2)
    assert found == reference_tokens(dequantised)
    printed = capfd.readouterr().err
    assert (f"{SHARDS[method]} weights stay in few bits" in printed) is (SHARDS[method] > 0)


@pytest.mark.long
def test_two_ranks_of_experts(reference_tokens, tiny_folder, tmp_path, capfd, caplog):
    sizes = {"head_dim": 16, "moe_intermediate_size": 64}
    plain = tiny_folder("qwen3_moe", **sizes)
    quantised, dequantised = quantised_pair(tmp_path, "awq 32", plain)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        found = tokens_of(quantised, tensor_parallel_size=2)
    assert found == reference_tokens(dequantised)
    printed = capfd.readouterr().err
    assert "weights stay in few bits" in printed
    assert "mlp.experts" not in printed  # none of the stacks is dequantised


@pytest.mark.one_is_quick
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("key", ["layers.1.mlp.down_proj.weight", "embed_tokens.weight"])
def test_values_that_cannot_be_rounded(tiny_copy, tmp_path, key, value):
    folder = tiny_copy("qwen2", tmp_path / "plain", **SIZES)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.{key}"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{key} has values that are not finite"):
        LLM(str(folder), quantization="int8")
