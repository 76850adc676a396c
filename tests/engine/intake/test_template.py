"""Chat templates: where they are found, and the sandbox that renders them."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmdeploy_llm.engine.intake.template import checkpoint_template, render
from mmdeploy_llm.engine.intake.tools import read_tools
from mmdeploy_llm.errors import CheckpointError, ConfigError, RequestError
from mmdeploy_llm.system.guarding.given_template import load_template


@pytest.fixture
def say(raw_tokenizer, renderer):
    def rendered(template, **variables):
        messages = [{"role": "user", "content": "hello"}]
        return render(raw_tokenizer, template, messages, variables, renderer=renderer)

    return rendered


def test_the_processors_template_wins_over_the_tokenizers(tmp_path, raw_tokenizer):
    assert checkpoint_template(tmp_path, raw_tokenizer) == raw_tokenizer.chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert checkpoint_template(tmp_path, raw_tokenizer) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert checkpoint_template(tmp_path, raw_tokenizer) == "from jinja"


def test_named_templates_and_none(tmp_path):
    class Bare:
        chat_template = None

    assert checkpoint_template(tmp_path, Bare) is None
    Bare.chat_template = {"default": "a", "tool_use": "b"}
    assert checkpoint_template(tmp_path, Bare) == "a"
    (tmp_path / "chat_template.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"chat_template.json"):
        checkpoint_template(tmp_path, Bare)


def test_a_template_is_a_file_or_a_text(tmp_path):
    path = tmp_path / "a{1}.jinja"
    path.write_text("in the file")
    assert load_template(str(path)) == "in the file"
    assert load_template("{{ messages }}") == "{{ messages }}"
    assert load_template("two\nlines") == "two\nlines"
    assert load_template("{{ 1 }}" * 5000) == "{{ 1 }}" * 5000
    for text in ("template.jinja", "chatml", str(tmp_path), "a\0b"):
        with pytest.raises(ConfigError, match="looks like a file path"):
            load_template(text)


def test_a_role_that_a_template_does_not_know_is_named(say):
    with pytest.raises(RequestError, match=r"Unsupported role \(the roles are: .*user"):
        say("{{ raise_exception('Unsupported role') }}")
    with pytest.raises(RequestError, match=r"bad content$"):
        say("{{ raise_exception('bad content') }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Unsupported role') }}", "Unsupported role"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 5 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
    ],
)
def test_errors_of_templates_are_request_errors(template, message, say):
    with pytest.raises(RequestError, match=message):
        say(template)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_cve_2026_5760_templates_are_sandboxed(attack, say):
    with pytest.raises(RequestError, match=r"SecurityError|UndefinedError"):
        say(attack)


FEATURES = {
    "loops": "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }} "
    "{{ (loop.previtem or m).role }}{{ (loop.nextitem or m).role }}{{ m.role }}: {{ m.content }}\n"
    "{% else %}no{% endfor %}{% for c in 'abc' if c != 'b' %}{% if loop.last %}{% break %}"
    "{% endif %}{{ c }}{% endfor %}"
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}{{ loop(x) }}"
    "{% else %}{{ x }}{% endif %}{% endfor %}{% for x in missing %}x{% else %}none{% endfor %}",
    "variables": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token is defined }}{{ mood }}"
    "{{ tools }}{{ documents }}{{ tools is defined }}{{ add_generation_prompt }}",
    "blocks": "  {% if true %}\n  a\n  {%- endif %}\n\n{% set x = [1, 2]|join('-') -%}\n {{ x }}\n",
    "macros": "{% macro say(x, y=2) %}<{{ x }}{{ y }}{{ caller() if caller else '' }}>"
    "{% endmacro %}{{ say('a') }}{% call say('b', y=3) %}in{% endcall %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ dict(a=1, **{'b': 2}) }}",
    "json": "{{ messages|tojson }}{{ {'b': '<é>', 'a': 1}|tojson(indent=2) }}",
    "training": "{% generation %}{% set x = 1 %}said{% endgeneration %}{{ x is defined }}",
    "filters": "{{ ' a '|trim }}{{ messages|map(attribute='role')|unique|list }}{{ 7|round }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 'a,b'.split(',')[-1] }}"
    "{{ 'x'|upper|replace('X', 'y') }}{{ 5 is divisibleby 5 }}{{ [3, 1]|sort|first }}"
    "{{ {'a': 1}.items()|list }}{{ 'ab'[::-1] }}{{ 'a' in 'abc' }}{{ none|default('d', true) }}",
    "arithmetic": "{{ 2 + 3 * 4 - 5 // 2 }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ 1 / 4 }} {{ 'a' * 3 }}"
    "{{ [1] + [2] }}{{ 'n=%d' % 3 }}{{ 'a' ~ 1 }}{{ -3|abs }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}",
}
CHAT = [
    {"role": "system", "content": "be kind", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "grüße <&>"}]},
    {"role": "assistant", "content": "", "reasoning": "why", "tool_calls": [{"a": (1, None)}]},
    {"role": "user", "content": "hello"},
]


@pytest.mark.parametrize("name", FEATURES)
def test_rendered_as_transformers_does(name, raw_tokenizer, renderer):
    variables = {"mood": "!", "documents": [{"title": "t", "text": "x"}]}
    expected = raw_tokenizer.apply_chat_template(
        CHAT, chat_template=FEATURES[name], tokenize=False, add_generation_prompt=True, **variables
    )
    assert render(raw_tokenizer, FEATURES[name], CHAT, variables, renderer=renderer) == expected


@pytest.mark.parametrize(
    "last", ["so far ", "so far", [{"type": "text", "text": "so"}, {"type": "image"}]]
)
def test_a_message_to_continue_ends_where_it_ends(last, raw_tokenizer, renderer):
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content|trim }}"
        "{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}</>{% endfor %}"
    )
    chat = [*CHAT, {"role": "assistant", "content": last}]
    variables = {"continue_final_message": True}
    expected = raw_tokenizer.apply_chat_template(
        chat, chat_template=template, tokenize=False, **variables
    )
    assert render(raw_tokenizer, template, chat, variables, renderer=renderer) == expected
    for wrong in ({"add_generation_prompt": True}, {"continue_final_message": "nothing"}):
        with pytest.raises(RequestError, match="continue_final_message"):
            render(raw_tokenizer, template, chat, {**variables, **wrong}, renderer=renderer)


def test_tools_as_functions(raw_tokenizer, renderer):
    def weather(city: str):
        """The weather.

        Args:
            city: where
        """

    template = "{{ tools|tojson }}"
    expected = raw_tokenizer.apply_chat_template(
        CHAT, tools=[weather], chat_template=template, tokenize=False
    )
    tools = {"tools": list(read_tools(weather))}
    assert render(raw_tokenizer, template, CHAT, tools, renderer=renderer) == expected
    assert "where" in expected


def test_objects_reach_a_template_by_name_only(say):
    class Dangerous:
        def delete(self):
            raise AssertionError("was called")

    assert say("{{ thing }}", thing=Dangerous()) == "<Dangerous>"
    with pytest.raises(RequestError, match="UndefinedError"):
        say("{{ thing.delete() }}", thing=Dangerous())


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "filters": "{{ range(99999)|map('center', 99999)|map('length')|sum }}",
    "recursive loops": "{% for x in [99] recursive %}{% set outer = loop %}{% for i in range(x) %}"
    "{{ outer([x - 1]) }}{% endfor %}{% endfor %}",
}
HUGE = {
    "powers": "{{ 9 ** 9 ** 9 ** 9 }}",
    "products": "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "texts": "{{ 'a' * 10 ** 12 }}",
    "lists": "{{ [0] * 10 ** 12 }}",
    "widths": "{{ 'a'.center(10 ** 10) }}",
    "precision": "{{ 1|round(-999999999) }}",
    "slices": "{{ range(5)|slice(10 ** 9)|list }}",
    "numbers from bytes": "{{ (1).from_bytes('a'.center(90000).encode(), 'big') // 3 }}",
    "tests": "{{ (1).from_bytes('a'.center(90000).encode(), 'big') is divisibleby 3 }}",
}


@pytest.mark.full
@pytest.mark.parametrize("attack", ENDLESS)
def test_pysec_2026_2013_endless_templates_are_stopped(attack, raw_tokenizer, renderer):
    """The limit holds in any thread, and the next prompt is rendered as usual."""
    seen = []

    def work():
        start = time.monotonic()
        try:
            render(raw_tokenizer, ENDLESS[attack], CHAT, {}, renderer=renderer, seconds=0.3)
        except RequestError as error:
            seen.append(str(error))
        seen.append(time.monotonic() - start)
        easy = "{{ messages|length }}"
        seen.append(render(raw_tokenizer, easy, CHAT, {}, renderer=renderer, seconds=60))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert "within 0.3 s; give another chat_template" in seen[0]
    assert seen[1] < 60
    assert seen[2] == "4"


@pytest.mark.parametrize("attack", HUGE)
def test_pysec_2026_2013_huge_numbers_in_templates_are_refused(attack, say):
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"SecurityError|OverflowError"):
        say(HUGE[attack])
    assert time.monotonic() - start < 60


def test_huge_templates_are_refused(say):
    with pytest.raises(RequestError, match="1048576 are allowed"):
        say(" " * (2**20 + 1))


@pytest.mark.full
def test_threads_render_the_same_template_with_their_own_time(raw_tokenizer, renderer):
    """One thread's limit neither ends nor extends another thread's rendering."""
    template = "{% for i in range(n) %}{{ i }}{% endfor %}"

    def work(n, seconds):
        try:
            variables = {"n": n}
            return len(
                render(raw_tokenizer, template, CHAT, variables, renderer=renderer, seconds=seconds)
            )
        except RequestError:
            return -1

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, (99999, 10, 99999, 10), (1e-9, 20, 1e-9, 20)))
    assert found == [-1, 10, -1, 10]
