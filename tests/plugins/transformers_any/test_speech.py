"""Models that hear and chat transcribe: asked as transformers asks them, read as it reads them."""

import json

import numpy as np
import pytest
import transformers
from mmdeploy_llm_plugins.transformers_any.speech import (
    AudioFlamingo3Speech,
    ChatSpeech,
    GlmAsrSpeech,
    GraniteSpeechPlusSpeech,
    GraniteSpeechSpeech,
    OmniASRSpeech,
    Qwen3ASRSpeech,
    VoxtralSpeech,
)
from transformers.models.qwen3_asr.processing_qwen3_asr import _parse_single_output
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.errors import RequestError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, TextRules
from mmdeploy_llm.testing.tiny import write_family
from tests.media.sound_files import wav16
from tests.plugins.transformers_any.sound_families import FAMILIES, RATE, sound

CHATTING = ("audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "voxtral")
SEEDS = {"audioflamingo3": 2, "voxtral": 4}  # with whose weights tiny models write words
SOUND = [{"type": "audio"}]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    found = {}

    def folder(name):
        if name not in found:
            found[name] = write_family(
                FAMILIES[name], tmp_path_factory.mktemp(name), seed=SEEDS.get(name, 0)
            )
        return found[name]

    return folder


def rule_of(kind, folder):
    return kind(Checkpoint(folder=folder, config=None))


def rendered(rule, folder, samples, *asked):
    """Returns the prompt as text and the answer's tokens."""
    prompt = {**rule.prompt(*asked), "multimodal_data": {"audio": (samples, RATE)}}
    with LLM(str(folder), dtype="float32", quiet=True, block_size=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False, on_error="raise")
    return output.prompt_token_ids, list(output.outputs.token_ids)


@pytest.mark.parametrize(
    ("name", "kind"), [("glmasr", GlmAsrSpeech), ("audioflamingo3", AudioFlamingo3Speech)]
)
def test_the_question_is_that_of_transformers(folder_of, name, kind):
    """The same tokens of the prompt, and of the answer."""
    folder, samples = folder_of(name), sound(1.0)
    own = FAMILIES[name].files["processor_config.json"]["processor_class"]
    processor = getattr(transformers, own).from_pretrained(folder)
    made = processor.apply_transcription_request(audio=samples)
    model = getattr(transformers, FAMILIES[name].architecture).from_pretrained(folder).eval()
    answer = model.generate(**made, max_new_tokens=8, do_sample=False, eos_token_id=None)
    ids = made["input_ids"][0].tolist()
    found = rendered(rule_of(kind, folder), folder, samples, None, "transcribe", "")
    assert found == (ids, answer[0, len(ids) :].tolist())


def test_a_checkpoints_own_question_is_asked(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"default_transcription_prompt": "Write"}')
    asked = rule_of(GlmAsrSpeech, tmp_path).prompt(None, "transcribe", "")
    text = {"type": "text", "text": "Write"}
    assert asked == {"messages": [{"role": "user", "content": [*SOUND, text]}]}
    asked = rule_of(OmniASRSpeech, tmp_path).prompt(None, "transcribe", "")
    assert asked == {"messages": [{"role": "user", "content": SOUND}]}


@pytest.mark.parametrize(
    ("language", "before"), [(None, ""), ("en", ""), ("German", "ACME, Dr. Mueller")]
)
def test_qwen3_asr_is_asked_as_by_transformers(folder_of, language, before):
    """The conversation is written by the template of another family, whose sounds are Qwen's."""
    folder = folder_of("glmasr")
    names = {"audio_token": "<|sound_pad|>", "audio_bos_token": "<s>", "audio_eos_token": "</s>"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    processor = transformers.Qwen3ASRProcessor(
        extractor, tokenizer, chat_template=tokenizer.chat_template
    )
    expected = processor.apply_transcription_request(
        audio=sound(1.0), language=language, prompt=before or None, tokenize=False
    )
    asked = rule_of(Qwen3ASRSpeech, folder).prompt(language, "transcribe", before)
    kwargs = asked.get("chat_template_kwargs", {"add_generation_prompt": True})
    assert tokenizer.apply_chat_template(asked["messages"], tokenize=False, **kwargs) == expected[0]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("language English<asr_text>Hello there.", "en"),
        ("language None<asr_text>", None),
        ("language Klingon<asr_text> nuqneH", None),
        ("Hello", None),
    ],
)
def test_answers_of_qwen3_asr_are_read_as_by_transformers(tmp_path, text, language):
    found = rule_of(Qwen3ASRSpeech, tmp_path).cleaned(text)
    assert found.words.strip() == _parse_single_output(text)["transcription"]
    assert found.language == language


