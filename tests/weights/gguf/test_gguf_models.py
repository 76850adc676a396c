"""A GGUF file generates the tokens of transformers' model whose weights it holds."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli import app
from mmdeploy_llm.engine.intake.tokenizer import load_tokenizer
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.testing.tiny import make_tokenizer
from mmdeploy_llm.weights.folder import read_checkpoint

from .gguf_writing import ARCHITECTURES, separate_qkv, write_gguf
from .opening import opened, stored

PROMPTS = ([5, 9, 200, 31, 7, 77, 78, 79, 80], [40, 41, 42])
NUM_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA3 = {
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 16,
    "layer_types": [SLIDING] * 5 + [FULL],
}
GEMMA4_MOE = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "attention_k_eq_v": True,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}

CASES = {
    "llama": ("llama", {}),
    "llama3 rope": (
        "llama",
        {"rope_parameters": LLAMA3, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2 moe": ("qwen2_moe", {"mlp_only_layers": [], "norm_topk_prob": False}),
    "qwen3": ("qwen3", {}),
    "qwen3 moe": ("qwen3_moe", {"decoder_sparse_step": 1}),
    "qwen3.5": ("qwen3_5_text", {"linear_num_value_heads": 6}),
    "qwen3.5 moe": ("qwen3_5_moe_text", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma4": ("gemma4_text", {}),
    "gemma4 moe": ("gemma4_text", GEMMA4_MOE),
    "granite": ("granite", {}),
    "granite hybrid": ("granite_hybrid", {}),
    "granite hybrid dense": (
        "granite_hybrid",
        {"num_local_experts": 0, "shared_intermediate_size": 48, "intermediate_size": 48},
    ),
    "lfm2": ("lfm2", {}),
    "lfm2 moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}),
    "qwen3 next": ("qwen3_next", {"mlp_only_layers": []}),
    "ernie4.5": ("ernie4_5", {}),
    "ernie4.5 moe": ("ernie4_5_moe", {}),
    "ernie4.5 moe interval": (
        "ernie4_5_moe",
        {"seed": 2, "moe_num_shared_experts": 0, "moe_layer_interval": 2, "num_hidden_layers": 4},
    ),
    "glm4": ("glm4", {}),
    "phi3": ("phi3", {}),
}
NOT_STATED_BY = {  # what has no effect
    "gemma4_text": {"vocab_size_per_layer_input", "use_bidirectional_attention"},
    "mistral": {"architectures", "model_type", "attention_bias", "mlp_bias", "pretraining_tp"},
    "gemma": {"hidden_activation"},
    "granite_hybrid": {"max_position_embeddings"},
    "lfm2": {"intermediate_size", "block_auto_adjust_ff_dim", "block_multiple_of"},
}
# GGUF has no dense layers among those with experts.
SPARSE = {
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "qwen3_next": {"mlp_only_layers": []},
}
GRANITE = re.compile(r"(shared_mlp|block_sparse_moe)\.(?:in|out)put_linear")
FIRST = ("llama", "qwen3.5", "gemma3")  # the others are full tests
KNOWN_TO_TRANSFORMERS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")


@pytest.fixture(scope="module")
def tiny_copy(tiny_copy):
    """The checkpoint of a family; of Phi-3 one without windows and factors of frequencies."""

    def copy(family, folder, **options):
        return write_phi3(folder) if family == "phi3" else tiny_copy(family, folder, **options)

    return copy


def write_phi3(folder):
    tokenizer = make_tokenizer("llama")
    config = transformers.Phi3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        original_max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generated(model, **options):
    with LLM(model=str(model), dtype="float32", max_model_len=256, quiet=True, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in PROMPTS], PARAMS)
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.mark.few_in_ci(9)
@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.full] * (name not in FIRST)) for name in CASES]
)
def test_tokens_of_a_file_alone(transformers_of, tiny_copy, tmp_path, case):
    """The config, too, is made of the file's metadata."""
    family, options = CASES[case]
    source = tmp_path / "source"
    tiny_copy(family, source, **options)
    (tmp_path / "alone").mkdir()
    write_gguf(source, tmp_path / "alone" / "tiny.gguf", family)
    reference = transformers_of(source)
    wanted = [reference.generate(ids, NUM_TOKENS) for ids in PROMPTS]
    assert generated(tmp_path / "alone") == wanted


def keys_of(folder):
    """Says which keys the checkpoint of a folder has."""
    return set(load_file(folder / "model.safetensors")).__contains__


def floats(path, source):
    """Returns the weights of a file, under the keys of the checkpoint in `source`, as floats."""
    found = stored(opened([path], keys_of(source)))
    return {key: tensor.float() for key, tensor in found.items()}


