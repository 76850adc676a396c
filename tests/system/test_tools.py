"""Tool calls and reasoning through the engine, with tiny models that a grammar makes write the
text."""

import importlib.util
import json
from pathlib import Path

import pytest

from mmdeploy_llm import LLM, GuidedDecodingParams, SamplingParams, ToolCall

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs llguidance: the extra 'guided'"
)
TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor -%}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments.city }}>
{%- endfor %}
{% endfor -%}
{%- if add_generation_prompt %}assistant: <think>
{% if enable_thinking is defined and not enable_thinking %}</think>
{% endif %}{% endif -%}"""
ROLES = ("assistant", "tool")  # of the messages after the question, once a tool was called
ASK = [{"role": "user", "content": "Is it warm in Rome?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city, such as <|image@placeholder|>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
XML = """<tool_call>
<function=weather>
<parameter=city>
Rome
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""


def saying(*texts, **fields):
    """Returns sampling parameters with which the model thinks for a token, if at all, and then
    writes one of these texts."""
    guided = GuidedDecodingParams(choice=list(texts))
    fields = {"reasoning_max_tokens": 1, "max_tokens": 400, **fields}
    return SamplingParams(temperature=0, guided_decoding=guided, **fields)


@pytest.fixture(scope="module")
def open_llm(tiny_folder):
    """Opens a tiny checkpoint with TEMPLATE and the parsers of its family."""
    opened = {}

    def make(family):
        if family not in opened:
            opened[family] = LLM(
                model=str(tiny_folder(family)),
                chat_template=TEMPLATE,
                reasoning_parser="auto",
                tool_call_parser="auto",
                block_size=16,
                num_threads=1,
                use_warmup=False,
            )
        return opened[family]

    yield make
    for llm in opened.values():
        llm.close()


def chat(llm, params, messages=ASK, **options):
    output = try_chat(llm, params, messages, **options)
    assert output.is_ok, output.error_msg
    return output


def try_chat(llm, params, messages=ASK, **options):
    (output,) = llm.chat(messages, params, use_tqdm=False, tools=TOOLS, **options)
    return output


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3", CALL),
        pytest.param("ernie4_5_vl_moe", CALL, marks=pytest.mark.full),
        pytest.param("qwen3_moe", XML, marks=pytest.mark.full),
    ],
)
def test_a_call_is_whole_and_separate_from_the_text(open_llm, family, said):
    output = chat(open_llm(family), saying(said))
    outputs = output.outputs
    assert outputs.reasoning_content
    assert (outputs.text, outputs.is_valid) == ("", True)
    assert outputs.finish_reason == "tool_calls"
    (call,) = outputs.tool_calls
    assert (call.name, call.index) == ("weather", 0)
    assert json.loads(call.arguments) == {"city": "Rome", "days": 2}
    json.dumps(output.to_dict())


def test_the_template_gets_the_tools_and_the_calls_come_back(open_llm):
    llm = open_llm("ernie4_5_vl_moe")
    (call,) = chat(llm, saying(CALL)).outputs.tool_calls
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "31 degrees", "tool_call_id": call.id},
    ]
    output = chat(llm, saying("It is."), messages)
    assert output.outputs.text == "It is."
    assert output.outputs.finish_reason == "stop"
    assert output.outputs.tool_calls == ()
    assert messages[1]["tool_calls"] == [call]
    rendered = llm._desk.intake._tokenizer.decode(output.prompt_token_ids)
    schema, question, *_ = rendered.splitlines()
    assert json.loads(schema) == TOOLS[0]
    assert question.startswith("user: Is it warm in Rome?")
    assert "<weather Rome>" in rendered
    assert "tool: 31 degrees" in rendered


@pytest.mark.full
def test_a_call_streams_in_the_delta_that_completes_it(open_llm):
    llm = open_llm("qwen3")
    params = saying(f"Let me see.\n{CALL}\n{CALL}")
    whole = chat(llm, params).outputs
    deltas = [delta.outputs for delta in llm.stream(ASK, params, tools=TOOLS)]
    assert "".join(delta.text for delta in deltas) == whole.text == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [(call.name, call.index) for call in calls] == [("weather", 0), ("weather", 1)]
    assert [delta.finish_reason for delta in deltas][-1] == "tool_calls"
    assert max(len(delta.tool_calls) for delta in deltas) == 1


def test_text_that_is_no_call_stays_content(open_llm):
    broken = CALL.replace("}}", "")
    outputs = chat(open_llm("qwen3"), saying(broken)).outputs
    assert (outputs.text, outputs.tool_calls, outputs.finish_reason) == (broken, (), "stop")