@pytest.mark.parametrize(
    "text",
    [
        'The spoken content of the audio is "We\'re here.".',
        "The transcription of the audio is 'so'",
        "The content of the input audio is hm.",
        '"A"',
        "Nothing else.",
        "",
        '"',
    ],
)
def test_answers_of_audio_flamingo_are_read_as_by_transformers(folder_of, text):
    folder = folder_of("audioflamingo3")
    processor = transformers.AudioFlamingo3Processor.from_pretrained(folder)
    found = rule_of(AudioFlamingo3Speech, folder).cleaned(text)
    assert found.words == processor._strip_assistant_prefix_and_quotes(text)


@pytest.mark.parametrize(
    ("kind", "asked", "words"),
    [
        (GlmAsrSpeech, ("en", "transcribe", ""), "is not told it"),
        (GlmAsrSpeech, (None, "translate", ""), "not asked for translations"),
        (GraniteSpeechSpeech, (None, "transcribe", "Dr. Who"), "no words before"),
        (GraniteSpeechPlusSpeech, ("en", "transcribe", ""), "is not told it"),
        (Qwen3ASRSpeech, ("tlh", "transcribe", ""), "tlh"),
        (Qwen3ASRSpeech, (None, "translate", ""), "not asked for translations"),
    ],
)
def test_what_it_cannot_be_asked_is_told(tmp_path, kind, asked, words):
    with pytest.raises(RequestError, match=words):
        rule_of(kind, tmp_path).prompt(*asked)


def test_voxtral_is_asked_by_tokens(folder_of):
    with pytest.raises(UnsupportedMediaError, match=r"no token \[TRANSCRIBE\]"):
        rule_of(VoxtralSpeech, folder_of("glmasr"))
    rule = rule_of(VoxtralSpeech, folder_of("voxtral"))
    begin = "[INST][BEGIN_AUDIO][AUDIO][/INST]"
    assert rule.prompt(None, "transcribe", "") == f"{begin}[TRANSCRIBE]"
    assert rule.prompt("german", "transcribe", "") == f"{begin}lang:de[TRANSCRIBE]"
    with pytest.raises(RequestError, match="'tlh' is no language"):
        rule.prompt("tlh", "transcribe", "")
    with pytest.raises(RequestError, match="no words before"):
        rule.prompt(None, "transcribe", "Dr. Who")


@pytest.mark.parametrize("name", CHATTING)
def test_transcribe_takes_it(folder_of, tmp_path, monkeypatch, name):
    """A window is a line; an answer of the tiny model is cut off, and so marked."""
    assert isinstance(rule_of(GlmAsrSpeech, tmp_path), TextRules)
    monkeypatch.setattr(ChatSpeech, "seconds", 4.0)
    monkeypatch.setattr(ChatSpeech, "max_tokens", 12)
    content = (sound(6.0)[:, None] * 32767).astype(np.int16)
    (tmp_path / "a.wav").write_bytes(wav16(content))
    command = ["transcribe", str(tmp_path / "a.wav"), "--model", str(folder_of(name))]
    ran = CliRunner().invoke(app, [*command, "--transcripts", "json", "-o", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    found = json.loads((tmp_path / "out" / "a.json").read_text())
    assert found
    assert all(0 <= line["start"] <= line["end"] <= 6 and line["doubtful"] for line in found)
