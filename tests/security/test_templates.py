"""Attacks by chat templates and on them: each ends in time as that request's error, with the memory
bounded, while other threads go on. (SECURITY.md, "chat templates")"""

import random
import re
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from mmdeploy_llm_plugins.ernie import tiny as ernie
from mmdeploy_llm_plugins.glm import tiny as glm
from mmdeploy_llm_plugins.llama import tiny as llama
from mmdeploy_llm_plugins.paddleocr import tiny as paddleocr

from mmdeploy_llm.engine.intake.template import render
from mmdeploy_llm.engine.intake.templates import Renderer
from mmdeploy_llm.engine.intake.templates.renderer import MAX_MEMORY
from mmdeploy_llm.engine.intake.templates.sandbox import run
from mmdeploy_llm.errors import EngineError, RequestError
from mmdeploy_llm.testing.tiny import CHATML, write_tiny

SECONDS = 0.5
NUM_MUTATIONS = 10_000
NUM_TOGETHER = 500  # in one test
SLACK = 60.0  # seconds after which something hangs
MAX_PAUSE = 60.0  # seconds without progress of another thread: it stands still
MAX_GROWTH = 512 * 2**10  # KiB of this process
CHAT = [{"role": "user", "content": "hello"}]
TOKENIZER = SimpleNamespace(special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})

SINGLE_CALLS = {
    "sum of lists": "{{ ([[0, 0, 0, 0]] * 200000)|sum(start=[])|length }}",
    "title": "{{ ('a ' * 20000000)|title|length }}",
    "unique": "{{ (range(99999)|list * 300)|unique|list|length }}",
    "pprint": "{{ ([[0]] * 1000000)|pprint|length }}",
    "groupby": "{{ (range(99999)|list * 100)|groupby('x')|length }}",
    "sort": "{{ (range(99999)|map('string')|list * 100)|sort|length }}",
    "tojson with a huge indent": "{{ messages|tojson(indent=10**9) }}",
    "tojson with a text as indent": "{{ ([0] * 1000)|tojson(indent='x' * 10**7)|length }}",
    "tojson, nested": "{% set ns = namespace(x=[0] * 100000) %}{% for i in range(500) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson(indent=16)|length }}",
    "width in %": "{{ '%1900000000d' % 1 }}",
    "output of a width in %": "{{ '%700000000d' % 1 }}",
    "width in format": "{{ '{:1900000000}'.format(1) }}",
    "width in the filter": "{{ '%1900000000d'|format(1) }}",
    "translate": "{{ ('a' * 60000000).translate({97: 'b' * 99999})|length }}",
    "indent": "{{ ('a\n' * 30000000)|indent(99999)|length }}",
    "replace": "{{ ('a' * 60000000)|replace('a', 'b' * 99999)|length }}",
    "replace as method": "{{ ('a' * 60000000).replace('a', 'b' * 99999)|length }}",
    "join": "{{ range(99999)|join('a' * 10**7)|length }}",
    "join as method": "{{ ('a' * 10**7).join(range(99999)|map('string'))|length }}",
    "strip": "{{ ('b' * 4000000).strip('a' * 4000000 ~ 'b')|length }}",
    "wordwrap": "{{ ('a ' * 20000000)|wordwrap(2)|length }}",
    "urlize": "{{ ('http://a.b ' * 2000000)|urlize|length }}",
    "find": "{{ ('a' * 10**7).count('a' * 5000000 ~ 'b' ~ 'a' * 5000) }}{% for a in range(9999) %}"
    "{{ ('ab' * 10**7).split('a')|length }}{% endfor %}",
}
GROWTH = {  # of constructs that published templates use
    "concatenations": "{% set a = 'aa' %}" + "{% set a = a ~ a %}" * 60 + "{{ a }}",
    "one long concatenation": "{% set a = bos_token * 999999 %}{{ a" + " ~ a" * 2000 + " }}",
    "sums": "{% set a = bos_token %}" + "{% set a = a + a %}" * 60 + "{{ a }}",
    "products": "{% set a = bos_token %}" + "{% set a = a * 99 %}" * 60 + "{{ a }}",
    "blocks": "{% set a = bos_token %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60 + "{{ a }}",
    "lists": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "tuples": "{% set a = [1] %}" + "{% set a = (a, a) %}" * 60 + "{{ a|tojson }}",
    "dicts": "{% set a = [1] %}" + "{% set a = {'x': a, 'y': a} %}" * 60 + "{{ a|string }}",
    "comparisons": "{% set a = [1] %}{% set b = [1] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ a == b }}",
    "macros": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set a = bos_token %}"
    + "{% set a = f(a) %}" * 60
    + "{{ a }}",
    "replacements": "{% set a = bos_token %}"
    + ("{% set a = a|replace('s', '" + "s" * 60 + "') %}") * 60
    + "{{ a }}",
    "separators": "{% set a = bos_token %}"
    + ("{% set a = '" + "x" * 60 + "'.join(a) %}") * 60
    + "{{ a }}",
    "namespaces": "{% set n = namespace(a=bos_token) %}{% for i in range(99999) %}"
    "{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "x" * 20000
    + "{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(99) }}",
    "json of json": "{% set a = messages %}" + "{% set a = a|tojson|tojson %}" * 60 + "{{ a }}",
}
COMPILING = {
    "sums": "{{ 1" + " + 1" * 200_000 + " }}",
    "concatenations": "{{ 1" + " ~ 1" * 200_000 + " }}",
    "tuples": "{{ (" + "1, " * 200_000 + ")|length }}",
    "alternatives": "{{ x" + " or x" * 150_000 + " }}",
    "outputs": "{{ x }}" * 140_000,
    "blocks": "{% if x %}" * 50_000 + "{% endif %}" * 50_000,
    "parentheses": "{{ " + "(" * 300_000 + "1" + ")" * 300_000 + " }}",
    "negations": "{{ " + "not " * 200_000 + "x }}",
    "folding": "{{ 'a'" + "|center(99999)|list|join('aaaaaaaa')" * 20_000 + " }}",
    "quotes": "{{ " + "'" * 2**20,
    "braces": "{%" * 2**19,
    "spaces": "{% " + " " * 2**19 + "{%" + " " * 2**18,
}


