"""Parakeet against transformers: whole answers, their times, and transcripts."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.parakeet import provide_media_processors
from mmdeploy_llm_plugins.parakeet.speech import ParakeetSpeech, texts_of
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.errors import CheckpointError, RequestError
from mmdeploy_llm.testing import MediaProcessorConformance
from mmdeploy_llm.testing.media.subject import ProcessorSubject
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.media.sound_files import wav16
from tests.plugins.parakeet.checkpoints import BLANK, RATE, write

WAYS = ("CTC", "RNNT", "TDT")
ODD = {
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "hidden_act": "gelu",
    "attention_bias": False,
    "convolution_bias": False,
    "conv_kernel_size": 5,
    "subsampling_factor": 4,
    "subsampling_conv_kernel_size": 5,
    "num_mel_bins": 24,
    "scale_input": False,
}
DECODER = {"decoder_hidden_size": 20, "num_decoder_layers": 3, "hidden_act": "silu"}


def samples(seed, seconds):
    values = np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * 0.1
    return values.astype(np.float32)


SOUNDS = [samples(seed, seconds) for seed, seconds in enumerate((0.9, 2.0, 1.25, 3.1, 2.0))]


@pytest.mark.full
class TestSounds(MediaProcessorConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory):
        spec, *_ = provide_media_processors()
        checkpoint = read_checkpoint(write(tmp_path_factory.mktemp("sounds"), "TDT"))
        own = ProcessorSubject(
            spec=spec, checkpoint=checkpoint, item_options=({"start": 0.1}, {"end": 0.25})
        )
        yield own
        own.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    few = {"RNNT": {"max_symbols_per_step": 4}}
    return {way: write(tmp_path_factory.mktemp(way), way, **few.get(way, {})) for way in WAYS}


def asked(sound, prompt=""):
    return {
        "prompt": prompt,
        "multimodal_data": {"audio": {"array": sound, "sampling_rate": RATE}},
    }


def opened(folder, **options):
    return LLM(str(folder), dtype="float32", quiet=True, **options)


def generated(llm, prompts, **params):
    params = SamplingParams(temperature=0, **{"max_tokens": 1000, **params})
    return llm.generate(prompts, params, use_tqdm=False, on_error="raise")


def words(output):
    return [one for one in output.outputs.token_ids if one != BLANK]


def reference(folder, sounds):
    """Yields tokens and the frames at which they begin and end, as transformers has them."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    extractor = transformers.ParakeetFeatureExtractor.from_pretrained(folder)
    for sound in sounds:
        made = extractor(sound, sampling_rate=RATE, return_tensors="pt")
        if config.model_type == "parakeet_ctc":
            yield collapsed(model.generate(**made)[0].tolist())
            continue
        found = model.generate(**made, max_new_tokens=2000)  # else it warns
        ids, ahead = found.sequences[0], found.durations[0]
        starts = ahead.cumsum(0) - ahead
        spans = ahead if config.model_type == "parakeet_tdt" else torch.ones_like(ahead)
        own = [
            (int(token), [int(start), int(start + span)])
            for token, start, span in zip(ids, starts, spans, strict=True)
            if token != BLANK
        ]
        yield [one for one, _ in own], [span for _, span in own]


def collapsed(frames):
    tokens, spans = [], []
    for at, token in enumerate(frames):
        if token != BLANK and at and frames[at - 1] == token:
            spans[-1][1] = at + 1
        elif token != BLANK:
            tokens.append(token)
            spans.append([at, at + 1])
    return tokens, spans


