"""A text model and its mmproj file generate the tokens of the safetensors model whose weights they
hold; tests of plugins compare that one with transformers."""

from __future__ import annotations

import json
import shutil
import struct

import gguf
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli import app
from mmdeploy_llm.errors import CheckpointError, ModelError, ModelNotSupportedError
from mmdeploy_llm.weights.folder import read_checkpoint
from mmdeploy_llm.weights.gguf import find_tower
from mmdeploy_llm.weights.gguf.header import read_headers
from mmdeploy_llm.weights.gguf.tower import media_config

from .gguf_writing import write_gguf
from .mmproj_writing import PROJECTORS, write_pair, write_qwen25_vl, write_tower
from .opening import opened, opened_tower, stored, tables_of

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
OPTIONS = {
    "qwen3_vl_moe": {"mlp_only_layers": []},  # GGUF has no dense layers among those with experts
}
SIDES = ((90, 140), (64, 64))
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")
# What has no effect, or is one and the same in another form.
NOT_STATED = {
    "_name_or_path",
    "audio_token_id",
    "audio_config",
    "boa_token_id",
    "dtype",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "image_size",  # of LFM2's tower, which takes any
    "block_auto_adjust_ff_dim",
    "block_multiple_of",
    "initializer_range",
    "intermediate_size",  # of LFM2's text model: the stated one is the final one
    "hidden_act",
    "projector_hidden_act",
    "use_mean_pooling",
}


@pytest.fixture(scope="module")
def tiny_copy(tiny_copy):
    """The checkpoint of a family as GGUF can hold it."""

    def copy(family, folder, **options):
        if family == "qwen2_5_vl":
            return write_qwen25_vl(folder)
        return tiny_copy(family, folder, **{**OPTIONS.get(family, {}), **options})

    return copy


@pytest.fixture(scope="module")
def images():
    random = np.random.default_rng(0)
    shapes = [(*side, 3) for side in SIDES]
    return [Image.fromarray(random.integers(0, 255, shape, dtype=np.uint8)) for shape in shapes]


def answers(model, images, **options):
    """Returns tokens and their logarithms of probabilities, of a prompt with images and one
    without."""
    parts = [*({"type": "image", "image": image} for image in images)]
    parts.append({"type": "text", "text": "Describe the two."})
    prompts = [[{"role": "user", "content": "The quick fox"}], [{"role": "user", "content": parts}]]
    settings = {"dtype": "float32", "max_model_len": 1024, "quiet": True, "enable_logprob": True}
    limits = {"image": len(images)}
    with LLM(model=str(model), limit_mm_per_prompt=limits, **{**settings, **options}) as llm:
        outputs = llm.chat(prompts, PARAMS)
    assert [output.error_msg for output in outputs] == [None, None]
    tokens = [(list(o.prompt_token_ids), list(o.outputs.token_ids)) for o in outputs]
    scores = [
        each.logprob for o in outputs for step in o.outputs.logprobs for each in step.values()
    ]
    return tokens, torch.tensor(scores)


def plain(key):
    for prefix in ("model.", "vision_model."):
        key = key.removeprefix(prefix).replace(f".{prefix}", ".")
    return key.removeprefix("multi_modal_")


def has_key_of(folder):
    """Says which keys the checkpoint of a folder has, under all names that models know."""
    keys = set(load_file(folder / "model.safetensors"))
    keys |= {key.removeprefix("model.") for key in keys}
    keys |= {f"model.{key}" for key in keys if not key.startswith(("model.", "lm_head."))}
    keys |= {key.replace("language_model.", "") for key in keys}
    keys |= {key.replace("tower.", "tower.vision_model.") for key in keys}
    return keys.__contains__