@pytest.fixture(scope="module")
def renderer():
    renderer = Renderer()
    yield renderer
    renderer.close()


@contextmanager
def others_go_on():
    """Fails when another thread of this process stands still, or the process grows."""
    is_done = threading.Event()
    pauses = [0.0]

    def work():
        last = time.monotonic()
        while not is_done.wait(0.01):
            pauses[0] = max(pauses[0], time.monotonic() - last)
            last = time.monotonic()

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
    assert pauses[0] < MAX_PAUSE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < MAX_GROWTH


def attack(renderer, template, messages=CHAT, **variables):
    """Renders a template; returns its text, None for a request's error. Checks time and memory."""
    begin = time.monotonic()
    with others_go_on():
        try:
            text = render(
                TOKENIZER, template, messages, variables, renderer=renderer, seconds=SECONDS
            )
        except RequestError:
            text = None
    assert time.monotonic() - begin < SECONDS + SLACK
    return text


def assert_sound(renderer):
    """Asserts that templates are rendered as usual."""
    for template, text in (("{{ 1 + 1 }}", "2"), ("{{ 'a'|center(3) }}", " a ")):
        assert render(TOKENIZER, template, CHAT, {}, renderer=renderer) == text


# Most end in one way, the process is killed: some of each sort, and the others are long.
IN_CI = {
    *("title", "tojson, nested", "width in %", "translate", "join", "find"),
    *("concatenations", "lists", "dicts", "output", "recursion", "json of json"),
    *("parentheses", "quotes", "braces"),
}


def with_tier(names):
    """Returns the names as parameters, each with its tier."""
    return [
        pytest.param(name, marks=pytest.mark.full if name in IN_CI else pytest.mark.long)
        for name in names
    ]


@pytest.mark.parametrize("name", with_tier(SINGLE_CALLS))
def test_a_single_call_ends_in_time(name, renderer):
    assert attack(renderer, SINGLE_CALLS[name]) is None
    assert_sound(renderer)


@pytest.mark.parametrize("name", with_tier(GROWTH))
def test_what_grows_ends_in_time(name, renderer):
    assert attack(renderer, GROWTH[name]) is None
    assert_sound(renderer)


