"""Delivery: what a caller gets, with and without streaming."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mmdeploy_llm_plugins.reasoning.parsers import (
    Ernie45VLParser,
    Ernie45VLThinkingParser,
    Qwen3Parser,
)
from mmdeploy_llm_plugins.tools.parsers import formats
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmdeploy_llm.engine.delivery.delivery import Delivery
from mmdeploy_llm.engine.delivery.summary import record_of
from mmdeploy_llm.hooks import ReasoningParser, Segment, ToolCall, ToolParser
from mmdeploy_llm.request import MediaInput, MediaSpan
from mmdeploy_llm.values.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import RequestFailure


class CharTokenizer:
    """One token per character of `CHARS` or text of `SPECIAL`; what Delivery reads."""

    CHARS = 'abcdefghijklmnopqrstuvwxyz <>/\n#!{}":,_1'
    SPECIAL = ("</s>", "<think>", "</think>")

    def __init__(self) -> None:
        self.tokens = [*self.CHARS, *self.SPECIAL]
        self.all_special_ids = [self.tokens.index(token) for token in self.SPECIAL]
        self.added_tokens_decoder: dict[int, Any] = {}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self.tokens[i] if i < len(self.tokens) else None for i in ids]

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]:
        return [self.tokens.index(token) if token in self.tokens else None for token in tokens]

    def decode(self, ids: list[int], **options: Any) -> str:
        assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return "".join(self.tokens[i] for i in ids)

    def ids(self, text: str) -> list[int]:
        """Returns `text` as ids, with special tokens where their text occurs."""
        ids = []
        while text:
            token = next((t for t in self.SPECIAL if text.startswith(t)), text[0])
            ids.append(self.tokens.index(token))
            text = text.removeprefix(token)
        return ids


CHARS = CharTokenizer()
EOS = CHARS.ids("</s>")[0]


def run(delivery: Delivery, generation: Any, chunks: list[list[int]], reason: str) -> list[Any]:
    """Returns all outputs of one request whose tokens arrive in `chunks`, until it ends."""
    outputs: list[RequestOutput] = []
    for number, chunk in enumerate(chunks):
        is_last = number == len(chunks) - 1
        outputs += delivery.deliver([generation.update(chunk, reason if is_last else None)])
        if outputs and outputs[-1].finished:
            break
    return outputs


def merged(outputs: list[RequestOutput]) -> CompletionOutput:
    """Joins deltas as a caller would."""
    parts = [output.outputs[0] for output in outputs]
    reasonings = [part.reasoning_content for part in parts]
    return CompletionOutput(
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        text="".join(part.text for part in parts),
        reasoning_content=None if None in reasonings else "".join(filter(None, reasonings)),
        finish_reason=parts[-1].finish_reason,
    )


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=10_000, **fields)


def test_one_output_at_the_end(generation: Any) -> None:
    made = generation(eos_token_ids=frozenset({EOS}), num_cached_tokens=2, index=3)
    (output,) = run(Delivery(CHARS), made, [CHARS.ids(c) for c in "hello"] + [[EOS]], "stop")
    assert output.prompt is made.request.prompt
    assert output.prompt_token_ids == [1, 2, 3]
    assert output.finished
    assert output.is_ok
    assert output.num_cached_tokens == 2
    assert output.prompt_logprobs is None
    assert output.outputs[0] == CompletionOutput(
        index=3, token_ids=[*CHARS.ids("hello"), EOS], text="hello", finish_reason="stop"
    )


def test_metrics(generation: Any) -> None:
    (output,) = run(Delivery(CHARS), generation(), [[0], [1], [2]], "length")
    metrics = output.metrics
    assert metrics.arrival_time == 100.0
    assert metrics.inference_start_time == 101.0
    assert metrics.first_token_time == 1.0
    assert metrics.time_in_queue == 0.5
    assert metrics.preprocess_time == 0.5
    assert metrics.model_forward_time == 3.0
    assert metrics.model_execute_time == 4.0


def test_streamed_deltas(generation: Any) -> None:
    made = generation(stream=True, eos_token_ids=frozenset({EOS}))
    outputs = run(Delivery(CHARS), made, [[0], [], [1], [EOS]], "stop")
    assert [output.outputs.text for output in outputs] == ["a", "b", ""]
    assert [output.outputs.token_ids for output in outputs] == [[0], [1], [EOS]]
    assert [output.outputs.send_idx for output in outputs] == [0, 1, 2]
    assert [output.finished for output in outputs] == [False, False, True]
    assert [output.outputs.finish_reason for output in outputs] == [None, None, "stop"]
    assert all(output.outputs.reasoning_content is None for output in outputs)


def test_a_delta_of_reasoning_only(generation: Any) -> None:
    made = generation(stream=True, prompt_text="<think>")
    chunks = [CHARS.ids("why"), CHARS.ids("</think>"), CHARS.ids("so")]
    outputs = run(Delivery(CHARS, Ernie45VLParser, "p"), made, chunks, "length")
    pairs = [(output.outputs.reasoning_content, output.outputs.text) for output in outputs]
    assert pairs == [("why", ""), ("", ""), ("", "so")]


@pytest.mark.full
@pytest.mark.parametrize("parser", [None, Ernie45VLParser, Ernie45VLThinkingParser, Qwen3Parser])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_streamed_is_unstreamed(generation: Any, parser: Any, data: st.DataObject) -> None:
    words = st.sampled_from(
        ["<think>", "</think>", "a", "ab", " ", "\n", "#", "##", "!", "<", "</"]
    )
    ids = CHARS.ids("".join(data.draw(st.lists(words, min_size=1, max_size=20))))
    stops = data.draw(st.lists(st.sampled_from(["##", "#a", "b!", "</think>\n", "a"]), max_size=3))
    sequences = data.draw(st.lists(st.sampled_from(["ab", "##a", " \n", "b", "!</s>"]), max_size=2))
    options = params(
        stop=tuple(stops),
        stop_token_sequences=[CHARS.ids(text) for text in sequences],
        include_stop_str_in_output=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 6)),
    )
    common = {
        "params": options,
        "eos_token_ids": frozenset({EOS}),
        "prompt_text": data.draw(st.sampled_from(["", "<think>\n", "<think></think>"])),
    }
    reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
    ids += [EOS] if reason == "stop" else []
    rng = random.Random(data.draw(st.integers(0, 999)))
    chunks = [[token_id] for token_id in ids]
    streamed = run(Delivery(CHARS, parser), generation(stream=True, **common), chunks, reason)
    (whole,) = run(Delivery(CHARS, parser), generation(**common), chunks, reason)
    assert merged(streamed) == merged([whole])
    if reason == "abort" and (stops or sequences):
        return  # an abort has no tokens of its own, so that it never meets a stop
    # Split anywhere: ids after a stop in the same step do not count.
    cuts = sorted(rng.randint(0, len(ids)) for _ in range(3))
    wide = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    outputs = run(Delivery(CHARS, parser), generation(stream=True, **common), wide, reason)
    assert merged(outputs) == merged([whole])


@pytest.mark.parametrize(
    ("text", "is_included", "expected", "reason"),
    [
        ("one ##a two", False, "one ", "stop"),
        ("one ##a two", True, "one ##a", "stop"),
        ("one ##b #", True, "one ##b #", "length"),
        ("one #</s>", False, "one ", "stop"),  # the id that ended the request completes it
        ("one ##</s>", False, "one #", "stop"),
        ("one z</s>", False, "one z", "stop"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_sequence_ends_the_request(
    generation: Any, text: str, is_included: bool, expected: str, reason: str, stream: bool
) -> None:
    """Ids of a sequence are held back until they are decided; the token ids stay complete."""
    options = params(
        stop_words_ids=[CHARS.ids("##a"), CHARS.ids(" #</s>")[1:], CHARS.ids("zz")],
        include_stop_str_in_output=is_included,
    )
    made = generation(params=options, stream=stream, eos_token_ids=frozenset({EOS}))
    ids = CHARS.ids(text)
    ends = "stop" if ids[-1] == EOS else "length"
    outputs = run(Delivery(CHARS), made, [[token_id] for token_id in ids], ends)
    found = merged(outputs)
    assert (found.text, found.finish_reason) == (expected, reason)
    assert text.startswith("".join(CHARS.tokens[token_id] for token_id in found.token_ids))
    for output in outputs[:-1]:
        assert "##" not in output.outputs.text or reason == "length"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("length", (), "a🦜"),
        ("abort", (), "a🦜"),
        ("error", (), "a🦜"),
        ("repetition", (), "a🦜"),
        ("stop", (), "a🦜\ufffd"),  # nothing would have come: wrong bytes of the model
        ("length", ("🦜🐢", "b"), "a🦜"),  # held back for a stop text, and then not found
        ("length", ("🦜",), "a"),
    ],
)
def test_a_character_in_which_an_answer_is_cut_has_tokens_and_no_text(
    byte_level: Any, generation: Any, stream: bool, reason: str, stop: Any, expected: str
) -> None:
    """Parrot and turtle in bytes, of which the last is missing."""
    of_byte = bytes_to_unicode()
    data = "a🦜🐢".encode()[:-1]
    ids = byte_level.convert_tokens_to_ids([of_byte[byte] for byte in data])
    made = generation(stream=stream, params=params(stop=list(stop)))
    answer = merged(run(Delivery(byte_level), made, [[token_id] for token_id in ids], reason))
    assert answer.text == expected
    assert answer.token_ids == (ids[:5] if expected == "a" else ids)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("skips", [True, False])
def test_real_tokenizers(tokenizer: Any, generation: Any, stream: bool, skips: bool) -> None:
    rng = random.Random(5)
    ids = [rng.randrange(len(tokenizer)) for _ in range(300)]
    made = generation(stream=stream, params=params(skip_special_tokens=skips))
    outputs = run(Delivery(tokenizer), made, [[token_id] for token_id in ids], "stop")
    assert merged(outputs).text == tokenizer.decode(ids, skip_special_tokens=skips)
    assert merged(outputs).token_ids == list(ids)


@pytest.mark.parametrize(("is_included", "text"), [(False, "one "), (True, "one ##")])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_request(
    generation: Any, is_included: bool, text: str, stream: bool
) -> None:
    options = params(stop="##", include_stop_str_in_output=is_included)
    made = generation(params=options, stream=stream)
    delivery = Delivery(CHARS)
    outputs = run(delivery, made, [[token] for token in CHARS.ids("one ##two")], "length")
    assert merged(outputs).text == text
    assert merged(outputs).finish_reason == "stop"
    assert outputs[-1].finished
    assert merged(outputs).token_ids == CHARS.ids("one ##")
    assert delivery.deliver([made.update([0])]) == ()  # an update too late changes nothing
    assert delivery.deliver([made.update((), "abort")]) == ()


def test_no_stop_before_min_tokens(generation: Any) -> None:
    made = generation(params=params(stop=["a"], min_tokens=3))
    (output,) = run(Delivery(CHARS), made, [[t] for t in CHARS.ids("abxab")], "length")
    assert output.outputs.text == "abx"
    made = generation(params=params(stop=["a"], min_tokens=1))
    (output,) = run(Delivery(CHARS), made, [[t] for t in CHARS.ids("ab")], "length")
    assert output.outputs.text == ""


def test_stop_strings_see_the_reasoning(generation: Any) -> None:
    made = generation(params=params(stop=["</think>\n"]), prompt_text="<think>")
    chunks = [[t] for t in CHARS.ids("why</think>\nso")]
    (output,) = run(Delivery(CHARS, Ernie45VLParser), made, chunks, "length")
    assert (output.outputs.reasoning_content, output.outputs.text) == ("why", "")
    assert output.outputs.finish_reason == "stop"


def test_the_id_that_stops_has_no_text(generation: Any) -> None:
    stop_id = CHARS.ids("!")[0]
    made = generation(params=params(stop_token_ids=[stop_id]))
    (output,) = run(Delivery(CHARS), made, [CHARS.ids("a!"), CHARS.ids("!")], "stop")
    assert output.outputs.text == "a!"
    options = params(skip_special_tokens=False)
    made = generation(params=options, eos_token_ids=frozenset({EOS}))
    (output,) = run(Delivery(CHARS), made, [[EOS], CHARS.ids("a"), [EOS]], "stop")
    assert output.outputs.text == "</s>a"
    made = generation(params=options, eos_token_ids=frozenset({EOS}))
    (output,) = run(Delivery(CHARS), made, [CHARS.ids("a"), [EOS]], "length")
    assert output.outputs.text == "a</s>"  # it did not end the request


def test_markers_reach_the_parser_though_they_are_special(generation: Any) -> None:
    made = generation()
    (output,) = run(Delivery(CHARS, Ernie45VLParser), made, [CHARS.ids("a</think>b</s>")], "length")
    assert (output.outputs.reasoning_content, output.outputs.text) == ("a", "b")
    (output,) = run(Delivery(CHARS), generation(), [CHARS.ids("a</think>b</s>")], "length")
    assert (output.outputs.reasoning_content, output.outputs.text) == (None, "ab")


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_generated(generation: Any, stream: bool) -> None:
    made = generation(stream=stream, eos_token_ids=frozenset({EOS}))
    (output,) = run(Delivery(CHARS, Qwen3Parser), made, [[EOS]], "stop")
    assert (output.outputs.text, output.outputs.reasoning_content) == ("", "")
    (output,) = run(Delivery(CHARS, Qwen3Parser), generation(stream=stream), [[]], "length")
    assert (output.outputs.text, output.outputs.reasoning_content) == ("", "")


@pytest.mark.parametrize("stream", [True, False])
def test_abort_keeps_the_text(generation: Any, stream: bool) -> None:
    made = generation(stream=stream, params=params(stop=["c!"]))
    outputs = run(Delivery(CHARS), made, [CHARS.ids("ab"), CHARS.ids("c"), []], "abort")
    assert merged(outputs).text == "abc"
    assert merged(outputs).finish_reason == "abort"
    assert outputs[-1].error_code == 499
    assert "aborted" in (outputs[-1].error_msg or "")


def test_abort_of_a_waiting_request(generation: Any) -> None:
    (output,) = Delivery(CHARS, Qwen3Parser).deliver([generation().update((), "abort")])
    assert output.finished
    assert output.error_code == 499
    assert output.outputs.token_ids == []


def test_a_failure_is_passed_on(generation: Any) -> None:
    failure = RequestFailure(code=413, message="too large")
    made = generation()
    delivery = Delivery(CHARS)
    assert delivery.deliver([made.update(CHARS.ids("ab"))]) == ()
    (output,) = delivery.deliver([made.update((), "error", failure=failure)])
    assert (output.error_code, output.error_msg) == (413, "too large")
    assert (output.outputs.text, output.outputs.finish_reason) == ("ab", "error")
    assert output.finished


def media(kind: str, num_tokens: int) -> MediaSpan:
    return MediaSpan(
        offset=0, item=MediaInput(kind=kind, tensors={}, num_tokens=num_tokens, key=kind)
    )


def test_media_tokens(generation: Any) -> None:
    made = generation(media=(media("image", 4), media("video", 6), media("image", 5)), stream=True)
    outputs = run(Delivery(CHARS), made, [[0], [1]], "length")
    for output in outputs:
        assert (output.num_input_image_tokens, output.num_input_video_tokens) == (9, 6)


def entry(*token_ids: int) -> dict[int, Logprob]:
    return {t: Logprob(logprob=-float(n), rank=n + 1) for n, t in enumerate(token_ids)}


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs(generation: Any, stream: bool) -> None:
    made = generation(stream=stream, params=params(logprobs=1, prompt_logprobs=0))
    delivery = Delivery(CHARS)
    outputs = [*delivery.deliver([made.update(prompt_logprobs=(None, entry(2)))])]
    assert outputs == []
    outputs += delivery.deliver(
        [made.update([0], logprobs=(entry(0, 1),), prompt_logprobs=(entry(1),))]
    )
    outputs += delivery.deliver([made.update([3], "length", logprobs=(entry(3, 4),))])
    entries = [found for output in outputs for found in output.outputs.logprobs or ()]
    assert [list(found) for found in entries] == [[0, 1], [3, 4]]
    assert [p.decoded_token for found in entries for p in found.values()] == ["a", "b", "d", "e"]
    assert [p.rank for p in entries[1].values()] == [1, 2]
    prompt = outputs[-1].prompt_logprobs
    assert prompt is not None
    assert [found and {t: p.decoded_token for t, p in found.items()} for found in prompt] == [
        None,
        {2: "c"},
        {1: "b"},
    ]
    assert all(output.prompt_logprobs is None for output in outputs[:-1])


class Broken(ReasoningParser):
    """Fails as its class attributes say."""

    failing = ""

    def start(self, prompt: str) -> None:
        self._check("start")

    def feed(self, text: str) -> list[Segment]:
        if "!" in text:
            self._check("feed")
        return [Segment(kind="content", text=text)]

    def finish(self) -> list[Segment]:
        self._check("finish")
        return []

    def _check(self, step: str) -> None:
        if self.failing == step:
            raise KeyError(f"no {step}")


@pytest.mark.parametrize("step", ["start", "feed", "finish", "create"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_raising_parser_harms_its_request_only(generation: Any, step: str, stream: bool) -> None:
    class Failing(Broken):
        failing = step

        def __init__(self) -> None:
            self._check("create")

    made, good = generation(stream=stream), generation(request_id="good")
    makers = iter([Failing, Broken])
    delivery = Delivery(CHARS, lambda: next(makers)(), "'x' of plugin 'p'")
    outputs: list[RequestOutput] = []
    chunks = [CHARS.ids("ab"), CHARS.ids("c!"), CHARS.ids("d")]
    for number, chunk in enumerate(chunks):
        reason = "length" if number == 2 else None
        updates = [] if outputs and outputs[-1].finished else [made.update(chunk, reason)]
        outputs += [o for o in delivery.deliver(updates) if o.request_id == "r"]
        if number < 2:
            assert delivery.deliver([good.update(chunk)]) == ()
    last = outputs[-1].outputs
    assert outputs[-1].error_code == 500
    assert last.finish_reason == "error"
    assert "'x' of plugin 'p'" in outputs[-1].error_msg
    assert f"KeyError: 'no {step}'" in outputs[-1].error_msg
    assert last.text == CHARS.decode(
        made.request.output_token_ids,
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    assert last.token_ids == made.request.output_token_ids
    assert (len(last.token_ids) < 5) == (stream and step != "finish")
    (other,) = delivery.deliver([good.update(CHARS.ids("e"), "length")])
    assert other.is_ok
    assert other.outputs.text == "abc!e"


@pytest.mark.parametrize("given", [["text"], [None], None, [Segment(kind="thought", text="a")]])
def test_a_parser_that_breaks_its_contract(generation: Any, given: Any) -> None:
    class Wrong(Broken):
        def feed(self, text: str) -> list[Segment]:
            return given

    (output,) = run(Delivery(CHARS, Wrong, "wrong"), generation(), [CHARS.ids("ab")], "length")
    assert (output.error_code, output.outputs.text) == (500, "ab")
    assert output.outputs.reasoning_content == ""


def test_an_abort_stays_an_abort_when_the_parser_raises(generation: Any) -> None:
    class Failing(Broken):
        failing = "finish"

    (output,) = run(Delivery(CHARS, Failing), generation(), [CHARS.ids("ab"), []], "abort")
    assert output.outputs.finish_reason == "abort"
    assert output.outputs.text == "ab"


CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def tool_delivery(parser: Any = None, tools: Any = None) -> Delivery:
    return Delivery(CHARS, parser, "p", tools or new_tool_parser, "'t' of plugin 'p'")


def new_tool_parser() -> ToolParser:
    return formats.hermes()


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_tool_calls(generation: Any, reason: str) -> None:
    """Only a request that stopped by itself has the finish reason "tool_calls"."""
    made = generation(request_id="r")
    chunks = [CHARS.ids(f"so\n{CALL}\n{CALL}")]
    (output,) = run(tool_delivery(), made, chunks, reason)
    assert output.outputs.finish_reason == ("tool_calls" if reason == "stop" else reason)
    assert output.outputs.text == "so"
    first, second = output.outputs.tool_calls
    assert (first.name, first.arguments, first.index, second.index) == ("f", '{"x": 1}', 0, 1)
    assert first.function.arguments == first.arguments
    assert re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", first.id)
    assert first.id != second.id
    assert output.to_dict()["outputs"][0]["tool_calls"][0] == first.to_dict()


def test_no_calls(generation: Any) -> None:
    (output,) = run(tool_delivery(), generation(), [CHARS.ids("so")], "stop")
    assert output.outputs.tool_calls == ()
    assert output.outputs.finish_reason == "stop"
    (output,) = run(Delivery(CHARS), generation(), [CHARS.ids(CALL)], "stop")
    assert output.outputs.tool_calls is None
    assert output.outputs.text == CALL


def test_calls_are_searched_only_after_the_reasoning(generation: Any) -> None:
    text = f"a {CALL}</think>\n{CALL}"
    for parser in (Ernie45VLParser, Ernie45VLThinkingParser):
        (output,) = run(tool_delivery(parser), generation(), [CHARS.ids(text)], "stop")
        assert output.outputs.reasoning_content == f"a {CALL}"
        assert output.outputs.text == ""
        assert [call.name for call in output.outputs.tool_calls] == ["f"]


def test_calls_that_are_no_content_are_dropped_without_a_tool_parser(generation: Any) -> None:
    text = f"a</think>\n{CALL}"
    delivery = Delivery(CHARS, Ernie45VLThinkingParser, "p")
    (output,) = run(delivery, generation(), [CHARS.ids(text)], "stop")
    assert (output.outputs.text, output.outputs.tool_calls) == ("", None)


def test_a_call_is_in_the_delta_that_completes_it(generation: Any) -> None:
    made = generation(stream=True)
    chunks = [CHARS.ids("so"), CHARS.ids(CALL[:-1]), CHARS.ids(">"), CHARS.ids("\nnow"), []]
    outputs = run(tool_delivery(), made, chunks, "stop")
    assert [len(output.outputs.tool_calls) for output in outputs] == [0, 0, 1, 0, 0]
    assert "".join(output.outputs.text for output in outputs) == "so\nnow"
    assert outputs[-1].outputs.finish_reason == "tool_calls"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_streamed_calls_are_the_unstreamed_ones(generation: Any, data: st.DataObject) -> None:
    words = st.sampled_from([CALL, "<tool_call>", "</tool_call>", "a", " ", "\n", "{", "</think>"])
    ids = CHARS.ids("".join(data.draw(st.lists(words, min_size=1, max_size=8))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    (whole,) = run(tool_delivery(Ernie45VLParser), generation(), [ids], "stop")
    deltas = run(tool_delivery(Ernie45VLParser), generation(stream=True), chunks, "stop")
    calls = [call for delta in deltas for call in delta.outputs.tool_calls]
    assert tuple(calls) == whole.outputs.tool_calls
    assert merged(deltas).text == whole.outputs.text
    assert deltas[-1].outputs.finish_reason == whole.outputs.finish_reason


class BrokenTools(ToolParser):
    """Raises at `failing`."""

    failing = ""

    def start(self, tools: Any) -> None:
        self._check("start")

    def feed(self, text: str) -> list[str | ToolCall]:
        self._check("feed")
        return [text]

    def finish(self) -> list[str | ToolCall]:
        self._check("finish")
        return []

    def _check(self, step: str) -> None:
        if self.failing == step:
            raise KeyError(f"no {step}")


@pytest.mark.parametrize("step", ["start", "feed", "finish"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_raising_tool_parser_ends_its_request_only(
    generation: Any, step: str, stream: bool
) -> None:
    class Failing(BrokenTools):
        failing = step

    made, good = generation(stream=stream), generation(request_id="good")
    makers = iter([Failing, BrokenTools])
    delivery = tool_delivery(Ernie45VLParser, lambda: next(makers)())
    outputs = delivery.deliver([made.update(CHARS.ids("a</think>b"))])
    delivery.deliver([good.update(CHARS.ids("a</think>b"))])
    if not (outputs and outputs[-1].finished):
        outputs = delivery.deliver([made.update(CHARS.ids("c"), "stop")])
    last = outputs[-1]
    assert last.error_code == 500
    assert "tool parser 't' of plugin 'p' failed" in last.error_msg
    assert f"KeyError: 'no {step}'" in last.error_msg
    assert last.outputs.finish_reason == "error"
    assert last.outputs.text.startswith("a</think>b")
    assert last.outputs.tool_calls == ()
    (other,) = delivery.deliver([good.update(CHARS.ids("c"), "length")])
    assert (other.is_ok, other.outputs.text) == (True, "bc")


@pytest.mark.parametrize(
    "given",
    [[None], [5], None, [ToolCall(name="", arguments="{}")], [ToolCall(name="f", arguments=None)]],  # type: ignore[arg-type]
)
def test_a_tool_parser_that_breaks_its_contract(generation: Any, given: Any) -> None:
    class Wrong(BrokenTools):
        def feed(self, text: str) -> list[str | ToolCall]:
            return given

    (output,) = run(tool_delivery(None, Wrong), generation(), [CHARS.ids("ab")], "stop")
    assert (output.error_code, output.outputs.text) == (500, "ab")


def test_markers_of_the_tool_parser_reach_it_though_they_are_special(generation: Any) -> None:
    class Tags(BrokenTools):
        markers = ("<think>",)

    made = generation(params=params(skip_special_tokens=True))
    (output,) = run(tool_delivery(None, Tags), made, [CHARS.ids("a<think>b</think>c")], "stop")
    assert output.outputs.text == "a<think>bc"


def test_state_is_dropped(generation: Any) -> None:
    delivery = Delivery(CHARS)
    made, other = generation(), generation(request_id="other")
    delivery.deliver([made.update([0]), other.update([1])])
    assert set(delivery._progress) == {"r", "other"}
    delivery.deliver([made.update([0], "length")])
    assert set(delivery._progress) == {"other"}


def test_requests_of_one_step_stay_apart(generation: Any) -> None:
    delivery = Delivery(CHARS, Ernie45VLParser)
    first = generation(request_id="1", prompt_text="<think>")
    second = generation(request_id="2", prompt_text="</think>")
    delivery.deliver([first.update(CHARS.ids("a</thi")), second.update(CHARS.ids("nk>"))])
    outputs = delivery.deliver([second.update([0], "length"), first.update([1], "length")])
    assert [output.request_id for output in outputs] == ["2", "1"]
    assert [(o.outputs.reasoning_content, o.outputs.text) for o in outputs] == [
        ("", "nk>a"),
        ("a</thib", ""),
    ]


def test_a_request_without_streaming_is_decoded_once(generation: Any) -> None:
    calls = []

    class Counting(CharTokenizer):
        def decode(self, ids: list[int], **options: Any) -> str:
            calls.append(len(ids))
            return super().decode(ids, **options)

    run(Delivery(Counting()), generation(), [[0]] * 20, "length")
    assert sum(calls) <= 3 * 20
    assert len(calls) <= 3


def test_record(generation: Any) -> None:
    made = generation(media=(media("image", 4),), num_cached_tokens=1)
    (output,) = run(Delivery(CHARS), made, [[0], [1]], "length")
    record = record_of(made.request, output)
    assert (record.request_id, record.finish_reason, record.error_code) == ("r", "length", 200)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (3, 2)
    assert record.num_cached_tokens == 1
    assert record.num_media_tokens == {"image": 4, "video": 0}
    assert record.metrics is output.metrics
