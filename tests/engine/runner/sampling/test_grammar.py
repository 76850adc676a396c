"""Guided decoding: which texts are allowed, which constraints are refused, and the error without
llguidance."""

import importlib.util
import json
import random
import re
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmdeploy_llm.engine.runner.sampling import grammar as grammar_module
from mmdeploy_llm.engine.runner.sampling.grammar import GrammarBackend
from mmdeploy_llm.engine.runner.sampling.grammars.probe import LIMITS
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.values.params import GuidedDecodingParams

from .guided import banned

EOS = 256
VOCAB_SIZE = 300  # wider than the tokenizer's

needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None,
    reason="needs llguidance: the extra 'guided'",
)


def accepts(backend, tokenizer, params, text):
    """Returns whether every token of the text, and then the end, is allowed."""
    matcher = backend.guide(params)
    for token_id in [*tokenizer(text).input_ids, EOS]:
        if banned(matcher, VOCAB_SIZE)[token_id]:
            return False
        matcher.accept(token_id)
    return True


def generate(make_request, make_sampler, backend, guided, seed, num_steps=120, **fields):
    """Returns token ids from random logits, up to the end of sequence."""
    request = make_request(
        guided_decoding=guided, temperature=1.0, seed=seed, eos_token_ids={EOS}, **fields
    )
    sampler = make_sampler([request], VOCAB_SIZE, backend)
    generator = torch.Generator().manual_seed(seed)
    token_ids = []
    for _ in range(num_steps):
        result = sampler.sample(torch.randn(1, VOCAB_SIZE, generator=generator), [0])
        assert result.errors == {}
        token_ids += result.token_ids
        if token_ids[-1] == EOS:
            break
    return token_ids


