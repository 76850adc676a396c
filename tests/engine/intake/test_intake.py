"""Intake from end to end, with a processor that makes no pixels."""

import copy
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmdeploy_llm.engine.intake.rendered import TokenCount
from mmdeploy_llm.errors import (
    CheckpointError,
    ConfigError,
    MediaError,
    MediaLimitError,
    PromptTooLongError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.values.params import GuidedDecodingParams, SamplingParams

PARAMS = SamplingParams()
IMAGE = "<|start|><|image@placeholder|><|end|>"


def only(requests):
    (request,) = requests
    return request


# Forms of a prompt


def test_text_ids_and_dicts_give_the_same_ids(intake, tokenizer):
    ids = tokenizer.encode("hello world")
    forms = [
        "hello world",
        ids,
        tuple(ids),
        {"prompt": "hello world"},
        {"prompt": ids},
        {"prompt_token_ids": ids, "multimodal_data": None},
        {"prompt_token_ids": np.array(ids), "multimodal_data": {"image": []}},
        {"prompt_token_ids": torch.tensor(ids)},
        {"prompt_token_ids": torch.tensor([ids])},
        {"prompt_token_ids": np.array([ids])},
        torch.tensor([ids]),
        [torch.tensor(ids)],
    ]
    for form in forms:
        request = only(intake.accept(form, PARAMS))
        assert request.prompt_token_ids == ids
        assert request.item is form
        is_text = form == "hello world" or form == {"prompt": "hello world"}
        assert request.prompt == ("hello world" if is_text else None)
        assert request.prompt_text == "hello world"
        assert request.media == ()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ({}, "exactly one of"),
        ({"prompt": None}, "exactly one of"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "prompt and prompt_token_ids"),
        ({"prompts": "a"}, "did you mean 'prompt'"),
        ({"prompt": "a", "multimodal": {}}, "did you mean 'multimodal_data'"),
        ({"prompt": "a", "images": []}, "did you mean 'multimodal_data'"),
        ({"prompt": "a", "multi_modal_uuids": {}}, "items are known again by their content"),
        ({"prompt": "a", "encoder_prompts": ""}, "known: prompt, "),
        ({"prompt": "a", "multimodal_data": {}, "multi_modal_data": {}}, "not both"),
        ({"prompt": "a", "multimodal_data": [1]}, "must be a dict"),
        ({"prompt": "a", "multimodal_data": {"images": []}}, "did you mean 'image'"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "need 'messages'"),
        ([5, 10**6], "token id 1000000"),
        ([5, -1], "token id -1"),
        ([5, "a"], "found str"),
        ([5, True], "found bool"),
        ([5, 1.5], "found float"),
        ([[5], [6]], "found list"),
        (5, "got int"),
        (None, "got NoneType"),
        (b"bytes", "got bytes"),
    ],
    ids=str,
)
def test_wrong_prompts_are_request_errors(prompt, message, intake):
    with pytest.raises(RequestError, match=message):
        intake.accept(prompt, PARAMS)


def test_nothing_of_the_callers_is_changed(intake):
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": b"3"}, {"type": "text", "text": "a"}],
        }
    ]
    prompts = [
        {"prompt": f"{IMAGE} x", "multimodal_data": {"image": [b"3"]}},
        {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}},
    ]
    before = copy.deepcopy(prompts)
    for prompt in prompts:
        intake.accept(prompt, PARAMS)
    assert prompts == before
    assert SamplingParams() == PARAMS


# Media and placeholders


@pytest.mark.parametrize("marker", ["<|image@placeholder|>", "<|image_pad|>"])
def test_expansion_equals_tokenizing_the_expanded_text(marker, intake, tokenizer):
    text = f"see {marker}and {marker}{marker} now"
    data = {"image": [b"3", b"1", b"12"]}
    request = only(intake.accept({"prompt": text, "multimodal_data": data}, PARAMS))
    pad = "<|image_pad|>"
    assert request.prompt_token_ids == tokenizer.encode(f"see {pad * 3}and {pad}{pad * 12} now")
    assert [span.item.num_tokens for span in request.media] == [3, 1, 12]
    for span in request.media:
        own = request.prompt_token_ids[span.offset : span.end]
        assert own == [tokenizer.token_id(pad)] * span.item.num_tokens
    assert request.num_media_tokens("image") == 16


