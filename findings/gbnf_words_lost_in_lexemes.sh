#!/usr/bin/env bash
# llguidance 1.9.1 has a converter for the grammars of llama.cpp (GBNF), and Lark grammars of its
# own. A grammar without any recursion, which as GBNF matches exactly four words,
#
#     root ::= ("a" | "ab") ("b" | "ba")          ab  aba  abb  abba
#
# matches two after the conversion: "ab" and "aba" are gone. The converter makes a lexeme of every
# literal, and the lexer takes the longest one: after "ab" it has read ("ab") and wants a "b". Nothing
# warns; with constrained decoding the model simply can never say these words. A good engineer
# expects that a converter keeps the language, or refuses what it cannot keep. Where alternatives
# begin alike (units, numbers, names), write the part that does not recurse as one regular
# expression: the last lines show that as one lexeme all four words come back.
#
# Found with llguidance 1.9.1, Python 3.11, Linux x86-64, 2026-11-28. Needs Python 3.9 or newer and
# the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import re

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

GBNF = 'root ::= ("a" | "ab") ("b" | "ba")'
ONE_LEXEME = "start: /(a|ab)(b|ba)/"
WORDS = ["ab", "aba", "abb", "abba"]
tokenizer = LLTokenizer("byte")


def matched(lark):
    found = []
    for word in WORDS:
        matcher = LLMatcher(tokenizer, lark)
        assert not matcher.is_error(), matcher.get_error()
        if all(matcher.try_consume_tokens([byte]) for byte in word.encode()):
            found += [word] if matcher.is_accepting() else []
    return found


meant = [word for word in WORDS if re.fullmatch("(a|ab)(b|ba)", word)]
converted, one = matched(gbnf_to_lark(GBNF)), matched(ONE_LEXEME)
print("as GBNF means it:   ", meant)
print("after gbnf_to_lark: ", converted)
print("as one lexeme:      ", one)
assert meant == WORDS and one == WORDS
assert converted == ["abb", "abba"], "the behaviour has changed"
PYTHON
