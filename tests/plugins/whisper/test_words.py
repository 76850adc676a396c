"""Times of words are those of transformers: its attention weights, its path, its words."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.whisper.speech import WhisperSpeech
from mmdeploy_llm_plugins.whisper.words import alignment_heads, frames_of, words_of
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import WordTimes
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.media.sound_files import noise, wav16

RATE = 16_000
HEADS = [[1, 0], [0, 1], [1, 1]]
PARAMS = SamplingParams(max_tokens=24, logprobs=1, temperature=0)
LENGTHS = (4.0, 1.3, 2.71, 0.5)
TIGHT = {"num_gpu_blocks_override": 4, "block_size": 16, "max_model_len": 60}


def sound(seed, seconds):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.1, round(seconds * RATE)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A checkpoint whose answers vary, and that names its heads."""
    own = tmp_path_factory.mktemp("words") / "whisper"
    shutil.copytree(tiny_folder("whisper", tie_word_embeddings=False), own)
    path = own / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alignment_heads": HEADS}))
    return own


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


def their_weights(model, folder, samples, ids):
    """Returns the weights with which each of the ids but the first was chosen, [n, h, L]."""
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    made = extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
    with torch.no_grad():
        out = model(made, decoder_input_ids=torch.tensor([ids]), output_attentions=True)
    chosen = torch.stack([out.cross_attentions[layer][0, head] for layer, head in HEADS], 1)
    return chosen[:-1], out.cross_attentions


class Generated(dict):
    __getattr__ = dict.__getitem__


