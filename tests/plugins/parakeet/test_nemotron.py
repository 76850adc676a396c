"""Nemotron ASR against transformers: whole answers in a language, their times, and transcripts."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.parakeet import provide_media_processors
from mmdeploy_llm_plugins.parakeet.sound import NemotronSounds
from mmdeploy_llm_plugins.parakeet.speech import LanguageSpeech, ParakeetSpeech
from typer.testing import CliRunner

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.errors import CheckpointError, RequestError
from mmdeploy_llm.hooks import MediaLimits, PluginManager
from mmdeploy_llm.testing import MediaProcessorConformance
from mmdeploy_llm.testing.media.subject import ProcessorSubject
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.media.sound_files import wav16
from tests.plugins.parakeet.checkpoints import BLANK, LANGUAGES, RATE, write_nemotron
from tests.plugins.parakeet.test_parakeet import (
    DECODER,
    ODD,
    SOUNDS,
    asked,
    generated,
    opened,
    samples,
    words,
)

NAMES = ("NemotronAsrStreaming", "Nemotron3_5Asr")
ENGLISH, TOLD = NAMES
AUTO = "auto"


@pytest.mark.full
class TestSounds(MediaProcessorConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory):
        _, spec, _ = provide_media_processors()
        checkpoint = read_checkpoint(write_nemotron(tmp_path_factory.mktemp("sounds"), TOLD))
        own = ProcessorSubject(
            spec=spec, checkpoint=checkpoint, item_options=({"start": 0.1}, {"end": 0.25})
        )
        yield own
        own.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write_nemotron(tmp_path_factory.mktemp(name), name) for name in NAMES}


class Reference:
    """transformers' model and processor of a folder."""

    def __init__(self, folder):
        config = transformers.AutoConfig.from_pretrained(folder)
        name = config.architectures[0]
        self.is_told = name.startswith(TOLD)
        self.model = getattr(transformers, name).from_pretrained(folder).eval()
        own = name.replace("ForRNNT", "Processor")
        self.processor = getattr(transformers, own).from_pretrained(folder)

    def made(self, sound, language=AUTO):
        told = {"language": language} if self.is_told else {}
        return self.processor(sound, sampling_rate=RATE, **told)

    def answer(self, sound, language=AUTO):
        """Returns tokens and the frames at which they begin and end."""
        found = self.model.generate(**self.made(sound, language), max_new_tokens=2000)
        ids, ahead = found.sequences[0], found.durations[0]
        starts = (ahead.cumsum(0) - ahead).tolist()
        own = [(token, at) for token, at in zip(ids.tolist(), starts, strict=True)]
        kept = [(token, [at, at + 1]) for token, at in own if token != BLANK]
        return [token for token, _ in kept], [span for _, span in kept]

    @torch.no_grad()
    def frames(self, sound, language=AUTO):
        heard = self.model.get_audio_features(**self.made(sound, language))
        return heard.pooler_output[0, : int(heard.attention_mask.sum())]


def in_language(language, prompt=""):
    return prompt if language == AUTO else f"{prompt}<|{language}|>"


@pytest.mark.parametrize("name", NAMES)
def test_answers_and_times_are_those_of_transformers(folders, name):
    """One sound of two languages stands beside others, of other lengths."""
    reference = Reference(folders[name])
    languages = (AUTO, "de", "en-US", "de-DE", AUTO) if name == TOLD else (AUTO,) * 5
    cases = [*zip(SOUNDS, languages, strict=True), (SOUNDS[0], "de" if name == TOLD else AUTO)]
    expected = [reference.answer(*case) for case in cases]
    assert all(len(tokens) > 0 for tokens, _ in expected)
    assert (expected[0] != expected[-1]) == (name == TOLD)
    prompts = [asked(sound, in_language(own, "<|timestamps|>")) for sound, own in cases]
    with opened(folders[name]) as llm:
        outputs = generated(llm, prompts)
        alone = [generated(llm, [prompt])[0] for prompt in prompts[:3]]
    assert [words(output) for output in outputs] == [tokens for tokens, _ in expected]
    assert [words(output) for output in alone] == [tokens for tokens, _ in expected[:3]]
    found = [output.outputs[0].attention.argmax(-1) for output in outputs]
    spans = [own[: len(each)].tolist() for own, (_, each) in zip(found, expected, strict=True)]
    assert spans == [own for _, own in expected]
    assert all(output.outputs.finish_reason == "stop" for output in outputs)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("encoder", "fields"),
    [
        ({**ODD, "sliding_window": 3}, {**DECODER, "max_symbols_per_step": 1}),
        ({"sliding_window": 1, "scale_input": False}, {"max_symbols_per_step": 3}),
    ],
)
def test_all_of_a_config_is_read(tmp_path, name, encoder, fields):
    extractor = {"hop_length": 128, "n_fft": 400, "preemphasis": 0.9}
    extractor["feature_size"] = encoder.get("num_mel_bins", 16)
    folder = write_nemotron(tmp_path, name, encoder=encoder, extractor=extractor, **fields)
    reference = Reference(folder)
    expected = [reference.answer(own)[0] for own in SOUNDS]
    assert any(expected)
    with opened(folder) as llm:
        outputs = generated(llm, [asked(own) for own in SOUNDS])
    assert [words(output) for output in outputs] == expected


def with_processor(folder, **fields):
    """Changes fields of the processor; None: removed."""
    file = folder / "processor_config.json"
    own = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in own.items() if value is not None}))
    return folder