@needs_llguidance
class TestConstraints:
    @pytest.mark.parametrize("seed", range(3))
    def test_regex(self, make_request, make_sampler, backend, tokenizer, seed):
        guided = GuidedDecodingParams(regex=r"[a-f]{2,4}-(he|[0-9])+x")
        token_ids = generate(
            make_request, make_sampler, backend, guided, seed, logit_bias={tokenizer.vocab["x"]: 3}
        )
        assert token_ids[-1] == EOS
        assert re.fullmatch(guided.regex, tokenizer.decode(token_ids[:-1]))

    @pytest.mark.parametrize("seed", range(6))
    def test_choice(self, make_request, make_sampler, backend, tokenizer, seed):
        choices = ("true", "tree", "he", "é\n")
        guided = GuidedDecodingParams(choice=choices)
        token_ids = generate(make_request, make_sampler, backend, guided, seed)
        assert token_ids[-1] == EOS
        assert tokenizer.decode(token_ids[:-1]) in choices

    def test_choices_of_odd_characters(self, backend, tokenizer):
        choices = (
            'say "no"',
            "a\\b",
            "a\nb\t",
            "日本😀",
            "\x01\x7f",
            "[x]|(y)*",
            "",
            " ' ",
            "\u2028",
        )
        guided = GuidedDecodingParams(choice=choices)
        for choice in choices:
            assert accepts(backend, tokenizer, guided, choice)
        for other in ("say", "a\\", "a\nb", "[x]", "x", "[x]|(y)*x"):
            assert not accepts(backend, tokenizer, guided, other)

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("as_text", [False, True])
    @pytest.mark.parametrize("seed", range(4))
    def test_json_schema(self, make_request, make_sampler, backend, tokenizer, seed, as_text):
        schema = {
            "type": "object",
            "properties": {
                "ok": {"type": "boolean"},
                "kind": {"enum": ["a", "b"]},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["ok", "kind", "n"],
            "additionalProperties": False,
        }
        given = json.dumps(schema) if as_text else schema
        guided = GuidedDecodingParams(json=given)
        token_ids = generate(make_request, make_sampler, backend, guided, seed)
        text = tokenizer.decode(token_ids[:-1])
        found = json.loads(text)
        assert text == json.dumps(found)
        assert set(found) == set(schema["properties"])
        assert type(found["ok"]) is bool
        assert found["kind"] in ("a", "b")
        assert 0 <= found["n"] <= 99

    def test_json_object(self, backend, tokenizer):
        guided = GuidedDecodingParams(json_object=True)
        assert accepts(backend, tokenizer, guided, '{"a": [1, {"b": null}]}')
        assert not accepts(backend, tokenizer, guided, "{a: 1}")

    @pytest.mark.parametrize("kind", [{"json": {"type": "object"}}, {"json_object": True}])
    def test_json_has_the_whitespace_of_json_dumps(self, backend, tokenizer, kind):
        value = {"a": [1, -2.5, {"b": None}, [], {}], "c d": "x, y: z"}
        compact, indented = json.dumps(value, separators=(",", ":")), json.dumps(value, indent=1)
        guided = GuidedDecodingParams(**kind)
        assert accepts(backend, tokenizer, guided, json.dumps(value))
        for text in (compact, indented, " {}", "{} ", "{ }", '{"a" : 1}', '{"a":  1}'):
            assert not accepts(backend, tokenizer, guided, text), text
        guided = GuidedDecodingParams(**kind, disable_any_whitespace=False)
        for text in (json.dumps(value), compact, indented, "{ }", '{"a" : 1}'):
            assert accepts(backend, tokenizer, guided, text), text

    @pytest.mark.parametrize("form", ["structures", "format", "text"])
    def test_structural_tags(self, backend, tokenizer, form):
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        tags = [
            {"begin": "<f=a>", "schema": schema, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": ""},
        ]
        given = {"structures": tags, "triggers": ["<f="]}
        if form == "format":
            newer = [
                {
                    "begin": tag["begin"],
                    "content": {"type": "json_schema", "json_schema": tag["schema"]},
                    "end": tag["end"],
                }
                for tag in tags
            ]
            inner = {"type": "triggered_tags", "triggers": ["<f="], "tags": newer}
            given = {"type": "structural_tag", "format": inner}
        guided = GuidedDecodingParams(structural_tag=json.dumps(given) if form == "text" else given)
        for text in (
            "free text",
            '<f=a>{"n": 1}</f>',
            'I ask: <f=a>{"n": -5}</f> and <f=b>true, done',
            "<f",
            "a < b",
        ):
            assert accepts(backend, tokenizer, guided, text), text
        for text in ("<f=c>", '<f=a>{"n": "x"}</f>', '<f=a>{"n": 1}', "<f=b>1", "<f=a>text"):
            assert not accepts(backend, tokenizer, guided, text), text

    @pytest.mark.full
    def test_added_tokens(self):
        """A text contains those that are not special; a structural tag may begin with a special
        one."""
        vocab = {one: i for i, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        model = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        model.add_tokens([AddedToken("<think>", special=False)])
        model.add_special_tokens(["<eos>", "<s>"])
        raw = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")
        think, eos, other = (raw.convert_tokens_to_ids(t) for t in ("<think>", "<eos>", "<s>"))
        with closing(GrammarBackend(raw, 300, {eos})) as backend:
            tag = {"begin": "<s>call ", "schema": {"type": "boolean"}, "end": "."}
            guided = GuidedDecodingParams(structural_tag={"structures": [tag], "triggers": ["<s>"]})
            backend.validate(guided)
            matcher = backend.guide(guided)
            for token_id in raw("x<s>call true.<think>").input_ids:
                assert not banned(matcher, 300)[token_id]
                matcher.accept(token_id)
            guided = GuidedDecodingParams(choice=("<think><s>",))
            backend.validate(guided)
            matcher, found = backend.guide(guided), []
            while not found or found[-1] != eos:
                allowed = (~banned(matcher, 300)).nonzero().flatten().tolist()
                found.append(allowed[0])
                matcher.accept(found[-1])
            assert found == [think, *raw.convert_tokens_to_ids([*"<s>"]), eos]
            guided = GuidedDecodingParams(regex="[^a]*")
            allowed = ~banned(backend.guide(guided), 300)
            assert allowed[think]
            assert not allowed[other]

    def test_ebnf(self, backend, tokenizer):
        guided = GuidedDecodingParams(
            grammar='root ::= greeting " " [a-z]+\ngreeting ::= "he" | "hi"'
        )
        assert accepts(backend, tokenizer, guided, "he you")
        assert not accepts(backend, tokenizer, guided, "ho you")

    def test_only_end_of_sequence_follows_the_end(
        self, make_request, make_sampler, backend, tokenizer
    ):
        request = make_request(
            guided_decoding=GuidedDecodingParams(choice=("he",)),
            eos_token_ids={EOS},
            ignore_eos=True,
        )
        sampler = make_sampler([request], VOCAB_SIZE, backend)
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, tokenizer.vocab["h"]] = 9.0
        found = [sampler.sample(logits, [0]).token_ids[0] for _ in range(4)]
        # A text that the grammar fixes is written with the tokens that the tokenizer makes of it.
        assert found == [tokenizer.vocab["he"], EOS, EOS, EOS]

    def test_padding_of_the_vocabulary_is_banned(self, backend):
        mask = banned(backend.guide(GuidedDecodingParams(regex=".*")), VOCAB_SIZE)
        assert mask[EOS + 3 :].all()
        assert not mask[0]


@needs_llguidance
class TestRows:
    def test_rows_with_and_without_a_grammar(self, make_request, make_sampler, backend, tokenizer):
        requests = [
            make_request(),
            make_request(guided_decoding=GuidedDecodingParams(choice=("a",))),
            make_request(guided_decoding=GuidedDecodingParams(choice=("b",)), logit_bias={5: 99.0}),
            make_request(repetition_penalty=1.1),
        ]
        logits = torch.zeros(4, VOCAB_SIZE)
        logits[:, 77] = 9.0
        result = make_sampler(requests, VOCAB_SIZE, backend).sample(logits, range(4))
        assert result.token_ids == [77, tokenizer.vocab["a"], tokenizer.vocab["b"], 77]

    def test_nothing_allowed_fails_that_row_alone(
        self, make_request, make_sampler, backend, tokenizer
    ):
        guided = GuidedDecodingParams(choice=("ab",))
        requests = [
            make_request(guided_decoding=guided, bad_words_token_ids=((tokenizer.vocab["a"],),)),
            make_request(guided_decoding=guided),
        ]
        result = make_sampler(requests, VOCAB_SIZE, backend).sample(
            torch.zeros(2, VOCAB_SIZE), range(2)
        )
        assert list(result.errors) == [0]
        assert result.token_ids[1] == tokenizer.vocab["a"]

    def test_preempted_is_uninterrupted(self, make_request, make_sampler, backend):
        guided = GuidedDecodingParams(regex="[a-z]{3}[0-9]{40}")
        fields = {"guided_decoding": guided, "temperature": 1.0, "eos_token_ids": {EOS}}
        sampler = make_sampler([make_request(**fields)], VOCAB_SIZE, backend)
        steps = torch.randn(9, 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        whole = [sampler.sample(logits, [0]).token_ids[0] for logits in steps]
        request = make_request(**fields, output_token_ids=whole[:5])
        sampler = make_sampler([request], VOCAB_SIZE, backend)
        assert [sampler.sample(logits, [0]).token_ids[0] for logits in steps[5:]] == whole[5:]


def tagged(**fields):
    """Returns a structural tag with some fields of its only structure replaced."""
    structure = {"begin": "<f>", "schema": {}, "end": "", **fields}
    return {"structures": [structure], "triggers": ["<f"]}


@needs_llguidance
class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"regex": "["}, "unclosed"),
            ({"regex": "a\ud800"}, "escape"),
            ({"json": "{"}, "guided_decoding.json is not JSON"),
            ({"json": {"a": object()}}, "guided_decoding.json is not JSON"),
            ({"json": {"type": "banana"}}, "banana"),
            ({"json": {"$ref": "#/definitions/x"}}, "definitions"),
            ({"grammar": "root = x"}, "guided_decoding.grammar is not valid: cannot read line 1"),
            ({"grammar": 'other ::= "a"'}, "root"),
            ({"choice": ("x" * 100_001,)}, "100000 are allowed"),
            ({"json": '{"items":' * 150 + "{}" + "}" * 150}, "nested 151 levels deep, 100 are"),
            ({"json": "[" * 40_000}, "guided_decoding.json is not JSON"),
            ({"json": {"not": {}}}, 'Unimplemented keys: \\["not"\\]'),
            ({"structural_tag": "["}, "guided_decoding.structural_tag is not JSON"),
            ({"structural_tag": {"structures": []}}, "a list of 1 to 256 tags is needed"),
            ({"structural_tag": tagged(begin=5)}, "a tag needs begin, schema and end"),
            ({"structural_tag": tagged(begin="x")}, "must start with exactly one of the triggers"),
            ({"structural_tag": tagged(schema={"type": "x"})}, "Invalid type: x"),
            ({"structural_tag": {"format": {"type": "grammar"}}}, "'grammar' is not supported"),
        ],
    )
    def test_a_bad_constraint_is_the_requests_error(self, backend, fields, reason):
        params = GuidedDecodingParams(**fields)
        for call in (backend.validate, backend.guide):
            with pytest.raises(RequestError, match=reason) as caught:
                call(params)
            assert caught.value.code == 400
            assert "/cpp/" not in str(caught.value)

    def test_a_schema_of_allowed_depth_is_accepted(self, backend):
        backend.validate(GuidedDecodingParams(json='{"items":' * 98 + "{}" + "}" * 98))

    def test_a_model_without_end_of_sequence(self, tokenizer):
        with pytest.raises(ConfigError, match="eos_token_id"):
            GrammarBackend(tokenizer, VOCAB_SIZE, ()).validate(GuidedDecodingParams(regex="a"))

    def test_an_unknown_kind_of_tokenizer(self):
        backend = GrammarBackend(object(), VOCAB_SIZE, {EOS})
        with pytest.raises(ConfigError, match="cannot read the tokenizer"):
            backend.validate(GuidedDecodingParams(regex="a"))


