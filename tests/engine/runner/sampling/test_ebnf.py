"""The translation of EBNF grammars: what they match, compared with Python's re and with a parser
that tries everything, and which errors wrong ones give."""

import importlib.util
import itertools
import random
import re

import pytest

from mmdeploy_llm.engine.runner.sampling.grammars.ebnf import EbnfError, to_lark
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.values.params import GuidedDecodingParams

from .guided import banned

needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs llguidance: the extra 'guided'"
)
EOS, VOCAB_SIZE = 256, 300
WORDS = ["".join(letters) for size in range(6) for letters in itertools.product("ab", repeat=size)]


def found_by(backend, tokenizer, grammar, words):
    """Returns those of `words` that a grammar matches."""
    params = GuidedDecodingParams(grammar=grammar)
    backend.validate(params)
    return [word for word in words if matches(backend.guide(params), tokenizer, word)]


def matches(matcher, tokenizer, word):
    # Token by token, as the single letters that "a" and "b" are here.
    for token_id in [*tokenizer(word).input_ids, EOS]:
        if banned(matcher, VOCAB_SIZE)[token_id]:
            return False
        matcher.accept(token_id)
    return True


@pytest.mark.full
@pytest.mark.one_is_quick
@needs_llguidance
@pytest.mark.parametrize(
    ("grammar", "regex"),
    [
        ('root ::= [a-b]+ "a"', "[ab]+a"),
        ('root ::= ("a" | "ab") ("b" | "ba")', "(a|ab)(b|ba)"),
        ('root ::= x? "b"\nx ::= "a"* | y\ny ::= "ba"', "(a*|ba)?b"),
        ('root ::= ("a" "b"?){2,3}', "(ab?){2,3}"),
        ('root ::= . [^a] | "a"{4,}', ".[^a]|a{4,}"),
        ('root ::= "a"{2} ("" | "b")', "a{2}(|b)"),
        ('root ::= | "a" | # nothing\n "\\x62" "\\u0062"', "|a|bb"),
        ("root ::= [\\x61]{1,2} ([^b-z] | [-b]){2}", "a{1,2}[ab]{2}"),
    ],
)
def test_grammars_without_recursion_equal_expressions(backend, tokenizer, grammar, regex):
    expected = [word for word in WORDS if re.fullmatch(regex, word)]
    assert found_by(backend, tokenizer, grammar, WORDS) == expected


@pytest.mark.one_is_quick
@needs_llguidance
@pytest.mark.parametrize(
    ("grammar", "is_in"),
    [
        ('root ::= "a" root "b" | ""', lambda w: w == "a" * (len(w) // 2) + "b" * (len(w) // 2)),
        ('root ::= root "a" | "b"', lambda w: re.fullmatch("ba*", w) is not None),
        ('root ::= ("a" | "b" root "b")+', lambda w: nested(w)),
    ],
)
def test_recursive_grammars(backend, tokenizer, grammar, is_in):
    assert found_by(backend, tokenizer, grammar, WORDS) == [word for word in WORDS if is_in(word)]


def nested(word):
    """Whether a word is one or more of "a" and b...b around such a word."""
    if not word:
        return False
    ends = [1] if word[0] == "a" else range(3, len(word) + 1)
    return any(
        (word[0] == "a" or (word[end - 1] == "b" and nested(word[1 : end - 1])))
        and (end == len(word) or nested(word[end:]))
        for end in ends
    )


@pytest.mark.full
@needs_llguidance
def test_random_grammars_equal_expressions(backend, tokenizer):
    random_ = random.Random(0)
    for _ in range(40):
        grammar, regex = random_expression(random_, 3)
        words = random_.sample(WORDS, 20)
        expected = [word for word in words if re.fullmatch(regex, word)]
        try:
            assert found_by(backend, tokenizer, f"root ::= {grammar}", words) == expected, grammar
        except RequestError:
            assert not any(re.fullmatch(regex, word) for word in WORDS if word), grammar


def random_expression(random_, depth):
    """Returns an expression as EBNF and as a regular expression."""
    if depth == 0:
        return random_.choice([('"a"', "a"), ('"b"', "b"), ("[ab]", "[ab]"), ('"ab"', "ab")])
    left, right = random_expression(random_, depth - 1), random_expression(random_, depth - 1)
    mark = random_.choice(["?", "*", "+", "{1,2}"])
    return random_.choice(
        [
            (f"({left[0]} | {right[0]})", f"({left[1]}|{right[1]})"),
            (f"{left[0]} {right[0]}", f"{left[1]}{right[1]}"),
            (f"({left[0]}){mark}", f"({left[1]}){mark}"),
        ]
    )


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "no rule named root"),
        ('root := "a"', "cannot read line 1"),
        ('root ::= "a', "cannot read line 1 from '\"a'"),
        ("root ::= x", "root uses x, which is not defined"),
        ('root ::= "a"\nroot ::= "b"', "root is defined twice"),
        ('root ::= ("a"', r"'\(' has no '\)'"),
        ('root ::= "a")', r"'\)' has no '\('"),
        ("root ::= * ", "found '\\*' where an expression is expected"),
        ('root ::= "a"{3,2}', "not a range"),
        ('root ::= "a"{999999999999}', "not a range"),
        ('root ::= "a"' + "?" * 20, "more than 8 repetitions"),
        ("root ::= " + "(" * 101 + '"a"' + ")" * 101, "100 levels"),
        ('root ::= "\\q"', r"escape \\q is not known"),
        ('root ::= "\\ud800"', "not a character"),
        ('root ::= "(" root ")"', "root can never end"),
    ],
)
def test_a_wrong_grammar_says_what_is_wrong(grammar, reason):
    with pytest.raises(EbnfError, match=reason):
        to_lark(grammar)


def test_rules_that_root_does_not_use_do_not_matter():
    assert to_lark('root ::= "a"\nx ::= x') == to_lark('root ::= "a"')