def as_stored(family, folder):
    """Reads the weights of a checkpoint, with those apart that GGUF takes apart."""
    found = load_file(folder / "model.safetensors")
    if family == "qwen3_next":
        return separate_qkv(found, json.loads((folder / "config.json").read_text()))
    if family != "granite_hybrid":
        return found
    apart = {}
    for key, tensor in found.items():
        parts = {"down": tensor}
        if "input_linear" in key:
            parts = dict(zip(("gate", "up"), tensor.chunk(2, -2), strict=True))
        kind = GRANITE.search(key)
        if kind is None:
            apart[key] = tensor
        elif kind[1] == "shared_mlp":
            own = key.replace(kind[0], "mlp.shared_experts.{}_proj")
            apart |= {own.format(name): part for name, part in parts.items()}
        else:
            own = key.replace(kind[0], "mlp.experts.{}.{}_proj")
            for name, part in parts.items():
                apart |= {own.format(i, name): expert for i, expert in enumerate(part)}
    return apart


@pytest.mark.full
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_weights_are_those_that_were_converted(tiny_copy, tmp_path, family):
    tiny_copy(family, tmp_path / "source", **SPARSE.get(family, {}))
    write_gguf(tmp_path / "source", tmp_path / "tiny.gguf", family)
    wanted = as_stored(family, tmp_path / "source")
    found = stored(opened([tmp_path / "tiny.gguf"], wanted.__contains__))
    has_head = "lm_head.weight" in found
    assert sorted(found) == sorted(key for key in wanted if has_head or key != "lm_head.weight")
    for key, tensor in found.items():
        if "norm" in key or key.endswith("A_log"):  # 1 was added and subtracted; exp and log
            torch.testing.assert_close(tensor, wanted[key], rtol=0, atol=2e-7)
        else:
            assert torch.equal(tensor, wanted[key]), key


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("BF16", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", KNOWN_TO_TRANSFORMERS)
def test_weights_are_those_that_transformers_reads(tiny_copy, tmp_path, family, kind):
    """Its reader undoes the converter's changes of these families, too."""
    options = {} if family in ("phi3", "qwen2") else {"head_dim": 16}
    if family == "qwen2":
        options = {"hidden_size": 64, "num_attention_heads": 4}
    tiny_copy(family, tmp_path / "source", **options)
    path = write_gguf(tmp_path / "source", tmp_path / "tiny.gguf", family, kind=kind)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "source")
    model = getattr(transformers, config.architectures[0])(config)
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    found = stored(opened([path], theirs.__contains__))
    assert sorted(found) == sorted(theirs)
    for key, tensor in found.items():
        assert torch.equal(tensor.float(), theirs[key]), key


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        "Q8_0",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("Q4_0", "Q5_1", "BF16", "F16")),
    ],
)
def test_tokens_of_quantised_weights(transformers_of, tiny_copy, tmp_path, kind, caplog):
    """The reference has the dequantised weights. Those of few bits stay so, embeddings included."""
    source, place = tmp_path / "source", tmp_path / "place"
    tiny_copy("llama", source, head_dim=16)
    place.mkdir()
    path = write_gguf(source, place / "tiny.gguf", "llama", kind=kind)
    weights = {
        key: tensor.float() for key, tensor in stored(opened([path], keys_of(source))).items()
    }
    shutil.copytree(source, tmp_path / "plain")
    save_file(weights, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    reference = transformers_of(tmp_path / "plain")
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        assert generated(path) == [reference.generate(ids, NUM_TOKENS) for ids in PROMPTS]
    num_matrices = sum(weight.dim() == 2 for weight in weights.values())
    num_fused = 3 * len([key for key in weights if "q_proj" in key])  # qkv, gate and up
    kept = f"{num_matrices - num_fused} weights stay in few bits"
    assert (kept in caplog.text) == kind.startswith("Q")
    dtype = {"F16": torch.float16}.get(kind, torch.bfloat16)
    assert read_checkpoint(path).config.dtype is dtype


@pytest.mark.full
def test_stacked_experts_that_are_quantised(transformers_of, tiny_copy, tmp_path):
    source = tmp_path / "source"
    tiny_copy("qwen3_moe", source, moe_intermediate_size=32, head_dim=16, decoder_sparse_step=1)
    path = write_gguf(source, tmp_path / "tiny.gguf", "qwen3_moe", kind="Q8_0")
    weights = {
        key: tensor.float() for key, tensor in stored(opened([path], keys_of(source))).items()
    }
    wanted = load_file(source / "model.safetensors")
    error = max(float((weights[key] - wanted[key]).abs().max()) for key in wanted)
    assert 0 < error < 0.02
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    reference = transformers_of(source)
    assert generated(path) == [reference.generate(ids, NUM_TOKENS) for ids in PROMPTS]


@pytest.mark.full
def test_files_of_the_folder_win_over_metadata(transformers_of, tiny_copy, tmp_path):
    """The config.json here has a window, which llama's metadata do not know."""
    tiny_copy("mistral", tmp_path)
    write_gguf(tmp_path, tmp_path / "tiny.gguf", "mistral", tokenizer=False)
    reference = transformers_of(tmp_path)
    wanted = [reference.generate(ids, NUM_TOKENS) for ids in PROMPTS]
    (tmp_path / "model.safetensors").unlink()
    assert read_checkpoint(tmp_path).config.sliding_window == 7
    assert generated(tmp_path) == wanted
    assert generated(tmp_path / "tiny.gguf") == wanted


def test_split_files_are_read_together(transformers_of, tiny_copy, tmp_path):
    source, place = tmp_path / "source", tmp_path / "place"
    tiny_copy("qwen3", source)
    place.mkdir()
    write_gguf(source, place / "tiny.gguf", "qwen3", num_files=2)
    paths = sorted(place.iterdir())
    assert len(paths) > 2
    reference = transformers_of(source)
    wanted = [reference.generate(ids, NUM_TOKENS) for ids in PROMPTS]
    assert generated(place) == wanted
    assert generated(paths[1]) == wanted


@pytest.mark.full
def test_tensor_parallel_ranks_read_their_shards(tiny_copy, tmp_path):
    source = tmp_path / "source"
    tiny_copy("llama", source, head_dim=16)
    path = write_gguf(source, tmp_path / "tiny.gguf", "llama", kind="Q8_0")
    assert generated(path, tensor_parallel_size=2, device="cpu") == generated(path)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
def test_the_tokenizer_and_the_template_of_a_file(tiny_copy, tmp_path, family):
    source = tmp_path / "source"
    tiny_copy(family, source)
    path = write_gguf(source, tmp_path / "tiny.gguf", family)
    texts = ("The quick brown fox <think> 123", "h\u00e9 \u4e2d\n\n  x<|im_end|>y")
    messages = [{"role": "user", "content": "Describe the picture."}]
    found = []
    for model in (source, path):
        with LLM(model=str(model), dtype="float32", max_model_len=256, quiet=True) as llm:
            outputs = [*llm.generate(list(texts), PARAMS), *llm.chat([messages], PARAMS)]
            found.append(
                [(o.prompt_token_ids, o.outputs.token_ids, o.outputs.text) for o in outputs]
            )
    assert found[0] == found[1]


@pytest.mark.full
def test_ids_that_end_an_answer(tiny_copy, tmp_path):
    """The end of a turn ends an answer as the end of a text does."""
    tiny_copy("qwen3", tmp_path)
    path = write_gguf(
        tmp_path, tmp_path / "tiny.gguf", "qwen3", extra=lambda writer: writer.add_eot_token_id(3)
    )
    (tmp_path / "config.json").unlink()
    assert read_checkpoint(path).config.eos_token_id == [make_tokenizer("qwen3").eos_token_id, 3]


@pytest.mark.full
def test_texts_that_are_no_token_of_the_file(tiny_copy, tmp_path):
    """transformers adds <|endoftext|> to every byte-level vocabulary, after the last row of the
    embedding."""
    source = tmp_path / "source"
    tiny_copy("qwen3", source)
    path = write_gguf(source, tmp_path / "tiny.gguf", "qwen3")
    wanted = make_tokenizer("qwen3")
    found = load_tokenizer(tmp_path, path)
    text = "a <|endoftext|> <|im_end|><think>"
    assert found(text)["input_ids"] == wanted(text)["input_ids"]
    assert len(found) == len(wanted)
    assert found.special_tokens_map == wanted.special_tokens_map
    ids = list(range(len(wanted)))
    assert found.decode(ids, skip_special_tokens=True) == wanted.decode(
        ids, skip_special_tokens=True
    )


def test_a_sentencepiece_vocabulary(tiny_copy, tmp_path):
    """Tokens of pieces with scores, and bytes for all else; there are no merges."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    words = ["\u2581", "t", "h", "e", "th", "the", "\u2581the", "c", "a", "ca", "cat", "\u2581cat"]
    tiny_copy("llama", tmp_path, vocab_size=len(pieces) + len(words))

    def extra(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([*pieces, *words])
        writer.add_token_scores([0.0] * len(pieces) + [float(-i) for i in range(len(words))])
        writer.add_token_types([*kinds, *[1] * len(words)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    place = tmp_path / "place"
    place.mkdir()
    path = write_gguf(tmp_path, place / "tiny.gguf", "llama", tokenizer=False, extra=extra)
    tokenizer = load_tokenizer(place, path)
    first = len(pieces)
    ids = tokenizer("the cat\u00e9")["input_ids"]
    assert ids == [1, first + 6, first + 11, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat\u00e9"
    with LLM(model=str(path), quiet=True, max_model_len=64) as llm:
        assert llm.generate(["the cat"], PARAMS)[0].prompt_token_ids == ids[:3]


@pytest.mark.full
def test_weights_in_8_bits(tiny_copy, tmp_path):
    """Weights that were dequantised are quantised again, as those of any other file."""
    source = tmp_path / "source"
    tiny_copy("qwen3", source, head_dim=16)
    path = write_gguf(source, tmp_path / "tiny.gguf", "qwen3", kind="BF16")
    weights = {
        key: tensor.float() for key, tensor in stored(opened([path], keys_of(source))).items()
    }
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assert generated(path, quantization="int8") == generated(source, quantization="int8")


@pytest.mark.full
def test_the_command_line(tiny_copy, tmp_path):
    source, place = tmp_path / "source", tmp_path / "place"
    tiny_copy("llama", source, head_dim=16)
    place.mkdir()
    path = write_gguf(source, place / "tiny-Q8_0.gguf", "llama", kind="Q8_0")
    for model in (place, path):
        words = ["generate", "Describe", "--model", str(model), "--max-tokens", "4"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    write_gguf(source, place / "tiny-F32.gguf", "llama")
    done = CliRunner().invoke(app, ["generate", "Describe", "--model", str(place)])
    assert done.exit_code != 0
    assert "holds 2 models: tiny-F32.gguf, tiny-Q8_0.gguf; name one" in " ".join(
        done.output.split()
    )


@pytest.mark.full
def test_layers_that_predict_further_tokens_are_not_used(transformers_of, tiny_copy, tmp_path):
    source = tmp_path / "source"
    tiny_copy("qwen3_5_text", source)

    def extra(writer):
        writer.kv_data[0].pop("qwen35.block_count")
        writer.add_block_count(5)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((64, 128), dtype=np.float32))

    path = write_gguf(source, tmp_path / "tiny.gguf", "qwen3_5_text", extra=extra)
    reference = transformers_of(source)
    assert generated(path) == [reference.generate(ids, NUM_TOKENS) for ids in PROMPTS]


@pytest.mark.full
def test_safetensors_files_when_they_are_asked_for(tiny_copy, tmp_path):
    tiny_copy("qwen3", tmp_path)
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf", "qwen3")
    assert generated(path, load_format="safetensors") == generated(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file"):
        generated(path, load_format="safetensors")


@pytest.mark.full
@pytest.mark.parametrize(("family", "options"), CASES.values(), ids=CASES)
def test_the_config_of_a_file_is_the_models(tiny_copy, tmp_path, family, options):
    """Its numbers are equal to the last digit."""
    source, place = tmp_path / "source", tmp_path / "place"
    tiny_copy(family, source, **options)
    place.mkdir()
    write_gguf(source, place / "tiny.gguf", family)
    found, wanted = (read_checkpoint(folder).config.to_dict() for folder in (place, source))
    if wanted.get("head_dim") is None:
        wanted["head_dim"] = found.get("head_dim")
    differing = {key for key in {*found, *wanted} if found.get(key) != wanted.get(key)}
    assert differing <= {"_name_or_path"} | NOT_STATED_BY.get(family, set())


@pytest.mark.full
def test_long_rope_of_phi3(tiny_copy, tmp_path):
    factors = {"long_factor": [1.5] * 4 + [8.0] * 4, "short_factor": [1.0] * 8}
    tiny_copy("phi3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["original_max_position_embeddings"] = 512
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 512,
        **factors,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_gguf(tmp_path, tmp_path / "tiny.gguf", "phi3")
    wanted = read_checkpoint(tmp_path).config.rope_parameters
    (tmp_path / "config.json").unlink()
    found = read_checkpoint(tmp_path / "tiny.gguf").config.rope_parameters
    assert {name: found[name] for name in factors} == factors
    assert found == wanted


@pytest.mark.full
@pytest.mark.parametrize(
    "names", [("tokenizer.json", "tokenizer_config.json"), ("tokenizer.json",)]
)
def test_a_tokenizer_beside_a_file(tiny_copy, tmp_path, names):
    """There is no config.json."""
    source, place = tmp_path / "source", tmp_path / "place"
    tiny_copy("qwen3", source)
    place.mkdir()
    for name in names:
        shutil.copy(source / name, place / name)
    path = write_gguf(source, place / "tiny.gguf", "qwen3", tokenizer=False)
    text = "The quick brown <think>"
    with LLM(model=str(path), quiet=True, max_model_len=64) as llm:
        ids = llm.generate([text], PARAMS)[0].prompt_token_ids
    assert ids == make_tokenizer("qwen3")(text)["input_ids"]
