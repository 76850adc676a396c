"""Counting tokens without weights: the function, the object, the command, against LLM."""

import json
import shutil
import sys

import pytest
from PIL import Image
from typer.testing import CliRunner

import mmdeploy_llm
from mmdeploy_llm import LLM, TokenCount, TokenCounter, count_tokens
from mmdeploy_llm.cli import app
from mmdeploy_llm.errors import CheckpointError, EngineError, MediaLimitError, RequestError
from mmdeploy_llm.values.options.model_names import bundled_models

IMAGE = Image.new("RGB", (96, 64))
PROMPTS = {
    "text": "A red circle",
    "ids": [1, 2, 3],
    "messages": {"messages": [{"role": "user", "content": "hello"}]},
    "conversation": [{"role": "user", "content": "hello"}],
    "picture": [
        {
            "role": "user",
            "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "What?"}],
        }
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without weights."""
    path = tmp_path_factory.mktemp("models") / "no weights"
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(bundled_models()["shapes-vl"], path, ignore=ignore)
    return str(path)


@pytest.fixture(scope="module")
def llm():
    with LLM("shapes-vl", num_gpu_blocks_override=8, max_model_len=512) as llm:
        yield llm


@pytest.mark.one_is_quick
@pytest.mark.parametrize("kind", PROMPTS)
def test_the_same_as_with_the_model(kind, folder, llm):
    found = count_tokens(folder, PROMPTS[kind])
    assert isinstance(found, TokenCount)
    assert found == llm.count_tokens(PROMPTS[kind])
    assert (found.num_input_image_tokens > 0) == (kind == "picture")


@pytest.mark.full
def test_options_count(folder):
    """The limit of media, another chat template, another size of pictures."""
    prompt = {"prompt": "x", "multimodal_data": {"image": [IMAGE, IMAGE]}}
    with pytest.raises(MediaLimitError):
        count_tokens(folder, prompt)
    usual = count_tokens(folder, PROMPTS["conversation"])
    shorter = count_tokens(
        folder, PROMPTS["conversation"], chat_template="{{ messages[0].content }}"
    )
    assert shorter.num_prompt_tokens < usual.num_prompt_tokens


def test_nothing_is_compiled_and_no_model_is_built(folder, monkeypatch):
    monkeypatch.setattr(sys.modules["mmdeploy_llm.kernels.cpu.build"], "_run", None)
    monkeypatch.setattr("mmdeploy_llm.weights.load.build_model", None)
    monkeypatch.setattr("mmdeploy_llm.kernels.cpu.load", None)
    with TokenCounter(folder, guided_decoding_backend="auto", quantization="int8") as counter:
        assert counter.count_tokens("A red circle").num_prompt_tokens > 0


def test_errors(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        count_tokens(str(tmp_path), "x")
    with TokenCounter(folder) as counter, pytest.raises(RequestError, match="token id 1000000"):
        counter.count_tokens([1000000])
    with pytest.raises(EngineError, match="closed"):
        counter.count_tokens(PROMPTS["picture"])


def test_a_hub_model_is_fetched_without_weights(monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match="no network"):
        count_tokens("some/model", "x")
    assert "*.json" in asked["allow_patterns"]
    assert "*.safetensors" not in asked["allow_patterns"]


def run(*arguments, code=0, **options):
    done = CliRunner().invoke(app, ["count", *arguments], **options)
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


@pytest.mark.full
def test_the_command_counts_a_prompt(folder, tmp_path):
    IMAGE.save(tmp_path / "a.png")
    own = count_tokens(folder, PROMPTS["picture"])
    output, _ = run("-m", folder, "--prompt", "What?", "--image", str(tmp_path / "a.png"))
    first, total = output.splitlines()
    assert first.split()[:3] == [
        str(own.num_prompt_tokens),
        str(own.num_input_image_tokens),
        "0",
    ]
    assert total.startswith(f"{own.num_prompt_tokens} prompt tokens; ")
    raw, _ = run("-m", folder, "--raw", "--prompt", "-", "--json", input="A red circle")
    expected = count_tokens(folder, "A red circle").num_prompt_tokens
    assert json.loads(raw)["num_prompt_tokens"] == expected


@pytest.mark.full
def test_the_command_counts_files(folder, tmp_path):
    IMAGE.save(tmp_path / "a.png")
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "A red"}\nbad\n{"prompt": ""}\n')
    given = ("-m", folder, str(tmp_path / "in.jsonl"), str(tmp_path / "a.png"))
    output, _ = run(*given, "--json", code=1)
    found = [json.loads(line) for line in output.splitlines()]
    assert [item["error"] and item["error"]["code"] for item in found] == [None, 400, 400, None]
    assert [item["id"] for item in found[:3]] == ["a", None, 3]
    assert found[0]["num_prompt_tokens"] == count_tokens(folder, "A red").num_prompt_tokens
    assert found[3]["num_input_image_tokens"] > 0
    output, errors = run(*given, "--total", "--json", code=1)
    total = json.loads(output)
    assert (total["num_items"], total["num_failed"]) == (4, 2)
    assert total["num_prompt_tokens"] == sum(item["num_prompt_tokens"] for item in found)
    assert "error: line 2: the line is not JSON" in errors
    assert run(*given[:3], "--limit", "1", "--total")[0].endswith("(1 item)\n")


@pytest.mark.full
def test_all_questions_of_a_line_are_counted(folder, tmp_path):
    """A record has the sum of them, too."""
    IMAGE.save(tmp_path / "a.png")
    messages = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    texts = ("What is it?", "Red?")
    lines = [{"messages": messages, "ask": dict(zip("ab", texts, strict=True))}]
    lines += [{"messages": messages, "ask": {"a": text}} for text in texts]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output, _ = run("-m", folder, str(tmp_path / "in.jsonl"), "--json")
    both, *single = map(json.loads, output.splitlines())
    for name in ("num_prompt_tokens", "num_input_image_tokens"):
        assert both[name] == sum(own[name] for own in single) > 0


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to count"),
        (["A red circle"], "does not exist; a text to count is given with --prompt, a model with"),
        (["FOLDER"], "is a model's folder; give it with --model"),
        (["a.png", "--raw"], "belong to a single --prompt"),
        (["a.png"], "does not exist"),
    ],
)
def test_wrong_usage(folder, arguments, message):
    named = [folder if word == "FOLDER" else word for word in arguments]
    _, errors = run("-m", folder, *named, code=2)
    assert message in errors.replace("\n", " ")


@pytest.mark.full
def test_a_forked_child_is_refused(folder, run_program):
    code = """
import os, sys
from mmdeploy_llm import EngineError, TokenCounter
with TokenCounter(sys.argv[1]) as counter:
    counter.count_tokens("x")
    pid = os.fork()
    if not pid:
        try:
            counter.count_tokens("x")
        except EngineError as error:
            sys.exit(7 if "forked" in str(error) else 1)
    print(os.waitpid(pid, 0)[1] >> 8, counter.count_tokens("x").num_prompt_tokens > 0)
"""
    done = run_program(code, folder)
    assert (done.stdout, done.stderr) == ("7 True\n", "")


def test_the_names_are_public():
    assert {"TokenCount", "TokenCounter", "count_tokens"} <= set(mmdeploy_llm.__all__)