def test_a_call_that_the_length_cuts_off_is_no_call(open_llm):
    output = try_chat(open_llm("qwen3"), saying(CALL, max_tokens=40))
    outputs = output.outputs
    assert (outputs.finish_reason, outputs.is_valid, output.error_code) == ("length", False, 422)
    assert outputs.tool_calls == ()
    assert CALL.startswith(outputs.text)


def test_tools_of_one_prompt(open_llm):
    llm, params = open_llm("qwen3"), saying(CALL)
    prompts = [{"messages": ASK, "tools": tools} for tools in (TOOLS, {"name": "f"}, None)]
    good, bad, without = llm.generate(prompts, params, use_tqdm=False)
    assert [call.name for call in good.outputs.tool_calls] == ["weather"]
    assert bad.error_code == 400
    assert "tool 0 must be" in bad.error_msg
    assert len(without.prompt_token_ids) < len(good.prompt_token_ids)


@pytest.mark.parametrize("family", ["ernie4_5_vl_moe", "qwen3"])
def test_the_template_may_open_or_close_the_thinking(open_llm, family):
    """`reasoning_parser="auto"`: the parser of the family reads the state from the prompt."""
    llm = open_llm(family)
    opened = chat(llm, saying("so")).outputs
    assert (bool(opened.reasoning_content), opened.text) == (True, "so")
    cut = try_chat(llm, saying("so", max_tokens=5, reasoning_max_tokens=None)).outputs
    assert (bool(cut.reasoning_content), cut.text, cut.is_valid) == (True, "", False)
    kwargs = {"enable_thinking": False}
    closed = chat(llm, saying("so it is"), chat_template_kwargs=kwargs).outputs
    assert (closed.reasoning_content, closed.text) == ("", "so it is")


@pytest.mark.full
def test_a_batch(open_llm, tmp_path):
    """A line may contain tools; its record has the calls, and a report shows them."""
    guided = {"guided_decoding": {"choice": [CALL]}, "max_tokens": 400, "reasoning_max_tokens": 1}
    lines = [
        {"id": "a", "messages": ASK, "tools": TOOLS, "sampling_params": guided},
        {"id": "b", "messages": ASK, "tools": "weather"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out, page = tmp_path / "out.jsonl", tmp_path / "out.html"
    open_llm("qwen3").run_batch(tmp_path / "in.jsonl", out, report=page, use_tqdm=False)
    records = {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}
    (call,) = records["a"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 2}
    assert records["a"]["finish_reason"] == "tool_calls"
    assert "tool 0 must be" in records["b"]["error"]["message"]
    assert "tool_calls" not in records["b"]
    assert "weather({&#34;city" in page.read_text()
    assert "answered nothing" not in page.read_text()


@pytest.mark.full
def test_no_parser_unless_requested(tiny_folder):
    options = {"chat_template": TEMPLATE, "block_size": 16, "use_warmup": False, "num_threads": 1}
    with LLM(model=str(tiny_folder("qwen3")), **options) as llm:
        outputs = chat(llm, saying(CALL, reasoning_max_tokens=None)).outputs
    assert (outputs.text, outputs.tool_calls, outputs.finish_reason) == (CALL, None, "stop")


def test_calls_are_public_values():
    call = ToolCall(id="1", name="f", arguments="{}")
    assert call.to_dict()["function"] == {"name": "f", "arguments": "{}"}
    assert (call.type, call.function.name) == ("function", "f")


@pytest.mark.full
def test_the_example_makes_a_round_trip(tiny_folder, monkeypatch, capsys):
    """Runs examples/tools.py with a tiny model that is made to write a call, and then an answer."""
    path = Path(__file__).parents[2] / "examples" / "tools.py"
    spec = importlib.util.spec_from_file_location("example_tools", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    arguments = json.dumps({"path": str(example.PICTURE)})
    call = f'<tool_call>\n{{"name": "image_size", "arguments": {arguments}}}\n</tool_call>'
    replies = [call, "440 by 220."]

    class Guided(LLM):
        """Writes one of the replies after the other."""

        def chat(self, messages, params, **options):
            assert [message["role"] for message in messages] in (["user"], ["user", *ROLES])
            return super().chat(messages, saying(replies.pop(0)), **options)

    monkeypatch.setattr(example, "LLM", lambda **options: Guided(chat_template=TEMPLATE, **options))
    example.main(str(tiny_folder("qwen3")))
    assert capsys.readouterr().out.splitlines() == [
        f"image_size({arguments}) gives 440 x 220 pixels",
        "440 by 220.",
    ]
    assert replies == []
