"""Families with sounds answer as transformers does: its processor's ids, its generate's tokens."""

import base64
import json
import shutil
from functools import cached_property

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_media.sound.extractors import GraniteSpeechFeatureExtractor
from mmdeploy_llm_plugins.transformers_media.sound.processor import AnyAudioProcessor
from safetensors.torch import save_file

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import CheckpointError, MediaError, MediaLimitError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.testing.tiny import write_family
from tests.data.files.test_kinds_by_tracks import film
from tests.media.sound_files import wav16
from tests.plugins.transformers_any.sound_families import CHUNK, FAMILIES, RATE, sound

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
FIRST = "qwen2_audio"


class Reference:
    """transformers' model and processor of a family, on one prompt at a time."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.described = FAMILIES[name]
        self.marker = self.described.chat_template.split("'audio' -%}{{- '")[1].split("'")[0]

    @cached_property
    def model(self):
        base = getattr(transformers, self.described.architecture)
        return base.from_pretrained(self.folder, attn_implementation="eager").eval()

    @cached_property
    def tokenizer(self):
        return transformers.AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def processor(self):
        name = self.described.files["processor_config.json"]["processor_class"]
        base = getattr(transformers, name)
        if name != "GraniteSpeechProcessor":
            return base.from_pretrained(self.folder)
        # Its own extractor needs torchaudio; bit for bit the same, compared on 2026-11-26.
        accepting = {"check_argument_for_proper_class": lambda *_: None}
        return type(name, (base,), accepting)(GraniteSpeechFeatureExtractor(), self.tokenizer)

    def of_one(self, samples):
        """Returns the text of a sound and its tensors."""
        if self.name == "voxtral":
            features = self.processor._retrieve_input_features(
                [samples],
                max_source_positions=100 * CHUNK,
                sampling_rate=RATE,
                padding=True,
                truncation=False,
                pad_to_multiple_of=CHUNK * RATE,
                return_tensors="pt",
            )
            text = "[BEGIN_AUDIO]" + "[AUDIO]" * (25 * len(features))
            return text, {"input_features": features}
        made = self.processor(
            text=[self.marker], audio=[samples], sampling_rate=RATE, return_tensors="pt"
        )
        of_text = ("input_ids", "attention_mask")
        tensors = {name: made[name] for name in made if name not in of_text}
        return self.tokenizer.decode(made["input_ids"][0]), tensors

    @torch.inference_mode()
    def generate(self, prompt, sounds):
        """Returns the ids of the prompt and of the answer, and the log-probabilities of these."""
        made = [self.of_one(samples) for samples in sounds]
        first, *others = prompt.split(self.marker)
        pairs = zip(made, others, strict=True)
        prompt = first + "".join(f"{text}{after}" for (text, _), after in pairs)
        names = made[0][1] if made else {}
        tensors = {name: torch.cat([one[1][name] for one in made]) for name in names}
        ids = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **tensors,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        scores = [float(x[0].log_softmax(-1).max()) for x in out.logits]
        return ids[0].tolist(), tokens, scores


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory):
    found = {}

    def reference(name):
        if name not in found:
            folder = write_family(FAMILIES[name], tmp_path_factory.mktemp(name))
            found[name] = Reference(name, folder)
        return found[name]

    return reference


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.full] * (name != FIRST)) for name in sorted(FAMILIES)
    ]
)
def reference(request, reference_of):
    return reference_of(request.param)


def open_llm(folder, **options):
    fixed = {"num_threads": 1, "use_warmup": False, "block_size": 16, "dtype": "float32"}
    return LLM(model=str(folder), limit_mm_per_prompt={"audio": 3}, **{**fixed, **options})


def given(samples):
    return {"array": samples, "sampling_rate": RATE}


def test_as_transformers(reference):
    """One sound, one shorter, two of a length in a prompt and none: together and in chunks."""
    marker = reference.marker
    cases = [
        (f"x {marker} What is it?", [sound(1.0)]),
        (f"{marker} What is it?", [sound(0.4, 1)]),
        (f"x {marker} and {marker} Which?", [sound(1.7, 2), sound(1.7, 3)]),
        ("What is it?", []),
    ]
    prompts = [
        {"prompt": text, "multimodal_data": {"audio": [given(one) for one in sounds]}}
        for text, sounds in cases
    ]
    with open_llm(reference.folder, max_num_batched_tokens=32) as llm:
        outputs = llm.generate(prompts, GREEDY)
        again = llm.generate(prompts, GREEDY)
    for (text, sounds), output, second in zip(cases, outputs, again, strict=True):
        assert output.error_msg is None
        ids, tokens, scores = reference.generate(text, sounds)
        assert output.prompt_token_ids == ids
        assert list(output.outputs.token_ids) == tokens
        found = [
            entry[token].logprob
            for entry, token in zip(output.outputs.logprobs, tokens, strict=True)
        ]
        assert found == pytest.approx(scores, abs=1e-4)
        assert list(second.outputs.token_ids) == tokens
        assert second.num_cached_tokens > 0 or len(ids) <= 16


def processor_of(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    return AnyAudioProcessor(Checkpoint(folder=folder, config=config), {})


HERE = MediaLimits(isolation="thread")


def test_longer_than_the_model_hears_is_refused_not_cut(reference):
    processor = processor_of(reference.folder)
    most = {"qwen2_audio": CHUNK, "audioflamingo3": 6, "glmasr": 6}.get(reference.name)
    assert processor.most == most
    if most is not None:
        longest, longer = sound(most), sound(most + 1 / RATE)
        item = processor.decode(given(longest), HERE)
        assert processor.count_tokens(item, {}) == processor.process(item, {}).num_tokens
        with pytest.raises(MediaLimitError, match=rf"longer than the {most} seconds that this mod"):
            processor.count_tokens(processor.decode(given(longer), HERE), {})
    else:
        item = processor.decode(given(sound(5 * CHUNK)), HERE)
        short = processor.decode(given(sound(CHUNK)), HERE)
        assert processor.count_tokens(item, {}) > 4 * processor.count_tokens(short, {})


def test_what_was_done_to_a_sound_is_in_the_output_and_the_record(reference_of, tmp_path):
    """Also of a recording in WebM, which is a sound by its tracks."""
    reference = reference_of(FIRST)
    samples = np.round(sound(0.5) * 20000).astype(np.int16)
    opposite = wav16(np.ascontiguousarray(np.stack([samples, -samples], axis=1)))
    (tmp_path / "talk.webm").write_bytes(film("webm", "libopus"))
    (tmp_path / "wires.wav").write_bytes(opposite)
    prompt = f"{reference.marker} What?"
    with open_llm(reference.folder) as llm:
        output, plain = llm.generate(
            [
                {"prompt": prompt, "multimodal_data": {"audio": one}}
                for one in (opposite, wav16(samples[:, None]))
            ],
            GREEDY,
        )
        options = {"prompt": "What?", "sampling_params": GREEDY, "use_tqdm": False}
        summary = llm.run_batch(tmp_path, tmp_path / "out.jsonl", kinds=("audio",), **options)
        records = {record.id: record for record in summary.records()}
    words = "its channels are opposite and cancel each other: channel 1 alone is heard there"
    assert (output.media_notes, plain.media_notes) == ((words,), ())
    assert output.outputs.token_ids == plain.outputs.token_ids
    assert {name: [*record.media_notes] for name, record in records.items()} == {
        "talk.webm": [], "wires.wav": [words]
    }  # fmt: skip
    assert any(note.startswith("1 record says") for note in summary.notes)


def test_what_is_too_short_says_so(reference):
    processor = processor_of(reference.folder)
    item = processor.decode(given(sound(1 / RATE)), HERE)
    if reference.name == "voxtral":  # each sound is filled with silence
        assert processor.count_tokens(item, {}) == 25
    else:
        with pytest.raises(MediaError, match=r"too short for this model: 0\.0001 s"):
            processor.process(item, {})


def test_counts_keys_and_options(reference_of):
    processor = processor_of(reference_of(FIRST).folder)
    samples = np.round(sound(1.5) * 20000).astype(np.int16)[:, None]
    item = processor.decode(wav16(samples), HERE)
    made = processor.process(item, {})
    part = processor.process(item, {"start": 0.5, "end": 1.0})
    assert part.num_tokens == processor.count_tokens(item, {"start": 0.5, "end": 1.0}) == 12
    assert processor.prompt_text(item, {}) == made.prompt_text
    assert (made.seconds, part.seconds) == (1.5, 0.5)
    assert made.key != part.key != processor.process(item, {"start": 0.5}).key
    last = samples.copy()
    last[-1] ^= 1
    assert processor.process(processor.decode(wav16(last), HERE), {}).key != made.key
    assert processor.process(processor.decode(wav16(samples), HERE), {}).key == made.key


@pytest.mark.full
def test_embeddings_take_the_place_of_a_sound(reference_of):
    reference = reference_of(FIRST)
    prompt = f"x {reference.marker} What?"
    with open_llm(reference.folder) as llm:
        embeds = torch.randn(5, 64)
        wanted = {"prompt": prompt, "multimodal_data": {"audio_embeds": embeds}}
        (output,) = llm.generate(wanted, GREEDY)
    assert output.error_msg is None
    assert len(output.outputs.token_ids) == 8


@pytest.mark.full
def test_a_chat_with_a_file(reference_of, tmp_path):
    reference = reference_of(FIRST)
    samples = np.round(sound(1.0) * 20000).astype(np.int16)
    path = tmp_path / "a.wav"
    path.write_bytes(wav16(samples[:, None]))
    content = [{"type": "audio", "audio": str(path)}, {"type": "text", "text": "What?"}]
    with open_llm(reference.folder) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], GREEDY)
    prompt = f"<|im_start|>user\n{reference.marker}What?<|im_end|>\n<|im_start|>assistant\n"
    ids, tokens, _ = reference.generate(prompt, [samples / np.float32(32768)])
    assert output.prompt_token_ids == ids
    assert list(output.outputs.token_ids) == tokens


@pytest.mark.full
def test_forms_of_one_sound_in_a_prompt(reference_of, tmp_path):
    """A pair, a row of datasets, an array with its option, base64 as OpenAI's, and a path."""
    reference = reference_of(FIRST)
    samples = np.round(sound(1.0) * 20000).astype(np.int16)
    path, blob = tmp_path / "a.wav", wav16(samples[:, None])
    path.write_bytes(blob)
    forms = [
        (samples, RATE),
        [(samples, RATE)],
        {"bytes": blob, "path": None},
        {"bytes": None, "path": str(path)},
        {"audio": samples, "sampling_rate": RATE},
        {"data": base64.b64encode(blob).decode(), "format": "wav"},
        {"audio": str(path), "end": 60},
    ]
    prompt = f"x {reference.marker} What?"
    with open_llm(reference.folder) as llm:
        outputs = llm.generate(
            [{"prompt": prompt, "multimodal_data": {"audio": form}} for form in forms], GREEDY
        )
        content = [
            {"type": "input_audio", "input_audio": forms[5]},
            {"type": "text", "text": "What?"},
        ]
        (chat,) = llm.chat([{"role": "user", "content": content}], GREEDY)
    assert [output.error_msg for output in (*outputs, chat)] == [None] * 8
    assert len({tuple(output.outputs.token_ids) for output in outputs}) == 1


