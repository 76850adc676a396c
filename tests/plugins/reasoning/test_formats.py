"""The rules of every reasoning parser, as examples of the kit's checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mmdeploy_llm_plugins import reasoning
from mmdeploy_llm_plugins.reasoning.scanner import TagParser

from mmdeploy_llm.engine.delivery.delivery import Delivery
from mmdeploy_llm.hooks import PluginManager, ReasoningParserSpec
from mmdeploy_llm.request import Request
from mmdeploy_llm.testing import ParserExample, ReasoningParserConformance
from mmdeploy_llm.testing.plugins.parsers import ParserSubject
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import TokenUpdate

SPECS = {spec.name: spec for spec in reasoning.provide_reasoning_parsers()}
OPEN, CLOSED = "Q\nA: <think>\n", "Q\nA: <think>\n\n</think>\n\n"
SAID = "<|start|>user<|message|>hi<|end|><|start|>assistant"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"

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
    # think-tag: once or several times, white space at both ends of each segment dropped
    ("think-tag", "", "<think>\nwhy\n</think>\n\nso\n", "why", "so"),
    ("think-tag", "", "so <think> but </think> then", "but", "so  then"),
    (
        "think-tag",
        "",
        "<think>\na\n</think>\nfirst\n<think>\nb\n</think>\nsecond\n",
        "a\nb",
        "first\n\nsecond",
    ),
    ("think-tag", OPEN, "a\n</think>\n\nb\n\n<think>c</think>- d", "ac", "b\n\n- d"),
    ("think-tag", "", "<think>a</think>b<think>c</think>d", "ac", "bd"),
    ("think-tag", "", "why</think>so", "why", "so"),
    ("think-tag", "", " no tag ", "", " no tag "),
    ("think-tag", OPEN, "why, cut ", "why, cut", ""),
    ("think-tag", CLOSED, "so", "", "so"),
    # glm-4.5: the model opens the thinking, the template may close it; a call ends it
    ("glm-4.5", "<|assistant|>", "\n<think>why</think>\nso", "\nwhy", "\nso"),
    ("glm-4.5", "<|assistant|>\n<think></think>", "\nso", "", "\nso"),
    ("glm-4.5", "<|assistant|>\n<think></think>", "<think>a</think>b", "a", "b"),
    ("glm-4.5", "", "why</think>so", "why", "so"),
    ("glm-4.5", "", "so", "", "so"),
    ("glm-4.5", OPEN, "why<tool_call>f", "why", "<tool_call>f"),
    ("glm-4.5", OPEN, "why</think><tool_call>f", "why", "<tool_call>f"),
    (
        "glm-4.5",
        OPEN,
        "why<tool_call>f</tool_call>\n</think>so",
        "why",
        "<tool_call>f</tool_call>\nso",
    ),
    ("glm-4.5", OPEN, "a<tool_call>f</think>b</think>c", "a", "<tool_call>fb</think>c"),
    ("glm-4.5", OPEN, "a</think><tool_call>f</think>", "a", "<tool_call>f</think>"),
    # gemma4: a channel whose name is no part of the thinking
    ("gemma4", "<|turn>model\n", "<|channel>thought\nwhy\n<channel|>so", "why", "so"),
    ("gemma4", "<|turn>model\n", "<|channel>thoughtful<channel|>so", "thoughtful", "so"),
    ("gemma4", "<|turn>model\n", "<|channel>why<channel|>so", "why", "so"),
    ("gemma4", "<|turn>model\n", "<|channel>thought\n<channel|>so", "", "so"),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nwhy, cut", "why, cut", ""),
    ("gemma4", "<|turn>model\n", "a thought<channel", "", "a thought<channel"),
    ("gemma4", "", "<|channel>thought\nwhy<|tool_call>f", "why", "<|tool_call>f"),
    # hunyuan: an answer in tags of its own
    ("hunyuan", "", "<think>\nwhy\n</think>\n<answer>\nso\n</answer>", "why", "so"),
    ("hunyuan", CLOSED, "<answer>\nso\n</answer>", "", "so"),
    ("hunyuan", CLOSED, "so", "", "so"),
    ("hunyuan", "", "<answer>so</answer>", "", "so"),
    ("hunyuan", "", "<think>why</think>so", "why", "so"),
    ("hunyuan", "", "<think>why</think><answer>so, cut", "why", "so, cut"),
    # step3, step3p5: reasoning until </think>; Step-3.5 drops the line breaks around it
    ("step3", OPEN, "why\n</think>\nso", "why\n", "\nso"),
    ("step3", "", "why, cut", "why, cut", ""),
    ("step3", OPEN, "why<tool_call>f</think>", "why", "<tool_call>f"),
    ("step3p5", OPEN, "why\n</think>\nso", "why", "so"),
    # mistral: no [THINK], no reasoning
    ("mistral", "", "[THINK]why[/THINK]so", "why", "so"),
    ("mistral", "[THINK]draft[/THINK] [INST]hi[/INST]", "[THINK]why[/THINK]so", "why", "so"),
    ("mistral", "", "so[/THINK]", "", "so[/THINK]"),
    ("mistral", "", "[THINK]why, cut", "why, cut", ""),
    # kimi-k2: thinks unless it is closed; a section of calls ends it
    ("kimi-k2", "", "why</think>so", "why", "so"),
    ("kimi-k2", "", "<think>why</think>so", "why", "so"),
    ("kimi-k2", CLOSED, "so", "", "so"),
    ("kimi-k2", CLOSED, "<think>why</think>so", "why", "so"),
    ("kimi-k2", "", "a<|tool_calls_section_begin|>b", "a", "<|tool_calls_section_begin|>b"),
    # kimi-vl
    ("kimi-vl", "", "◁think▷why◁/think▷so", "why", "so"),
    ("kimi-vl", "", "so", "", "so"),
    ("kimi-vl", "A: ◁think▷", "why, cut", "why, cut", ""),
    # minimax-m2
    ("minimax-m2", OPEN, "why\n</think>\n\nso", "why\n", "\n\nso"),
    ("minimax-m2", OPEN, "why<minimax:tool_call>", "why", "<minimax:tool_call>"),
    # seed-oss
    ("seed-oss", "", "<seed:think>why</seed:think>so", "why", "so"),
    ("seed-oss", "", "why</seed:think>so", "why", "so"),
    ("seed-oss", "<seed:think>x</seed:think>", "so", "", "so"),
    ("seed-oss", "", "why<seed:tool_call>f", "why", "<seed:tool_call>f"),
    # granite
    ("granite", "", "Here is my thought process: a Here is my response: b", " a ", " b"),
    ("granite", "", "\nHere's my thought process:a Here's my response:b", "a ", "b"),
    ("granite", "Here is my response:", "Here is my thought process:a", "a", ""),
    ("granite", "", "so. Here is my response: x", "", "so. Here is my response: x"),
    ("granite", "", "Here is my dog", "", "Here is my dog"),
    # gpt-oss
    ("gpt-oss", SAID, f"<|channel|>analysis<|message|>why{FINAL}so", "why", "so"),
    ("gpt-oss", SAID, "<|channel|>final<|message|>so<|return|>", "", "so"),
    ("gpt-oss", SAID, "<|channel|>analysis<|message|>why, cut", "why, cut", ""),
    ("gpt-oss", SAID, f"<|channel|>analysis<|message|>a<|end|><|start|>assistant{CALL}", "a", ""),
    ("gpt-oss", SAID, " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", ""),
    ("gpt-oss", SAID, "<|channel|>commentary<|message|>a<|end|>", "", "a"),
    ("gpt-oss", SAID, "<|channel|>ana", "", ""),
    ("gpt-oss", SAID, "so", "", "so"),
    ("gpt-oss", "", "so <|", "", "so <|"),
    ("gpt-oss", SAID, "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b"),
    ("gpt-oss", f"{SAID}<|channel|>analysis<|message|>", f"why{FINAL}so", "why", "so"),
    ("gpt-oss", f"{SAID}<|channel|>", "analysis<|message|>why", "why", ""),
]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("qwen3", "<|im_start|>user\nWhy <think>?<|im_end|>\n<|im_start|>assistant\n"),
        ("deepseek-r1", "<\uff5cUser\uff5c>Why <think>?<\uff5cAssistant\uff5c>"),
        ("think-tag", "<start_of_turn>user\nWhy <think>?<end_of_turn>\n<start_of_turn>model\n"),
        ("glm-4.5", "<|user|>\nWhy <think>?<|assistant|>"),
        ("mistral", "[INST]Why [THINK]?[/INST]"),
        ("ernie-45-vl", "<|begin_of_sentence|>User: <think>?<|end_of_sentence|>Assistant: "),
    ],
)
def test_a_tag_that_a_user_wrote_opens_nothing(parse, name: str, prompt: str) -> None:
    assert parse(name, "It opens.", prompt=prompt) == ("", "It opens.")
    # the template's own tag counts, and so does one in an answer that is to be continued
    tag = "[THINK]" if name == "mistral" else "<think>"
    for end in (tag, f"{tag}\n", f"{tag}I see"):
        assert parse(name, "why, cut", prompt=prompt + end) == ("why, cut", "")


def examples_of(name: str) -> tuple[ParserExample, ...]:
    return tuple(
        ParserExample(prompt=prompt, text=text, reasoning=thought, content=answer)
        for parser, prompt, text, thought, answer in ROWS
        if parser == name
    )


FIRST = ("ernie-45-vl", "gpt-oss")  # the others are full tests


class TestEveryParser(ReasoningParserConformance):
    """Runs all checks of the kit on all parsers."""

    @pytest.fixture(
        scope="class",
        params=[
            pytest.param(spec, marks=[pytest.mark.full] * (name not in FIRST))
            for name, spec in SPECS.items()
        ],
        ids=SPECS,
    )
    @classmethod
    def subject(cls, request: pytest.FixtureRequest) -> Iterator[ParserSubject]:
        spec: ReasoningParserSpec = request.param
        return ParserSubject(spec=spec, examples=examples_of(spec.name))


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        (
            "ernie-45-vl-thinking",
            "a</think>\n<tool_call>{}</tool_call>",
            "<tool_call>{}</tool_call>",
        ),
        ("ernie-x1", "a</think><tool_call>x</tool_call>\n", "<tool_call>x</tool_call>\n"),
        ("ernie-x1", "a</think><response>b</response>\n<tool_call>x", "<tool_call>x"),
        ("gpt-oss", CALL, CALL),
        (
            "gpt-oss",
            f"<|channel|>analysis<|message|>a<|end|><|start|>assistant{CALL}",
            f"<|start|>assistant{CALL}",
        ),
    ],
)
def test_tool_calls_are_kept_apart(new_parser, name: str, text: str, calls: str) -> None:
    for pieces in ((text,), tuple(text)):
        parser = new_parser(name)
        parser.start(SAID)
        segments = [segment for piece in pieces for segment in parser.feed(piece)]
        segments += parser.finish()
        assert "".join(item.text for item in segments if item.kind == "tool_calls") == calls


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", SPECS)
def test_no_tag_inside_another(name: str) -> None:
    """The scanner relies on this."""
    manager = PluginManager.load(plugins=["reasoning"])
    parser = manager.build(manager.reasoning_parser(name))
    for mode in parser.grammar.modes.values() if isinstance(parser, TagParser) else ():
        pairs = ((one, other) for one in mode.exits for other in mode.exits if one != other)
        assert not any(one in other for one, other in pairs)
        leads = [way.mode for way in mode.exits.values()] + [mode.otherwise] * bool(mode.otherwise)
        assert set(leads) <= set(parser.grammar.modes)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("stream", [False, True])
def test_markers_that_are_special_tokens_reach_the_parser(
    new_parser, byte_tokenizer, name: str, stream: bool
) -> None:
    tokenizer = byte_tokenizer(("<eos>", *new_parser(name).markers), "<eos>")
    examples = [ParserExample(prompt=OPEN, text="a</think>b", reasoning="", content="")]
    for example in examples_of(name) or examples:
        expected = ParserSubject(spec=SPECS[name]).split((example.text,), example.prompt)
        request = Request(
            request_id="r",
            prompt="",
            prompt_token_ids=[0],
            prompt_text=example.prompt,
            params=SamplingParams(max_tokens=1000, skip_special_tokens=True),
            stream=stream,
        )
        delivery = Delivery(tokenizer, lambda: new_parser(name))
        outputs = []
        for token_id in tokenizer(example.text).input_ids:
            request.output_token_ids.append(token_id)
            outputs += delivery.deliver([TokenUpdate(request=request, new_token_ids=(token_id,))])
        end = TokenUpdate(request=request, new_token_ids=(), finish_reason="length")
        found = [output.outputs for output in [*outputs, *delivery.deliver([end])]]
        reasoning = "".join(part.reasoning_content or "" for part in found)
        assert (reasoning, "".join(part.text for part in found)) == expected