@pytest.mark.few_in_ci(4)
@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.full] * (name != "qwen2_vl")) for name in PROJECTORS],
)
def test_tokens_of_a_pair_of_files_alone(tiny_copy, tmp_path, images, family):
    """Config, tokenizer, template and tokens of media come from the files; the sizes of images,
    which they leave out, from the processor's file."""
    source, place = tiny_copy(family, tmp_path / "source"), tmp_path / "place"
    write_pair(source, place, family)
    for name in PROCESSOR_FILES:
        if (source / name).exists():
            shutil.copy(source / name, place / name)
    wanted, scores = answers(source, images)
    for model in (place, place / "model.gguf"):
        found, own = answers(model, images)
        assert found == wanted
        torch.testing.assert_close(own, scores, rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3_vl", "Q8_0"), pytest.param("glm4v", "BF16", marks=pytest.mark.long)],
)
def test_tokens_of_weights_in_few_bits(tiny_copy, tmp_path, images, family, kind):
    source, place = tiny_copy(family, tmp_path / "source"), tmp_path / "place"
    write_pair(source, place, family, kind=kind)
    text = stored(opened([place / "model.gguf"], has_key_of(source)))
    tower = stored(opened_tower(place / "mmproj-model.gguf", has_key_of(source)))
    weights = {key: values.float() for key, values in {**text, **tower}.items()}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    for name in PROCESSOR_FILES:
        shutil.copy(source / name, place / name)
    wanted, scores = answers(source, images)
    found, own = answers(place, images)
    assert found == wanted
    torch.testing.assert_close(own, scores, rtol=0, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("family", PROJECTORS)
def test_weights_of_a_tower_are_those_that_were_converted(tiny_copy, tmp_path, family):
    tiny_copy(family, tmp_path)
    path = write_tower(tmp_path, tmp_path / "mmproj.gguf", family)
    found = stored(opened_tower(path, has_key_of(tmp_path)))
    wanted = {
        plain(key): tensor for key, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert found
    for key, tensor in found.items():
        assert torch.equal(tensor, wanted.pop(plain(key))), key
    parts = ("visual.", "vision_tower.", "projector.", "embed_vision.")
    assert not [key for key in wanted if key.startswith(parts)]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_weights_in_fewer_bits_are_those_of_the_library(tiny_copy, tmp_path, kind):
    """Matrices are those that the library reads again; the rest stays in float32."""
    tiny_copy("qwen2_5_vl", tmp_path)
    path = write_tower(tmp_path, tmp_path / "mmproj.gguf", "qwen2_5_vl", kind=kind)
    wanted = load_file(tmp_path / "model.safetensors")
    number, num_rounded = gguf.GGMLQuantizationType[kind], 0
    for key, tensor in stored(opened_tower(path, has_key_of(tmp_path))).items():
        values = wanted[key.replace("model.visual.", "visual.") if key not in wanted else key]
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            data = gguf.quantize(values.numpy(), number)
            values = torch.from_numpy(gguf.dequantize(data, number))
            num_rounded += 1
        assert torch.equal(tensor.float(), values), key
    assert num_rounded > 1


@pytest.mark.full
@pytest.mark.parametrize("family", PROJECTORS)
def test_the_config_of_a_pair_is_the_models(tiny_copy, tmp_path, family):
    source, place = tiny_copy(family, tmp_path / "source"), tmp_path / "place"
    write_pair(source, place, family)
    found, wanted = (read_checkpoint(folder).config.to_dict() for folder in (place, source))
    assert found["architectures"] == wanted["architectures"]
    # Each outer config decides.
    wanted["text_config"].pop("tie_word_embeddings", None)
    assert differing(found, wanted) == {}


def differing(found, wanted):
    names = (found.keys() & wanted.keys()) - NOT_STATED
    different = {}
    for name in names:
        if isinstance(wanted[name], dict) and isinstance(found[name], dict):
            inner = differing(found[name], wanted[name])
            different |= {f"{name}.{key}": values for key, values in inner.items()}
        elif found[name] != wanted[name] and wanted[name] is not None:
            different[name] = found[name], wanted[name]
    return different


def test_options_of_the_processors(tiny_copy, tmp_path):
    tiny_copy("qwen2_vl", tmp_path / "source")
    write_pair(tmp_path / "source", tmp_path / "place", "qwen2_vl")
    found = read_checkpoint(tmp_path / "place")
    channels = {
        "image_mean": [0.48145467, 0.4578275, 0.40821072],
        "image_std": [0.26862955, 0.2613026, 0.2757771],
    }
    assert found.preprocessor == {
        **channels,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 16384 * 28 * 28,
    }
    assert found.video_preprocessor == channels
    shutil.copy(tmp_path / "source" / PROCESSOR_FILES[0], tmp_path / "place")
    wanted = json.loads((tmp_path / "source" / PROCESSOR_FILES[0]).read_text())
    assert read_checkpoint(tmp_path / "place").preprocessor == wanted


@pytest.mark.full
def test_a_config_beside_the_files(tiny_copy, tmp_path, images):
    """It wins; that of a text model leaves the tower unread."""
    source, place = tiny_copy("qwen3_vl", tmp_path / "source"), tmp_path / "place"
    write_pair(source, place, "qwen3_vl")
    for name in ("config.json", *PROCESSOR_FILES):
        shutil.copy(source / name, place / name)
    assert answers(place, images)[0] == answers(source, images)[0]
    text = tiny_copy("qwen3", tmp_path / "text")
    write_gguf(text, text / "model.gguf", "qwen3")
    (text / "model.safetensors").unlink()
    shutil.copy(place / "mmproj-model.gguf", text)
    assert read_checkpoint(text / "model.gguf").gguf_tower is None


@pytest.mark.full
def test_the_command_line(tiny_copy, tmp_path, images):
    tiny_copy("qwen3_vl", tmp_path / "source")
    write_pair(tmp_path / "source", tmp_path / "place", "qwen3_vl")
    images[1].save(tmp_path / "picture.png")
    words = ["generate", "Describe", "--image", str(tmp_path / "picture.png"), "--max-tokens", "4"]
    done = CliRunner().invoke(app, [*words, "--model", str(tmp_path / "place")])
    assert done.exit_code == 0, done.output


class TestRefusals:
    @pytest.fixture
    def place(self, tiny_copy, tmp_path):
        tiny_copy("qwen2_vl", tmp_path / "source")
        write_pair(tmp_path / "source", tmp_path / "place", "qwen2_vl")
        return tmp_path / "place"

    def test_a_text_model_that_needs_its_tower(self, place):
        (place / "mmproj-model.gguf").unlink()
        with pytest.raises(CheckpointError, match=r"put the file with its vision tower, mmproj-"):
            read_checkpoint(place)

    def test_a_tower_alone(self, place):
        with pytest.raises(ModelNotSupportedError, match="name the file of the text model"):
            read_checkpoint(place / "mmproj-model.gguf")

    def test_several_towers(self, place):
        shutil.copy(place / "mmproj-model.gguf", place / "mmproj-F16.gguf")
        with pytest.raises(CheckpointError, match=r"2 vision towers: mmproj-F16.gguf, mmproj-m"):
            find_tower(place)

    def test_a_tower_of_another_family(self, tiny_copy, tmp_path, place):
        tiny_copy("glm4v", tmp_path / "glm4v")
        write_tower(tmp_path / "glm4v", place / "mmproj-model.gguf", "glm4v")
        with pytest.raises(CheckpointError, match=r"of the architecture glm4, but .* 'qwen2vl'"):
            read_checkpoint(place)

    def test_a_tower_of_another_size(self, tiny_copy, tmp_path, place):
        tiny_copy("qwen2_vl", tmp_path / "wide", hidden_size=128)
        write_tower(tmp_path / "wide", place / "mmproj-model.gguf", "qwen2_vl")
        with pytest.raises(CheckpointError, match=r"mm.2.weight .* has 64 channels: they do not"):
            read_checkpoint(place)

    def test_an_unknown_kind(self, tmp_path, place):
        def extra(writer):
            del writer.kv_data[0]["clip.projector_type"]
            writer.add_clip_projector_type("pixtral")

        write_tower(tmp_path / "source", place / "mmproj-model.gguf", "qwen2_vl", extra=extra)
        with pytest.raises(CheckpointError, match=r"'pixtral', .* known: .*qwen2vl_merger"):
            read_checkpoint(place)

    def test_a_file_that_is_no_tower(self, place):
        shutil.copy(place / "model.gguf", place / "mmproj-model.gguf")
        with pytest.raises(CheckpointError, match="architecture is 'qwen2vl', not 'clip'; rename"):
            read_checkpoint(place)

    def test_a_vocabulary_without_the_token_of_images(self, tmp_path, place):
        write_gguf(tmp_path / "source", place / "model.gguf", "qwen2_vl", tokenizer=False)
        with pytest.raises(CheckpointError, match=r"has no <\|image_pad\|>, .* config.json into"):
            read_checkpoint(place)

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("clip.vision.block_count", 2**31 - 1, "allowed: an integer from 1 to 10000"),
            ("clip.vision.attention.head_count", 7, "allowed: a divisor of 48 channels"),
            ("clip.vision.patch_size", 0, "allowed: an integer from 1 to 65536"),
            ("clip.vision.image_std", [1.0, 0.0, 1.0], "allowed: three numbers above 0"),
            ("clip.vision.image_mean", [1.0], "allowed: three numbers"),
            ("clip.use_silu", True, "has the activation silu; models of its kind have quick_gelu"),
        ],
    )
    def test_metadata(self, tmp_path, place, name, value, message):
        def extra(writer):
            writer.kv_data[0].pop(name, None)
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            else:
                writer.add_uint32(name, value)

        write_tower(tmp_path / "source", place / "mmproj-model.gguf", "qwen2_vl", extra=extra)
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(place)

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("v.blk.0.attn_sinks.weight", (4,), "1 tensors that vision towers of its kind do not"),
            ("v.blk.00000000000009.ln1.weight", (4,), "do not have here"),
            ("a.conv1d.0.weight", (4,), "do not have here"),
            ("v.patch_embd.weight.2", (4,), "do not have here"),
        ],
    )
    def test_tensors(self, tiny_copy, tmp_path, name, shape, message):
        def extra(writer):
            writer.add_tensor(name, np.zeros(shape, dtype=np.float32))

        tiny_copy("qwen2_vl", tmp_path)
        path = write_tower(tmp_path, tmp_path / "mmproj.gguf", "qwen2_vl", extra=extra)
        with pytest.raises(CheckpointError, match=message):
            opened_tower(path, has_key_of(tmp_path))

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("v.patch_embd.weight", (48, 3, 14, 15)),
            ("v.patch_embd.weight.1", (48, 588)),
            ("v.blk.0.attn_k.weight", (48, 47)),
            ("v.blk.1.ln1.weight", (7,)),
        ],
    )
    def test_shapes(self, tmp_path, place, name, shape):
        """Whatever the shapes are, an error says which of them do not fit."""

        def extra(writer):
            add = writer.add_tensor

            def changed(own, values, **options):
                add(own, np.zeros(shape, np.float32) if own == name else values, **options)

            writer.add_tensor = changed

        write_tower(tmp_path / "source", place / "mmproj-model.gguf", "qwen2_vl", extra=extra)
        with pytest.raises(ModelError, match=r"do not (fit|belong) together"):
            LLM(model=str(place), quiet=True, max_model_len=64)


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))]
)
def test_changed_bytes_of_a_tower_end_in_an_error_or_a_model(tiny_copy, tmp_path, seed):
    """Fuzzes the header: nothing but an error of this package comes out."""
    tiny_copy("qwen2_vl", tmp_path / "source")
    write_pair(tmp_path / "source", tmp_path / "place", "qwen2_vl")
    path = tmp_path / "place" / "mmproj-model.gguf"
    text = read_headers([tmp_path / "place" / "model.gguf"])
    whole, random = path.read_bytes(), np.random.default_rng(seed)
    for _ in range(150):
        data = bytearray(whole)
        for place in random.integers(0, 6000, random.integers(1, 4)):
            data[place] = random.integers(0, 256)
        if random.integers(0, 4) == 0:
            place = int(random.integers(0, 6000))
            data[place : place + 8] = struct.pack("<Q", 2**60)
        path.write_bytes(data)
        try:
            header = read_headers([path])
            media_config(text, header, tables_of(text, header))
            opened_tower(path)
        except ModelError:
            continue