def test_token_ids_with_single_and_with_full_placeholders(intake, tokenizer):
    pad = "<|image_pad|>"
    data = {"image": [b"3", b"5", b"4"]}
    wanted = tokenizer.encode(f"a {pad * 3} b {pad * 9} c")
    forms = [
        wanted,
        tokenizer.encode(f"a {pad} b {pad * 2} c"),
        tokenizer.encode(f"a {pad * 3} b {pad * 2} c"),
        tokenizer.encode(f"a <|image@placeholder|> b {pad}<|image@placeholder|> c"),
    ]
    for ids in forms:
        prompt = {"prompt_token_ids": ids, "multimodal_data": data}
        request = only(intake.accept(prompt, PARAMS))
        assert request.prompt_token_ids == wanted
        assert tuple(span.offset for span in request.media) == starts(wanted, tokenizer)


def starts(ids, tokenizer):
    first = ids.index(tokenizer.token_id("<|image_pad|>"))
    second = ids.index(tokenizer.token_id("<|image_pad|>"), first + 3)
    return first, second, second + 5


@pytest.mark.parametrize(
    ("prompt", "data", "message"),
    [
        ("none here", {"image": [b"3"]}, "0 image placeholders, fewer than the 1 image item given"),
        (IMAGE, {"image": [b"3", b"4"]}, "1 image placeholder, fewer than the 2 image items"),
        ("none", {"image": [b"3"]}, r"written <\|image_pad\|>; chat\(\) writes them"),
        (IMAGE * 2, {"image": [b"3"]}, "2 image placeholders, more than the 1 image item"),
        (IMAGE, None, "1 image placeholder, more than the 0 image items"),
        ("<|image_pad|>" * 3 + IMAGE, {"image": [b"5", b"6"]}, "neither one for each"),
        ("<|image_pad|>" * 5, {"image": [b"5", b"6"]}, "fewer than the 2"),
    ],
)
def test_counts_that_differ_are_errors(prompt, data, message, intake):
    with pytest.raises(MediaError, match=message):
        intake.accept({"prompt": prompt, "multimodal_data": data}, PARAMS)


def test_cve_2026_44222_placeholders_without_media_open_nothing(intake, processor):
    for prompt in ("<|image_pad|>", "a <|image@placeholder|>", [6]):
        with pytest.raises(MediaError, match="more than the 0 image items"):
            intake.accept(prompt, PARAMS)
    with pytest.raises(MediaError, match="fewer"):
        intake.accept({"prompt": IMAGE, "multimodal_data": {"image": [b"3", b"4"]}}, PARAMS)
    assert processor.calls == []


def test_cve_2026_100650_limits_are_checked_before_anything_is_opened(intake, processor):
    message = r"got 5 but limit is 4; raise it with limit_mm_per_prompt=\{'image': 5\}"
    with pytest.raises(MediaLimitError, match=message):
        intake.accept({"prompt": IMAGE * 5, "multimodal_data": {"image": [b"3"] * 5}}, PARAMS)
    part = {"type": "image_url", "image_url": {"url": "3"}}
    with pytest.raises(MediaLimitError, match=message):
        intake.accept({"messages": [{"role": "user", "content": [part] * 5}]}, PARAMS)
    assert processor.calls == []


def test_kinds_without_a_processor(intake, make_intake):
    with pytest.raises(UnsupportedMediaError, match="no installed plugin processes video"):
        intake.accept({"prompt": "x", "multimodal_data": {"video": b"1"}}, PARAMS)
    text_only = make_intake(processors={})
    with pytest.raises(UnsupportedMediaError, match="accepts text only"):
        text_only.accept({"prompt": "x", "multimodal_data": {"image": b"1"}}, PARAMS)
    request = only(text_only.accept("the text <|image_pad|> is a text here", PARAMS))
    assert request.media == ()


def test_tokenizer_must_know_the_placeholder(make_intake, processor):
    processor.token = "<|picture|>"
    with pytest.raises(CheckpointError, match=r"no token '<\|picture\|>'"):
        make_intake()


# Chat


def test_chat_renders_media_in_order(intake, tokenizer):
    messages = [
        {"role": "system", "content": "plain words"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "3"}},
                {"type": "text", "text": "and"},
                {"type": "image", "image": b"5"},
            ],
        },
    ]
    request = only(intake.accept({"messages": messages}, PARAMS, item=messages))
    pad = "<|image_pad|>"
    expected = (
        "<|begin|>system: plain words\nuser: <|start|>{}<|end|>and<|start|>{}<|end|>\n"
        "assistant: <think>"
    )
    assert request.prompt_token_ids == tokenizer.encode(expected.format(pad * 3, pad * 5))
    assert request.prompt_text == expected.format(*["<|image@placeholder|>"] * 2)
    assert request.item is messages
    assert request.prompt == request.prompt_text
    same = [only(intake.accept(form, PARAMS)) for form in (messages, {"messages": messages})]
    assert {tuple(one.prompt_token_ids) for one in same} == {tuple(request.prompt_token_ids)}


