"""Granite Speech 5 against transformers: features, whole answers, their times, and transcripts."""

import json

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.parakeet import provide_media_processors
from mmdeploy_llm_plugins.parakeet.granite_sound import GraniteSpeech5Sounds
from mmdeploy_llm_plugins.parakeet.speech import GraniteSpeech5Speech
from safetensors.torch import load_file, save_file
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function
from typer.testing import CliRunner

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.testing import MediaProcessorConformance
from mmdeploy_llm.testing.media.subject import ProcessorSubject
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.media.sound_files import wav16
from tests.plugins.parakeet.checkpoints import GRANITE_EXTRACTOR, RATE, write_granite
from tests.plugins.parakeet.test_parakeet import (
    SOUNDS,
    asked,
    collapsed,
    generated,
    opened,
    samples,
    words,
)

ODD = {
    "hidden_size": 36,
    "head_dim": 10,
    "num_hidden_layers": 5,
    "num_mel_bins": 24,
    "max_position_embeddings": 9,
    "context_size": 7,
    "conv_kernel_size": 3,
    "conv_expansion_factor": 1,
    "subsample_layers": [2],
    "attention_bias": False,
    "hidden_act": "gelu",
}


@pytest.mark.full
class TestSounds(MediaProcessorConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory):
        *_, spec = provide_media_processors()
        checkpoint = read_checkpoint(write_granite(tmp_path_factory.mktemp("sounds")))
        own = ProcessorSubject(
            spec=spec, checkpoint=checkpoint, item_options=({"start": 0.1}, {"end": 0.25})
        )
        yield own
        own.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_granite(tmp_path_factory.mktemp("granite"))


