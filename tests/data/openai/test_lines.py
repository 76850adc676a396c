"""Lines of OpenAI's Batch API: those of its documentation and of vLLM's example run unchanged, and
hostile ones are errors of their own."""

import json
import logging

import pytest

from mmdeploy_llm.data.openai.lines import OpenAILines, is_openai_line
from mmdeploy_llm.errors import RequestError

URL = "https://upload.wikimedia.org/boardwalk.jpg"
TOOL = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}


def line(body, url="/v1/chat/completions", **more):
    return {"custom_id": "request-1", "method": "POST", "url": url, "body": body, **more}


def own(body, url="/v1/chat/completions", **more):
    return OpenAILines().translated(line(body, url, **more)).fields


# https://platform.openai.com/docs/guides/batch, and the example of `vllm run-batch`.
DOCUMENTED = """
{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are a helpful assistant."},{"role": "user", "content": "Hello world!"}],"max_tokens": 1000}}
{"custom_id": "request-2", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "meta-llama/Meta-Llama-3-8B-Instruct", "messages": [{"role": "system", "content": "You are an unhelpful assistant."},{"role": "user", "content": "Hello world!"}],"max_completion_tokens": 1000}}
"""  # noqa: E501


def test_documented_lines():
    lines = OpenAILines()
    one, two = (lines.translated(json.loads(text)) for text in DOCUMENTED.strip().splitlines())
    assert one.endpoint == two.endpoint == "/v1/chat/completions"
    assert one.fields == {
        "id": "request-1",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Hello world!"},
        ],
        "sampling_params": {"max_tokens": 1000},
    }
    assert two.fields["sampling_params"] == {"max_tokens": 1000}


def test_a_picture_and_every_parameter():
    body = {
        "model": "gpt-4o-mini",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "name": "Ann",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
                ],
            },
        ],
        "frequency_penalty": 0.5,
        "logit_bias": {"50256": -100},
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 300,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "n": 2,
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "seed": 7,
        "service_tier": "auto",
        "stop": ["\n"],
        "store": True,
        "stream": False,
        "temperature": 0.2,
        "tool_choice": "auto",
        "tools": [{"type": "function", "function": TOOL}],
        "top_p": 0.9,
        "user": "u",
        "verbosity": "medium",
        "audio": None,
    }
    found = own(body)
    params = found.pop("sampling_params")
    assert params == {
        **{name: body[name] for name in ("n", "temperature", "top_p", "seed", "stop")},
        **{name: body[name] for name in ("presence_penalty", "frequency_penalty")},
        "response_format": body["response_format"],
        "max_tokens": 300,
        "logit_bias": {50256: -100},
        "logprobs": 2,
    }
    assert found["tools"] == body["tools"]
    thinking = {"enable_thinking": True, "reasoning_effort": "low"}
    assert found["chat_template_kwargs"] == thinking
    system, user = found["messages"]
    assert system == {"role": "developer", "content": "Be brief."}
    assert user["content"] == body["messages"][1]["content"]


def test_tool_messages_and_choices():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "12"},
    ]
    found = own({"messages": messages, "tools": [{"type": "function"}], "tool_choice": "none"})
    assert "tools" not in found
    assert found["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert found["messages"][2] == messages[2]


def test_extras_of_vllm():
    found = own(
        {
            "messages": [{"role": "user", "content": "x"}],
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "guided_choice": ["a", "b"],
            "chat_template_kwargs": {"enable_thinking": False},
            "add_generation_prompt": True,
            "extra_body": {"ignore_eos": False},
            "best_of": 1,
        }
    )
    assert found["chat_template_kwargs"] == {
        "add_generation_prompt": True,
        "enable_thinking": False,
    }
    assert found["sampling_params"] == {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": False,
        "guided_decoding": {"choice": ["a", "b"]},
    }


def test_responses():
    """https://platform.openai.com/docs/api-reference/responses/create"""
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    body = {
        "model": "gpt-4.1",
        "instructions": "Be brief.",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "what is in this image?"},
                    {"type": "input_image", "image_url": URL, "detail": "auto"},
                ],
            },
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "12"},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "A boardwalk.", "annotations": []}],
            },
            {"role": "user", "content": "Again."},
        ],
        "tools": [{"type": "function", **TOOL, "strict": True}],
        "text": text,
        "reasoning": {"effort": "none"},
        "max_output_tokens": 50,
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
        "truncation": "disabled",
        "store": True,
    }
    found = own(body, "/v1/responses")
    system, user, called, told, answered, again = found["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"] == body["input"][0]["content"]
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert told == {"role": "tool", "tool_call_id": "c", "content": "12"}
    assert answered["content"] == body["input"][4]["content"]
    assert again == {"role": "user", "content": "Again."}
    assert found["tools"] == [{"type": "function", "function": TOOL}]
    assert found["chat_template_kwargs"] == {"enable_thinking": False}
    assert found["sampling_params"] == {
        "max_tokens": 50,
        "logprobs": 1,
        "response_format": {"type": "json_schema", "json_schema": text["format"]},
    }
    assert own({"input": "Hi"}, "")["messages"] == [{"role": "user", "content": "Hi"}]


