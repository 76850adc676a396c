"""Parakeet against transformers: whole answers, their times, and transcripts."""

import json

import numpy as np
import pytest
import torch
import transformers

from mmdeploy_llm import LLM, SamplingParams
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {way: write(tmp_path_factory.mktemp(way), way) for way in WAYS}


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
    assert all(0 < len(tokens) for tokens, _ in expected)
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
