"""The calls and attributes of the offline guides of FastDeploy and DashInfer work, by section.

FastDeploy: each `example_*` is the body of a code block of section 1, with the import, the model's
name and the media changed (URLs are off by default); the tests after them go through the lists of
section 2. DashInfer: the request of its snippet, every field of its generation config that has a
counterpart, and its engine in the background: install, start, handles and queues, states, sync,
stop and release. Not here: its conversion of checkpoints, which is not needed.

The examples allow thousands of tokens, so that models with random weights are made to end early."""

import base64
import io
import json
import re
import runpy
import types
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mmdeploy_llm import LLM, ModelPool, SamplingParams
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


@pytest.mark.full
def test_chat(text_model):
    found = check(example_chat(text_model), 2)
    assert "把李白的静夜思改写为现代诗" in found[0][1]
    assert "Write me a poem" in found[1][1]


@pytest.mark.full
def test_chat_with_an_image(png):
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    ((_, text, reasoning, output),) = check(example_chat_with_an_image(VL_MODEL, url), 1)
    assert text
    assert reasoning == ""
    assert output.num_input_image_tokens > 0


def test_generate(text_model):
    ((_, prompt, text, output),) = check(example_generate(text_model), 1)
    assert prompt.endswith("Assistant: 好的。")
    assert text == output.outputs[0].text


@pytest.fixture(scope="module")
def mp4(load_file):
    return load_file("media/video_files.py").video(20, 10)


@pytest.mark.full
@pytest.mark.parametrize(
    "kinds",
    [
        ("image",),
        *(pytest.param(each, marks=pytest.mark.full) for each in (("video",), ("image", "video"))),
    ],
)
def test_generate_with_media(png, mp4, kinds, model_of):
    from mmdeploy_llm.weights.folder import resolve_model

    contents = {"image": png, "video": mp4}
    requests = types.SimpleNamespace(get=lambda url: types.SimpleNamespace(content=contents[url]))
    parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": kind}} for kind in kinds]
    model = model_of(kinds)
    folder = resolve_model(model, None)
    ((_, prompt, _, reasoning, output),) = check(
        example_generate_with_media(model, folder, parts, requests), 1
    )
    assert "图中的文物属于哪个年代" in prompt
    assert reasoning == output.outputs.resoning_content  # the guide's spelling in mid-2025
    assert reasoning
    assert (output.num_input_image_tokens > 0) == ("image" in kinds)
    assert (output.num_input_video_tokens > 0) == ("video" in kinds)


@pytest.mark.full
def test_frame_options_of_a_prompt(mp4):
    """vLLM's scripts give them for a prompt, FastDeploy's for a video; the video's own win."""
    found = []
    with LLM(model=VL_MODEL, quiet=True) as llm:
        for own, kwargs in (
            ({"max_frames": 4}, None),
            ({}, {"video_max_frames": 4}),
            ({"max_frames": 4}, {"video_max_frames": 8}),
            ({}, {"video_max_frames": 8}),
        ):
            part = {"type": "video", "video": {"video": mp4, "fps": 10, **own}}
            prompt = {
                "messages": [{"role": "user", "content": [part]}],
                "mm_processor_kwargs": kwargs,
            }
            found.append(llm.count_tokens(prompt).num_input_video_tokens)
    assert found[0] == found[1] == found[2]
    assert found[3] == 2 * found[0]


@pytest.mark.full
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


@pytest.fixture(scope="module")
def llm(text_model):
    with LLM(model=text_model, tensor_parallel_size=1, max_model_len=512) as llm:
        yield llm


FEW = SamplingParams(top_p=0.95, max_tokens=4, seed=1)


