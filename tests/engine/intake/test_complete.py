"""Every message of a conversation is in the prompt, or the request fails and says which is not."""

import jinja2
import pytest

from mmdeploy_llm.engine.intake.complete import check_complete, with_known_roles
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.values.params import SamplingParams

PARAMS = SamplingParams(max_tokens=5)

# As families write them: roles that are known, texts that are moved, cut, stripped or escaped.
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ (c.function or c).name }}]"
    "{% endfor %}</s>{% endif %}{% endfor %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'user' %}U {{ m.content | trim }}"
    "{% elif m.role == 'assistant' %}A {{ m.content | trim }}{% endif %}{% endfor %}"
)
SYSTEM_MOVES = (  # into the last turn of the user
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{% if loop.last and s %}{{ s }} {% endif %}"
    "[{{ m.role }}] {{ m.content }}{% endfor %}"
)
REASONING_GOES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1].lstrip() }}</s>"
    "{% endfor %}"
)
ESCAPED = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
FIRST_PART = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{{ m.content[0].text }}{% endif %}{% endfor %}"
)
ALL_PARTS = FIRST_PART.replace(
    "{{ m.content[0].text }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"
)
LAST_TURN = "{{ messages[-1].role }}: {{ messages[-1].content }}"
ONE_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + KNOWN_ROLES


def say(role, content, **fields):
    return {"role": role, "content": content, **fields}


USER = say("user", "What is in the picture?")
CALL = {"type": "function", "function": {"name": "look_closer", "arguments": {"x": 1}}}
CALLS = [USER, say("assistant", "", tool_calls=[CALL]), say("tool", "nothing of interest")]
PARTS = [{"type": "text", "text": "What is it?"}, {"type": "text", "text": "Answer in French."}]


def check(template, messages, tools=()):
    compiled = jinja2.Environment().from_string(template)

    def rendered(own, own_tools):
        return compiled.render(messages=own, tools=own_tools)

    known = with_known_roles(messages, template)
    text = rendered(known, tools)
    check_complete(known, tools, text, rendered)
    return text


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (KNOWN_ROLES, [say("system", "Be brief."), USER]),
        (KNOWN_ROLES, [say("developer", "Be brief."), USER]),
        (KNOWN_ROLES, [say("system", ""), say("user", "hi")]),
        (KNOWN_ROLES, [say("user", "hi"), say("assistant", "hi"), say("user", "hi")]),
        (KNOWN_ROLES, [say("critic", ""), USER]),  # nothing was said
        (KNOWN_ROLES, [say("critic", None), USER]),
        (KNOWN_ROLES, CALLS),
        (KNOWN_ROLES, [USER, say("assistant", None, tool_calls=[{"name": "f", "arguments": {}}])]),
        (NO_TOOLS, [say("user", "  What is it? \n"), say("assistant", "\nA cat."), USER]),
        (SYSTEM_MOVES, [say("system", "Answer in French."), USER, say("assistant", "Oui."), USER]),
        (REASONING_GOES, [USER, say("assistant", "<think>Well, a cat?</think>A cat."), USER]),
        (ESCAPED, [say("user", 'He said "hello" <b> é\nand left'), say("critic", "a\\b's")]),
        (ALL_PARTS, [say("user", PARTS)]),
        (ALL_PARTS, [say("user", [{"type": "image"}, PARTS[0]])]),
    ],
)
def test_complete(template, messages):
    check(template, messages)


@pytest.mark.parametrize(
    ("template", "messages", "number", "role"),
    [
        (KNOWN_ROLES, [say("critic", "Say BANANA at the end."), USER], 0, "critic"),
        (KNOWN_ROLES, [USER, say("Assistant", "A cat, I think."), USER], 1, "Assistant"),
        (KNOWN_ROLES, [say("critic", "What is"), USER], 0, "critic"),  # words of another message
        (KNOWN_ROLES, [say("critic", "user"), USER], 0, "critic"),  # and of the template
        (KNOWN_ROLES, [USER, say("critic", USER["content"])], 1, "critic"),
        (NO_TOOLS, [say("system", "Answer in French."), USER], 0, "system"),
        (NO_TOOLS, [say("developer", "Answer in French."), USER], 0, "system"),
        (NO_TOOLS, CALLS, 1, "assistant"),
        (NO_TOOLS, [USER, say("tool", "nothing of interest")], 1, "tool"),
        (FIRST_PART, [say("user", PARTS)], 0, "user"),
        (LAST_TURN, [say("user", "My name is Ada."), say("user", "Who am I?")], 0, "user"),
        (SYSTEM_MOVES, [USER, say("system", "Answer in French.")], 1, "system"),
        (ONE_SYSTEM, [say("system", "Be brief."), say("system", "In French."), USER], 1, "system"),
    ],
)
def test_left_out(template, messages, number, role):
    wanted = rf"message {number}, of role '{role}', or a part of it is not in the prompt"
    with pytest.raises(RequestError, match=wanted):
        check(template, messages)


def test_a_template_that_knows_developers_gets_them():
    template = "{% for m in messages %}{% if m.role != 'developer' %}-{% endif %}{{ m.content }}"
    messages = [say("developer", "Be brief.")]
    assert check(template + "{% endfor %}", messages) == "Be brief."
    assert check(ESCAPED, messages).count('"system"') == 1


def test_tools_that_no_template_tells_of():
    tool = {"type": "function", "function": {"name": "look_closer", "parameters": {}}}
    assert "look_closer" in check(TOOLS, [USER], [tool])
    with pytest.raises(RequestError, match=r"does not tell the model of the tools \(look_closer\)"):
        check(KNOWN_ROLES, [USER], [tool])


def tool_named(name):
    return {"type": "function", "function": {"name": name, "parameters": {}}}


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("picture", [USER]),  # a word of the question
        ("user", [USER]),  # of the template
        ("look_closer", CALLS),  # of a call in the conversation
        ("is", [say("system", 'There is a tool "is".'), USER]),
    ],
)
def test_a_name_that_stands_elsewhere_tells_of_no_tool(name, messages):
    with pytest.raises(RequestError, match=rf"does not tell the model of the tools \({name}\)"):
        check(KNOWN_ROLES, messages, [tool_named(name)])
    assert name in check(TOOLS, messages, [tool_named(name)])


def test_each_tool_is_told():
    tools = [tool_named("look_closer"), tool_named("picture")]
    check(TOOLS, [USER], tools)
    first = TOOLS.replace("tools or []", "(tools or [])[:1]")
    with pytest.raises(RequestError, match=r"of the tools \(picture\)"):
        check(first, [USER], tools)


def test_tools_in_json_are_rendered_once():
    text = '{"name": "look_closer"} <user>What is in the picture?'
    check_complete([USER], [tool_named("look_closer")], text, None)


def test_long_texts_are_rendered_once():
    rendered = []
    text = "<system>Answer in French.<user>What is in the picture?"
    check_complete([say("system", "Answer in French."), USER], (), text, rendered.append)
    assert rendered == []


def test_through_the_intake(intake):
    template = KNOWN_ROLES + "{% if add_generation_prompt %}<assistant>{% endif %}"

    def text(role):
        messages = [say(role, "Say BANANA."), USER]
        (request,) = intake.accept({"messages": messages, "chat_template": template}, PARAMS)
        return request.prompt

    assert text("developer") == text("system") != text("user")
    with pytest.raises(RequestError, match=r"message 0, of role 'critic'.* is not in the prompt"):
        text("critic")
