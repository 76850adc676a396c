"""Reasoning parsers: what no example shows. test_formats.py has the rules."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

# Parsers that read <think> or at least </think>, and drop no content.
NAMES = ["deepseek-r1", "ernie-45-vl", "ernie-45-vl-thinking", "ernie-x1", "qwen3"]
PROMPTS = ["", "hi <think>\n", "hi <think>\n\n</think>\n\n", "a </think> <response>", "</response>"]
TAGS = ["<think>", "</think>", "<response>", "</response>", "<tool_call>", "</tool_call>"]
SCRAPS = ["a", "b c", " ", "\n", "\n\n", "<", "</", "</thi", "<thi", "nk>", "<x>", "é", "<<", ">"]

OPEN, CLOSED = "Q: hi\nA: <think>\n", "Q: hi\nA: <think>\n\n</think>\n\n"


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@given(text=st.text("ab <>/\n", max_size=30), prompt=st.sampled_from(PROMPTS[:3]))
def test_text_without_tags_is_kept(parse, name: str, text: str, prompt: str) -> None:
    thought, answer = parse(name, *text, prompt=prompt)
    if name == "ernie-x1" and prompt == PROMPTS[2]:
        assert (thought, answer) == ("", "")  # no <response>, no content
    elif name == "qwen3" and prompt == PROMPTS[1]:
        assert (thought, answer) == (text.strip(), "")
    else:
        assert text in (thought, answer)
        assert "" in (thought, answer)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ["ernie-45-vl", "deepseek-r1"])
@given(parts=st.lists(st.sampled_from(TAGS + SCRAPS), max_size=10), prompt=st.sampled_from(PROMPTS))
def test_only_tags_are_lost(parse, name: str, parts: list[str], prompt: str) -> None:
    text = "".join(parts)
    thought, answer = parse(name, text, prompt=prompt)
    missing = len(text) - len(thought + answer)
    assert missing in (0, len("<think>"), len("</think>"), len("<think></think>"))
    assert sorted(thought + answer) == sorted(
        text.replace("<think>", "", missing in (7, 15)).replace("</think>", "", missing in (8, 15))
    )


@pytest.mark.parametrize("name", NAMES)
def test_open_reasoning_streams(new_parser, name: str) -> None:
    parser = new_parser(name)
    parser.start(OPEN)
    shown = "".join(
        segment.text for piece in ("I", " see", " a</th") for segment in parser.feed(piece)
    )
    assert shown == "I see a"


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        *((name, "<think>", "</think>") for name in NAMES),
        ("kimi-vl", "◁think▷", "◁/think▷"),
        ("seed-oss", "<seed:think>", "</seed:think>"),
        # their prompts quote the markers or hold those of earlier turns
        ("granite", None, "Here is my response:"),
        ("gpt-oss", None, "<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("mistral", None, "[/THINK]"),
    ],
)
def test_the_start_marker_is_where_a_prompt_can_open_and_close(
    new_parser, name: str, start: str | None, end: str
) -> None:
    parser = new_parser(name)
    assert (parser.start_marker, parser.end_marker) == (start, end)


def test_the_hook_module_and_the_parsers_import_no_torch() -> None:
    code = (
        "import sys, mmdeploy_llm_plugins.reasoning.parsers\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_long_text_in_small_pieces_is_linear(new_parser) -> None:
    parser = new_parser("ernie-45-vl")
    parser.start("")
    for _ in range(20_000):
        parser.feed("word < ")
        assert len(parser._buffer) <= len("</think>")
    assert sum(len(segment.text) for segment in parser.finish()) == 140_000