@pytest.mark.parametrize("lookahead", [0, 1, 6, None])
def test_frames_are_those_of_transformers(tmp_path, lookahead):
    """Without a field of its own the processor takes the first that it supports."""
    folder = with_processor(write_nemotron(tmp_path, TOLD), default_num_lookahead_tokens=lookahead)
    reference, checkpoint = Reference(folder), read_checkpoint(folder)
    spec = PluginManager.load().model_for(checkpoint.config.architectures)
    model = build(spec, folder, checkpoint.config, torch.float32)
    sounds = NemotronSounds(checkpoint, {})
    limits = MediaLimits(isolation="thread")
    made = [sounds.process(sounds.decode((own, RATE), limits), {}) for own in SOUNDS]
    sounds.close()
    heard = [model.encoder_projector(own) for own in model.heard(made)]
    for sound, own, item in zip(SOUNDS, heard, made, strict=True):
        assert item.num_tokens == len(own)
        torch.testing.assert_close(own, reference.frames(sound), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("<|xx|>", "'xx' is no language that this model is told; give one of auto, de, de-DE"),
        ("<|de|><|en|>", "one language, found 'de, en'"),
        ("<|de|> Dr. Who", "hears and reads no words, found 'Dr. Who'"),
    ],
)
def test_what_it_cannot_be_asked_is_refused(folders, prompt, told):
    """The neighbour in the batch is answered; English names and capitals are known."""
    with opened(folders[TOLD]) as llm:
        params = SamplingParams(temperature=0)
        prompts = [asked(SOUNDS[0], prompt), asked(SOUNDS[0], "<|German|>")]
        found = llm.generate(prompts, params, use_tqdm=False)
        (expected,) = generated(llm, [asked(SOUNDS[0], "<|DE-de|>")])
    assert told in found[0].error_msg
    assert found[0].error_code == 400
    assert found[1].outputs.token_ids == expected.outputs.token_ids


def test_files_that_contradict_the_model_are_refused(tmp_path):
    folder = write_nemotron(tmp_path, TOLD)
    with_processor(folder, prompt_dictionary={**LANGUAGES, "fr": 8})
    with pytest.raises(CheckpointError, match=r"\{'fr': 8\}, but the model has num_prompts=8"):
        opened(folder)
    with_processor(folder, prompt_dictionary=LANGUAGES, default_num_lookahead_tokens=-1)
    with pytest.raises(CheckpointError, match="is -1, must be 0 or more"):
        opened(folder)


def test_a_tag_is_no_word_and_tells_the_language(folders):
    rule = LanguageSpeech(read_checkpoint(folders[TOLD]))
    german, english = BLANK + 1, BLANK + 2
    assert rule.tags == {german: "de-DE", english: "en-US"}
    heard = rule.read((7, 8, german, 9, english, BLANK))
    assert (heard.language, [one.ids for one in heard.spoken]) == ("en-US", [(7, 8, 9)])
    weights = np.zeros((5, 2, 9), dtype=np.float32)
    for at, spans in enumerate([(0, 1), (2, 3), (3, 4), (6, 7), (0, 0)]):
        weights[at, [0, 1], spans] = 1
    texts = {7: "Hel", 8: "lo.", 9: " Fine"}
    own = SimpleNamespace(token_ids=[7, 8, german, 9, BLANK], attention=weights, logprobs=None)
    heard = rule.read_words(
        SimpleNamespace(outputs=[own]), 3.0, None, lambda ids: "".join(texts[one] for one in ids)
    )
    found = [(one.text, one.start) for line in heard.spoken for one in line.words]
    assert found == [("Hello.", 0), (" Fine", pytest.approx(0.48))]
    assert heard.language == "de-DE"


def test_only_the_one_of_several_languages_is_told_one(folders):
    english, told = (
        kind(read_checkpoint(folders[name]))
        for kind, name in ((ParakeetSpeech, ENGLISH), (LanguageSpeech, TOLD))
    )
    assert told.prompt("german", "transcribe", "") == "<|german|>"
    assert told.prompt(None, "transcribe", "") == english.prompt(None, "transcribe", "") == " "
    with pytest.raises(RequestError, match="is not asked for 'de'"):
        english.prompt("de", "transcribe", "")
    with pytest.raises(RequestError, match="'klingon' is no language"):
        told.prompt("klingon", "transcribe", "")
    with pytest.raises(RequestError, match="cannot translate"):
        told.prompt("de", "translate", "")


def transcribed(folder, tmp_path, *options):
    command = ["transcribe", str(tmp_path / "a.wav"), "--model", str(folder), *options]
    command += ["--transcripts", "json", "-o", str(tmp_path / "out"), "--word-timestamps"]
    return CliRunner().invoke(app, command)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_transcribe_tells_when_words_are_spoken(folders, tmp_path, name):
    """Windows are joined, words are in their lines, and the language changes them."""
    content = (samples(0, 32.0)[:, None] * 32767).astype(np.int16)
    (tmp_path / "a.wav").write_bytes(wav16(content))
    options = ([], ["--language", "de"]) if name == TOLD else ([],)
    found = []
    for own in options:
        ran = transcribed(folders[name], tmp_path, *own)
        assert ran.exit_code == 0, ran.output
        found.append(json.loads((tmp_path / "out" / "a.json").read_text()))
        (tmp_path / "out" / "a.json").unlink()
    times = [(own["start"], own["end"]) for line in found[0] for own in line["words"]]
    assert all(0 <= start <= end <= 32 for start, end in times)
    assert times[-1][1] > 20
    assert found[0] != found[-1] or name != TOLD


def test_transcribe_refuses_a_language_before_the_model_is_loaded(folders, tmp_path):
    (tmp_path / "a.wav").write_bytes(wav16(np.zeros((RATE, 1), np.int16)))
    ran = transcribed(folders[ENGLISH], tmp_path, "--language", "de")
    assert ran.exit_code != 0
    assert "is not asked for 'de'" in " ".join(ran.output.split())
