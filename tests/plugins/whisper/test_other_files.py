"""Whisper models in files of other programs, CTranslate2 and whisper.cpp, against transformers."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.whisper.ctranslate2_header import read_variables
from mmdeploy_llm_plugins.whisper.ggml import read_contents
from mmdeploy_llm_plugins.whisper.vocabulary import write_tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.folder import look_up, read_checkpoint
from tests.plugins.whisper.other_files import (
    GGML_TYPES,
    ctranslate2_bytes,
    ctranslate2_variables,
    write_ctranslate2,
    write_ggml,
)

NUM_WORDS, END = 50257, 50257
RATE = 16000
CT2_KINDS = ("float32", "float16", "bfloat16", "int16", "int8", "int8_float16")
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8_float16": torch.float16}
GGML_KINDS = ("f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
LANGUAGES = list(transformers.models.whisper.tokenization_whisper.LANGUAGES)[:99]
MARKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
NAMES = ("endoftext", "startoftranscript", *LANGUAGES, *MARKS)
SPECIALS = [f"<|{name}|>" for name in NAMES] + [f"<|{n * 0.02:.2f}|>" for n in range(1501)]
ID = {name: END + number for number, name in enumerate(SPECIALS)}


@pytest.fixture(scope="module")
def words():
    """Makes as many tokens as Whisper's multilingual models have: all bytes, and pairs of them."""
    pairs = [bytes([one, two]) for one in range(256) for two in range(256)]
    return [bytes([byte]) for byte in range(256)] + pairs[: NUM_WORDS - 256]


@pytest.fixture(scope="module")
def tokens(words):
    letters = bytes_to_unicode()
    return ["".join(letters[byte] for byte in word) for word in words] + SPECIALS


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = transformers.WhisperConfig(
        vocab_size=NUM_WORDS + len(SPECIALS),
        d_model=32,
        num_mel_bins=80,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        decoder_start_token_id=ID["<|startoftranscript|>"],
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )
    made = transformers.WhisperForConditionalGeneration(config).eval()
    for value in made.parameters():
        torch.nn.init.normal_(value, std=0.3 if value.ndim > 1 else 0.1)
    generation = made.generation_config
    generation.suppress_tokens, generation.begin_suppress_tokens = [30, 31], [32, END]
    generation.lang_to_id = {f"<|{name}|>": ID[f"<|{name}|>"] for name in LANGUAGES}
    return made


def with_values_of(model, checkpoint):
    """Returns transformers' model with the weights that a file holds, dequantised."""
    other = transformers.WhisperForConditionalGeneration(model.config).eval()
    with checkpoint.model_file.open_weights() as file:
        state = {}
        for key, entry in file.entries.items():
            state[key] = torch.empty(entry.shape)
            file.read_into(key, state[key], first_value=0, transpose=False)
    missing, extra = other.load_state_dict(state, strict=False)
    assert extra == []
    assert missing == ["proj_out.weight"]
    other.tie_weights()
    return other


def answers(folder, **options):
    sound = np.random.default_rng(4).standard_normal(2 * RATE).astype(np.float32) * 0.1
    prompt = {
        "prompt": "<|en|>",
        "multi_modal_data": {"audio": {"array": sound, "sampling_rate": RATE}},
    }
    with LLM(str(folder), dtype="float32", max_num_seqs=2, **options) as llm:
        (found,) = llm.generate([prompt], SamplingParams(max_tokens=8, logprobs=3), use_tqdm=False)
    return sound, found.outputs[0]