@needs_llguidance
class TestCache:
    @pytest.fixture
    def num_compiled(self, monkeypatch):
        """Collects the grammars that this process compiles."""
        grammars, real = [], grammar_module.compiled

        def compile_and_note(tokenizer, grammar):
            grammars.append(grammar)
            return real(tokenizer, grammar)

        monkeypatch.setattr(grammar_module, "compiled", compile_and_note)
        return lambda: len(grammars)

    @pytest.mark.full
    def test_equal_constraints_are_compiled_once(self, own_backend, num_compiled):
        own_backend.validate(GuidedDecodingParams(regex="a+"))
        own_backend.validate(GuidedDecodingParams(regex="a+"))
        own_backend.guide(GuidedDecodingParams(regex="a+"))
        own_backend.guide(GuidedDecodingParams(regex="b+"))
        assert num_compiled() == 2

    @pytest.mark.full
    def test_a_regex_is_not_a_grammar(self, own_backend, num_compiled):
        own_backend.validate(GuidedDecodingParams(regex='root ::= "a"'))
        own_backend.validate(GuidedDecodingParams(grammar='root ::= "a"'))
        assert num_compiled() == 2

    @pytest.mark.full
    def test_spacing_makes_another_grammar(self, own_backend, num_compiled):
        own_backend.validate(GuidedDecodingParams(json_object=True))
        own_backend.validate(GuidedDecodingParams(json_object=True, disable_any_whitespace=False))
        assert num_compiled() == 2

    def test_the_least_recently_used_is_evicted(self, own_backend, num_compiled, monkeypatch):
        monkeypatch.setattr(grammar_module, "CACHE_SIZE", 2)
        counts = []
        for regex in ("a", "b", "a", "c", "a", "b"):
            own_backend.guide(GuidedDecodingParams(regex=regex))
            counts.append(num_compiled())
        assert counts == [1, 2, 2, 3, 3, 4]

    def test_a_grammar_that_reaches_its_limit_is_compiled_anew(
        self, own_backend, tokenizer, monkeypatch
    ):
        """The automaton that grows as texts are read is shared by the requests of one grammar."""
        monkeypatch.setitem(LIMITS, "max_lexer_states", 500)
        guided = GuidedDecodingParams(regex="(a|b)*a(a|b){40}")
        generator, letters = random.Random(0), tokenizer("ab").input_ids

        def num_read():
            matcher = own_backend.guide(guided)
            for count in range(3000):
                if banned(matcher, VOCAB_SIZE).all():
                    return count
                matcher.accept(generator.choice(letters))
            return 3000

        counts = [num_read() for _ in range(4)]
        assert all(100 < count < 3000 for count in counts), counts

    def test_several_threads(self, backend):
        failures = []

        def work():
            try:
                for number in range(20):
                    backend.guide(GuidedDecodingParams(regex=f"a{{{number % 5 + 1}}}"))
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_without_llguidance_the_error_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    backend = GrammarBackend(tokenizer, VOCAB_SIZE, {EOS})
    with pytest.raises(ConfigError, match=r"pip install mmdeploy_llm\[guided\]"):
        backend.validate(GuidedDecodingParams(regex="a"))