def their_times(model, cross, num_before, ids, num_frames):
    """Returns the seconds at which transformers' generate ends each of the ids."""
    steps = [tuple(layer[:, :, :num_before] for layer in cross)]
    steps += [
        tuple(layer[:, :, at : at + 1] for layer in cross) for at in range(num_before, len(ids) - 1)
    ]
    made = Generated(cross_attentions=steps, sequences=torch.tensor([ids]))
    return model._extract_token_timestamps(
        made, HEADS, num_frames=np.array([num_frames]), num_input_ids=num_before
    )[0].tolist()


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"native_kernels": False},
        {"max_num_batched_tokens": 3, "max_num_seqs": 3},
        TIGHT,
        {"encoder_cache_memory": 2 * 200 * 2 * 3 * 64 * 4},
    ],
    ids=["", "torch", "few tokens a step", "preempted", "few items"],
)
def test_times_of_tokens_are_those_of_transformers(folder, reference, options):
    """In a batch of several lengths: weights, and the times of each token."""
    speech = WhisperSpeech(read_checkpoint(folder))
    assert isinstance(speech, WordTimes)
    asked = [speech.with_words(speech.prompt(own, "transcribe", "")) for own in (None, "de")]
    sounds = [sound(seed, seconds) for seed, seconds in enumerate(LENGTHS)]
    prompts = [
        {
            "prompt": asked[at % 2],
            "multimodal_data": {"audio": {"array": own, "sampling_rate": RATE}},
        }
        for at, own in enumerate(sounds)
    ]
    options = {"kv_cache_memory": 2**22, **options}
    with LLM(str(folder), dtype="float32", use_warmup=False, **options) as llm:
        outputs = llm.generate(prompts, PARAMS)
        tokenizer = llm.get_tokenizer()
    for output, samples in zip(outputs, sounds, strict=True):
        own = output.outputs[0]
        prompt, ids = output.prompt_token_ids, own.token_ids
        whole = [*prompt, *ids]
        theirs, cross = their_weights(reference, folder, samples, whole)
        wanted = theirs[len(prompt) - 1 :]
        assert own.attention.shape == (len(ids), 3, 200)
        torch.testing.assert_close(torch.from_numpy(own.attention), wanted, atol=1e-5, rtol=1e-3)
        num_before = len(whole) - len(ids)
        num_before += next(at for at, one in enumerate(ids) if one >= speech._first)
        num_frames = -(-len(samples) // 160)
        times = their_times(reference, cross, num_before, whole, num_frames)
        first = num_before - len(prompt)
        mine = frames_of(own.attention[first + 1 :, :, : num_frames // 2], 7) * 0.02
        far = np.abs(mine - np.array(times[num_before:-1]))
        assert far.max() <= 0.0201, far
        heard = speech.read_words(output, len(samples) / RATE, "de", tokenizer.decode)
        assert [one.ids for one in heard.spoken] == [one.ids for one in speech.read(ids).spoken]
        for sentence in heard.spoken:
            text = "".join(word.text for word in sentence.words)
            assert text == tokenizer.decode(list(sentence.ids))
            assert all(0 <= word.start <= word.end <= 4.0 for word in sentence.words)
            assert all(0 <= word.probability <= 1 for word in sentence.words)
        assert "attention" not in own.to_dict()
        json.loads(output.to_json())


@pytest.mark.full
def test_the_command_writes_words(folder, tiny_folder, tmp_path):
    """Windows are joined; the option is part of what transcripts are made of; a model that tells no
    times of words is refused before anything is loaded."""
    (tmp_path / "a.wav").write_bytes(wav16(noise(9.0, seed=1)))
    asked = ["transcribe", str(tmp_path), "--dtype", "float32", "--transcripts", "json,vtt,srt"]
    asked += ["--overlap", "1", "--engine", "kv_cache_memory=4194304"]
    ours = [*asked, "--model", str(folder)]
    found = CliRunner().invoke(app, [*ours, "--word-timestamps"])
    assert found.exit_code == 0, found.output
    rows = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert rows
    for row in rows:
        assert "".join(word["word"] for word in row["words"]) == row["text"]
        begins = [word["start"] for word in row["words"]]
        assert begins == sorted(begins)
    said = json.loads((tmp_path / "a.source").read_text())
    assert said["vtt"]["values"]["word_timestamps"] is True
    found = CliRunner().invoke(app, ours)
    assert found.exit_code == 1
    assert "word_timestamps is False, was True" in found.output
    found = CliRunner().invoke(
        app, [*asked, "--word-timestamps", "--model", str(tiny_folder("moonshine"))]
    )
    assert found.exit_code == 2, found.output
    assert "does not tell when a word is spoken" in found.output
    assert "cacheable tokens" not in found.output


@pytest.mark.full
def test_what_is_not_asked_is_not_there(folder):
    speech = WhisperSpeech(read_checkpoint(folder))
    sounds = {"audio": {"array": sound(0, 1.0), "sampling_rate": RATE}}
    asked = speech.prompt(None, "transcribe", "")
    both = (asked, speech.with_words(asked))
    prompts = [{"prompt": own, "multimodal_data": sounds} for own in both]
    with LLM(str(folder), dtype="bfloat16", use_warmup=False, kv_cache_memory=2**22) as llm:
        plain, timed = llm.generate(prompts, PARAMS)
        (repeated,) = llm.generate(prompts[1:], PARAMS)  # with what the prefix cache holds
    assert plain.outputs[0].attention is None
    assert plain.outputs.token_ids == timed.outputs.token_ids
    assert np.abs(timed.outputs[0].attention - repeated.outputs[0].attention).max() < 1e-6
    assert speech.read_words(plain, 1.0, None, str) == speech.read(plain.outputs.token_ids)


@pytest.mark.parametrize("shape", [(1, 2, 30), (7, 3, 50), (50, 1, 7), (4, 2, 3), (2, 1, 1)])
def test_the_path_is_that_of_transformers(shape):
    weights = torch.from_numpy(np.random.default_rng(sum(shape)).random(shape, dtype=np.float32))
    x = weights.transpose(0, 1)
    x = (x - x.mean(-2, keepdim=True)) / x.std(-2, keepdim=True, unbiased=False)
    mean = _median_filter(x, 7).mean(0)
    rows, columns = _dynamic_time_warping(-mean.nan_to_num().double().numpy())
    expected = columns[np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)]
    assert frames_of(weights.numpy(), 7).tolist() == expected.tolist()


def test_a_path_through_nothing():
    assert frames_of(np.zeros((3, 2, 0), np.float32), 7).tolist() == [0, 0, 0]
    assert frames_of(np.zeros((0, 2, 9), np.float32), 7).tolist() == []


@pytest.mark.parametrize("language", ["en", "german", "zh", "yue", "thai", None, "klingon"])
def test_words_are_those_of_transformers(tiny_folder, language):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder("whisper"))
    names = {"zh": "chinese", "yue": "cantonese"}
    name = "english" if language in ("en", None) else names.get(language, language)
    for text in (" A fox, (or two) jumps -- over.", " 狐は跳ぶ。犬", ' "Yes," he said.', " é 😀"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        theirs, _, places = _combine_tokens_into_words(tokenizer, ids, name)
        found = list(words_of(ids, language, tokenizer.eos_token_id, tokenizer.decode))
        assert [word.text for word in found] == theirs
        assert [list(word.places) for word in found] == places


def test_heads(folder, caplog):
    checkpoint = read_checkpoint(folder)
    assert alignment_heads(checkpoint) == ((1, 0), (0, 1), (1, 1))

    def of(heads):
        return replace(checkpoint, generation={**checkpoint.generation, "alignment_heads": heads})

    config = checkpoint.config
    upper = range(config.decoder_layers // 2, config.decoder_layers)
    every = tuple((one, two) for one in upper for two in range(config.decoder_attention_heads))
    assert alignment_heads(of(None)) == every
    for wrong in ([[99, 0]], [[0, 99]], [[-1, 0]], [1, 2], "ab", [["x", 0]]):
        with pytest.raises(CheckpointError, match="alignment_heads"):
            alignment_heads(of(wrong))
    assert WhisperSpeech(of(None)).with_words("") == "<|words|>"
    assert "alignment_heads" in caplog.text
