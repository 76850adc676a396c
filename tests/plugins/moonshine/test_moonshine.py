"""Moonshine against transformers: the model with the checks of every family, its sounds, and whole
answers and transcripts."""

import json

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins import moonshine
from mmdeploy_llm_plugins.moonshine.sound import tokens_of
from mmdeploy_llm_plugins.moonshine.speech import MoonshineSpeech
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.errors import ModelNotSupportedError, RequestError
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.media.sound_files import wav16

SPEC, STREAMING = moonshine.provide_models()
SOUNDS, STREAMING_SOUNDS = moonshine.provide_media_processors()
RATE = 16000


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


@pytest.mark.full
class TestSounds(MediaProcessorConformance):
    spec = SOUNDS


@pytest.mark.full
class TestStreaming(ModelConformance):
    spec = STREAMING


@pytest.mark.full
class TestStreamingSounds(MediaProcessorConformance):
    spec = STREAMING_SOUNDS


def samples(seed, seconds):
    values = np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * 0.1
    return values.astype(np.float32)


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("moonshine")


@pytest.mark.parametrize("has_bias", [False, True])
def test_answers_are_those_of_transformers(tiny_folder, has_bias):
    """Sounds of several lengths are answered in one step."""
    folder = tiny_folder("moonshine", attention_bias=has_bias)
    sounds = [samples(seed, seconds) for seed, seconds in enumerate((0.5, 2.0, 1.25, 3.1))]
    model = transformers.MoonshineForConditionalGeneration.from_pretrained(folder).eval()
    expected = []
    for sound in sounds:
        made = model.generate(input_values=torch.tensor(sound)[None], max_length=21)
        expected.append(made[0, 1:].tolist())
    prompts = [
        {"prompt": "", "multimodal_data": {"audio": {"array": sound, "sampling_rate": RATE}}}
        for sound in sounds
    ]
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(str(folder), dtype="float32", quiet=True) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False, on_error="raise")
    assert [list(output.outputs.token_ids) for output in outputs] == expected


@pytest.mark.parametrize(
    "options",
    [
        {"attention_bias": True, "hidden_act": "gelu"},
        {"hidden_size": 48, "tie_word_embeddings": True},  # as the encoder: no projection
    ],
)
def test_streaming_answers_are_those_of_transformers(tiny_folder, options):
    """Each sound is filled to whole frames, as by transformers' processor, and has a mask, without
    which transformers' encoder would have no windows."""
    folder = tiny_folder("moonshine_streaming", **options)
    sounds = [samples(seed, seconds) for seed, seconds in enumerate((0.5, 2.0, 1.2503, 3.1))]
    extractor = transformers.Wav2Vec2FeatureExtractor.from_pretrained(folder)
    base = transformers.MoonshineStreamingForConditionalGeneration
    model, expected = base.from_pretrained(folder).eval(), []
    for sound in sounds:
        given = extractor(
            sound,
            sampling_rate=RATE,
            return_tensors="pt",
            padding=True,
            pad_to_multiple_of=80,
            return_attention_mask=True,
        )
        expected.append(model.generate(**given, max_length=21)[0, 1:].tolist())
    prompts = [
        {"prompt": "", "multimodal_data": {"audio": {"array": sound, "sampling_rate": RATE}}}
        for sound in sounds
    ]
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(str(folder), dtype="float32", quiet=True) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False, on_error="raise")
    assert [list(output.outputs.token_ids) for output in outputs] == expected


def test_a_sound_without_positions_is_refused(tiny_folder):
    """256 positions of four frames of 80 samples."""
    sounds = [samples(0, seconds) for seconds in (5.12, 5.1201)]
    prompts = [
        {"prompt": "", "multimodal_data": {"audio": {"array": sound, "sampling_rate": RATE}}}
        for sound in sounds
    ]
    with LLM(str(tiny_folder("moonshine_streaming")), dtype="float32", quiet=True) as llm:
        taken, refused = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    assert taken.is_ok
    assert "max_position_embeddings" in refused.error_msg


def test_an_odd_number_of_rotated_channels_is_refused(tiny_folder):
    """transformers rotates one more."""
    folder = tiny_folder("moonshine_streaming")
    config = read_checkpoint(folder).config
    config.rope_parameters["partial_rotary_factor"] = 0.8  # of 32 channels
    with pytest.raises(ModelNotSupportedError, match=r"partial_rotary_factor 0\.8"):
        build(STREAMING, folder, config, torch.float32)


def test_streaming_heads_of_another_size_are_refused(tiny_folder):
    folder = tiny_folder("moonshine_streaming")
    config = read_checkpoint(folder).config
    config.head_dim = 16
    with pytest.raises(ModelNotSupportedError, match="head_dim 16"):
        build(STREAMING, folder, config, torch.float32)


@pytest.mark.parametrize("count", [0, 1, 126, 127, 510, 511, 894, 895, 896, 1000, 16000, 31999])
def test_the_number_of_tokens_is_that_of_the_convolutions(count):
    kernels = ((127, 64), (7, 3), (3, 2))
    x = torch.zeros(1, 1, count)
    for size, stride in kernels:
        if x.shape[-1] < size:
            x = torch.zeros(1, 1, 0)
            break
        x = torch.nn.functional.conv1d(x, torch.zeros(1, 1, size), stride=stride)
    assert tokens_of(count) == x.shape[-1]


def test_shared_keys_are_refused(folder):
    config = read_checkpoint(folder).config
    config.decoder_num_key_value_heads = 1
    with pytest.raises(ModelNotSupportedError, match="decoder_num_key_value_heads 1"):
        build(SPEC, folder, config, torch.float32)


@pytest.mark.parametrize("family", ["moonshine", "moonshine_streaming"])
def test_transcribe_takes_it(tiny_folder, tmp_path, family):
    """A window is a line, since its answers have no times."""
    folder = tiny_folder(family)
    content = (samples(0, 32.0)[:, None] * 32767).astype(np.int16)
    (tmp_path / "a.wav").write_bytes(wav16(content))
    command = ["transcribe", str(tmp_path / "a.wav"), "--model", str(folder)]
    ran = CliRunner().invoke(app, [*command, "--transcripts", "json", "-o", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    found = json.loads((tmp_path / "out" / "a.json").read_text())
    assert found
    assert all(0 <= line["start"] <= line["end"] <= 32 for line in found)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("en", "transcribe", ""), "knows one language"),
        ((None, "translate", ""), "cannot translate"),
        ((None, "transcribe", "Dr. Who"), "no words before"),
    ],
)
def test_what_it_cannot_be_asked_is_told(folder, asked, words):
    with pytest.raises(RequestError, match=words):
        MoonshineSpeech(read_checkpoint(folder)).prompt(*asked)