def test_completions_and_urls():
    url = "https://api.openai.com/v1/completions"
    assert own({"prompt": "x", "max_tokens": 3, "logprobs": 2}, url)["sampling_params"] == {
        "max_tokens": 3,
        "logprobs": 2,
    }
    assert own({"prompt": [1, 2]}, "completions")["prompt_token_ids"] == [1, 2]
    assert own({"prompt": ["x"]}, "")["prompt"] == "x"
    chat = {"messages": [{"role": "user", "content": "x"}]}
    together = {"custom_id": "a", "body": chat}
    assert OpenAILines().translated(together).endpoint == "/v1/chat/completions"
    assert own(json.dumps(chat))["messages"] == chat["messages"]


CHAT = {"messages": [{"role": "user", "content": "x"}]}
HOSTILE = [
    ({"body": CHAT, "custom_id": 7}, "custom_id must be a text"),
    ({"body": CHAT, "custom_id": ""}, "custom_id must be a text"),
    (line([]), "body must be an object"),
    (line("{"), "body must be an object"),
    (line(CHAT, method="GET"), "method must be POST"),
    (line(CHAT, "/v1/embeddings"), "'/v1/embeddings' is not supported"),
    (line(CHAT, "http://[x"), "not supported"),
    (line(CHAT, other=1), "unknown key 'other'"),
    (line({}), "needs 'messages'"),
    (line({"messages": "x"}), "needs 'messages'"),
    (line({"messages": ["x"]}), "message 0 must be an object"),
    (line({"messages": [{"role": "function", "content": "x"}]}), "tool_calls"),
    (line({**CHAT, "max_tokens": 1, "max_completion_tokens": 2}), "two limits"),
    (line({**CHAT, "tool_choice": "required"}), "cannot be forced"),
    (line({**CHAT, "tool_choice": {"type": "function"}}), "cannot be forced"),
    (line({**CHAT, "tools": {}}), "tools must be a list"),
    (line({**CHAT, "parallel_tool_calls": False}), "cannot be bounded"),
    (line({**CHAT, "functions": [TOOL]}), "use tools"),
    (line({**CHAT, "top_logprobs": 2}), "needs logprobs: true"),
    (line({**CHAT, "logprobs": 3}), "must be true or false"),
    (line({**CHAT, "logit_bias": {"a": 1}}), "token ids"),
    (line({**CHAT, "logit_bias": [1]}), "token ids"),
    (line({**CHAT, "temprature": 1}), "did you mean 'temperature'"),
    (line({**CHAT, "best_of": 4}), "not supported"),
    (line({**CHAT, "web_search_options": {}}), "not supported"),
    (line({**CHAT, "audio": {"voice": "x"}}), "not supported"),
    (line({**CHAT, "chat_template_kwargs": 1}), "must be an object"),
    (line({"prompt": ["a", "b"]}, "/v1/completions"), "several lines"),
    (line({"input": []}, "/v1/responses"), "needs 'input'"),
    (line({"input": [{"type": "web_search_call"}]}, "/v1/responses"), "not supported"),
    (line({"input": [7]}, "/v1/responses"), "not supported"),
    (line({"input": "x", "previous_response_id": "r"}, "/v1/responses"), "not stored"),
    (line({"input": "x", "tools": [{"type": "web_search"}]}, "/v1/responses"), "only functions"),
    (line({"input": "x", "text": {"verbosity": "low"}}, "/v1/responses"), "format only"),
]


@pytest.mark.parametrize(("values", "words"), HOSTILE)
def test_hostile_lines_are_errors_of_their_own(values, words):
    assert is_openai_line(values)
    with pytest.raises(RequestError, match=words):
        OpenAILines().translated(values)


def test_what_is_ignored_is_told_once(caplog):
    lines = OpenAILines()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            lines.translated(line({**CHAT, "model": "m", "user": "u"}, metadata={}))
        lines.translated(line({**CHAT, "store": True}))
    one, two = caplog.messages
    assert one.endswith("change no answer: model, user, metadata")
    assert two.endswith(": store")


def test_parts_are_left_to_what_reads_messages():
    parts = [
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA=="}},
    ]
    body = {"messages": [{"role": "user", "content": [*parts, "text"]}]}
    found = own(body)["messages"][0]["content"]
    assert found == [*parts, {"type": "text", "text": "text"}]
