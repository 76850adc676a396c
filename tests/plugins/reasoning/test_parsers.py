"""The reasoning parsers: each rule alone; how the text is split makes no difference."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager, ReasoningParser

# Parsers that read <think> or at least </think>, and drop no content.
NAMES = ["deepseek-r1", "ernie-45-vl", "ernie-45-vl-thinking", "ernie-x1", "qwen3"]
PROMPTS = ["", "hi <think>\n", "hi <think>\n\n</think>\n\n", "a </think> <response>", "</response>"]
TAGS = ["<think>", "</think>", "<response>", "</response>", "<tool_call>", "</tool_call>"]
SCRAPS = ["a", "b c", " ", "\n", "\n\n", "<", "</", "</thi", "<thi", "nk>", "<x>", "é", "<<", ">"]

OPEN, CLOSED = "Q: hi\nA: <think>\n", "Q: hi\nA: <think>\n\n</think>\n\n"

# parser, prompt, text, reasoning, content
ROWS = [
    # ernie-45-vl: a tag decides, no tag is content
    ("ernie-45-vl", "", "why\n</think>\n\nso", "why\n", "\n\nso"),
    ("ernie-45-vl", "", " no tag ", "", " no tag "),
    ("ernie-45-vl", "", "a</think>b</think>c", "a", "b</think>c"),
    ("ernie-45-vl", "", "why</thi", "", "why</thi"),
    ("ernie-45-vl", "", "<think>why</think>so", "why", "so"),
    ("ernie-45-vl", "", "<think>why", "why", ""),
    ("ernie-45-vl", "", "a <think>b</think>c", "a <think>b", "c"),
    ("ernie-45-vl", OPEN, "why\n</think>\nso", "why\n", "\nso"),
    ("ernie-45-vl", OPEN, "why, cut", "why, cut", ""),
    ("ernie-45-vl", OPEN, "why</thi", "why</thi", ""),
    ("ernie-45-vl", OPEN, "</think>so", "", "so"),
    ("ernie-45-vl", CLOSED, " so", "", " so"),
    ("ernie-45-vl", CLOSED, "<think>a</think>b", "", "<think>a</think>b"),
    # ernie-45-vl-thinking: reasoning unless a tag ends it; a tool call has no content
    ("ernie-45-vl-thinking", "", "why\n</think>\n\nso", "why\n", "\n\nso"),
    ("ernie-45-vl-thinking", "", "no tag", "no tag", ""),
    ("ernie-45-vl-thinking", "", "a</think>\n\n<tool_call>\n{}</tool_call>", "a", ""),
    ("ernie-45-vl-thinking", "", "a</think>\n \n<tool_call>x", "a", "\n \n<tool_call>x"),
    ("ernie-45-vl-thinking", "", "a</think>so <tool_call>x", "a", "so <tool_call>x"),
    ("ernie-45-vl-thinking", "", "a</think>\n\n", "a", "\n\n"),
    ("ernie-45-vl-thinking", "", "a</think>\n<tool", "a", "\n<tool"),
    ("ernie-45-vl-thinking", OPEN, "why", "why", ""),
    ("ernie-45-vl-thinking", CLOSED, "so", "", "so"),
    ("ernie-45-vl-thinking", CLOSED, "\n<tool_call>{}", "", ""),
    # ernie-x1: content is what <response> holds
    ("ernie-x1", "", "why\n</think>\n\n<response>\nso\n</response>\n", "why\n", "\nso\n"),
    ("ernie-x1", "", "no tag ", "no tag ", ""),
    ("ernie-x1", "", "a</think>b", "a", ""),
    ("ernie-x1", "", "a</think><response>so, cut", "a", "so, cut"),
    ("ernie-x1", "", "a</think><response>so</resp", "a", "so</resp"),
    ("ernie-x1", "", "a</think><tool_call>{}</tool_call><response>b</response>", "a", ""),
    ("ernie-x1", "", "a</think><response>b<tool_call>c</response>d", "a", "b<tool_call>c"),
    ("ernie-x1", "", "a</think><response>b</response><response>c</response>", "a", "b"),
    ("ernie-x1", "", "a<response>b</think><response>c", "a<response>b", "c"),
    ("ernie-x1", OPEN, "a</think><response>b", "a", "b"),
    ("ernie-x1", CLOSED, "\n<response>b</response>", "", "b"),
    ("ernie-x1", CLOSED + "<response>", "b</response>c", "", "b"),
    ("ernie-x1", CLOSED + "<response>x</response> next", "a</think><response>b", "a", "b"),
    # qwen3: stripped only when the text has no start tag
    ("qwen3", "", "<think>\nwhy\n</think>\n\nso\n", "\nwhy\n", "\n\nso\n"),
    ("qwen3", "", "\n why\n</think>\n\nso \n", "why", "so"),
    ("qwen3", "", " no tag ", "", " no tag "),
    ("qwen3", "", "<think>why, cut", "why, cut", ""),
    ("qwen3", "", "<think></think>", "", ""),
    ("qwen3", "", "well <think>why</think> so", "why", "well  so"),
    ("qwen3", "", "\n<think>why</think>so", "\nwhy", "so"),
    ("qwen3", OPEN, "why\n</think>\n\nso\n", "why", "so"),
    ("qwen3", OPEN, " why, cut\n", "why, cut", ""),
    ("qwen3", OPEN, "\n<think>why \n</think>\nso", "\nwhy \n", "\nso"),
    ("qwen3", CLOSED, " so\n", "", " so\n"),
    ("qwen3", CLOSED, "a</think>b", "", "a</think>b"),
    ("qwen3", CLOSED, "<think>a</think>b", "a", "b"),
    # deepseek-r1: nothing stripped
    ("deepseek-r1", "", "<think>\nwhy\n</think>\n\nso", "\nwhy\n", "\n\nso"),
    ("deepseek-r1", "", "<think>why, cut", "why, cut", ""),
    ("deepseek-r1", "", " no tag ", "", " no tag "),
    ("deepseek-r1", "", "why \n</think>\nso", "why \n", "\nso"),
    ("deepseek-r1", OPEN, "why, cut", "why, cut", ""),
    ("deepseek-r1", OPEN, "why\n</think>\n\nso", "why\n", "\n\nso"),
    ("deepseek-r1", CLOSED, " so", "", " so"),
]


@pytest.mark.parametrize(("name", "prompt", "text", "thought", "answer"), ROWS)
def test_rule(parse, name: str, prompt: str, text: str, thought: str, answer: str) -> None:
    assert parse(name, text, prompt=prompt) == (thought, answer)
    assert parse(name, *text, prompt=prompt) == (thought, answer)


@pytest.mark.parametrize("name", NAMES)
@given(
    parts=st.lists(st.sampled_from(TAGS + SCRAPS), max_size=12),
    prompt=st.sampled_from(PROMPTS),
    seed=st.integers(0, 2**32),
)
def test_any_split_is_the_whole(parse, name: str, parts: list[str], prompt: str, seed: int) -> None:
    text = "".join(parts)
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(name, *pieces, prompt=prompt) == parse(name, text, prompt=prompt)


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


def test_undecided_text_waits(new_parser) -> None:
    parser = new_parser("ernie-45-vl")
    parser.start("no marker")
    assert [parser.feed(piece) for piece in ("I ", "see ", "it")] == [[], [], []]
    (segment,) = parser.finish()
    assert (segment.kind, segment.text) == ("content", "I see it")


@pytest.mark.parametrize("name", NAMES)
def test_two_requests_share_nothing(new_parser, parse, name: str) -> None:
    first, second = new_parser(name), new_parser(name)
    first.start(OPEN)
    second.start(CLOSED + "<response>")
    pairs = zip("a</think>b", "cdefghijkl", strict=True)
    fed = [(first.feed(one), second.feed(two)) for one, two in pairs]
    ends = first.finish(), second.finish()
    texts = ["".join(s.text for part in fed for s in part[i]) for i in (0, 1)]
    texts = [text + "".join(s.text for s in end) for text, end in zip(texts, ends, strict=True)]
    assert texts[1] == "cdefghijkl"
    assert texts[0] == "".join(parse(name, "a</think>b", prompt=OPEN))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_generated(parse, name: str) -> None:
    assert parse(name) == ("", "")


@pytest.mark.parametrize("name", NAMES)
def test_markers(new_parser, name: str) -> None:
    parser = new_parser(name)
    assert {"<think>", "</think>"} <= set(parser.markers)
    assert (parser.start_marker, parser.end_marker) == ("<think>", "</think>")


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
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


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("deepseek", "deepseek-r1"),
        ("deepseek-v3.1", "deepseek-r1"),
        ("deepseek_v3_0324", "deepseek-r1"),
        ("glm45", "glm-4.5"),
        ("GLM-4-5", "glm-4.5"),
        ("hunyuan_a13b", "hunyuan"),
        ("kimi_k2", "kimi-k2"),
        ("minimax_m2", "minimax-m2"),
        ("openai_gptoss", "gpt-oss"),
        ("seed_oss", "seed-oss"),
        ("step-3", "step3"),
    ],
)
def test_other_names(asked: str, found: str) -> None:
    assert PluginManager.load(plugins=["reasoning"]).reasoning_parser(asked).name == found


def test_did_you_mean_knows_the_other_names() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'minimax-m2\.5'"):
        PluginManager.load(plugins=["reasoning"]).reasoning_parser("minimax-m25")


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


@pytest.mark.parametrize("name", NAMES)
def test_the_plugin_manager_finds_and_builds_it(name: str) -> None:
    manager = PluginManager.load(plugins=["reasoning"])
    parser = manager.build(manager.reasoning_parser(name.replace("-", "_")))
    assert isinstance(parser, ReasoningParser)