@pytest.mark.full
def test_typed_placeholders_never_count(intake, tokenizer):
    typed = "I type <|image_pad|> and <|image@placeholder|>!"
    for content in (typed, [{"type": "text", "text": typed}]):
        request = only(intake.accept({"messages": [{"role": "user", "content": content}]}, PARAMS))
        assert tokenizer.token_id("<|image_pad|>") not in request.prompt_token_ids
        assert tokenizer.token_id("<|image@placeholder|>") not in request.prompt_token_ids
        assert tokenizer.decode(request.prompt_token_ids) == request.prompt_text
        assert f"user: {typed}\n" in request.prompt_text
    with_image = [{"type": "image", "image": b"2"}, {"type": "text", "text": typed + "\ue000"}]
    request = only(intake.accept({"messages": [{"role": "user", "content": with_image}]}, PARAMS))
    assert request.prompt_token_ids.count(tokenizer.token_id("<|image_pad|>")) == 2
    assert typed + "\ue000" in tokenizer.decode(request.prompt_token_ids)


def test_parts_without_media_take_those_of_multimodal_data(intake):
    content = [{"type": "image"}, {"type": "image", "image": b"2"}, {"type": "image"}]
    messages = [{"role": "user", "content": content}]
    prompt = {"messages": messages, "multimodal_data": {"image": [b"3", b"4"]}}
    request = only(intake.accept(prompt, PARAMS))
    assert [span.item.num_tokens for span in request.media] == [3, 2, 4]
    with pytest.raises(RequestError, match="1 more items"):
        intake.accept({**prompt, "multimodal_data": {"image": [b"3", b"4", b"5"]}}, PARAMS)
    with pytest.raises(RequestError, match="has no image"):
        intake.accept({"messages": messages}, PARAMS)


def test_chat_template_kwargs(intake, make_intake, caplog):
    messages = [{"role": "user", "content": "hello"}]

    def text(**kwargs):
        return only(
            intake.accept({"messages": messages, "chat_template_kwargs": kwargs}, PARAMS)
        ).prompt_text

    assert text().endswith("<think>")
    assert text(enable_thinking=True).endswith("<think>")
    assert text(enable_thinking=False).endswith("<think></think>")
    assert text(options={"thinking_mode": "close"}).endswith("<think></think>")
    assert text(options={"thinking_mode": "open"}).endswith("<think>")
    assert text(add_generation_prompt=False).endswith("hello\n")
    for _ in range(2):
        assert text(enable_thinkin=False).endswith("<think>")
    assert [record.getMessage() for record in caplog.records] == [
        "chat_template_kwargs: the template never reads 'enable_thinkin'; "
        "did you mean 'enable_thinking'?"
    ]
    for wrong in ([("a", 1)], {1: 2}):
        with pytest.raises(ValueError, match="must be a dict"):
            intake.accept({"messages": messages, "chat_template_kwargs": wrong}, PARAMS)
    with pytest.raises(RequestError, match="must not set tokenize"):
        text(tokenize=True)
    with pytest.raises(RequestError, match="no chat template"):
        make_intake(chat_template=None).accept({"messages": messages}, PARAMS)


@pytest.mark.full
def test_own_template_of_a_call(intake, tmp_path):
    messages = [{"role": "user", "content": "hello"}]
    own = "{{ messages[0].content }}!"
    path = tmp_path / "own.jinja"
    path.write_text(own)
    for template in (own, str(path)):
        request = only(intake.accept({"messages": messages, "chat_template": template}, PARAMS))
        assert request.prompt_text == "hello!"
    with pytest.raises(RequestError, match="looks like a file path"):
        intake.accept({"messages": messages, "chat_template": str(tmp_path / "gone.jinja")}, PARAMS)


# Params


def test_defaults_of_fastdeploy_and_of_the_checkpoint(make_intake):
    params = only(make_intake().accept("hello", PARAMS)).params
    values = (params.temperature, params.top_p, params.top_k, params.min_p)
    assert values == (1.0, 0.7, 0, 0.0)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert penalties == (1.0, 0.0, 0.0)
    generation = {"temperature": 0.2, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    intake = make_intake(generation={**generation, "do_sample": True, "min_p": None})
    params = only(intake.accept("hello", SamplingParams(top_p=0.5))).params
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.5, 20)
    assert (params.repetition_penalty, params.min_p) == (1.1, 0.0)
    with pytest.raises(CheckpointError, match="top_p"):
        make_intake(generation={"top_p": 7})