def features_of(sound, *, num_mel_bins, n_fft, win_length, hop_length, **fields):
    """Returns what transformers' feature extractor, which needs torchaudio, is written to do, by
    its functions on numpy: [1, frames / 2, 4 * mels]."""
    frames = -(-(len(sound) // hop_length) // 2) * 2
    sound = np.pad(sound, (0, max(0, (frames - 1) * hop_length + 1 - len(sound))))
    banks = mel_filter_bank(
        n_fft // 2 + 1, num_mel_bins, 0.0, RATE / 2, RATE, norm=None, mel_scale="htk"
    )
    mel = spectrogram(
        sound.astype(np.float64),
        window_function(win_length, "hann", frame_length=n_fft),
        frame_length=n_fft,
        hop_length=hop_length,
        power=2.0,
        mel_filters=banks,
    )[:, :frames]
    logs = np.log10(np.maximum(mel, 1e-10))
    logs = np.maximum(logs, logs.max() - fields["logmel_floor_db"]) / 4 + 1
    reach = (fields["delta_win_length"] - 1) // 2
    last, rise = frames - 1, np.zeros_like(logs)
    for at in range(frames):
        for step in range(1, reach + 1):
            rise[:, at] += step * (logs[:, min(at + step, last)] - logs[:, max(at - step, 0)])
    rise /= 2 * sum(step**2 for step in range(1, reach + 1))
    both = np.concatenate([logs, rise]).T
    return torch.from_numpy(both.reshape(1, frames // 2, -1)).float()


def reference(folder, sounds, features):
    """Yields the tokens and frames of each sound by transformers' generate."""
    model = transformers.GraniteSpeech5ForCTC.from_pretrained(folder).eval()
    for sound in sounds:
        made = features(sound)
        mask = torch.ones(made.shape[:2], dtype=torch.long)
        yield collapsed(model.generate(made, attention_mask=mask)[0].tolist())


def prepared(folder):
    """Returns what prepares the features of a sound."""
    sounds = GraniteSpeech5Sounds(read_checkpoint(folder), {})
    return lambda sound: sounds.prepare(sound, {}).tensors["input_features"]


@pytest.mark.parametrize("count", [1120, 1121, 1600, 3999, 16000])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"delta_win_length": 7, "logmel_floor_db": 2.0},
        {"hop_length": 128, "n_fft": 400, "win_length": 400},
    ],
)
def test_features_are_those_of_the_extractor(tmp_path, count, fields):
    sound = samples(count, count / RATE)
    whole = {**GRANITE_EXTRACTOR, **fields}
    found = prepared(write_granite(tmp_path, extractor=fields))(sound)
    torch.testing.assert_close(found, features_of(sound, **whole), atol=1e-4, rtol=1e-4)


def test_answers_and_times_are_those_of_transformers(folder):
    expected = list(reference(folder, SOUNDS, prepared(folder)))
    assert all(len(tokens) > 0 for tokens, _ in expected)
    with opened(folder) as llm:
        outputs = generated(llm, [asked(own, "<|timestamps|>") for own in SOUNDS])
        alone = [generated(llm, [asked(own)])[0] for own in SOUNDS]
    assert [words(output) for output in outputs] == [tokens for tokens, _ in expected]
    assert [words(output) for output in alone] == [tokens for tokens, _ in expected]
    found = [output.outputs[0].attention.argmax(-1) for output in outputs]
    spans = [own[: len(each)].tolist() for own, (_, each) in zip(found, expected, strict=True)]
    assert spans == [own for _, own in expected]
    assert all(output.outputs.finish_reason == "stop" for output in outputs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("encoder", "fields"),
    [(ODD, {}), ({}, {"tie_word_embeddings": False}), ({"subsample_layers": []}, {})],
)
def test_all_of_a_config_is_read(tmp_path, encoder, fields):
    extractor = {"num_mel_bins": encoder.get("num_mel_bins", 16), "hop_length": 200}
    folder = write_granite(tmp_path, encoder=encoder, extractor=extractor, **fields)
    expected = [tokens for tokens, _ in reference(folder, SOUNDS, prepared(folder))]
    assert any(expected)
    with opened(folder) as llm:
        outputs = generated(llm, [asked(own) for own in SOUNDS])
    assert [words(output) for output in outputs] == expected


def test_frames_and_logits_are_those_of_transformers(folder):
    checkpoint = read_checkpoint(folder)
    spec = PluginManager.load().model_for(checkpoint.config.architectures)
    model = build(spec, folder, checkpoint.config, torch.float32)
    theirs = transformers.GraniteSpeech5ForCTC.from_pretrained(folder).eval()
    sounds = GraniteSpeech5Sounds(checkpoint, {})
    made = [sounds.processed(own, str(at), {}) for at, own in enumerate(SOUNDS)]
    for item, own in zip(made, model.heard(made), strict=True):
        with torch.no_grad():
            frames = theirs.encoder(item.tensors["input_features"]).last_hidden_state[0]
            logits = theirs(item.tensors["input_features"]).logits[0]
        assert item.num_tokens == len(frames)
        torch.testing.assert_close(own, frames, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model.ctc_head(own), logits, atol=1e-4, rtol=1e-4)


def test_what_has_no_frame_and_other_mel_channels_are_refused(folder, tmp_path):
    with opened(folder) as llm:
        short, least = llm.generate(
            [asked(SOUNDS[0][:1119]), asked(SOUNDS[0][:1120])],
            SamplingParams(temperature=0),
            use_tqdm=False,
        )
    assert short.error_code == 400
    assert "too short for this model" in short.error_msg
    assert least.error_code == 200
    other = write_granite(tmp_path, extractor={"num_mel_bins": 24})
    with pytest.raises(CheckpointError, match="makes 24 mel channels"):
        opened(other)


def test_a_tied_head_may_be_stored_a_second_time(tmp_path):
    folder = write_granite(tmp_path)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    assert "encoder.out.weight" in tensors
    again = {f"ctc_head.{name}": tensors[f"encoder.out.{name}"] for name in ("weight", "bias")}
    save_file({**tensors, **{name: own.clone() for name, own in again.items()}}, path)
    expected = [tokens for tokens, _ in reference(folder, SOUNDS, prepared(folder))]
    with opened(folder) as llm:
        outputs = generated(llm, [asked(own) for own in SOUNDS])
    assert [words(output) for output in outputs] == expected


@pytest.mark.full
def test_transcribe_tells_when_words_are_spoken(folder, tmp_path):
    """Windows are joined, and a frame is 80 ms."""
    content = (samples(0, 32.0)[:, None] * 32767).astype(np.int16)
    (tmp_path / "a.wav").write_bytes(wav16(content))
    command = ["transcribe", str(tmp_path / "a.wav"), "--model", str(folder)]
    command += ["--transcripts", "json", "-o", str(tmp_path / "out"), "--word-timestamps"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    found = json.loads((tmp_path / "out" / "a.json").read_text())
    times = [(own["start"], own["end"]) for line in found for own in line["words"]]
    assert all(0 <= start <= end <= 32 for start, end in times)
    assert times[-1][1] > 20
    assert GraniteSpeech5Speech(read_checkpoint(folder)).frames(
        read_checkpoint(folder).config.encoder_config
    ) == round(0.08 * RATE / 160)
