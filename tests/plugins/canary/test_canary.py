"""Canary and Cohere ASR against transformers: the models with the checks of every family, their
sounds, and whole answers and transcripts."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins import canary
from mmdeploy_llm_plugins.canary.model import FixedPositions
from mmdeploy_llm_plugins.canary.prompts import CanaryPrompts, CohereAsrPrompts
from mmdeploy_llm_plugins.canary.speech import CanarySpeech, CohereAsrSpeech
from safetensors.torch import load_file, save_file
from transformers.models.canary.modeling_canary import CanaryPositionalEmbedding
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError, RequestError
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.testing.media.truth import transformers_truth
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.media.sound_files import wav16

CANARY, COHERE = canary.provide_models()
CANARY_SOUNDS, COHERE_SOUNDS = canary.provide_media_processors()
RATE = 16000
SPECS = {"canary": CANARY, "cohere_asr": COHERE}
OPTIONS = (
    {"tie_word_embeddings": False},  # tied ones of a tiny Canary write one token for ever
    {"tie_word_embeddings": False, "attention_bias": False, "hidden_act": "gelu"},
)
LENGTHS = (0.5, 2.0, 1.2501, 3.17, 0.04)


@pytest.mark.full
class TestCanary(ModelConformance):
    spec = CANARY


@pytest.mark.full
class TestCohereAsr(ModelConformance):
    spec = COHERE


@pytest.mark.full
class TestCanarySounds(MediaProcessorConformance):
    spec = CANARY_SOUNDS


@pytest.mark.full
class TestCohereAsrSounds(MediaProcessorConformance):
    spec = COHERE_SOUNDS

    @staticmethod
    def make_reference(kind, checkpoint):
        """transformers' processor needs a language, which its features do not depend on."""
        truth = transformers_truth(kind, checkpoint)
        truth.processor = partial(truth.processor, language="en")
        return truth


def samples(seed, seconds):
    values = np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * 0.1
    return values.astype(np.float32)


def asked(text, sound):
    return {"prompt": text, "multimodal_data": {"audio": {"array": sound, "sampling_rate": RATE}}}


def answers_of(folder, prompts, **options):
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(str(folder), dtype="float32", quiet=True, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False, on_error="raise")
    return [list(output.outputs.token_ids) for output in outputs]