@pytest.mark.full
def test_llguidance_is_not_imported_before_it_is_needed():
    code = "import sys, mmdeploy_llm.engine.runner.sampling; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_llguidance
class TestSchemas:
    """What a schema says holds exactly, or it is refused by name."""

    @pytest.mark.parametrize(
        "number",
        [2**53 + 1, 12345678901234567, 10**17 + 1, -(2**53 + 1), 2**64 + 1, 123456789.12345679],
    )
    @pytest.mark.parametrize("keyword", ["const", "enum", "minimum", "nested", "tag"])
    def test_a_number_that_would_be_rounded_is_refused(self, backend, number, keyword):
        schema = {
            "const": {"const": number},
            "enum": {"enum": ["a", number]},
            "minimum": {"type": "number", "minimum": number},
            "nested": {"type": "object", "properties": {"a": {"const": [{"b": number}]}}},
            "tag": {"const": number},
        }[keyword]
        guided = GuidedDecodingParams(json=schema)
        if keyword == "tag":
            guided = GuidedDecodingParams(structural_tag=tagged(schema=schema))
        with pytest.raises(RequestError, match=re.escape(f"number {number} in")):
            backend.guide(guided)

    @pytest.mark.parametrize(
        "number",
        [0, -1, 2**53, 2**60, 10**17, 2**63 - 1, 0.1, 1.5, -2.25, 123456789.123456, 1e22],
    )
    def test_a_number_that_is_exact_is_written_exactly(self, backend, tokenizer, number):
        text = format(number, ".0f") if number == 1e22 else json.dumps(number)
        guided = GuidedDecodingParams(json={"const": number})
        assert accepts(backend, tokenizer, guided, text)

    def test_bounds_of_machine_words_and_notes_are_no_reason(self, backend, tokenizer):
        schema = {
            "type": "integer",
            "minimum": 0,
            "maximum": 2**64 - 1,
            "default": 2**60 + 1,
        }
        assert accepts(backend, tokenizer, GuidedDecodingParams(json=schema), "5")

    def test_numbers_in_the_text_of_a_schema(self, backend):
        text = '{"const": 0.12345678901234567890}'
        with pytest.raises(RequestError, match=r"number 0\.12345678901234567890 in 'const'"):
            backend.guide(GuidedDecodingParams(json=text))

    @pytest.mark.full
    def test_an_unknown_format_is_a_note(self, own_backend, tokenizer, caplog):
        schema = {
            "type": "object",
            "properties": {
                "format": {"type": "string", "format": "colour"},
                "id": {"type": "string", "format": "uuid4"},
                "const": {"const": {"format": "colour"}},
            },
            "required": ["format", "id", "const"],
            "additionalProperties": False,
        }
        guided = GuidedDecodingParams(json=schema)
        for _ in range(2):
            own_backend.validate(guided)
        assert [record.getMessage() for record in caplog.records] == [
            "the format 'colour' in a JSON schema is a note: texts are not checked"
        ]
        text = '{"format": "x", "id": "%s", "const": {"format": "colour"}}'
        good = "123e4567-e89b-42d3-a456-426614174000"
        assert accepts(own_backend, tokenizer, guided, text % good)
        assert not accepts(own_backend, tokenizer, guided, text % "x")

    def test_an_anchor_is_what_it_names(self, backend, tokenizer):
        schema = {
            "type": "array",
            "items": {"$ref": "#x"},
            "minItems": 1,
            "$defs": {"a": {"$anchor": "x", "type": "boolean"}},
        }
        guided = GuidedDecodingParams(json=schema)
        backend.validate(guided)
        assert accepts(backend, tokenizer, guided, "[true]")
        assert not accepts(backend, tokenizer, guided, '["a"]')
        endless = {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "$ref": "#x"}}}
        with pytest.raises(RequestError, match="requires itself"):
            backend.guide(GuidedDecodingParams(json=endless))

    @pytest.mark.parametrize("regex", [r"\d", r"[\d]", r"[a\d]", r"[^\D]", r"[\d-z]"])
    def test_digits_are_those_of_json(self, backend, tokenizer, regex):
        guided = GuidedDecodingParams(regex=regex)
        assert accepts(backend, tokenizer, guided, "3")
        assert not accepts(backend, tokenizer, guided, "\u0663")
        assert accepts(backend, tokenizer, GuidedDecodingParams(regex=r"\\d/\D"), "\\d/\u0663")
        ebnf = GuidedDecodingParams(grammar=r"root ::= [\d]")
        assert not accepts(backend, tokenizer, ebnf, "\u0663")
