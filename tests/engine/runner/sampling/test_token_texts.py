"""Which tokens complete a marker, go on after it, or spell a tag."""

import pytest

from mmdeploy_llm.engine.runner.sampling.token_texts import BITS, TokenTexts, num_begun

TEXTS = [b"</", b"think", b">", b">{", b"</think>", b"</think>\n", b"\n", b"x", b"</think>", b">\n"]
TEXTS += [b"pad"] * 40 + [b"nk>a"]
MARKER = b"</think>"


def ids(words):
    return [i for i in range(len(words) * BITS) if words[i // BITS] >> i % BITS & 1]


@pytest.fixture(scope="module")
def texts():
    return TokenTexts(TEXTS, hidden={8})


@pytest.mark.parametrize(
    ("begun", "completing", "overshooting"),
    [
        (0, [4, 5], [5]),
        (7, [2, 3, 9], [3, 9]),
        (5, [50], [50]),
        (2, [], []),
    ],
)
def test_tokens_that_complete_a_marker(texts, begun, completing, overshooting):
    assert ids(texts.completing(MARKER, begun)) == completing
    assert ids(texts.overshooting(MARKER, begun)) == overshooting


@pytest.mark.parametrize(
    ("begun", "found"),
    [
        (b"", [0, 4, 6]),
        (b"\n\n", [0, 4, 6]),
        (b"\n" * 4, [0, 4]),
        (b"</", [1]),
        (b"\n</think", [2]),
        (b"x", []),
    ],
)
def test_tokens_that_spell_a_tag(texts, begun, found):
    assert ids(texts.spelling([MARKER], b" \n", begun)) == found


def test_a_marker_may_begin_in_several_ways():
    assert num_begun(b"abab", b"ababc") == [0, 2, 4]
    assert num_begun(b"", b"ab") == [0]
    assert TokenTexts(TEXTS, hidden=())[99] == b""
