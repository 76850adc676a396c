"""Scripts of other engines, as the guide shows them, run once the lines are changed that it marks;
their other calls say what to write here."""

import asyncio
import re
import warnings
from pathlib import Path

import pytest

from mmdeploy_llm import LLM, AsyncLLM, EngineConfig, SamplingParams, StructuredOutputsParams

ROOT = Path(__file__).parents[2]
PAGES = ("coming_from.md", "coming_from_vllm.md")
GUIDE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in PAGES)
SCRIPTS = re.findall(r"```diff\n(.*?)```", GUIDE, re.DOTALL)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PEERS = ("fastdeploy", "vllm", "openvino_genai", "transformers")


@pytest.fixture(scope="module")
def llm():
    with LLM("shapes-vl", quiet=True, use_warmup=False) as llm:
        yield llm


def changed(script):
    """The script after the change."""
    return "\n".join(line[1:] for line in script.splitlines() if not line.startswith("-"))


def title(script):
    """The line that imports the other engine."""
    return re.search(r"^-(?:from|import) (\w+).*", script, re.M)[0][1:60]


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=title)
def test_a_script_runs_after_the_change(script, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of ports and of code in checkpoints
        exec(compile(changed(script), "script", "exec"), found)
    if "llm" in found:
        found["llm"].close()
    assert len(capsys.readouterr().out.strip()) > 3
    assert not [name for name in PEERS if re.search(rf"import {name}|from {name}", changed(script))]


def test_there_is_a_script_of_each(tmp_path):
    assert {name for name in PEERS for own in SCRIPTS if f"-from {name}" in own} == {*PEERS} - {
        "openvino_genai"
    }
    assert sum("-import openvino_genai" in own for own in SCRIPTS) == 1
    assert sum("-from vllm" in own for own in SCRIPTS) == 3


CALLS = [
    ("generate", {"stream": True}, "use stream(prompts, sampling_params)"),
    ("generate", {"images": ["a.png"]}, '"multimodal_data": {"image": ...}'),
    ("generate", {"max_new_tokens": 5}, "use max_tokens"),
    ("generate", {"temperature": 0.5}, "use sampling_params=SamplingParams(temperature=0.5)"),
    ("generate", {"do_sample": False}, "use sampling_params=SamplingParams(do_sample=False)"),
    ("generate", {"max_model_len": 5}, "it is an option of LLM: LLM(max_model_len=...)"),
    ("generate", {"max_batch": 5}, "it is an option of LLM: use max_num_seqs"),
    ("generate", {"sampling_parms": GREEDY}, "did you mean 'sampling_params'?"),
    ("generate", {"frobnicate": 1}, "known: prompts, sampling_params, use_tqdm, adapter"),
    ("generate", {"prompt_token_ids": [[1, 2]]}, "give them as prompts"),
    ("generate", {"enable_thinking": False}, 'chat_template_kwargs={"enable_thinking": ...}'),
    ("chat", {"mm_processor_kwargs": {"max_pixels": 9}}, '"messages": ..., "mm_processor_kwargs"'),
    ("chat", {"chat_template_content_format": "openai"}, "leave it out: the template is tried"),
    ("chat", {"stream": True}, "use stream(prompts, sampling_params)"),
    ("stream", {"streamer": print}, "which yields deltas"),
    ("generate_iter", {"batch_size": 8}, "LLM(max_num_seqs=...)"),
]


def test_keywords_of_other_calls_are_told(llm):
    for method, given, hint in CALLS:
        with pytest.raises(TypeError) as refused:
            getattr(llm, method)("A red", **given)
        assert str(refused.value).startswith(f"{method}() has no argument '{next(iter(given))}'; ")
        assert hint in str(refused.value), given


@pytest.mark.full
def test_keywords_that_ask_for_nothing_are_accepted(llm):
    chat = [{"role": "user", "content": [{"type": "input_text", "text": "A red"}]}]
    nothing = {"stream": False, "lora_request": None, "priority": None, "images": []}
    nothing |= {"max_new_tokens": None, "temperature": None, "return_full_text": False}
    (plain,) = llm.generate("A red", GREEDY, use_tqdm=False)
    (output,) = llm.generate("A red", GREEDY, use_tqdm=False, **nothing)
    assert output.outputs.token_ids == plain.outputs.token_ids
    own = {"mm_processor_kwargs": None, "chat_template_content_format": "auto"}
    (output,) = llm.chat(chat, GREEDY, use_tqdm=False, **own)
    assert output.is_ok


def test_an_adapter_is_named_by_its_request(llm):
    with pytest.raises(TypeError, match="must be the name of an adapter or a LoRARequest"):
        llm.generate("A red", lora_request=object())


def test_the_calls_keep_their_signatures():
    import inspect

    assert list(inspect.signature(LLM.generate).parameters)[1:3] == ["prompts", "sampling_params"]
    assert LLM.generate.__doc__.startswith("Completes every prompt")


class TestStopReason:
    def test_it_is_the_stop_that_was_found(self, llm):
        free = llm.generate("A red", GREEDY, use_tqdm=False)[0].outputs
        ids = free.token_ids
        word = free.text[3:6]
        for options, expected in (
            ({"stop": ["never", word]}, word),
            ({"stop_token_ids": [ids[2]]}, ids[2]),
            ({"stop_token_sequences": [ids[1:3]]}, tuple(ids[1:3])),
            ({"max_tokens": 1, "ignore_eos": True}, None),
        ):
            params = GREEDY.replace(**options)
            (output,) = llm.generate("A red", params, use_tqdm=False)
            assert output.outputs.stop_reason == expected, options
            assert output.outputs[0].stop_reason == expected
            assert output.outputs.finish_reason == ("length" if expected is None else "stop")
            *others, last = llm.stream("A red", params)
            assert last.outputs.stop_reason == expected
            assert not [one for one in others if one.outputs.stop_reason is not None]

    def test_an_end_of_sequence_is_none(self, llm):
        (output,) = llm.generate("A red", GREEDY.replace(max_tokens=400), use_tqdm=False)
        assert (output.outputs.finish_reason, output.outputs.stop_reason) == ("stop", None)


def test_default_params_are_those_of_open_options(llm):
    params = llm.get_default_sampling_params()
    (usual,) = llm.generate("A red", SamplingParams(max_tokens=8, seed=3), use_tqdm=False)
    (same,) = llm.generate("A red", params.replace(max_tokens=8, seed=3), use_tqdm=False)
    assert same.outputs.token_ids == usual.outputs.token_ids
    assert None not in (params.temperature, params.top_p, params.top_k, params.min_p)


def test_structured_outputs_are_guided_decoding():
    constraint = StructuredOutputsParams(choice=["a", "b"], disable_any_whitespace=False)
    assert SamplingParams(structured_outputs=constraint).guided_decoding is constraint
    with pytest.raises(ValueError, match="another name of guided_decoding"):
        SamplingParams(structured_outputs=constraint, guided_decoding=constraint)


@pytest.mark.full
def test_an_async_engine_is_made_of_engine_args():
    async def answer():
        config = EngineConfig(model="shapes-vl", quiet=True, use_warmup=False)
        async with AsyncLLM.from_engine_args(config) as engine:
            with pytest.raises(TypeError, match="must be the name of an adapter"):
                await anext(engine.generate("A red", GREEDY, "1", lora_request=1))
            handle = engine.submit("A red", GREEDY, lora_request=None)
            return await handle

    assert asyncio.run(answer()).is_ok
