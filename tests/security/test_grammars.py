"""Attacks by schemas, expressions and grammars: each is that request's error in time, or compiles
and cannot stall a step, while other requests go on. (SECURITY.md, "grammars")"""

import importlib.util
import json
import random
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmdeploy_llm.engine.runner.sampling.grammar import GrammarBackend, ban_tokens
from mmdeploy_llm.engine.runner.sampling.grammars.probe import GOOD, _answer
from mmdeploy_llm.engine.runner.sampling.grammars.vocabulary import Vocabulary
from mmdeploy_llm.errors import ConfigError, EngineError, RequestError
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.values.params import GuidedDecodingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs llguidance: the extra 'guided'"
)
EOS = 256
SECONDS = 1.0
SLACK = 60.0  # seconds after which something hangs
MAX_STEP = 60.0  # seconds for the masks of a token
NUM_STEPS = 120


def with_tiers(names, *quick):
    """Leaves all but the quick ones to the full tier."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name not in quick)) for name in names]


def properties(count):
    return {f"p{i}": {"type": "string"} for i in range(count)}


def rules(count, body):
    return "root ::= r0\n" + "\n".join(
        [*(f"r{i} ::= " + body.format(i + 1) for i in range(count)), f'r{count} ::= "a"']
    )


CHAIN = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(900)}
ATTACKS = {
    "parentheses in a pattern": {"json": {"type": "string", "pattern": "(" * 49000 + ")" * 49000}},
    "parentheses in a regex": {"regex": "(" * 49_000 + "a" + ")" * 49_000},
    "parentheses in a grammar": {"grammar": "root ::= " + "(" * 49_000 + '"a"' + ")" * 49_000},
    "counted optional properties": {
        "json": {"properties": properties(200), "minProperties": 50, "maxProperties": 150}
    },
    "stars of stars": {"regex": "(.*)*" * 10_000},
    "optional letters": {"regex": "a?" * 30_000 + "a" * 30_000},
    "anyOf of objects": {
        "json": {"anyOf": [{"required": [f"p{i}"], "properties": {}} for i in range(900)]}
    },
    "anyOf of patterns": {
        "json": {
            "anyOf": [{"type": "string", "pattern": f"a{{1,{i + 1}}}x{i}"} for i in range(900)]
        }
    },
    "counts of counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "counts of counts in a grammar": {"grammar": 'root ::= ((("a"{1,999}){1,999}){1,999}){1,999}'},
    "exponential automaton": {"regex": ".*a.{200}b.{200}"},
    "ambiguous grammar": {"grammar": 'root ::= root root | "a" | ""'},
    "ambiguous classes": {"grammar": "root ::= x\nx ::= x x | y\ny ::= [^a] | [^b] | [^c] y"},
    "ambiguity that comes late": {"grammar": 'root ::= "b"{200} x\nx ::= x x | "a" | ""'},
    "doubled rules": {"grammar": rules(3000, 'r{0} r{0} | "a"')},
    "doubled rules without end": {"grammar": rules(60, "r{0} r{0}")},
    "a deep chain of rules": {"grammar": rules(4000, '"(" r{0} ")"')},
    "a deep chain of references": {
        "json": {"$defs": CHAIN | {"d900": {"type": "string"}}, "$ref": "#/$defs/d0"}
    },
    "products of allOf": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(12)
            ]
        }
    },
    "properties without end": {"json": {"type": "object", "properties": properties(1500)}},
    "patterns of properties": {
        "json": {"patternProperties": {f"^{i}.*{i}$": {} for i in range(300)}}
    },
    "huge lengths": {"json": {"type": "string", "minLength": 10**9, "maxLength": 2 * 10**9}},
    "huge numbers": {"json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}},
    "tiny factors": {"json": {"type": "number", "multipleOf": 1e-300}},
    "nested JSON": {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "a schema from elsewhere": {"json": {"$ref": "http://127.0.0.1:9/schema"}},
    "a file as schema": {"json": {"$ref": "file:///etc/passwd"}},
    "surrogates": {"regex": "a\ud800"},
    "a surrogate as choice": {"choice": ("a\ud800",)},
    "tags": {
        "structural_tag": {
            "structures": [{"begin": f"<{i}", "schema": {}, "end": ""} for i in range(200)],
            "triggers": [f"<{i}" for i in range(200)],
        }
    },
    "Lark in a literal": {"grammar": 'root ::= "/ \\n%import x\\nstart: /a/"'},
    "options of the library": {"json": {"x-guidance": {"lenient": True}, "not": {}}},
}
NOTHING_FITS = {
    "the empty text": {"choice": ("",)},
    "an empty expression": {"regex": "()"},
    "a reference to itself": {"json": {"$ref": "#"}},
    "two references in a circle": {
        "json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "an object that contains itself": {
        "json": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    },
    "a list that contains itself": {
        "json": {"type": "array", "items": {"anyOf": [{"$ref": "#"}, False]}, "minItems": 1}
    },
    "lengths": {"json": {"type": "string", "minLength": 5, "maxLength": 2}},
    "numbers": {"json": {"type": "integer", "minimum": 5, "maximum": 2}},
    "counts of items": {"json": {"type": "array", "minItems": 3, "maxItems": 2}},
    "no choice": {"json": {"enum": []}},
    "contradicting choices": {"json": {"allOf": [{"enum": ["a"]}, {"enum": ["b"]}]}},
    "a choice of another type": {"json": {"type": "integer", "enum": ["a"]}},
    "false": {"json": "false"},
    "a required property that is false": {
        "json": {"type": "object", "properties": {"a": False}, "required": ["a"]}
    },
    "an empty class": {"regex": r"[^\s\S]"},
    "an empty class in a grammar": {"grammar": "root ::= []"},
    "left recursion": {"grammar": 'root ::= root "a"'},
    "right recursion": {"grammar": 'root ::= "a" root'},
    "rules in a circle": {"grammar": 'root ::= a | "x" b\na ::= b a\nb ::= a'},
}
FAIR = {
    "fifty properties": {
        "json": {"type": "object", "properties": properties(50), "required": list(properties(50))}
    },
    "fifty optional properties": {"json": {"type": "object", "properties": properties(50)}},
    "lengths": {
        "json": {
            "type": "object",
            "properties": {
                "s": {"type": "string", "minLength": 3, "maxLength": 200},
                "l": {"type": "array", "items": {"type": "integer"}, "maxItems": 20},
            },
            "required": ["s", "l"],
        }
    },
    "nesting": {"json": '{"items":' * 90 + "{}" + "}" * 90},
    "a tree": {
        "json": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#"}},
            },
            "required": ["name", "children"],
        }
    },
    "choices": {"json": {"enum": [f"value {i}" for i in range(500)]}},
    "many choices": {"choice": tuple(f"value {i}" for i in range(5000))},
    "a date": {"json": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}},
    "oneOf": {"json": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 9}]}},
    "arithmetic": {"grammar": 'root ::= t ("+" t)*\nt ::= [0-9]+ | "(" root ")"'},
}


def make_tokenizer():
    """Returns a tokenizer of bytes and an end of sequence."""
    vocab = {one: index for index, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(models.BPE(vocab=vocab | {"<eos>": EOS}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


@pytest.fixture(scope="module")
def backend():
    backend = GrammarBackend(make_tokenizer(), EOS + 1, {EOS}, seconds=SECONDS)
    backend.validate(GuidedDecodingParams(regex="a"))
    yield backend
    backend.close()


def slowest_step(backend, params, random_, num_steps=NUM_STEPS):
    """Follows a grammar for some random tokens; returns the seconds of the slowest."""
    matcher, slowest = backend.guide(params), 0.0
    for _ in range(num_steps):
        begin = time.monotonic()
        logits = torch.zeros(1, EOS + 1)
        ban_tokens(logits, {0: matcher})
        allowed = logits[0, :EOS].isfinite().nonzero().flatten().tolist()
        if not allowed:
            break
        matcher.accept(random_.choice(allowed))
        slowest = max(slowest, time.monotonic() - begin)
    return slowest


def error_of(backend, params):
    try:
        backend.validate(params)
    except RequestError as error:
        return error
    return None


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "name",
    with_tiers(
        ATTACKS,
        "parentheses in a pattern",
        "ambiguous grammar",
        "a surrogate as choice",
    ),
)
def test_an_attack_ends_in_time(backend, name):
    params = GuidedDecodingParams(**ATTACKS[name])
    begin = time.monotonic()
    error = error_of(backend, params)
    if error is None:
        assert slowest_step(backend, params, random.Random(0)) < MAX_STEP
    else:
        assert error.code == 400
        assert re.match(r"guided_decoding\.\w+ ", str(error)), str(error)
        assert len(str(error)) < 600
        assert "\n" not in str(error)
    assert time.monotonic() - begin < SLACK
    backend.validate(GuidedDecodingParams(regex="a"))


@pytest.mark.parametrize(
    "name", with_tiers(NOTHING_FITS, "a reference to itself", "no choice", "contradicting choices")
)
def test_what_nothing_fulfils_is_refused(backend, name):
    with pytest.raises(RequestError) as caught:
        backend.validate(GuidedDecodingParams(**NOTHING_FITS[name]))
    assert caught.value.code == 400


@pytest.mark.parametrize("name", with_tiers(FAIR, "choices", "many choices"))
def test_what_is_fair_is_accepted(backend, name):
    params = GuidedDecodingParams(**FAIR[name])
    backend.validate(params)
    assert slowest_step(backend, params, random.Random(0)) < MAX_STEP


class Calls:
    """Counts the calls of a backend's process."""

    def __init__(self, backend, monkeypatch):
        helper = backend._probe._helper
        self.real, self.count = helper.call, 0
        monkeypatch.setattr(helper, "call", self)

    def __call__(self, job, seconds):
        self.count += 1
        return self.real(job, seconds)