def test_do_sample_false_is_greedy_unless_the_user_samples(make_intake):
    intake = make_intake(generation={"do_sample": False})
    assert only(intake.accept("hello", SamplingParams(min_p=0.1))).params.is_greedy
    for own in ({"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 3}):
        assert not only(intake.accept("hello", SamplingParams(**own))).params.is_greedy


@pytest.mark.parametrize("own", [{}, {"do_sample": False}, {"do_sample": True}])
@pytest.mark.parametrize("generation", [{}, {"do_sample": False}, {"temperature": 0.2}])
def test_do_sample_alone_decides_whether_tokens_are_drawn(make_intake, generation, own):
    params = only(make_intake(generation=generation).accept("x", SamplingParams(**own))).params
    is_wanted = own.get("do_sample", generation.get("do_sample", True))
    assert params.is_greedy == (not is_wanted)
    assert not is_wanted or params.temperature == generation.get("temperature", 1.0)


@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": True, "temperature": 0},
        {"do_sample": True, "top_k": 1},
        {"do_sample": False, "temperature": 0.5},
        {"do_sample": False, "top_p": 0.9},
    ],
)
def test_do_sample_must_not_contradict_the_other_options(given):
    with pytest.raises(ConfigError, match="contradict each other"):
        SamplingParams(**given)


def test_max_length_counts_the_prompt(make_intake, tokenizer):
    ids = [tokenizer.token_id("<s>")] * 10
    for max_length, max_tokens, room in ((14, None, 4), (14, 3, 3), (14, 9, 4), (100, None, 6)):
        given = SamplingParams(max_length=max_length, max_tokens=max_tokens)
        request = only(make_intake(max_model_len=16).accept(ids, given))
        assert request.params.max_tokens == room
    with pytest.raises(PromptTooLongError, match="over max_length = 10, which counts them"):
        make_intake(max_model_len=16).accept(ids, SamplingParams(max_length=10))


def test_max_tokens_and_prompts_that_are_too_long(make_intake, tokenizer):
    ids = [tokenizer.token_id("<s>")] * 10
    for given, room in ((None, 6), (4, 4), (100, 6)):
        request = only(make_intake(max_model_len=16).accept(ids, SamplingParams(max_tokens=given)))
        assert request.params.max_tokens == room
    assert only(make_intake(max_model_len=11).accept(ids, PARAMS)).params.max_tokens == 1
    message = r"Input text is too long, length of prompt token\(10\) \+ min_dec_len \({}\)"
    for limit, needed in ((10, 0), (10, 1), (12, 3)):
        params = SamplingParams(min_tokens=needed)
        with pytest.raises(PromptTooLongError, match=message.format(max(1, needed))):
            make_intake(max_model_len=limit).accept(ids, params)
    with pytest.raises(PromptTooLongError, match=r"prompt token\(102\)"):
        make_intake(max_model_len=100).accept(
            {"prompt": IMAGE, "multimodal_data": {"image": b"100"}}, PARAMS
        )


def test_n_samples_share_media_and_have_their_own_seeds(intake):
    prompt = {"prompt": IMAGE, "multimodal_data": {"image": b"3"}}
    requests = intake.accept(prompt, SamplingParams(n=3, seed=7), stream=True)
    assert [request.index for request in requests] == [0, 1, 2]
    assert [request.params.seed for request in requests] == [7, 8, 9]
    assert len({request.request_id for request in requests}) == 3
    assert all(request.media is requests[0].media for request in requests)
    assert all(request.stream for request in requests)
    assert requests[0].output_token_ids is not requests[1].output_token_ids
    assert requests[0].preprocess_end_time >= requests[0].arrival_time > 0