@pytest.mark.parametrize("name", with_tier(COMPILING))
def test_compiling_ends_in_time(name, renderer):
    attack(renderer, COMPILING[name])  # some are fast enough to be rendered
    assert_sound(renderer)


@pytest.mark.full
def test_large_messages(renderer):
    """What the messages decide is bounded too."""
    template = (
        "{% for m in messages %}{% for n in messages %}{% if m == n or m in messages %}"
        "{{ n.content|upper|replace('A', 'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbb')|tojson }}"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a" * 10**6} for _ in range(50)]
    assert attack(renderer, template, messages) is None
    nested = [0]
    for _ in range(300):
        nested = [nested]
    attack(renderer, "{{ x|tojson(indent=16) }}", x=[nested] * 1000)
    assert_sound(renderer)


ROOT = Path(__file__).parents[2]
TREE = (
    CHATML,
    *(family.TEMPLATE for family in (ernie, glm, llama, paddleocr)),
    *(path.read_text() for path in sorted(ROOT.glob("mmdeploy_llm/**/*.jinja"))),
)
COMMON = (  # what published templates use
    "{{ bos_token }}{% set ns = namespace(n=0, last=messages|length - 1) %}"
    "{% for m in messages[::-1] %}{% if m.role == 'user' and not m.content is string %}"
    "{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if loop.index0 % 2 == 1 %}{{ ' ' + m.content|string|trim }}"
    "{% elif m.content is string %}{{ m['content'].split('</think>')[-1].lstrip('\\n') ~ ns.last }}"
    "{% else %}{% for c in m.content if c.type == 'text' %}{{ c.text }}"
    "{% endfor %}{% endif %}{% endfor %}{{ tools|tojson }}{{ tools|tojson(indent=4) }}",
    "{% for t in tools %}{{ t.function|items|list }}{{ t|tojson|safe }}{{ t is mapping }}"
    "{% filter trim %} {{ messages|selectattr('role', 'equalto', 'user')|list|length }} "
    "{% endfilter %}{% endfor %}{% if not date is defined %}{% set date = strftime_now('%Y') %}"
    "{% endif %}{{ date }}",
    "{% if messages[0].role != 'system' %}{{ raise_exception('Begin with ' ~ 5) }}{% endif %}",
    "{% if messages[0].role == 'system' %}{{ raise_exception(messages[0].role) }}{% endif %}",
    "{{ missing.attribute }}",
    "{{ 1 + 'a' }}",
    "{{ '\ud800' ~ 'ü' ~ 5 ~ none ~ 1.5 ~ true }}{{ {1: 'a', none: [(1, 2)]} }}{{ x }}",
)
CONVERSATION = [
    {"role": "system", "content": "be <kind> & grüße"},
    {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]},
    {"role": "assistant", "content": "<think>why</think>\nIt is 5."},
    {"role": "user", "content": " \ud83d alone, and 🙂 "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": [1.5, None], "a": {}}}}]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("index", range(len(TREE) + len(COMMON)))
def test_what_published_templates_use_is_rendered(index, renderer):
    """The process gives the text, or the error, that the sandbox gives in this process."""

    def caught(call, *args):
        try:
            return call(*args)
        except Exception as error:
            return str(error).rpartition(": ")[2]

    template = (*TREE, *COMMON)[index]
    for tools in (None, TOOLS):
        variables = {
            **TOKENIZER.special_tokens_map,
            "messages": CONVERSATION,
            "tools": tools or [],
            "add_generation_prompt": True,
            "x": {1: 2.5, "a": [None, True]},
        }
        there = caught(renderer.render, template, variables, 60.0)
        assert there == caught(run, template, variables, 60.0) is not None


@pytest.mark.full
def test_one_process_renders_template_after_template(renderer):
    """None is started for a template: that would cost a hundred times as much."""
    variables = {**TOKENIZER.special_tokens_map, "messages": [*CONVERSATION[2:], *CHAT] * 3}
    renderer.render(CHATML, variables, 60.0)
    first = renderer._helper._worker.pid
    for _ in range(20):
        renderer.render(CHATML, variables, 60.0)
        assert renderer._helper._worker.pid == first


@pytest.mark.full
def test_threads_share_the_process(renderer):
    """An attack costs its own request; the others wait for it and are rendered."""

    def work(template):
        try:
            return render(TOKENIZER, template, CHAT, {}, renderer=renderer, seconds=SECONDS)
        except RequestError:
            return None

    templates = ["{{ 'a'|center(3) }}", SINGLE_CALLS["title"], SINGLE_CALLS["width in %"]] * 3
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, templates)) == [" a ", None, None] * 3