def same_as_transformers(model, sound, output, suppressed):
    extractor = transformers.WhisperFeatureExtractor(feature_size=80)
    frames = extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features
    names = ("startoftranscript", "en", "transcribe", "notimestamps")
    ids = [ID[f"<|{name}|>"] for name in names]
    for number, token in enumerate(output.token_ids):
        with torch.no_grad():
            logits = model(frames, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        logits[suppressed if number else [*suppressed, 32, END]] = -torch.inf
        assert int(logits.argmax()) == token
        found = output.logprobs[number][token]
        assert abs(getattr(found, "logprob", found) - float(logits.log_softmax(0)[token])) < 2e-3
        ids.append(token)


KEYS = (
    "model.decoder.layers.1.self_attn.v_proj.weight",
    "model.decoder.layers.0.encoder_attn.k_proj.weight",
    "model.decoder.embed_tokens.weight",
    "model.encoder.layers.1.fc2.weight",
    "model.encoder.conv1.weight",
    "model.encoder.conv1.bias",
    "model.decoder.layer_norm.bias",
    "model.encoder.embed_positions.weight",
)


@pytest.mark.parametrize("kind", CT2_KINDS)
def test_ctranslate2_weights_are_the_models(model, tokens, tmp_path, kind):
    write_ctranslate2(model, tokens, tmp_path, kind)
    found = with_values_of(model, read_checkpoint(tmp_path)).state_dict()
    for key in KEYS:
        wanted = model.state_dict()[key]
        if kind.startswith("int") and wanted.ndim > 1 and "positions" not in key:
            rows, most = wanted.flatten(1), wanted.abs().max()
            step = (
                rows.abs().amax(1) / 127 if kind.startswith("int8") else 2 * most / 1024
            )  # of fused ones
            wrong = (found[key].flatten(1) - rows).abs().amax(1)
            assert bool((wrong <= 0.501 * step).all())
        else:
            assert torch.equal(found[key], wanted.to(FLOATS.get(kind, torch.float32)).float())


@pytest.mark.parametrize("kind", GGML_KINDS)
def test_whisper_cpp_weights_are_the_models(model, words, tmp_path, kind):
    path = tmp_path / "ggml-tiny.bin"
    write_ggml(model, words, path, kind)
    found = with_values_of(model, read_checkpoint(path)).state_dict()
    for key in KEYS:
        wanted, own = model.state_dict()[key], kind
        if wanted.ndim == 1 or "positions" in key:
            own = "f32"
        elif "conv" in key and kind.startswith("q"):
            own = "f16"
        number = gguf.GGMLQuantizationType(GGML_TYPES[own])
        stored = gguf.dequantize(gguf.quantize(wanted.numpy(), number), number)
        assert torch.equal(found[key], torch.from_numpy(stored))


@pytest.mark.parametrize("kind", ["int8", "f32", "q5_0"])
def test_answers_are_those_of_transformers(model, tokens, words, tmp_path, kind):
    path = tmp_path / "model"
    if kind == "int8":
        write_ctranslate2(model, tokens, path, kind)
    else:
        path = tmp_path / "ggml-tiny.bin"
        write_ggml(model, words, path, kind)
    checkpoint = read_checkpoint(path)
    other = with_values_of(model, checkpoint)
    sound, output = answers(path)
    same_as_transformers(other, sound, output, checkpoint.generation["suppress_tokens"])


def test_ctranslate2_int8_is_dequantised_by_rows(model, tokens, tmp_path):
    variables = ctranslate2_variables(model, "int8")
    write_ctranslate2(model, tokens, tmp_path / "model", "int8")
    other = with_values_of(model, read_checkpoint(tmp_path / "model")).state_dict()
    name = "decoder/layer_0/attention/linear_1/weight"
    whole = variables[name].float() / variables[f"{name}_scale"][:, None]
    assert torch.equal(other["model.decoder.layers.0.encoder_attn.v_proj.weight"], whole[32:])
    conv = variables["encoder/conv2/weight"]
    whole = conv.float() / variables["encoder/conv2/weight_scale"][:, None, None]
    assert torch.equal(other["model.encoder.conv2.weight"], whole)


def test_what_the_folder_says_is_read(model, tokens, tmp_path):
    write_ctranslate2(model, tokens, tmp_path, "float32")
    (tmp_path / "preprocessor_config.json").write_text(
        '{"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 20}'
    )
    found = read_checkpoint(tmp_path)
    assert found.config.decoder_attention_heads == 4
    assert found.config.encoder_attention_heads == 2
    assert found.config.max_source_positions == 1500
    assert found.preprocessor["chunk_length"] == 20
    assert found.preprocessor["feature_size"] == 80
    generation = found.generation
    assert generation["suppress_tokens"] == [30, 31]
    assert generation["lang_to_id"]["<|de|>"] == ID["<|de|>"]
    assert len(generation["lang_to_id"]) == 99
    assert generation["no_timestamps_token_id"] == ID["<|notimestamps|>"]


def test_a_folder_of_one_whisper_cpp_file_is_a_model_and_of_two_is_not(model, words, tmp_path):
    write_ggml(model, words, tmp_path / "ggml-one.bin", "f16")
    assert read_checkpoint(tmp_path).model_file.path.name == "ggml-one.bin"
    (tmp_path / "ggml-two.bin").write_bytes((tmp_path / "ggml-one.bin").read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 models: ggml-one\.bin, ggml-two\.bin"):
        read_checkpoint(tmp_path)


def test_the_tokenizer_merges_as_the_words_were_numbered(tmp_path):
    longer = [b"ab", b"abc", b"bc", b" a", b" abc"]
    words = [bytes([byte]) for byte in range(256)] + longer
    write_tokenizer(tmp_path, words, ["<|endoftext|>", "<|0.00|>"], "here")
    made = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert made("abc abc bcab", add_special_tokens=False).input_ids == [257, 260, 32, 258, 256]
    assert made.convert_tokens_to_ids("<|0.00|>") == 262
    assert made.eos_token_id == 261


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([b"xyz"], "no two earlier ones make"),
        ([b"xy", b"xy"], "a token twice"),
        (None, "no token for some bytes"),
    ],
)
def test_words_that_say_no_merges_name_the_file_to_add(tmp_path, extra, message):
    words = [bytes([byte]) for byte in range(255 if extra is None else 256)] + (extra or [])
    with pytest.raises(CheckpointError, match=f"{message}.*add tokenizer.json"):
        write_tokenizer(tmp_path, words, ["<|endoftext|>"], "vocabulary.txt")