def test_seeds_come_from_the_engines_seed_and_the_number(make_intake):
    def seed(number, engine_seed=0):
        request = only(make_intake(seed=engine_seed).accept("hello", PARAMS, number=number))
        return request.params.seed

    assert seed(1) == seed(1)
    assert len({seed(0), seed(1), seed(2), seed(1, engine_seed=5)}) == 4


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 6}, "logprobs = 6 is over the engine's max_logprobs = 5"),
        ({"logprobs": -1}, "whole vocabulary"),
        ({"prompt_logprobs": 6}, "prompt_logprobs = 6"),
        ({"stop": ["x"] * 65}, "stop has 65 entries, 64 are allowed"),
        ({"stop": ["x" * 1025]}, "1025 characters, 1024"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids has token id 1000000"),
        ({"stop_token_sequences": [[1], [2, 10**6]]}, "stop_token_sequences has token id 1000000"),
        ({"stop_words_ids": [[1]] * 65}, "stop_token_sequences has 65 entries"),
        ({"stop_words_ids": [[1] * 1025]}, "1025 ids, 1024 are allowed"),
        ({"logits_processors": "x"}, "a plugin that provides them"),
        ({"bad_words_token_ids": [10**6]}, "bad_words_token_ids has"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias has"),
        ({"guided_decoding": GuidedDecodingParams(regex="a")}, "guided_decoding_backend"),
        ({"reasoning_max_tokens": 5}, "reasoning_parser"),
    ],
    ids=str,
)
def test_params_that_the_engine_cannot_serve(params, message, intake):
    with pytest.raises(RequestError, match=message):
        intake.accept("hello", SamplingParams(**params))


def test_logprobs_within_the_limit(intake, make_intake):
    assert intake.accept("hello", SamplingParams(logprobs=5, prompt_logprobs=0))
    assert make_intake(max_logprobs=-1).accept("hello", SamplingParams(logprobs=-1))


def test_guided_decoding_is_validated_by_the_backend(make_intake):
    def refuse(guided):
        if guided.regex == "(":
            raise RequestError(f"bad regex {guided.regex}")

    grammars = SimpleNamespace(validate=refuse, interrupt=int, close=int)
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="("))
    with pytest.raises(RequestError, match=r"bad regex \("):
        make_intake(grammars=grammars).accept("hello", params)
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a"))
    assert make_intake(grammars=grammars).accept("hello", params)


def test_bad_words_with_and_without_a_space(intake, tokenizer):
    params = SamplingParams(bad_words=["red circle", "red", "red"], bad_words_token_ids=[4])
    found = only(intake.accept("hello", params)).bad_words_token_ids
    texts = [tokenizer.decode(ids) for ids in found]
    assert texts == ["red circle", " red circle", "red", " red", "<|start|>"]
    assert any(len(ids) > 1 for ids in found)


def test_reasoning_end_ids(make_intake, tokenizer):
    intake = make_intake(reasoning_start_marker="<think>", reasoning_end_marker="</think>")
    end = (tokenizer.token_id("</think>"),)
    params = SamplingParams(reasoning_max_tokens=5)
    for prompt, expected in {
        "hello": end,
        "a <think> b </think> c": (),
        "a <think></think> b <think>": end,
    }.items():
        assert only(intake.accept(prompt, params)).reasoning_end_ids == expected
    assert only(intake.accept("hello", PARAMS)).reasoning_end_ids == ()


def test_without_a_start_marker_no_prompt_closes_the_reasoning(make_intake, tokenizer):
    """Granite's parser has none, because its system prompt quotes both sentences."""
    sentences = "after 'Here is my thought process:' ... after 'Here is my response:'."
    intake = make_intake(reasoning_end_marker="Here is my response:")
    request = only(intake.accept(sentences, SamplingParams(reasoning_max_tokens=5)))
    assert request.reasoning_end_ids == tuple(tokenizer.encode("Here is my response:"))


# Counting, threads


@pytest.mark.full
def test_count_tokens_processes_nothing(intake, processor):
    prompt = {"prompt": f"a {IMAGE}{IMAGE}", "multimodal_data": {"image": [b"30", b"400"]}}
    count = intake.count_tokens(prompt)
    assert count == TokenCount(
        num_prompt_tokens=430 + 4 + len(intake.accept("a ", PARAMS)[0].prompt_token_ids),
        num_input_image_tokens=430,
        num_input_video_tokens=0,
        num_input_tokens_by_kind={"image": 430},
    )
    assert {name for name, _ in processor.calls} == {"decode"}
    messages = [{"role": "user", "content": [{"type": "image", "image": b"9"}]}]
    assert intake.count_tokens(messages).num_input_image_tokens == 9
    assert intake.count_tokens("hello").num_input_image_tokens == 0


def test_many_threads_at_once(intake):
    results, barrier = {}, threading.Barrier(8)

    def work(index):
        barrier.wait()
        for _ in range(10):
            prompt = {
                "prompt": f"word {index} {IMAGE}",
                "multimodal_data": {"image": b"%d" % (index + 1)},
            }
            request = only(intake.accept(prompt, PARAMS, number=index))
            results.setdefault(index, set()).add(tuple(request.prompt_token_ids))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, results.values())) == [1] * 8
