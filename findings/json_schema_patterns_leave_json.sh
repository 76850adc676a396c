#!/usr/bin/env bash
# A JSON schema whose property must match a `pattern` with a quote, a backslash or a line break in it
# (sizes in inches, paths of Windows, LaTeX). Three engines of constrained decoding, each with the
# same schema and no choice left: what does a model write that is held to it?
#
#     pattern      the value meant    llguidance 1.9.1  xgrammar 0.2.9, outlines_core 0.2.14
#     ^5"$         5"                 {"x":"5\""}       {"x":"5""}        no JSON
#     ^a\nb$       a, new line, b     {"x":"a\nb"}      a raw new line    no JSON
#     ^C:\\srv$    C:\srv             {"x":"C:\\srv"}   {"x":"C:\srv"}    no JSON
#     ^C:\\tmp$    C:\tmp             {"x":"C:\\tmp"}   {"x":"C:\tmp"}    JSON: C:, a tab, mp
#     ^\\frac$     \frac              {"x":"\\frac"}    {"x":"\frac"}     JSON: a form feed, rac
#
# A pattern is about the value, JSON text spells the value. llguidance writes the value as JSON does;
# the other two put the pattern between the quotes as it stands, so that they refuse the only right
# answer and force a wrong one. Neither warns. The last two are the costly ones: they parse, and the
# data set has a tab where a path went on. Valid JSON is the one promise one buys such an engine for.
# In xgrammar a negated class keeps it ([^x] takes neither a quote nor a backslash), so that tests with
# the usual patterns find nothing; in outlines_core not even that: after ^[^x]+$ a quote may follow.
# Check what comes back against the schema with jsonschema, not by parsing alone; or leave those
# characters out of patterns and write an `enum` (which all three spell right).
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
	xgrammar==0.2.9 torch==2.13.0 transformers==5.24.0 numpy==2.3.4 \
	outlines_core==0.2.14 llguidance==1.9.1 jsonschema==4.26.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
import re

import jsonschema
import xgrammar
from llguidance import LLMatcher, LLTokenizer
from outlines_core.json_schema import build_regex_from_schema

END = 256  # the token after the 256 bytes
names = xgrammar.TokenizerInfo([bytes([b]) for b in range(END)] + [b"</s>"], stop_token_ids=[END])
compiler, tokenizer = xgrammar.GrammarCompiler(names), LLTokenizer("byte")


def llguidance_takes(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
    return taken and matcher.is_accepting()


def xgrammar_takes(schema, text):
    compiled = compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(b) for b in text.encode()) and matcher.accept_token(END)


def outlines_takes(schema, text):
    return re.fullmatch(build_regex_from_schema(schema), text) is not None


def schema_of(**rules):
    own = {"type": "string", **rules}
    return {"type": "object", "properties": {"x": own}, "required": ["x"], "additionalProperties": False}


def read(schema, text):
    """Returns the value a reader gets, "no JSON" if none, and whether the schema allows it."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return "no JSON", False
    return value["x"], jsonschema.Draft202012Validator(schema).is_valid(value)


CASES = (  # pattern, value meant, what a reader gets of the text that the pattern itself spells
    ('^5"$', '5"', "no JSON"),
    (r"^a\nb$", "a\nb", "no JSON"),
    (r"^C:\\srv$", r"C:\srv", "no JSON"),
    (r"^C:\\tmp$", r"C:\tmp", "C:\tmp"),
    (r"^\\frac$", r"\frac", "\frac"),
)
TAKERS = (llguidance_takes, xgrammar_takes, outlines_takes)
for pattern, value, got in CASES:
    schema = schema_of(pattern=pattern)
    right, raw = '{"x":%s}' % json.dumps(value), '{"x":"%s"}' % value
    assert read(schema, right) == (value, True) and read(schema, raw) == (got, False)
    taken = [(takes(json.dumps(schema), right), takes(json.dumps(schema), raw)) for takes in TAKERS]
    print(f"{pattern:9s} the right text and the raw one: {taken}; the raw one reads {got!r}")
    assert taken == [(True, False), (False, True), (False, True)], "the behaviour has changed"

schema = json.dumps(schema_of(pattern="^[^x]+$"))
for text in ('{"x":"5""}', '{"x":"a\nb"}', r'{"x":"C:\srv"}'):
    taken = [takes(schema, text) for takes in TAKERS]
    assert taken == [False, False, True], "the behaviour of negated classes has changed"
schema = json.dumps(schema_of(enum=[value for _, value, _ in CASES]))
for _, value, _ in CASES:
    assert all(takes(schema, '{"x":%s}' % json.dumps(value)) for takes in TAKERS)
    assert not any(takes(schema, '{"x":"%s"}' % value) for takes in TAKERS)
print("a negated class: only outlines_core leaves JSON; an enum: none does")
PYTHON