@pytest.mark.full
def test_a_process_that_dies_costs_one_request_at_most(renderer):
    assert_sound(renderer)
    renderer._helper._worker.interrupt()
    with pytest.raises(RequestError, match="ended the process"):
        render(TOKENIZER, "{{ 'a'|center(3) }}", CHAT, {}, renderer=renderer)
    assert_sound(renderer)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_process_loads_no_torch_and_has_limits(renderer):
    assert_sound(renderer)
    process = Path(f"/proc/{renderer._helper._worker.pid}")
    assert "libtorch" not in (process / "maps").read_text()
    limits = (process / "limits").read_text()
    assert re.search(rf"Max address space +{MAX_MEMORY} ", limits)
    assert re.search(r"Max cpu time +\d+ ", limits)


@pytest.mark.full
def test_answers_of_the_process_are_not_unpickled(renderer, monkeypatch):
    import pickle

    monkeypatch.setattr(pickle, "loads", lambda *args, **kwargs: pytest.fail("unpickled"))
    assert_sound(renderer)


@pytest.mark.full
def test_closing_ends_a_call_that_hangs():
    renderer = Renderer()
    assert_sound(renderer)
    worker, found = renderer._helper._worker, []

    def work():
        try:
            render(TOKENIZER, SINGLE_CALLS["title"], CHAT, {}, renderer=renderer, seconds=60)
        except EngineError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    begin = time.monotonic()
    renderer.close()
    thread.join(60)
    assert time.monotonic() - begin < SLACK
    assert found == ["this LLM is closed; make a new one"]
    assert worker._process.returncode is not None
    with pytest.raises(EngineError, match="closed"):
        render(TOKENIZER, "{{ 'a'|center(3) }}", CHAT, {}, renderer=renderer)


@pytest.mark.full
def test_the_engine_goes_on_during_an_attack(tmp_path):
    from mmdeploy_llm import LLM, SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0)
    with LLM(str(write_tiny("qwen2", tmp_path)), block_size=16) as llm:
        (expected,) = llm.generate(["hello"], params, use_tqdm=False)
        found, rounds = [], 0
        attacks = [SINGLE_CALLS[name] for name in ("indent", "translate", "width in %")]

        def work():
            for template in attacks:
                found.extend(llm.chat(CHAT, params, use_tqdm=False, chat_template=template))

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            (output,) = llm.generate(["hello"], params, use_tqdm=False)
            assert output.outputs.token_ids == expected.outputs.token_ids
            rounds += 1
        assert rounds > 3
        assert [output.error_code for output in found] == [400] * 3
        (output,) = llm.chat(CHAT, params, use_tqdm=False)
        assert output.error_code == 200


def mutated(random_):
    """Returns a template made of pieces of all templates of this file."""
    sources = (*TREE, *COMMON, *SINGLE_CALLS.values(), *(text[:500] for text in GROWTH.values()))
    text = random_.choice(sources)
    for _ in range(random_.randrange(1, 5)):
        other = random_.choice(sources)
        start, end = sorted(random_.randrange(len(other) + 1) for _ in range(2))
        at = random_.randrange(len(text) + 1)
        text = text[:at] + other[start : min(end, start + 60)] + text[at + random_.randrange(30) :]
    return text


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.long if seed else pytest.mark.full)
        for seed in range(NUM_MUTATIONS // NUM_TOGETHER)
    ],
)
def test_mutations_end_in_text_or_request_errors(seed, renderer):
    random_ = random.Random(seed)
    for _ in range(NUM_TOGETHER):
        template = mutated(random_)
        begin = time.monotonic()
        with suppress(RequestError):
            render(TOKENIZER, template, CONVERSATION, {}, renderer=renderer, seconds=0.2)
        assert time.monotonic() - begin < SLACK, template
    assert_sound(renderer)