@pytest.mark.full
def test_an_attack_that_is_repeated_costs_one_timeout(backend, monkeypatch):
    calls, params = Calls(backend, monkeypatch), GuidedDecodingParams(regex="(.*)*" * 9_999)
    messages = set()

    def work():
        for _ in range(500):
            with pytest.raises(RequestError) as caught:
                backend.validate(params)
            messages.add(str(caught.value))

    threads = [threading.Thread(target=work) for _ in range(3)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < SLACK
    assert len(messages) == calls.count == 1


@pytest.mark.full
def test_running_grammars_do_not_wait_for_one_that_compiles(backend):
    params = GuidedDecodingParams(json=FAIR["a tree"]["json"])
    backend.validate(params)
    attack = GuidedDecodingParams(regex="(.*)*" * 9_998)
    thread = threading.Thread(target=lambda: suppress_errors(backend, attack))
    thread.start()
    rounds = 0
    while thread.is_alive():
        assert slowest_step(backend, params, random.Random(0), num_steps=10) < MAX_STEP
        rounds += 1
    assert rounds > 3


def suppress_errors(backend, params):
    with suppress(RequestError, EngineError):
        backend.validate(params)


@pytest.mark.full
def test_a_process_that_dies_costs_one_request_at_most(backend, capfd):
    backend.validate(GuidedDecodingParams(regex="a{3}"))
    backend._probe._helper._worker.interrupt()
    suppress_errors(backend, GuidedDecodingParams(regex="b{3}"))
    backend.validate(GuidedDecodingParams(regex="c{3}"))
    with pytest.raises(RequestError):
        backend.validate(GuidedDecodingParams(**ATTACKS["doubled rules"]))
    backend.validate(GuidedDecodingParams(regex="d{3}"))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.full
def test_the_process_loads_no_torch_and_has_limits(backend):
    backend.validate(GuidedDecodingParams(regex="e{3}"))
    process = Path(f"/proc/{backend._probe._helper._worker.pid}")
    if not process.exists():
        pytest.skip("/proc is Linux's")
    assert "libtorch" not in (process / "maps").read_text()
    assert re.search(r"Max address space +\d+ ", (process / "limits").read_text())


@pytest.mark.full
def test_closing_ends_a_check_that_is_under_way():
    backend = GrammarBackend(make_tokenizer(), EOS + 1, {EOS}, seconds=60)
    backend.validate(GuidedDecodingParams(regex="a"))
    worker, found = backend._probe._helper._worker, []

    def work():
        try:
            backend.validate(GuidedDecodingParams(regex="(.*)*" * 10_000))
        except EngineError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.5)
    begin = time.monotonic()
    backend.close()
    thread.join(SLACK)
    assert time.monotonic() - begin < SLACK
    assert found == ["this LLM is closed; make a new one"]
    assert worker._process.returncode is not None
    with pytest.raises(EngineError, match="closed"):
        backend.validate(GuidedDecodingParams(regex="b"))


