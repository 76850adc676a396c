"""A table of the reasoning formats that consist of tags only: which tags open and close the
thinking, and how a text without tags is read.

The rules follow the chat templates of the model families and the parsers of vLLM and SGLang
(docs.vllm.ai, features/reasoning_outputs; docs.sglang.io, separate reasoning). A rule that needs
the end of the text (vLLM: no `</think>` at all means no reasoning) cannot change text that was
already streamed as reasoning; that text stays reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from string import whitespace
from typing import Literal

from .grammar import Exit, Grammar, Mode

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFormat:
    """A format whose reasoning is enclosed in `start` and `end`.

    name, aliases: what users write.
    untagged: how a text is read when neither it nor the prompt has a tag: as reasoning up to `end`,
        as content, or undecided until a tag or the end decides (content at the end).
    label: a text after `start` that is no part of the reasoning.
    calls: tags of tool calls that also end the reasoning; they stay in the content. The `end` that
        may still come after a call is dropped.
    answer: tags around the content; they are dropped.
    is_stripped: white space at both ends of reasoning and content is dropped.
    is_repeated: reasoning may start again after content.
    is_quoted: the system prompt quotes the tags, so the last tag of a prompt does not say whether
        the reasoning is closed.
    """

    name: str
    aliases: tuple[str, ...] = ()
    start: str = THINK
    end: str = END_THINK
    untagged: Literal["reasoning", "content", "undecided"]
    label: str = ""
    calls: tuple[str, ...] = ()
    answer: tuple[str, str] | None = None
    is_stripped: bool = False
    is_repeated: bool = False
    is_quoted: bool = False

    @property
    def key(self) -> str:
        """The name as a Python identifier."""
        return re.sub(r"\W", "_", self.name)

    @property
    def _opened(self) -> str:
        """The mode after `start`."""
        return "label" if self.label else "reasoning"

    def grammar(self) -> Grammar:
        """Builds the grammar: a first mode for each state that the prompt can leave, then the rest.

        A `start` at the beginning of the text opens the thinking whatever the prompt says: the last
        tag of the prompt may belong to an earlier turn.
        """
        return Grammar(
            modes=dict(self._modes()),
            entries={self.start: "begin open", self.end: "begin closed"},
            default="begin",
            openings=frozenset({self.start}),
        )

    def _modes(self) -> Iterator[tuple[str, Mode]]:
        stripped = self.is_stripped
        first = {"reasoning": "reasoning", "content": "answer", "undecided": "undecided"}
        yield "begin", self._begin(first[self.untagged])
        yield "begin open", self._begin("reasoning")
        yield "begin closed", self._begin("answer")
        yield "undecided", Mode(kind="held", exits=self._decisions(), is_stripped=stripped)
        ends = {self.end: Exit(mode="answer")}
        ends |= {tag: Exit(mode="after a call", is_kept=True) for tag in self.calls}
        yield "reasoning", Mode(kind="reasoning", exits=ends, is_stripped=stripped)
        if self.label:
            word = {self.label: Exit(mode="reasoning")}
            yield "label", Mode(kind="dropped", exits=word, blanks="", otherwise="reasoning")
        again = {self.start: Exit(mode=self._opened)} if self.is_repeated else {}
        yield "content", Mode(kind="content", exits=again, is_stripped=stripped)
        late = {self.end: Exit(mode="content")}  # of thinking in which a call stood
        yield "after a call", Mode(kind="content", exits=late, is_stripped=stripped)
        yield from self._answer_modes()

    def _begin(self, otherwise: str) -> Mode:
        kind: Literal["dropped", "reasoning"] = "dropped" if self.is_stripped else "reasoning"
        exits = {self.start: Exit(mode=self._opened)}
        return Mode(kind=kind, exits=exits, blanks=whitespace, otherwise=otherwise)

    def _decisions(self) -> dict[str, Exit]:
        """Returns the tags that decide whether undecided text is reasoning or content."""
        exits = {self.start: Exit(mode=self._opened, held="content")}
        exits |= {self.end: Exit(mode="answer")}
        if self.answer is not None:
            exits[self.answer[0]] = Exit(mode="in answer", held="content")
        return exits

    def _answer_modes(self) -> Iterator[tuple[str, Mode]]:
        """Yields the modes after the thinking: the content, or its tags and then the content."""
        if self.answer is None:
            yield "answer", Mode(kind="content", blanks="", otherwise="content")
            return
        start, end = self.answer
        exits = {start: Exit(mode="in answer")}
        yield "answer", Mode(kind="dropped", exits=exits, blanks=whitespace, otherwise="content")
        closing = {end: Exit(mode="content")}
        yield "in answer", Mode(kind="content", exits=closing, is_stripped=self.is_stripped)


FORMATS = (
    # Any model that thinks in <think>, once or several times.
    TagFormat(
        name="think-tag",
        aliases=("think", "think-tags"),
        untagged="undecided",
        is_stripped=True,
        is_repeated=True,
    ),
    # FastDeploy's deepseek parsers, which all follow this rule.
    TagFormat(
        name="deepseek-r1",
        aliases=("deepseek", "deepseek-v3", "deepseek-v3-0324", "deepseek-v3.1"),
        untagged="undecided",
    ),
    # The template of GLM-4.5 leaves <think> to the model and writes <think></think> where thinking
    # is off; those of GLM-4.6 and later may open it. A tool call may come without </think> (vLLM
    # 56635).
    TagFormat(
        name="glm-4.5",
        aliases=("glm45", "glm-4-5", "glm-45", "glm-4.6", "glm-4.7"),
        untagged="undecided",
        calls=("<tool_call>",),
    ),
    # Gemma 4: "<|channel>thought\n...<channel|>", or no tags where thinking is off (Google's page
    # on prompt formatting); a tool call ends it too (vLLM's parser).
    TagFormat(
        name="gemma4",
        aliases=("gemma-4",),
        start="<|channel>",
        end="<channel|>",
        label="thought\n",
        untagged="content",
        calls=("<|tool_call>",),
        is_stripped=True,
    ),
    # Hunyuan-A13B: "<think>\n...\n</think>\n<answer>\n...\n</answer>" (docstring of vLLM's parser).
    TagFormat(
        name="hunyuan",
        aliases=("hunyuan-a13b",),
        untagged="undecided",
        answer=("<answer>", "</answer>"),
        is_stripped=True,
    ),
    # Step-3: always reasoning until </think> (vLLM 45247). A tool call ends it too (SGLang 38892).
    TagFormat(
        name="step3",
        aliases=("step", "step-3"),
        untagged="reasoning",
        calls=("<tool_call>",),
    ),
    # Step-3.5: the line breaks around </think> are not part of the text (vLLM 51201).
    TagFormat(
        name="step3p5",
        aliases=("step-3.5", "step-3p5", "step3.5"),
        untagged="reasoning",
        calls=("<tool_call>",),
        is_stripped=True,
    ),
    # Magistral: no reasoning without [THINK] (docstring of vLLM's parser). Its system prompt
    # contains both tags, so the last tag of a prompt is the closing one.
    TagFormat(
        name="mistral",
        aliases=("magistral",),
        start="[THINK]",
        end="[/THINK]",
        untagged="content",
        is_quoted=True,
    ),
    # Kimi K2 Thinking and later: thinks unless the prompt has closed the thinking; a section of
    # tool calls ends it too (smg 1873, on vLLM's kimi_k2).
    TagFormat(
        name="kimi-k2",
        aliases=("kimi-k2-thinking", "kimi-k2.5", "kimi-k25"),
        untagged="reasoning",
        calls=("<|tool_calls_section_begin|>",),
    ),
    # Kimi-VL Thinking, whose tags are plain text; "kimi" is SGLang's name for it.
    TagFormat(
        name="kimi-vl",
        aliases=("kimi", "kimi-vl-thinking"),
        start="◁think▷",
        end="◁/think▷",
        untagged="undecided",
    ),
    # MiniMax-M2: its template opens the thinking, the text only closes it; tool calls may come
    # without </think> (ai-dynamo/frontend-crates 108).
    TagFormat(
        name="minimax-m2",
        aliases=("minimax", "minimax-m2.1", "minimax-m2.5"),
        untagged="reasoning",
        calls=("<minimax:tool_call>",),
    ),
    # Seed-OSS: like DeepSeek R1 with its own tags; the opening tag may be missing (docstring of
    # vLLM's parser).
    TagFormat(
        name="seed-oss",
        aliases=("seed", "seed-oss-36b"),
        start="<seed:think>",
        end="</seed:think>",
        untagged="reasoning",
        calls=("<seed:tool_call>",),
    ),
)