class TestFastDeploy:
    """The lists of section 2."""

    def test_2_1_the_number_of_blocks_is_shown(self, text_model, capfd):
        """The guide computes max_num_seqs from it and the block size, 64 by default."""
        with LLM(model=text_model, max_model_len=512) as llm:
            blocks = int(re.search(r"total_block_num:(\d+)", capfd.readouterr().err)[1])
            assert blocks == llm.num_kv_blocks
            assert blocks * 64 // (300 + 212) >= 1
            assert llm.runtime.block_size == 64

    @pytest.mark.full
    def test_2_2_arguments_of_chat(self, llm):
        messages = [{"role": "user", "content": "hi"}]
        by_position = llm.chat(messages, FEW, False, {"enable_thinking": False})
        by_name = llm.chat(
            messages=[messages],
            sampling_params=FEW,
            use_tqdm=False,
            chat_template_kwargs={"enable_thinking": False},
        )
        assert by_position[0].outputs == by_name[0].outputs

    def test_2_3_forms_of_prompts(self, llm):
        ids = llm.generate("hello world", FEW, False)[0].prompt_token_ids
        forms = ["hello world", ["hello world"], ids, [ids], {"prompt": "hello world"}]
        for form in (*forms, [{"prompt": "hello world"}]):
            (output,) = llm.generate(prompts=form, sampling_params=FEW, use_tqdm=False)
            assert output.prompt_token_ids == ids
            assert output.outputs.token_ids

    def test_2_4_sampling_parameters(self, llm):
        params = SamplingParams(
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            temperature=0.8,
            top_p=0.9,
            top_k=20,
            min_p=0.01,
            max_tokens=6,
            min_tokens=2,
            bad_words=["hello"],
        )
        (output,) = llm.generate("a", params, False)
        assert 2 <= len(output.outputs.token_ids) <= 6

    def test_2_5_to_2_7_outputs(self, llm):
        (output,) = llm.generate(["hello world"], FEW, False)
        types_of = {
            "request_id": str,
            "prompt": str,
            "prompt_token_ids": list,
            "finished": bool,
            "num_cached_tokens": int,
            "num_input_image_tokens": int,
            "num_input_video_tokens": int,
            "error_code": int,
        }
        assert {name: type(getattr(output, name)) for name in types_of} == types_of
        assert (output.error_code, output.error_msg) == (200, None)
        own = {"index": int, "send_idx": int, "token_ids": list, "text": str}
        for completion in (output.outputs, output.outputs[0]):
            assert {name: type(getattr(completion, name)) for name in own} == own
            assert completion.reasoning_content is None  # without a reasoning parser
        times = "arrival_time inference_start_time first_token_time time_in_queue"
        times += " model_forward_time model_execute_time"
        assert all(type(getattr(output.metrics, name)) is float for name in times.split())
        assert output.metrics.model_forward_time <= output.metrics.model_execute_time


class TestDashInfer:
    """A request of its snippet is one call here; GenerationConfig is SamplingParams."""

    def test_start_request_with_text(self, llm):
        (output,) = llm.generate("who are you?", FEW, use_tqdm=False)
        generated_ids = []
        generated_ids += output.outputs.token_ids
        text = llm.get_tokenizer().decode(generated_ids, skip_special_tokens=True)
        assert text == output.outputs.text

    @pytest.mark.parametrize("form", ["list", "tensor", "batch"])
    def test_start_request_with_ids(self, llm, form):
        import torch

        (expected,) = llm.generate("who are you?", FEW, use_tqdm=False)
        encoded = llm.get_tokenizer()(["who are you?"], return_tensors="pt")
        ids = expected.prompt_token_ids
        forms = {"list": ids, "tensor": torch.tensor(ids), "batch": encoded}
        (output,) = llm.generate(forms[form], FEW, use_tqdm=False)
        assert output.outputs == expected.outputs

    def test_generation_config(self, llm):
        params = SamplingParams(
            temperature=0.7,
            top_k=50,
            top_p=0.9,
            max_tokens=12,  # max_length counts the prompt too
            min_tokens=1,
            stop_token_ids=[7],  # eos_token_id
            no_repeat_ngram_size=3,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            seed=3,
            logprobs=2,  # top_logprobs
        )
        first, second = llm.generate(["who are you?"] * 2, params, use_tqdm=False)
        assert first.outputs.token_ids == second.outputs.token_ids
        for token_id, candidates in zip(
            first.outputs.token_ids, first.outputs.logprobs, strict=True
        ):
            assert token_id in candidates
            assert len(candidates) >= 2

    def test_elements_while_they_are_generated(self, llm):
        """Its loop adds up `ids_from_generate` of what the queue has."""
        (whole,) = llm.generate("who are you?", FEW, use_tqdm=False)
        generated_ids = []
        for elements in llm.stream("who are you?", FEW):
            generated_ids += elements.outputs.token_ids
        assert generated_ids == whole.outputs.token_ids
        assert elements.finished


