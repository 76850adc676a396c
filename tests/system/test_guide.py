"""The examples of FastDeploy's guide to offline inference run with the import, the model's name and
the media changed, and nothing else. Each `example_*` below is the body of one of them.

They allow thousands of tokens, so that models with random weights are made to end early."""

import base64
import io
import json
import re
import types

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, write_tiny

VL_MODEL = "shapes-vl"


def write_terse(family, folder, **options):
    """Writes a tiny checkpoint in which all tokens are equally likely and every eighth ends the
    text."""
    write_tiny(family, folder, **options)
    tensors = load_file(folder / "model.safetensors")
    (last_norm,) = [key for key in tensors if re.search(r"(model|language_model)\.norm\.", key)]
    tensors[last_norm] *= 1e-3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    settings["eos_token_id"] = list(range(0, VOCAB_SIZE, 8))
    file.write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return write_terse("ernie4_5", folder, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Returns model_of(kinds): shapes-vl, which knows a picture or a clip, but not both at once."""

    def find(kinds):
        if len(kinds) == 1:
            return VL_MODEL
        folder = tmp_path_factory.mktemp("vl")
        return write_terse("ernie4_5_vl_moe", folder, max_position_embeddings=32768)

    return find


@pytest.fixture(scope="module")
def png(make_picture):
    buffer = io.BytesIO()
    make_picture(2, 140, 112).save(buffer, "PNG")
    return buffer.getvalue()


def example_chat(model):
    msg1 = [
        {"role": "system", "content": "I'm a helpful AI assistant."},
        {"role": "user", "content": "把李白的静夜思改写为现代诗"},
    ]
    msg2 = [
        {"role": "system", "content": "I'm a helpful AI assistant."},
        {"role": "user", "content": "Write me a poem about large language model."},
    ]
    messages = [msg1, msg2]
    sampling_params = SamplingParams(top_p=0.95, max_tokens=6400)
    llm = LLM(model=model, tensor_parallel_size=1, max_model_len=8192)
    outputs = llm.chat(messages, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs.text
        yield llm, prompt, generated_text, output


def example_chat_with_an_image(model, url):
    llm = LLM(
        model=model,
        tensor_parallel_size=1,
        max_model_len=32768,
        limit_mm_per_prompt={"image": 100},
        reasoning_parser="ernie-45-vl",
    )
    outputs = llm.chat(
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "图中的文物属于哪个年代"},
                ],
            }
        ],
        chat_template_kwargs={"enable_thinking": False},
    )
    for output in outputs:
        generated_text = output.outputs.text
        reasoning_text = output.outputs.reasoning_content
        yield llm, generated_text, reasoning_text, output


def example_generate(model):
    prompts = ["User: 帮我写一篇关于深圳文心公园的500字游记和赏析。\nAssistant: 好的。"]
    sampling_params = SamplingParams(top_p=0.95, max_tokens=6400)
    llm = LLM(model=model, tensor_parallel_size=1, max_model_len=8192)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs.text
        yield llm, prompt, generated_text, output


def example_generate_with_media(model, tokenizer_folder, parts, requests):
    from PIL import Image

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    messages = [
        {
            "role": "user",
            "content": [*parts, {"type": "text", "text": "图中的文物属于哪个年代"}],
        }
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images, videos = [], []
    for message in messages:
        content = message["content"]
        if not isinstance(content, list):
            continue
        for part in content:
            if part["type"] == "image_url":
                url = part["image_url"]["url"]
                image_bytes = requests.get(url).content
                img = Image.open(io.BytesIO(image_bytes))
                images.append(img)
            elif part["type"] == "video_url":
                url = part["video_url"]["url"]
                video_bytes = requests.get(url).content
                videos.append({"video": video_bytes, "max_frames": 30})
    sampling_params = SamplingParams(temperature=0.1, max_tokens=6400)
    llm = LLM(
        model=model,
        tensor_parallel_size=1,
        max_model_len=32768,
        limit_mm_per_prompt={"image": 100},
        reasoning_parser="ernie-45-vl",
    )
    outputs = llm.generate(
        prompts={"prompt": prompt, "multimodal_data": {"image": images, "video": videos}},
        sampling_params=sampling_params,
    )
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs.text
        reasoning_text = output.outputs.reasoning_content
        yield llm, prompt, generated_text, reasoning_text, output


def check(results, count):
    found = list(results)
    assert len(found) == count
    for llm, *_, output in found:
        assert output.is_ok, output.error_msg
        assert output.finished
        llm.close()
    return found


def test_chat(text_model):
    found = check(example_chat(text_model), 2)
    assert found[0][1][1]["content"].startswith("把李白")


def test_chat_with_an_image(png):
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    ((_, text, reasoning, output),) = check(example_chat_with_an_image(VL_MODEL, url), 1)
    assert text
    assert reasoning == ""
    assert output.num_input_image_tokens > 0


def test_generate(text_model):
    check(example_generate(text_model), 1)


@pytest.fixture(scope="module")
def mp4(load_file):
    return load_file("processors/video_files.py").video(20, 10)


@pytest.mark.parametrize("kinds", [("image",), ("video",), ("image", "video")])
def test_generate_with_media(png, mp4, kinds, model_of):
    from mmdeploy_llm.intake.checkpoint import resolve_model

    contents = {"image": png, "video": mp4}
    requests = types.SimpleNamespace(get=lambda url: types.SimpleNamespace(content=contents[url]))
    parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": kind}} for kind in kinds]
    model = model_of(kinds)
    folder = resolve_model(model, None)
    ((_, _, _, reasoning, output),) = check(
        example_generate_with_media(model, folder, parts, requests), 1
    )
    assert reasoning
    assert (output.num_input_image_tokens > 0) == ("image" in kinds)
    assert (output.num_input_video_tokens > 0) == ("video" in kinds)


def test_frame_options_on_a_chat_part(mp4):
    """A video_url part accepts the options that the guide passes in a dict."""
    url = "data:video/mp4;base64," + base64.b64encode(mp4).decode()
    found = {}
    with LLM(model=VL_MODEL) as llm:
        for most in (4, 8):
            part = {"type": "video_url", "video_url": {"url": url}, "max_frames": most, "fps": 10}
            text = {"type": "text", "text": "Describe the video."}
            message = {"role": "user", "content": [part, text]}
            [output] = llm.chat([message], SamplingParams(max_tokens=4), use_tqdm=False)
            assert output.is_ok, output.error_msg
            found[most] = output.num_input_video_tokens
    assert found[8] == 2 * found[4]