@pytest.mark.full
def test_the_engine_goes_on_during_attacks(tmp_path, caplog):
    from mmdeploy_llm import LLM, SamplingParams

    plain = SamplingParams(max_tokens=4, temperature=0)
    names = ("stars of stars", "a deep chain of rules", "parentheses in a pattern")
    attacks = [
        SamplingParams(guided_decoding=GuidedDecodingParams(**ATTACKS[name])) for name in names
    ]
    folder = str(write_tiny("qwen2", tmp_path))
    with LLM(folder, block_size=16, guided_decoding_timeout=1) as llm:
        (expected,) = llm.generate(["hello"], plain, use_tqdm=False)
        prompts, params = ["hello"] * 6, [plain, *attacks, plain, plain]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error_code for output in outputs] == [200, 400, 400, 400, 200, 200]
    assert "more than 1 s to compile" in outputs[1].error_msg
    assert outputs[0].outputs.token_ids == expected.outputs.token_ids
    assert "Traceback" not in caplog.text


SEEDS = (
    *({"json": case["json"]} for case in FAIR.values() if isinstance(case.get("json"), dict)),
    {"regex": r"(\d{1,3}\.){3}[a-f]+|(?i)x*?[^\n]"},
    {"grammar": FAIR["arithmetic"]["grammar"]},
    {"grammar": 'root ::= "a" | [b-e\\n]{2,5} (x | "\\u00e9")* # end\nx ::= root? "y"'},
    {
        "structural_tag": {
            "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
            "triggers": ["<f="],
        }
    },
    {"choice": ["yes", "no"]},
)
PIECES = [*"()[]{}|*+?.^$\\\"'/-,:#\n\0é😀", "::=", "{9999}", "{2,1}", "(?=", "\\x", "\\u{110000}"]
VALUES = (None, True, False, 0, -1, 10**9, 1e300, "", "a", "#", "^", [], {}, [{}], {"$ref": "#"})
KEYWORDS = (
    *("type", "items", "properties", "required", "enum", "const", "anyOf", "oneOf", "allOf"),
    *("$ref", "pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "not"),
    *("minimum", "maximum", "multipleOf", "additionalProperties", "patternProperties", "$defs"),
)


def changed_text(text, random_):
    for _ in range(random_.randrange(1, 4)):
        start, end = sorted(random_.randrange(len(text) + 1) for _ in range(2))
        piece = random_.choice([*PIECES, text[start : min(end, start + 20)] * 2])
        text = text[:start] + piece + text[start + random_.randrange(6) :]
    return text


def changed_value(value, random_):
    """Returns JSON with one value or key changed."""
    if isinstance(value, str) and random_.random() < 0.5:
        return changed_text(value, random_)
    if not value or not isinstance(value, dict | list) or random_.random() < 0.15:
        return random_.choice(VALUES)
    if isinstance(value, list):
        index = random_.randrange(len(value))
        return [*value[:index], changed_value(value[index], random_), *value[index + 1 :]]
    key = random_.choice(list(value))
    if random_.random() < 0.3:
        key = random_.choice(KEYWORDS)
    return value | {key: changed_value(value.get(key, random_.choice(VALUES)), random_)}


def mutated(random_):
    ((name, value),) = random_.choice(SEEDS).items()
    for _ in range(random_.randrange(1, 4)):
        is_text = isinstance(value, str)
        value = changed_text(value, random_) if is_text else changed_value(value, random_)
    if isinstance(value, dict) and random_.random() < 0.1:
        value = changed_text(json.dumps(value), random_)
    return {name: value}


@pytest.mark.full
@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.long)])
def test_mutations_compile_or_end_in_request_errors(backend, count):
    random_, num_good = random.Random(count), 0
    for _ in range(count):
        given = mutated(random_)
        begin = time.monotonic()
        with suppress(RequestError, ConfigError):  # ConfigError: no constraint at all
            params = GuidedDecodingParams(**given)
            backend.validate(params)
            num_good += 1
            slowest_step(backend, params, random_, num_steps=5)
        assert time.monotonic() - begin < SLACK, given
    assert count / 10 < num_good < count


def test_what_the_process_says_in_this_one():
    """The same function as in the process that can be killed."""
    tokenizer = make_tokenizer().backend_tokenizer.to_str()
    vocabulary = Vocabulary(tokenizer=tokenizer, size=EOS + 1, eos_token_ids=(EOS,))
    reader, _ = vocabulary.read()
    for grammar, problem in (
        ({"json_schema": {"type": "integer"}}, None),
        ({"json_schema": {"enum": ["a"], "type": "integer"}}, "Unsatisfiable schema"),
        ({"lark_grammar": 'start: "a" | "bc"'}, None),
        ({"lark_grammar": 'start: ""'}, "allows only the empty text"),
        ({"lark_grammar": "start: nothing"}, "unknown name"),
        ({"lark_grammar": f'start: "{"x" * 10}" start'}, "is too complex"),
    ):
        answers = []
        _answer(reader, json.dumps({"grammars": [grammar]}), answers)
        if problem is None:
            assert answers == [GOOD]
        else:
            assert problem in answers[0].decode()