def test_another_model_of_ctranslate2_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    data = ctranslate2_bytes({"a": torch.ones(2)}, spec="TransformerSpec")
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(ModelNotSupportedError, match=r"'TransformerSpec'.*only Whisper.*Give the"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.bin").write_bytes(ctranslate2_bytes({}, version=5))
    with pytest.raises(CheckpointError, match="version 5 of CTranslate2's format; read is 6"):
        read_checkpoint(tmp_path)


def test_a_pickle_named_model_bin_is_refused_as_before(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    (tmp_path / "model.bin").write_bytes(b"PK\3\4" + bytes(99))
    assert read_checkpoint(tmp_path).model_file is None


def test_a_file_of_no_format_is_told_at_once(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("Hello")
    with pytest.raises(CheckpointError, match="begins as no known format"):
        look_up(EngineConfig.from_options(str(path), {}))


def cuts(data):
    """Returns beginnings of a file, most of them within its header."""
    return [data[:size] for size in (4, 5, 9, 40, 90, 1000, len(data) // 2, len(data) - 3)]


def test_a_cut_or_lying_file_of_ctranslate2_is_an_error(model, tmp_path):
    data = ctranslate2_bytes(ctranslate2_variables(model, "int8"))
    path = tmp_path / "model.bin"
    count = data.index(b"WhisperSpec\0") + 12 + 4
    lies = [
        data[:count] + b"\xff\xff\xff\xff" + data[count + 4 :],  # of how many variables
        data[: count + 4] + b"\xff\xff" + data[count + 6 :],  # of the length of a name
        data[:-30] + b"\0" * 30,
    ]
    for bad in [*cuts(data), *lies]:
        path.write_bytes(bad)
        with pytest.raises(CheckpointError):
            read_variables(path)


def test_a_cut_or_lying_file_of_whisper_cpp_is_an_error(model, words, tmp_path):
    path = tmp_path / "ggml-a.bin"
    write_ggml(model, words, path, "q5_0")
    data = path.read_bytes()
    minus = (-1).to_bytes(4, "little", signed=True)
    lies = [data[: 4 * at] + minus + data[4 * at + 4 :] for at in (1, 3, 5, 10, 12, 13)]
    for bad in [*cuts(data), *lies]:
        path.write_bytes(bad)
        with pytest.raises(CheckpointError):
            read_contents(path)