class TestDashInferEngine:
    """Its engine is ModelPool; a request's handle and queue are one Handle."""

    NAME = "my_model"

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, text_model):
        with ModelPool() as engine:
            engine.install(cls.NAME, text_model, max_num_seqs=8, max_model_len=256, quiet=True)
            engine.start(cls.NAME)
            yield engine

    def test_the_snippet(self, engine):
        handle = engine[self.NAME].submit("who are you?", FEW)
        whole = handle.result()  # sync_request
        generated_ids = []
        generated_ids += handle.get().outputs.token_ids
        assert generated_ids == whole.outputs.token_ids
        handle.release()

    def test_the_loop_over_get_and_generate_status(self, engine):
        whole = engine[self.NAME].submit("who are you?", FEW).result()
        handle = engine[self.NAME].submit("who are you?", FEW)
        generated_ids = []
        while handle.status in ("init", "context_finished", "generating"):
            elements = handle.get()
            if elements is not None:
                generated_ids += elements.outputs.token_ids
        assert handle.status == "finished"
        assert generated_ids == whole.outputs.token_ids
        assert handle.generated_length == len(generated_ids)

    def test_several_requests_each_with_its_queue(self, engine):
        texts = ["who are you?", "a", "hello world"]
        handles = [engine[self.NAME].submit(text, FEW) for text in texts]
        each = [[ids for delta in handle for ids in delta.outputs.token_ids] for handle in handles]
        assert each == [list(handle.result().outputs.token_ids) for handle in handles]

    def test_request_stat_info(self, engine):
        handle = engine[self.NAME].submit("who are you?", FEW)
        output = handle.result()
        names = "arrival_time first_token_time last_token_time finished_time time_to_first_token"
        names += " time_in_queue context_tps"
        assert all(getattr(handle.stats, name) >= 0 for name in names.split())
        assert handle.stats.context_token_length == len(output.prompt_token_ids)
        assert handle.stats.generated_token_length == len(output.outputs.token_ids)
        assert handle.stats.context_cached_length == output.num_cached_tokens

    def test_stop_request(self, engine):
        handle = engine[self.NAME].submit("a", SamplingParams(max_tokens=200, ignore_eos=True))
        first = handle.get()
        handle.abort()
        assert handle.wait(60)
        assert handle.status == "interrupted"
        rest = handle.get_nowait()
        ids = first.outputs.token_ids + (rest.outputs.token_ids if rest else [])
        assert ids == handle.result().outputs.token_ids

    @pytest.mark.full
    def test_states_of_a_model(self, text_model):
        engine = ModelPool()
        engine.install(self.NAME, text_model, max_model_len=256, quiet=True)
        found = [engine.status()[0].state]
        for step in (engine.start, engine.stop):
            step(self.NAME)
            found.append(engine.status()[0].state)
        assert found == ["installed", "running", "stopped"]
        engine.release(self.NAME)
        assert engine.status() == ()
        engine.close()


@pytest.mark.full
@pytest.mark.parametrize("name", ["async_engine", "two_models"])
def test_the_programs_run(name, capsys):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    if name == "async_engine":
        assert "From left to right: a small yellow diamond, a large cyan circle" in printed
        assert "(finished, " in printed
        assert "stopped after" in printed
    else:
        assert printed.count("The judge sees") == 5
        assert "captioner: running, at most" in printed