@pytest.mark.parametrize("way", WAYS)
def test_answers_and_times_are_those_of_transformers(folders, way):
    expected = list(reference(folders[way], SOUNDS))
    assert all(len(tokens) > 0 for tokens, _ in expected)
    with opened(folders[way]) as llm:
        outputs = generated(llm, [asked(own, "<|timestamps|>") for own in SOUNDS])
        alone = [generated(llm, [asked(own)])[0] for own in SOUNDS]
    assert [words(output) for output in outputs] == [tokens for tokens, _ in expected]
    assert [words(output) for output in alone] == [tokens for tokens, _ in expected]
    found = [output.outputs[0].attention.argmax(-1) for output in outputs]
    counts = [len(tokens) for tokens, _ in expected]
    spans = [own[:count].tolist() for own, count in zip(found, counts, strict=True)]
    assert spans == [own for _, own in expected]
    assert all(output.outputs.finish_reason == "stop" for output in outputs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "fields"),
    [
        ("CTC", {}),
        ("RNNT", {**DECODER, "max_symbols_per_step": 1}),
        ("RNNT", {**DECODER, "max_symbols_per_step": 3}),
        ("TDT", {**DECODER, "durations": [0, 1, 2]}),
        ("TDT", {**DECODER, "durations": [0, 1, 2, 3, 4, 5, 6]}),
    ],
)
def test_all_of_a_config_is_read(tmp_path, way, fields):
    extractor = {"feature_size": 24, "hop_length": 128, "n_fft": 400, "preemphasis": 0.9}
    folder = write(tmp_path, way, encoder=ODD, extractor=extractor, **fields)
    expected = list(reference(folder, SOUNDS))
    assert any(tokens for tokens, _ in expected)
    with opened(folder) as llm:
        outputs = generated(llm, [asked(own) for own in SOUNDS])
    assert [words(output) for output in outputs] == [tokens for tokens, _ in expected]


@pytest.mark.full
def test_durations_are_those_of_the_config(tmp_path):
    """transformers 5.24 takes the place of a duration in the list for the duration: the same where
    the list is 0, 1, 2 .., as in all published checkpoints."""
    durations = [1, 3, 0, 2]
    folder = write(tmp_path, "TDT", durations=durations)
    model = transformers.ParakeetForTDT.from_pretrained(folder).eval()
    extractor = transformers.ParakeetFeatureExtractor.from_pretrained(folder)
    expected = []
    for sound in SOUNDS:
        made = extractor(sound, sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            expected.append(walked(model, made, durations))
    with opened(folder) as llm:
        outputs = generated(llm, [asked(own) for own in SOUNDS])
    assert any(expected)
    assert [words(output) for output in outputs] == expected


def walked(model, made, durations):
    """Returns the tokens of a sound by the joint network of transformers, one frame at a time."""
    heard = model.get_audio_features(**made)
    frames, tokens, at = heard.pooler_output[0, : int(heard.attention_mask.sum())], [], 0
    for _ in range(10 * len(frames)):
        if at >= len(frames):
            break
        said = model.decoder(torch.tensor([[BLANK, *tokens]]))[:, -1]
        logits = model.joint(said, frames[at][None])[0]
        token, ahead = int(logits[: BLANK + 1].argmax()), int(logits[BLANK + 1 :].argmax())
        at += max(durations[ahead], token == BLANK)
        tokens += [token] if token != BLANK else []
    return tokens


@pytest.mark.parametrize("way", ["RNNT", "TDT"])
def test_a_sound_without_words_has_an_empty_answer(tmp_path, way):
    folder = write(tmp_path, way, bias=30.0)
    with opened(folder) as llm:
        (output,) = generated(llm, [asked(SOUNDS[0], "<|timestamps|>")])
    assert words(output) == []
    assert output.outputs.text == ""
    assert output.outputs.finish_reason == "stop"


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_cut_where_it_is_asked(folders, way):
    """Its neighbours in the batch are not."""
    with opened(folders[way]) as llm:
        whole = [words(output) for output in generated(llm, [asked(own) for own in SOUNDS])]
        params = [SamplingParams(temperature=0, max_tokens=most) for most in (2, 1000, 1)]
        prompts = [asked(own, "<|timestamps|>") for own in SOUNDS[:3]]
        cut = llm.generate(prompts, params, use_tqdm=False, on_error="raise")
    assert [words(output) for output in cut] == [whole[0][:2], whole[1], whole[2][:1]]
    assert [output.outputs.finish_reason for output in cut] == ["length", "stop", "length"]
    assert [len(output.outputs[0].attention) for output in cut] == [2, len(whole[1]) + 1, 1]


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_those_of_the_frames(folders, way):
    """The end has the probability 1."""
    with opened(folders[way]) as llm:
        (output,) = generated(llm, [asked(SOUNDS[3])], logprobs=2)
    entries = list(zip(output.outputs.token_ids, output.outputs.logprobs, strict=True))
    assert entries[-1][0] == BLANK
    assert entries[-1][1][BLANK].logprob == 0
    found = [entry[token].logprob for token, entry in entries[:-1]]
    assert all(entry[token].rank == 1 for token, entry in entries)
    assert found == pytest.approx(list(logprobs_of(folders[way], SOUNDS[3])), abs=1e-4)


def logprobs_of(folder, sound):
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    extractor = transformers.ParakeetFeatureExtractor.from_pretrained(folder)
    made = extractor(sound, sampling_rate=RATE, return_tensors="pt")
    ((tokens, spans),) = reference(folder, [sound])
    with torch.no_grad():
        if config.model_type == "parakeet_ctc":
            found = model(**made).logits[0].log_softmax(-1)
            rows = [found[start] for start, _ in spans]
        else:
            ids = torch.tensor([[BLANK, *tokens[:-1]]])
            frames = model.get_audio_features(**made).pooler_output[0]
            said = model.decoder(ids)[0]
            at = [start for start, _ in spans]
            rows = model.joint(said, frames[at])[:, : BLANK + 1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"temperature": 0.7}, "temperature: this model hears one answer"),
        ({"temperature": 0, "repetition_penalty": 1.2}, "repetition_penalty: "),
        ({"temperature": 0, "min_tokens": 5}, "min_tokens: "),
        ({"temperature": 0, "ignore_eos": True}, "ignore_eos: "),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, "logit_bias: "),
        ({"temperature": 0, "bad_words": ["the"]}, "bad_words: "),
        ({"temperature": 0, "guided_decoding": {"regex": "a+"}}, "guided_decoding.regex: "),
    ],
)
def test_other_answers_than_the_likeliest_are_refused(folders, params, told):
    with opened(folders["TDT"]) as llm:
        found = llm.generate(
            [asked(SOUNDS[0]), asked(SOUNDS[1])],
            [SamplingParams(**params), SamplingParams(temperature=0)],
            use_tqdm=False,
        )
    assert told in found[0].error_msg
    assert found[0].error_code == 400
    assert found[1].error_code == 200


