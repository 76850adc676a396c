"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: sounds, pictures and videos with their sound, as
transformers' processors, positions and models have them."""

import io
import json
import shutil
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.qwen import omni_media, tiny_omni
from mmdeploy_llm_plugins.qwen.omni import IS_SOUND
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.testing.tiny import sound_inputs
from tests.media.sound_files import RATE

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
HERE = MediaLimits(isolation="thread")
NAMES = [
    pytest.param("qwen2_5_omni", marks=[]),
    pytest.param("qwen3_omni_moe", marks=pytest.mark.full),
]
PREFIX = {"qwen2_5_omni": "Qwen25Omni", "qwen3_omni_moe": "Qwen3Omni"}
NAMED = {"qwen2_5_omni": tiny_omni.NAMED2, "qwen3_omni_moe": tiny_omni.NAMED3}


def sound(seconds, seed=0):
    values = np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * 0.1
    return {"array": values.astype(np.float32), "sampling_rate": RATE}


def video(seconds, *, has_sound=True, fps=8, seed=0):
    """Returns an MKV file of noise."""
    rng, buffer = np.random.default_rng(seed), io.BytesIO()
    with av.open(buffer, "w", format="matroska") as file:
        frames = file.add_stream("mpeg4", rate=fps)
        frames.width = frames.height = 64
        if has_sound:
            track = file.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for _ in range(round(seconds * fps)):
            pixels = rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            file.mux(frames.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(frames.encode(None))
        if has_sound:
            samples = rng.integers(-9000, 9000, (1, round(seconds * RATE)), dtype=np.int16)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate = RATE
            file.mux(track.encode(frame))
            file.mux(track.encode(None))
    return buffer.getvalue()


class Family:
    """A tiny checkpoint, its processors, and transformers' processor and model."""

    def __init__(self, name, folder):
        self.folder, self.named = folder, NAMED[name]
        config = transformers.AutoConfig.from_pretrained(folder)
        plain = Checkpoint(folder=folder, config=config)
        self.checkpoint = replace(
            plain,
            preprocessor=plain.read_json("preprocessor_config.json"),
            video_preprocessor=plain.read_json("video_preprocessor_config.json"),
        )
        self.prefix = PREFIX[name]
        self.config = config

    def processor(self, kind, **options):
        name = "Omni" if kind == "Audio" else self.prefix
        return getattr(omni_media, f"{name}{kind}Processor")(self.checkpoint, options)

    def theirs(self):
        """transformers' processor without what needs torchvision."""
        name = self.checkpoint.read_json("processor_config.json")["processor_class"]
        base = getattr(transformers, name)
        fields = self.checkpoint.read_json("processor_config.json")["feature_extractor"]
        accepting = {"check_argument_for_proper_class": lambda *_: None}
        return type(name, (base,), accepting)(
            image_processor=SimpleNamespace(merge_size=2),
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            feature_extractor=transformers.WhisperFeatureExtractor(
                **{key: value for key, value in fields.items() if key != "feature_extractor_type"}
            ),
            tokenizer=transformers.AutoTokenizer.from_pretrained(self.folder),
        )

    def written(self, kind, text=None):
        """The text of a medium with its marks."""
        side = "audio" if kind == "audio" else "vision"
        begin, end = self.named[f"{side}_bos_token"], self.named[f"{side}_eos_token"]
        return f"{begin}{text or self.named[f'{kind}_token']}{end}"

    @cached_property
    def model(self):
        base = getattr(transformers, self.config.architectures[0])
        return base.from_pretrained(self.folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def found():
    return {}


@pytest.fixture(params=NAMES)
def family(request, tiny_folder, found):
    if request.param not in found:
        found[request.param] = Family(request.param, tiny_folder(request.param))
    return found[request.param]


def reference(family, text, tensors):
    """Returns ids, greedy tokens and their log-probabilities."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(family.folder)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        out = family.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **tensors,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    return ids[0].tolist(), tokens, [float(x[0].log_softmax(-1).max()) for x in out.logits]


def assert_same(output, wanted):
    assert output.error_msg is None
    ids, tokens, scores = wanted
    assert output.prompt_token_ids == ids
    assert list(output.outputs.token_ids) == tokens
    pairs = zip(output.outputs.logprobs, tokens, strict=True)
    assert [entry[token].logprob for entry, token in pairs] == pytest.approx(scores, abs=1e-4)


def open_llm(folder, **options):
    limits = {"audio": 2, "image": 2, "video": 2}
    fixed = {"num_threads": 1, "use_warmup": False, "block_size": 16, "dtype": "float32"}
    return LLM(model=str(folder), limit_mm_per_prompt=limits, **{**fixed, **options})


def joined(kind, items):
    names = {"pixels": "pixel_values" if kind == "image" else "pixel_values_videos"}
    keep = ("pixels", "input_features", "feature_attention_mask")
    return {
        names.get(name, name): torch.cat([item.tensors[name] for item in items])
        for name in keep
        if name in items[0].tensors
    }


@pytest.mark.full
def test_two_sounds_a_picture_and_a_video(family, noise):
    """All stand in one prompt; the video is without its sound."""
    given = {
        # Of whole windows: in Qwen3-Omni's tower transformers fills shorter ones for the batch.
        "audio": [sound(1.0), sound(2.0, 1)],
        "image": [noise(90, 70)],
        "video": [{"video": video(2.0), "fps": 2}],
    }
    heard, seen, shown = map(family.written, ("audio", "image", "video"))
    prompt = f"x {heard} y {seen} {shown} z {heard}?"
    with open_llm(family.folder, max_num_batched_tokens=64) as llm:
        (output,) = llm.generate({"prompt": prompt, "multimodal_data": given}, GREEDY)
    ears, eyes, films = (family.processor(kind) for kind in ("Audio", "Image", "Video"))
    sounds = [ears.process(ears.decode(one, HERE), {}) for one in given["audio"]]
    images = [eyes.process(eyes.decode(one, HERE), {}) for one in given["image"]]
    videos = [films.process(films.decode(given["video"][0]["video"], HERE), {"fps": 2})]
    names = family.named
    text = (
        f"x {family.written('audio', sounds[0].prompt_text)} y "
        f"{family.written('image', names['image_token'] * images[0].num_tokens)} "
        f"{family.written('video', names['video_token'] * videos[0].num_tokens)} z "
        f"{family.written('audio', sounds[1].prompt_text)}?"
    )
    tensors = {
        **joined("video", videos),
        **joined("image", images),
        "image_grid_thw": torch.tensor([images[0].grid_thw]),
        "video_grid_thw": torch.tensor([videos[0].grid_thw]),
        "video_second_per_grid": torch.tensor([1.0]),
        **sound_inputs([SimpleNamespace(item=item) for item in sounds]),
    }
    assert_same(output, reference(family, text, tensors))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("seconds", [0.2, 1.0, 3.3])
def test_sounds_equal_transformers(family, seconds):
    given, token = sound(seconds), family.named["audio_token"]
    made = family.theirs()(text=[token], audio=[given["array"]], return_tensors="pt")
    processor = family.processor("Audio")
    ours = processor.process(processor.decode(given, HERE), {})
    for name in ("input_features", "feature_attention_mask"):
        assert torch.equal(ours.tensors[name], made[name])
    assert ours.num_tokens == made["input_ids"].shape[1]
    assert processor.most == (tiny_omni.CHUNK if family.prefix == "Qwen25Omni" else None)


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.6, 2.0, 3.7])
def test_a_video_with_its_sound(family, seconds):
    """Interleaved as by transformers' processor, at its positions, with its answers."""
    blob = video(seconds)
    options = {"fps": 2, "use_audio_in_video": True}
    prompt = f"x {family.written('video')} z?"
    with open_llm(family.folder) as llm:
        given = {"video": [{"video": blob, **options}]}
        (output,) = llm.generate({"prompt": prompt, "multimodal_data": given}, GREEDY)
    films = family.processor("Video")
    item = films.decode(blob, HERE)
    made = films.process(item, options)
    assert made.num_tokens == films.count_tokens(item, options)
    assert made.prompt_text == films.prompt_text(item, options)
    theirs = family.theirs()
    num_sound = int(made.tensors[IS_SOUND].sum())
    written = theirs.replace_video_with_audio_token(
        {"video_grid_thw": np.array([made.grid_thw]), "video_second_per_grid": [1.0]},
        0,
        {"num_audio_tokens": [num_sound]},
        0,
        position_id_per_seconds=family.config.position_id_per_seconds,
        seconds_per_chunk=2.0,
    )
    text = f"x {family.written('video', written)} z?"
    tensors = {
        **joined("video", [made]),
        "video_grid_thw": torch.tensor([made.grid_thw]),
        "video_second_per_grid": torch.tensor([1.0]),
        "use_audio_in_video": True,
    }
    assert_same(output, reference(family, text, tensors))


def test_a_budget_is_for_frames_and_sound(family):
    films, options = family.processor("Video"), {"fps": 2, "use_audio_in_video": True}
    item = films.decode(video(2.0), HERE)
    whole = films.process(item, options)
    num_sound = int(whole.tensors[IS_SOUND].sum())
    limited = films.with_budget(whole.num_tokens - 2)
    assert limited.count_tokens(item, options) <= whole.num_tokens - 2
    assert limited.process(item, options).num_tokens == limited.count_tokens(item, options)
    with pytest.raises(MediaError, match=f"the sound of the video has {num_sound} tokens"):
        films.with_budget(num_sound).count_tokens(item, options)


def test_a_silent_video_is_its_frames(family):
    films = family.processor("Video", video_use_audio_in_video=True)
    silent = films.decode(video(1.0, has_sound=False), HERE)
    made = films.process(silent, {})
    assert IS_SOUND not in made.tensors
    assert made.num_tokens == films.count_tokens(silent, {})
    assert made.other_tokens == ()
    with_sound = films.decode(video(1.0), HERE)
    heard = films.process(with_sound, {})
    without = films.process(with_sound, {"use_audio_in_video": False})
    assert heard.num_tokens > without.num_tokens
    assert heard.key != without.key
    with pytest.raises(MediaError, match="use_audio_in_video must be True or False, got 1"):
        films.process(with_sound, {"use_audio_in_video": 1})
    with pytest.raises(ConfigError, match="use_audio_in_video must be True or False"):
        family.processor("Video", video_use_audio_in_video="yes")


@pytest.mark.full
def test_published_checkpoints_hold_the_thinker_in_a_whole(family, tmp_path):
    """Their configs nest it, their keys begin with "thinker."; the parts that speak are left."""
    folder = tmp_path / "whole"
    shutil.copytree(family.folder, folder)
    thinker = json.loads((folder / "config.json").read_text())
    whole = {"qwen2_5_omni_thinker": "qwen2_5_omni", "qwen3_omni_moe_thinker": "qwen3_omni_moe"}
    architecture = thinker["architectures"][0].replace("Thinker", "")
    if family.prefix == "Qwen25Omni":
        architecture = "Qwen2_5OmniModel"
    config = {
        "architectures": [architecture],
        "model_type": whole[thinker["model_type"]],
        "thinker_config": thinker,
        "enable_audio_output": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights = {f"thinker.{key}": value for key, value in weights.items()}
    weights["talker.codec_head.weight"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    given = {"prompt": f"x {family.written('audio')} y?", "multimodal_data": {"audio": sound(1.0)}}
    answers = []
    for path in (family.folder, folder):
        with open_llm(path) as llm:
            (output,) = llm.generate(given, GREEDY)
        assert output.error_msg is None
        answers.append(list(output.outputs.token_ids))
    assert answers[0] == answers[1]