def answers_of_transformers(family, folder, sounds, *, source="de", target="de", marks="pnc"):
    """Returns the answers of transformers' `generate` to its processor's features and prompt; of
    Canary's prompt, to the one that its chat template is tested to write."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kind = {"canary": "ParakeetFeatureExtractor", "cohere_asr": "CohereAsrFeatureExtractor"}[family]
    extractor = getattr(transformers, kind).from_pretrained(folder)
    made = extractor(sounds, sampling_rate=RATE, return_tensors="pt")
    if family == "cohere_asr":
        processor = transformers.CohereAsrProcessor(extractor, tokenizer)
        ids = processor.get_decoder_prompt_ids(source, punctuation=marks == "pnc")
    else:
        prompt = (
            "<|startofcontext|><|startoftranscript|><|emo:undefined|>"
            f"<|{source}|><|{target}|><|{marks}|><|noitn|><|notimestamp|><|nodiarize|>"
        )
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    model = getattr(transformers, SPECS[family].architectures[0]).from_pretrained(folder).eval()
    found = model.generate(
        input_features=made["input_features"],
        attention_mask=made["attention_mask"],
        decoder_input_ids=torch.tensor([ids] * len(sounds)),
        max_new_tokens=20,
    )
    end = tokenizer.eos_token_id
    return [[*row, end][: [*row, end].index(end) + 1][:20] for row in found[:, len(ids) :].tolist()]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", SPECS)
def test_answers_are_those_of_transformers(tiny_folder, family, options):
    """Sounds of several lengths are answered in one step, as they are alone."""
    folder = tiny_folder(family, **options)
    sounds = [samples(seed, seconds) for seed, seconds in enumerate(LENGTHS)]
    expected = answers_of_transformers(family, folder, sounds)
    found = answers_of(folder, [asked("<|de|>", sound) for sound in sounds])
    assert found == expected
    assert len({tuple(answer) for answer in found}) > 1
    assert [answers_of(folder, [asked("<|de|>", one)])[0] for one in sounds[:2]] == expected[:2]


@pytest.mark.parametrize(
    ("family", "text", "meant"),
    [
        ("canary", "<|en|><|nopnc|>", {"source": "en", "target": "en", "marks": "nopnc"}),
        ("canary", "<|German|><|en|>", {"source": "de", "target": "en"}),
        ("cohere_asr", "<|fr|><|nopnc|>", {"source": "fr", "marks": "nopnc"}),
    ],
)
def test_what_is_asked_is_what_transformers_asks(tiny_folder, family, text, meant):
    folder, sounds = tiny_folder(family), [samples(7, 1.0), samples(8, 0.6)]
    expected = answers_of_transformers(family, folder, sounds, **meant)
    assert answers_of(folder, [asked(text, sound) for sound in sounds]) == expected


@pytest.mark.parametrize("family", SPECS)
def test_the_head_may_be_tied(tiny_folder, family):
    folder = tiny_folder(family, tie_word_embeddings=True)
    expected = answers_of_transformers(family, folder, [samples(3, 1.0)])
    assert answers_of(folder, [asked("<|de|>", samples(3, 1.0))]) == expected


def test_names_of_the_authors_own_checkpoint_are_read(tiny_folder, tiny_copy, tmp_path):
    """Those that transformers' table names: NeMo's."""
    folder = tiny_copy("cohere_asr", tmp_path / "own")
    names = (
        ("model.encoder.subsampling.linear.", "encoder.pre_encode.out."),
        ("model.encoder.subsampling.layers.", "encoder.pre_encode.conv."),
        (".conv.norm.", ".conv.batch_norm."),
        (".self_attn.relative_k_proj.", ".self_attn.linear_pos."),
        ("model.decoder.embed_tokens.", "transf_decoder._embedding.token_embedding."),
        ("model.decoder.norm.", "transf_decoder._decoder.final_layer_norm."),
        ("model.decoder.proj.", "encoder_decoder_proj."),
        ("proj_out.", "log_softmax.mlp.layer0."),
        ("model.", ""),
    )
    stored = {"preprocessor.featurizer.window": torch.zeros(4)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for new, own in names:
            name = name.replace(new, own)
        if name.startswith("decoder.layers."):
            name = f"transf_decoder._decoder.{name.removeprefix('decoder.')}"
            name = name.replace(".encoder_attn.q_proj.", ".second_sub_layer.query_net.")
            name = name.replace(".mlp.fc1.", ".third_sub_layer.dense_in.")
        stored[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    prompts = [asked("<|de|>", samples(3, 1.0))]
    assert answers_of(folder, prompts) == answers_of(tiny_folder("cohere_asr"), prompts)


def test_positions_are_those_of_transformers():
    theirs = CanaryPositionalEmbedding(50, 12)
    positions = torch.tensor([0, 1, 7, 49])
    assert torch.equal(FixedPositions(12)(positions), theirs(positions))


@pytest.mark.parametrize("family", SPECS)
def test_heads_that_no_checkpoint_has_are_refused(tiny_folder, family):
    folder = tiny_folder(family)
    config = read_checkpoint(folder).config
    own = getattr(config, "decoder_config", config)
    own.num_key_value_heads = 2
    with pytest.raises(ModelNotSupportedError, match="2 key heads of 16 channels for 4 heads"):
        build(SPECS[family], folder, config, torch.float32)


def test_an_encoder_of_another_size_is_refused(tiny_folder):
    folder = tiny_folder("canary")
    config = read_checkpoint(folder).config
    config.encoder_config.hidden_size = 48
    with pytest.raises(ModelNotSupportedError, match="hidden_size 64 of the decoder"):
        build(CANARY, folder, config, torch.float32)


@pytest.mark.parametrize("family", SPECS)
def test_a_sound_that_is_too_short_is_told(tiny_folder, family):
    folder = tiny_folder(family)
    with LLM(str(folder), dtype="float32", quiet=True) as llm:
        (short,) = llm.generate([asked("<|de|>", samples(0, 0.012))], use_tqdm=False)
    assert "too short" in short.error_msg


def test_a_sound_that_would_be_divided_is_refused(tiny_folder):
    """Cohere's extractor makes several of it; 8 seconds are the tiny checkpoint's limit."""
    prompts = [asked("<|de|>", samples(0, seconds)) for seconds in (8.0, 8.1)]
    with LLM(str(tiny_folder("cohere_asr")), dtype="float32", quiet=True) as llm:
        taken, refused = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    assert taken.is_ok
    assert "max_audio_clip_s" in refused.error_msg


@pytest.mark.parametrize("family", SPECS)
def test_transcribe_takes_it(tiny_folder, tmp_path, family):
    """A window is a line, since its answers have no times."""
    content = (samples(0, 12.0)[:, None] * 32767).astype(np.int16)
    (tmp_path / "a.wav").write_bytes(wav16(content))
    folder = tiny_folder(family, **OPTIONS[1])
    command = ["transcribe", str(tmp_path / "a.wav"), "--model", str(folder)]
    command += ["--language", "german", "--transcripts", "json", "-o", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    found = json.loads((tmp_path / "out" / "a.json").read_text())
    assert found
    assert all(0 <= line["start"] <= line["end"] <= 12 for line in found)


@pytest.mark.parametrize(
    ("rules", "asked", "words"),
    [
        (
            CanarySpeech,
            (None, "transcribe", ""),
            "does not recognize the language; give it: bg, cs",
        ),
        (CanarySpeech, ("ja", "transcribe", ""), "'ja' is no language"),
        (CanarySpeech, ("en", "transcribe", "Dr. Who"), "reads no words before"),
        (CohereAsrSpeech, ("en", "translate", ""), "cannot translate"),
        (CohereAsrSpeech, ("bg", "transcribe", ""), "give one of ar, de"),
    ],
)
def test_what_it_cannot_be_asked_is_told(tiny_folder, rules, asked, words):
    family = "canary" if rules is CanarySpeech else "cohere_asr"
    with pytest.raises(RequestError, match=words):
        rules(read_checkpoint(tiny_folder(family))).prompt(*asked)


def test_translation_is_from_a_language_to_english(tiny_folder):
    rule = CanarySpeech(read_checkpoint(tiny_folder("canary")))
    assert rule.prompt("german", "translate", "") == "<|german|><|en|>"
    with pytest.raises(RequestError, match="does not recognize the language"):
        rule.prompt(None, "translate", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<|de|><|en|>", "cannot translate, from de to en"),
        ("<|de|><|pnc|><|nopnc|>", "at most one to translate to"),
        ("<|ja|>", "has not all of"),
    ],
)
def test_prompts_that_it_cannot_take_are_told(tiny_folder, text, words):
    folder = tiny_folder("cohere_asr")
    with LLM(str(folder), dtype="float32", quiet=True) as llm:
        (found,) = llm.generate([asked(text, samples(0, 1.0))], use_tqdm=False)
    assert words in found.error_msg


def test_prompts_of_the_models_own_tokens_stay(tiny_folder):
    rule = CanaryPrompts(read_checkpoint(tiny_folder("canary")))
    own = "<|startofcontext|><|startoftranscript|><|de|>"
    ids = {own: [386, 387, 390]}
    assert rule.begin(own, (), ids.__getitem__) == (386, 387, 390)
    assert rule.begin(None, (387, 390), ids.__getitem__) == (386, 387, 390)


def test_a_vocabulary_without_the_first_token_is_told(tiny_copy, tmp_path):
    folder = tiny_copy("cohere_asr", tmp_path / "own")
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["added_tokens"] = [one for one in stored["added_tokens"] if one["content"] != "▁"]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="no token '▁'"):
        CohereAsrPrompts(read_checkpoint(folder))
    stored["model"] = {"vocab": [["<unk>", 0.0], ["▁", -1.0]]}  # as a unigram model has it
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    ids = CohereAsrPrompts(read_checkpoint(folder)).begin("<|de|>", (), lambda _: [9] * 9)
    assert ids[:2] == (385, 1)