def test_words_in_a_prompt_are_refused(folders):
    with opened(folders["CTC"]) as llm:
        (found,) = llm.generate(
            [asked(SOUNDS[0], "Dr. Who")], SamplingParams(temperature=0), use_tqdm=False
        )
    assert "hears and reads no words, found 'Dr. Who'" in found.error_msg


@pytest.mark.full
def test_drafts_change_nothing(folders):
    prompts = [asked(own) for own in SOUNDS]
    with opened(folders["RNNT"]) as llm:
        expected = [words(output) for output in generated(llm, prompts)]
    with opened(folders["RNNT"], speculative="ngram") as llm:
        assert [words(output) for output in generated(llm, prompts)] == expected


def test_the_extractor_may_be_in_the_file_of_the_processor(tmp_path):
    folder = write(tmp_path, "TDT", extractor={"hop_length": 200})
    expected = [tokens for tokens, _ in reference(folder, SOUNDS[:2])]
    fields = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    own = {"processor_class": "ParakeetProcessor", "feature_extractor": fields}
    (folder / "processor_config.json").write_text(json.dumps(own))
    with opened(folder) as llm:
        outputs = generated(llm, [asked(sound) for sound in SOUNDS[:2]])
        short, long = llm.generate(
            [asked(SOUNDS[0][:399]), asked(SOUNDS[0][:400])],
            SamplingParams(temperature=0),
            use_tqdm=False,
        )
    assert [words(output) for output in outputs] == expected
    assert short.error_code == 400  # a frame
    assert long.error_code == 200
    rule = ParakeetSpeech(read_checkpoint(folder))
    assert rule.rate == RATE
    assert rule.seconds == 30


def test_too_long_a_sound_is_refused(tmp_path):
    folder = write(tmp_path, "CTC", encoder={"max_position_embeddings": 25})
    with opened(folder) as llm:
        found = llm.generate(
            [asked(SOUNDS[1]), asked(SOUNDS[3])], SamplingParams(temperature=0), use_tqdm=False
        )
    assert found[0].error_code == 200
    assert "max_position_embeddings" in found[1].error_msg