@pytest.mark.full
def test_the_adapter_of_granite_speech_is_merged(reference_of, tmp_path, caplog):
    """Its answers are those of weights that hold it; what is no plain LoRA is refused."""
    source, folder = reference_of("granite_speech"), tmp_path / "with_adapter"
    shutil.copytree(source.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "has_lora_adapter": True}))
    layer, generator = "language_model.model.layers.1.self_attn.q_proj", torch.Generator()
    halves = {
        f"base_model.model.{layer}.lora_A.weight": torch.randn(2, 64, generator=generator),
        f"base_model.model.{layer}.lora_B.weight": torch.randn(64, 2, generator=generator) / 4,
    }
    save_file(halves, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    merged = Reference("granite_speech", source.folder)
    weight = merged.model.model.language_model.layers[1].self_attn.q_proj.weight
    first, second = halves.values()
    weight.data += 2 * second @ first
    prompt = {"prompt": f"x {merged.marker} y", "multimodal_data": {"audio": given(sound(1.0))}}
    with open_llm(folder) as llm:
        (output,) = llm.generate(prompt, GREEDY)
    assert "is merged: prompts without sounds use it too" in caplog.text
    _, tokens, scores = merged.generate(prompt["prompt"], [sound(1.0)])
    assert list(output.outputs.token_ids) == tokens
    pairs = zip(output.outputs.logprobs, tokens, strict=True)
    assert [entry[token].logprob for entry, token in pairs] == pytest.approx(scores, abs=1e-4)
    (folder / "adapter_config.json").write_text(json.dumps({**adapter, "use_dora": True}))
    with pytest.raises(CheckpointError, match="expected: lora_A, lora_B, lora_magnitude_vector"):
        open_llm(folder)
    (folder / "adapter_model.safetensors").unlink()
    open_llm(folder).close()
    assert "answers about sounds will be worse" in caplog.text
