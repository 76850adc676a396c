"""A constraint holds in the answer and leaves the thinking free, whatever parser divides the text.

Tokens come from random logits that want a text: first thinking and its end, then, in the answer, a
marker, which must never become complete there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from mmdeploy_llm.engine.delivery.delivery import Delivery
from mmdeploy_llm.engine.runner.sampling.grammar import GrammarBackend
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.sampling.state import SlotRequest
from mmdeploy_llm.hooks import ReasoningParser, Segment
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.request_output import CompletionOutput
from mmdeploy_llm.values.params import GuidedDecodingParams, SamplingParams
from mmdeploy_llm.values.plan import TokenUpdate

from .conftest import SPECS

pytest.importorskip("llguidance", reason="needs llguidance: the extra 'guided'")

SEED = 3
FINAL = "<|channel|>final<|message|>"
FIRST = ("think-tag", "qwen3", "gpt-oss", "glm-4.5", "ernie-x1", "hunyuan")  # the rest are full
NAMES = [pytest.param(n, marks=[pytest.mark.full] * (n not in FIRST)) for n in SPECS]
SCHEMA = {
    "type": "object",
    "properties": {"k": {"type": "string", "maxLength": 30}},
    "additionalProperties": False,
    "required": ["k"],
}
CONSTRAINTS: dict[str, GuidedDecodingParams] = {
    "json": GuidedDecodingParams(json=SCHEMA),
    "json_object": GuidedDecodingParams(json_object=True),
    "regex": GuidedDecodingParams(regex="[^0]{12}[0-9]"),
    "choice": GuidedDecodingParams(choice=["red", "<blue>"]),
    "grammar": GuidedDecodingParams(grammar='root ::= "a" [^z]{9,12}'),
    "structural_tag": GuidedDecodingParams(
        structural_tag={
            "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
            "triggers": ["<f>"],
        }
    ),
}
KINDS = [pytest.param(k, marks=[pytest.mark.full] * (k != "json")) for k in CONSTRAINTS]


def follows(kind: str, text: str) -> bool:
    """Whether a text keeps a constraint, without the library that enforced it."""
    match kind:
        case "json" | "json_object":
            try:
                value = json.loads(text)
            except ValueError:
                return False
            return isinstance(value, dict) and (kind == "json_object" or [*value] == ["k"])
        case "regex":
            return re.fullmatch(r"[^0]{12}[0-9]", text, re.DOTALL) is not None
        case "choice":
            return text in ("red", "<blue>")
        case "grammar":
            return re.fullmatch(r"a[^z]{9,12}", text, re.DOTALL) is not None
    tags = re.findall(r"<f>(.*?)</f>", text, re.DOTALL)
    return text.count("<f>") == len(tags) and all(follows("json", one) for one in tags)


class Writer:
    """Writes texts with one parser and tokenizer of bytes. The parser's markers are tokens, or not:
    then they are spelled."""

    def __init__(
        self, tokenizer: Any, new_parser: Callable[[], ReasoningParser], eos_id: int
    ) -> None:
        self.tokenizer, self.new_parser, self.eos_id = tokenizer, new_parser, eos_id
        self.size = len(tokenizer)
        self.grammars = GrammarBackend(tokenizer, self.size, {eos_id}, new_parser=new_parser)

    def write(
        self,
        guided: GuidedDecodingParams,
        prompt: str,
        thinking: str,
        lure: str,
        *,
        seed: int = SEED,
        num_tokens: int = 260,
        restarts: bool = False,
        **fields: Any,
    ) -> CompletionOutput:
        """Returns what delivery makes of a text. lure: what logits want once `thinking` is written.
        restarts: the request starts again after every token, as after a preemption."""
        params = SamplingParams(
            temperature=1.0, seed=seed, max_tokens=num_tokens, guided_decoding=guided, **RESOLVED,
            **fields,
        )  # fmt: skip
        ids: list[int] = []
        sampler, generator = self._sampler(params, prompt, ids), torch.Generator().manual_seed(seed)
        wanted = self.tokenizer(thinking, add_special_tokens=False).input_ids
        lured = self.tokenizer(lure, add_special_tokens=False).input_ids
        for step in range(num_tokens):
            logits = torch.randn(1, self.size, generator=generator)
            if wanted:
                logits[0, wanted[0]] = 30.0
            elif lured:
                logits[0, lured[step % len(lured)]] += 4.0
            if restarts:
                sampler = self._sampler(params, prompt, ids)
            result = sampler.sample(logits, [0])
            assert result.errors == {}
            ids += result.token_ids
            wanted = wanted[1:]
            if ids[-1] == self.eos_id:
                break
        return self.delivered(params, prompt, ids)

    def delivered(self, params: SamplingParams, prompt: str, ids: list[int]) -> CompletionOutput:
        """Returns the completion of a request with these tokens."""
        request = Request(
            request_id="r",
            prompt=prompt,
            prompt_text=prompt,
            prompt_token_ids=[1],
            params=params,
            eos_token_ids=frozenset({self.eos_id}),
            output_token_ids=ids,
            arrival_time=1.0,
        )
        reason = "stop" if ids[-1] == self.eos_id else "length"
        delivery = Delivery(self.tokenizer, self.new_parser, "p", matches=self.grammars.matches)
        update = TokenUpdate(request=request, new_token_ids=tuple(ids), finish_reason=reason)
        (output,) = delivery.deliver([update])
        return output.outputs[0]

    def _sampler(self, params: SamplingParams, prompt: str, ids: list[int]) -> Sampler:
        sampler = Sampler(
            max_num_slots=1,
            vocab_size=self.size,
            device=torch.device("cpu"),
            grammars=self.grammars,
        )
        end = self.tokenizer(self.new_parser().end_marker, add_special_tokens=False).input_ids
        request = SlotRequest(
            params=params,
            prompt_token_ids=(1,),
            output_token_ids=tuple(ids),
            eos_token_ids={self.eos_id},
            reasoning_end_ids=tuple(end) if params.reasoning_max_tokens else (),
            prompt_text=prompt,
        )
        sampler.add(0, request)
        return sampler


RESOLVED = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@pytest.fixture(scope="module")
def writer(byte_tokenizer, new_parser) -> Iterator[Callable[..., Writer]]:
    made: list[Writer] = []

    @cache
    def make(name: str, *, are_tokens: bool = False) -> Writer:
        build = (lambda: new_parser(name)) if name in SPECS else PARSERS[name]
        markers = build().markers if are_tokens else ()
        tokenizer = byte_tokenizer(("<eos>", *markers), "<eos>")
        made.append(Writer(tokenizer, build, tokenizer.eos_token_id))
        return made[-1]

    yield make
    for one in made:
        one.grammars.close()


def opened(name: str) -> tuple[str, str]:
    """Returns a prompt and the beginning of a text, together in the thinking."""
    if name == "gpt-oss":
        return "<|start|>assistant", "<|channel|>analysis<|message|>"
    if name == "granite":
        return "Q\nA: ", "Here is my thought process:"
    if name == "mistral":
        return "Q[/INST]", "[THINK]"
    start = {"gemma4": "<|channel>", "seed-oss": "<seed:think>", "kimi-vl": "◁think▷"}
    return f"Q\nA: {start.get(name, '<think>')}\n", ""


def end_of(name: str, parser: ReasoningParser) -> str:
    """Returns the text that ends the thinking and opens the answer."""
    end = parser.end_marker or ""
    return end + {"ernie-x1": "\n<response>", "hunyuan": "\n<answer>"}.get(name, "")


@pytest.mark.few_in_ci(36)
@pytest.mark.one_is_quick
@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_thinking_is_free_and_the_answer_follows(writer, name, kind, are_tokens) -> None:
    one = writer(name, are_tokens=are_tokens)
    prompt, begun = opened(name)
    end = end_of(name, one.new_parser())
    thinking = f"{begun}I see <a> {{}} \x07 so{end}"
    lure = one.new_parser().end_marker
    found = one.write(CONSTRAINTS[kind], prompt, thinking, lure)
    assert "I see <a> {} \x07 so" in found.reasoning_content
    is_stripped = one.new_parser().parse(" a ")[0].text == "a"  # then the regex's end may be lost
    assert found.is_valid == follows(kind, found.text) or (kind == "regex" and is_stripped)
    assert found.is_valid == (found.error_code == 200)
    assert found.is_valid or found.finish_reason == "length"
    assert lure not in found.text
    if kind in ("json", "choice", "regex", "grammar"):
        assert found.is_valid


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_closes_the_thinking_is_answered_at_once(writer, name) -> None:
    one = writer(name)
    parser = one.new_parser()
    if parser.start_marker is None:  # prompts say nothing about these, but for one
        prompt = f"<|start|>assistant{FINAL}" if name == "gpt-oss" else "Q[/INST]"
    else:
        prompt = f"Q\nA: {parser.start_marker}\n\n{parser.end_marker}\n\n"
    lure = parser.start_marker or "I think"
    found = one.write(CONSTRAINTS["choice"], prompt, lure, lure)
    if name in ("granite", "mistral"):
        return  # nothing can close their thinking
    assert found.text in ("red", "<blue>")
    assert not (found.reasoning_content or "").strip()


@pytest.mark.one_is_quick
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", ["think-tag", "qwen3", "deepseek-r1", "glm-4.5", "mistral"])
def test_a_prompt_that_leaves_it_open_is_answered_or_thought_about(writer, name, begun) -> None:
    one = writer(name)
    start, end = ("[THINK]", "[/THINK]") if name == "mistral" else ("<think>", "</think>")
    found = one.write(CONSTRAINTS["choice"], "Q", f"\n{start}hm{end}" if begun else "r", "x")
    assert found.text in ("red", "<blue>")
    assert (found.reasoning_content or "").strip() == ("hm" if begun else "")


def test_white_space_before_the_thinking_has_an_end(writer) -> None:
    one = writer("qwen3")
    found = one.write(CONSTRAINTS["choice"], "Q", "\n" * 7, "x", num_tokens=7)
    assert one.tokenizer.decode(found.token_ids[:5]) in ("\n\n\n\nr", "\n\n\n\n<")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", [*FIRST[:4], *(pytest.param(n) for n in FIRST[4:])])
def test_preempted_is_uninterrupted(writer, name) -> None:
    one, (prompt, begun) = writer(name), opened(name)
    thinking = f"{begun}so{end_of(name, one.new_parser())}"
    whole, again = (
        one.write(CONSTRAINTS["regex"], prompt, thinking, "x", restarts=restarts)
        for restarts in (False, True)
    )
    assert whole.is_valid
    assert whole == again


@pytest.mark.parametrize("cut", ["thinking", "answer"])
def test_a_text_that_is_cut_off_says_so(writer, cut) -> None:
    thinking = "hm" * 99 if cut == "thinking" else "hm</think>"
    found = writer("qwen3").write(CONSTRAINTS["regex"], "<think>", thinking, "", num_tokens=20)
    assert (found.is_valid, found.error_code, found.finish_reason) == (False, 422, "length")
    assert "max_tokens = 20 ended the text" in found.error_msg
    assert ("set reasoning_max_tokens" in found.error_msg) == (cut == "thinking")
    assert bool(found.text) == (cut == "answer")
    assert found.reasoning_content


def test_the_end_of_sequence_ends_no_thinking(writer) -> None:
    one = writer("qwen3")
    found = one.write(CONSTRAINTS["choice"], "<think>", "a<eos>b</think>", "x")
    assert found.text in ("red", "<blue>")
    assert found.reasoning_content.startswith("a")


def test_the_limit_of_the_thinking_holds(writer) -> None:
    one = writer("qwen3")
    found = one.write(CONSTRAINTS["choice"], "<think>", "hm" * 99, "x", reasoning_max_tokens=9)
    assert found.reasoning_content == "hmhmhmhmh"
    assert found.text in ("red", "<blue>")
    found = one.write(CONSTRAINTS["json"], "Q", "{", "x", reasoning_max_tokens=2)
    assert found.is_valid  # the limit closes no thinking that never began
    for name in ("qwen3", "glm-4.5"):
        one = writer(name, are_tokens=True)
        found = one.write(CONSTRAINTS["choice"], "Q", "\n" * 9, "x", reasoning_max_tokens=2)
        assert found.text in ("red", "<blue>"), name  # it ends white space before the thinking


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5"])
def test_white_space_before_a_forced_end_is_no_part_of_the_answer(writer, name) -> None:
    """The grammar took it for the beginning of an answer, and begins again after the end."""
    one, guided = writer(name, are_tokens=True), GuidedDecodingParams(regex=r"\n\n[ab]{3}")
    found = one.write(guided, "Q", "\n" * 9, "x", reasoning_max_tokens=2)
    _, end, answer = one.tokenizer.decode(found.token_ids).partition("</think>")
    assert end
    assert re.fullmatch(r"\n\n[ab]{3}(<eos>)?", answer), answer


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_a_tool_call_ends_the_thinking_only_where_the_constraint_allows_it(writer, kind) -> None:
    call = {"begin": "<tool_call>", "schema": SCHEMA, "end": "</tool_call>"}
    tag = GuidedDecodingParams(structural_tag={"structures": [call], "triggers": ["<tool_call>"]})
    one, guided = writer("glm-4.5"), tag if kind == "structural_tag" else CONSTRAINTS[kind]
    found = one.write(guided, "Q<think>", 'hm<tool_call>{"k": "a"}</tool_call><eos>', "</think>")
    if kind == "structural_tag":
        assert (found.reasoning_content, found.is_valid) == ("hm", True)
        assert found.text.startswith('<tool_call>{"k": "a"}</tool_call>')
    else:
        assert "<tool_call>" not in found.reasoning_content + found.text


class Acme(ReasoningParser):
    """A parser that knows nothing of constraints, and holds all of its thinking to its end."""

    markers, start_marker, end_marker = ("[[", "]]"), "[[", "]]"

    def __init__(self) -> None:
        self._held, self._is_thinking = "", False

    def start(self, prompt: str) -> None:
        self._is_thinking = prompt.rfind("[[") > prompt.rfind("]]")

    def feed(self, text: str) -> list[Segment]:
        self._held += text
        if not self._is_thinking and self._held.startswith("[["):
            self._held, self._is_thinking = self._held[2:], True
        if not self._is_thinking or "]]" not in self._held:
            return []
        before, _, self._held = self._held.partition("]]")
        self._is_thinking = False
        return [Segment(kind="reasoning", text=before)] * bool(before)

    def finish(self) -> list[Segment]:
        kind = "reasoning" if self._is_thinking else "content"
        return [Segment(kind=kind, text=self._held)] * bool(self._held)


class Broken(Acme):
    """A parser that raises when the thinking ends."""

    def feed(self, text: str) -> list[Segment]:
        if "]" in text:
            raise ValueError("no such character")
        return super().feed(text)


PARSERS = {"acme": Acme, "broken": Broken}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "begun"), [("Q[[", ""), ("Q", "[[")])
def test_a_parser_of_a_third_party(writer, kind, prompt, begun) -> None:
    one = writer("acme")
    found = one.write(CONSTRAINTS[kind], prompt, f"{begun}hm]]", "]]")
    assert found.reasoning_content == "hm"
    assert found.is_valid == follows(kind, found.text)
    assert found.is_valid or found.finish_reason == "length"


def test_a_parser_of_a_third_party_after_a_closed_prompt(writer) -> None:
    found = writer("acme").write(CONSTRAINTS["choice"], "Q[[]]", "x", "x")
    assert (found.text in ("red", "<blue>"), found.reasoning_content) == (True, "")


def test_a_parser_that_raises_fails_its_request_alone(writer) -> None:
    found = writer("broken").write(CONSTRAINTS["choice"], "Q[[", "hm]]", "x", num_tokens=9)
    assert (found.error_code, found.is_valid) == (500, False)
    assert "reasoning parser p failed" in found.error_msg