def test_another_start_is_refused(tmp_path):
    folder = write(tmp_path, "TDT")
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 5}))
    with pytest.raises(CheckpointError, match="decoder_start_token_id is 5"):
        opened(folder)


def test_other_mel_channels_are_refused(tmp_path):
    folder = write(tmp_path, "CTC", extractor={"feature_size": 24})
    with pytest.raises(CheckpointError, match="makes 24 mel channels"):
        opened(folder)


def test_texts_of_tokens_are_that_of_the_answer(folders):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["TDT"])
    text = "  Zwölf Boxkämpfer, \U0001f600 jagen 你好!"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    decode = partial(tokenizer.decode, group_tokens=False)
    for own in (ids, ids[:1] * 3, ids[::-1], ids[4:] + ids[:9], []):  # some are no characters
        found = texts_of(own, decode)
        assert "".join(found) == decode(own)
        assert len(found) == len(own)


def test_lines_end_with_sentences_and_before_pauses(folders):
    """Marks take no time of a word."""
    rule = ParakeetSpeech(read_checkpoint(folders["TDT"]))
    texts = ["Hel", "lo", ".", " How", " are", " you", "?", " Fine"]
    frames = [(0, 1), (2, 3), (9, 10), (10, 12), (12, 13), (30, 31), (31, 31), (33, 40)]
    weights = np.zeros((9, 2, 41), dtype=np.float32)
    for at, spans in enumerate([*frames, (0, 0)]):
        weights[at, [0, 1], spans] = 1
    own = SimpleNamespace(token_ids=[*range(8), BLANK], attention=weights, logprobs=None)
    heard = rule.read_words(
        SimpleNamespace(outputs=[own]), 3.0, None, lambda ids: "".join(texts[one] for one in ids)
    )
    assert [one.ids for one in heard.spoken] == [(0, 1, 2), (3, 4), (5, 6), (7,)]
    times = [(one.text, one.start, one.end) for line in heard.spoken for one in line.words]
    assert times == [
        ("Hello.", 0, pytest.approx(0.24)),
        (" How", pytest.approx(0.8), pytest.approx(0.96)),
        (" are", pytest.approx(0.96), pytest.approx(1.04)),
        (" you?", pytest.approx(2.4), pytest.approx(2.48)),
        (" Fine", pytest.approx(2.64), 3.0),
    ]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("en", "transcribe", ""), "is not asked for 'en'"),
        ((None, "translate", ""), "cannot translate"),
        ((None, "transcribe", "Dr. Who"), "no words before"),
    ],
)
def test_what_it_cannot_be_asked_is_told(folders, asked, told):
    with pytest.raises(RequestError, match=told):
        ParakeetSpeech(read_checkpoint(folders["CTC"])).prompt(*asked)


def test_the_same_token_twice_is_written_twice(folders):
    """transformers' tokenizer of the family would join them, as it does frames of CTC."""
    with opened(folders["CTC"]) as llm:
        tokenizer = llm.get_tokenizer()
    ids = tokenizer("aa", add_special_tokens=False)["input_ids"]
    assert len(set(ids)) < len(ids)
    assert tokenizer.decode(ids) == "aa"


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_transcribe_tells_when_words_are_spoken(folders, tmp_path, way):
    """Windows are joined, and words are in their lines."""
    content = (samples(0, 32.0)[:, None] * 32767).astype(np.int16)
    (tmp_path / "a.wav").write_bytes(wav16(content))
    command = ["transcribe", str(tmp_path / "a.wav"), "--model", str(folders[way])]
    command += ["--transcripts", "json", "-o", str(tmp_path / "out"), "--word-timestamps"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    found = json.loads((tmp_path / "out" / "a.json").read_text())
    assert len(found) > 0
    assert all(0 <= line["start"] <= line["end"] <= 32 for line in found)
    times = [(own["start"], own["end"]) for line in found for own in line["words"]]
    assert all(start <= end for start, end in times)
    assert times[-1][1] > 20
    for line in found:
        told = "".join(own["word"] for own in line["words"])
        assert "".join(told.split()) == "".join(line["text"].split())
