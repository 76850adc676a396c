"""LLM as its callers see it: input forms, errors, one bad item among good ones, streaming,
sampling."""

import copy
import itertools
import time

import numpy as np
import pytest
import torch

from mmdeploy_llm import (
    ConfigError,
    MediaLimitError,
    ModelNotSupportedError,
    PromptTooLongError,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def text_llm(tiny_folder):
    from mmdeploy_llm import LLM

    with LLM(model=str(tiny_folder("qwen2")), block_size=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def vl_llm(tiny_folder):
    from mmdeploy_llm import LLM

    options = {"reasoning_parser": "ernie_45_vl", "limit_mm_per_prompt": {"image": 2}}
    with LLM(model=str(tiny_folder("ernie4_5_vl_moe")), block_size=16, **options) as llm:
        yield llm


IMAGE = "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>"


def tokens(output):
    return list(output.outputs.token_ids)


class TestInputForms:
    def test_every_form_of_a_text_prompt(self, text_llm):
        ids = text_llm.generate("The quick brown", GREEDY, use_tqdm=False)[0].prompt_token_ids
        forms = [
            "The quick brown",
            ["The quick brown"],
            list(ids),
            [list(ids)],
            {"prompt": "The quick brown"},
            [{"prompt_token_ids": list(ids)}],
            iter(["The quick brown"]),
        ]
        results = [text_llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
        assert all(len(result) == 1 for result in results)
        assert len({tuple(tokens(result[0])) for result in results}) == 1

    def test_mixed_list_keeps_its_order(self, text_llm):
        prompts = ["a", [21, 22, 23], {"prompt": "The lazy dog"}]
        outputs = text_llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.prompt for output in outputs] == ["a", None, "The lazy dog"]
        assert all(one.item is two for one, two in zip(outputs, prompts, strict=True))

    def test_no_prompts_give_no_outputs(self, text_llm):
        assert text_llm.generate([], GREEDY) == []

    @pytest.mark.parametrize("wrong", [5, 2.5, [None], ["a", 3.5], [{"a", "b"}]])
    def test_a_wrong_type_raises_at_once(self, text_llm, wrong):
        with pytest.raises(TypeError, match="Invalid type for 'prompt'"):
            text_llm.generate(wrong, GREEDY, use_tqdm=False)

    def test_none_raises(self, text_llm):
        with pytest.raises(ValueError, match="must not be None"):
            text_llm.generate(None)

    def test_every_form_of_an_image(self, vl_llm, make_picture, tmp_path):
        import base64
        import io

        picture = make_picture(3, 90, 70)
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        blob, path = buffer.getvalue(), tmp_path / "picture.png"
        path.write_bytes(blob)
        array = np.asarray(picture)
        forms = [
            picture,
            str(path),
            path,
            path.as_uri(),
            blob,
            bytearray(blob),
            io.BytesIO(blob),
            array,
            torch.from_numpy(array.transpose(2, 0, 1).copy()),
            "data:image/png;base64," + base64.b64encode(blob).decode(),
        ]
        results = []
        for form in forms:
            for value in (form, [form]):
                prompt = {"prompt": f"A {IMAGE} B", "multimodal_data": {"image": value}}
                (output,) = vl_llm.generate(prompt, GREEDY, use_tqdm=False)
                assert output.error_msg is None, type(form)
                results.append(tuple(tokens(output)))
        assert len(set(results)) == 1

    def test_both_spellings_of_multimodal_data(self, vl_llm, make_picture):
        picture = make_picture(3, 90, 70)
        one, other = vl_llm.generate(
            [
                {"prompt": f"A {IMAGE} B", "multimodal_data": {"image": picture}},
                {"prompt": f"A {IMAGE} B", "multi_modal_data": {"image": [picture]}},
            ],
            GREEDY,
            use_tqdm=False,
        )
        assert tokens(one) == tokens(other)

    def test_chat_takes_one_conversation_or_many(self, vl_llm):
        one = [{"role": "user", "content": "The quick brown fox"}]
        (alone,) = vl_llm.chat(one, GREEDY, use_tqdm=False)
        both = vl_llm.chat([one, one], GREEDY, use_tqdm=False)
        assert [tokens(output) for output in both] == [tokens(alone)] * 2
        assert alone.item is one
        assert alone.prompt == "<|begin_of_sentence|>User: The quick brown fox\nAssistant: <think>"

    def test_chat_and_generate_agree(self, vl_llm, make_picture):
        picture = make_picture(5, 84, 84)
        part = {"type": "image", "image": picture}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]
        (chat,) = vl_llm.chat(messages, GREEDY, use_tqdm=False)
        text = f"<|begin_of_sentence|>User: Picture 1:{IMAGE}what is it?\nAssistant: <think>"
        prompt = {"prompt": text, "multimodal_data": {"image": picture}}
        (generated,) = vl_llm.generate(prompt, GREEDY, use_tqdm=False)
        assert chat.prompt_token_ids == generated.prompt_token_ids
        assert tokens(chat) == tokens(generated)

    def test_enable_thinking_reaches_the_template(self, vl_llm):
        messages = [{"role": "user", "content": "fox"}]
        (on,) = vl_llm.chat(messages, GREEDY, use_tqdm=False)
        off_kwargs = {"enable_thinking": False}
        (off,) = vl_llm.chat(messages, GREEDY, use_tqdm=False, chat_template_kwargs=off_kwargs)
        assert len(off.prompt_token_ids) == len(on.prompt_token_ids) + 1
        assert off.outputs.reasoning_content == ""

    @pytest.mark.parametrize("wrong", ["hello", {"role": "user"}, 3, [["role"], 4]])
    def test_wrong_messages_raise(self, vl_llm, wrong):
        with pytest.raises(TypeError):
            vl_llm.chat(wrong, GREEDY, use_tqdm=False)

    def test_wrong_template_kwargs_raise(self, vl_llm):
        with pytest.raises(ValueError, match="must be a dict"):
            vl_llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs="thinking")


class TestParams:
    def test_one_sampling_params_for_each_prompt(self, text_llm):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
        outputs = text_llm.generate(["a", "b"], params, use_tqdm=False)
        assert [len(tokens(output)) for output in outputs] == [2, 5]
        assert all(output.outputs.finish_reason == "length" for output in outputs)

    def test_a_list_of_another_length_raises(self, text_llm):
        with pytest.raises(ValueError, match="must be the same length, got 3 prompts and 2"):
            text_llm.generate(["a", "b", "c"], [GREEDY, GREEDY], use_tqdm=False)

    def test_params_of_a_wrong_type_raise(self, text_llm):
        with pytest.raises(TypeError, match="must be SamplingParams"):
            text_llm.generate("a", {"max_tokens": 3}, use_tqdm=False)

    def test_n_gives_n_completions_of_one_output(self, text_llm):
        params = SamplingParams(n=3, temperature=1.0, top_p=1.0, seed=7, max_tokens=8)
        outputs = text_llm.generate(["a", "b"], params, use_tqdm=False)
        assert [output.prompt for output in outputs] == ["a", "b"]
        for output in outputs:
            assert output.finished
            assert [completion.index for completion in output.outputs] == [0, 1, 2]
            assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
            assert {completion.finish_reason for completion in output.outputs} <= {"length", "stop"}
        assert len({output.request_id for output in outputs}) == 2

    def test_a_seed_gives_the_same_text_in_any_batch(self, text_llm):
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=10)
        (alone,) = text_llm.generate("The quick", params, use_tqdm=False)
        others = [f"{word} dog" for word in "abcdefgh"]
        *_, last = text_llm.generate([*others, "The quick"], params, use_tqdm=False)
        assert tokens(last) == tokens(alone)

    def test_a_stop_string_ends_the_text(self, text_llm):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (whole,) = text_llm.generate("The quick", params, use_tqdm=False)
        stop = whole.outputs.text[4:7]
        at = whole.outputs.text.index(stop)
        stopped = params.model_copy(update={"stop": (stop,)})
        (output,) = text_llm.generate("The quick", stopped, use_tqdm=False)
        assert output.outputs.text == whole.outputs.text[:at]
        assert output.outputs.finish_reason == "stop"

    def test_bad_words_do_not_occur(self, text_llm):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (free,) = text_llm.generate("The quick", params, use_tqdm=False)
        banned = params.model_copy(update={"bad_words_token_ids": tuple(tokens(free)[:2])})
        (output,) = text_llm.generate("The quick", banned, use_tqdm=False)
        assert not set(tokens(free)[:2]) & set(tokens(output))

    def test_logprobs_come_with_the_sampled_token_first(self, text_llm):
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
        (output,) = text_llm.generate("The quick", params, use_tqdm=False)
        assert len(output.outputs.logprobs) == len(tokens(output))
        for token, entry in zip(tokens(output), output.outputs.logprobs, strict=True):
            assert next(iter(entry)) == token
            assert entry[token].rank == 1
            assert entry[token].decoded_token is not None

    def test_given_params_are_not_changed(self, text_llm):
        params = SamplingParams(max_tokens=3)
        before = params.model_dump()
        text_llm.generate("a", params, use_tqdm=False)
        assert params.model_dump() == before


class TestErrors:
    def test_one_bad_item_harms_no_other(self, vl_llm, make_picture):
        good = {"prompt": f"A {IMAGE} B", "multimodal_data": {"image": make_picture(1, 84, 84)}}
        bad = [
            {"prompt": f"A {IMAGE} B", "multimodal_data": {"image": b"no image"}},
            {"prompt": f"A {IMAGE} B", "multimodal_data": {"image": "/does/not/exist.png"}},
            {"prompt": f"A {IMAGE} B"},
            {"prompt": "A B", "multimodal_data": {"image": make_picture(1, 84, 84)}},
            {"prompt": f"{IMAGE * 3}", "multimodal_data": {"image": [make_picture(1, 84, 84)] * 3}},
            {"prompt": "fox " * 5000},
            {"prompt": ""},
            {"prompt_token_ids": [5, 10**9]},
            {"prompts": "a misspelt key"},
            {"prompt": "A", "multimodal_data": {"video": b"video"}},
        ]
        mixed = list(itertools.chain.from_iterable((good, one) for one in bad))
        outputs = vl_llm.generate(mixed, GREEDY, use_tqdm=False)
        prompts = [one.get("prompt") for one in mixed]  # of the rest, pictures are not kept
        assert [output.item.get("prompt") for output in outputs] == prompts
        assert [output.prompt for output in outputs] == prompts
        assert all(output.is_ok for output in outputs[::2])
        assert len({tuple(tokens(output)) for output in outputs[::2]}) == 1
        for output in outputs[1::2]:
            assert output.finished
            assert output.outputs.finish_reason == "error"
            assert output.error_code in range(400, 500)
            assert output.error_msg
            assert "0x" not in output.error_msg
        assert outputs[1 + 2 * 4].error_code == 413
        assert vl_llm.generate(good, GREEDY, use_tqdm=False)[0].is_ok

    def test_on_error_raise(self, text_llm):
        with pytest.raises(PromptTooLongError, match="too long"):
            text_llm.generate(["a", "fox " * 5000], GREEDY, use_tqdm=False, on_error="raise")
        assert text_llm.generate("a", GREEDY, use_tqdm=False)[0].is_ok

    def test_on_error_of_another_kind(self, text_llm):
        with pytest.raises(ValueError, match="'return' or 'raise'"):
            text_llm.generate("a", GREEDY, on_error="ignore")

    def test_n_completions_of_a_refused_prompt_are_errors(self, text_llm):
        params = SamplingParams(n=2, max_tokens=2)
        bad, good = text_llm.generate(["fox " * 5000, "a"], params, use_tqdm=False)
        assert [completion.is_ok for completion in good.outputs] == [True, True]
        assert [completion.error_code for completion in bad.outputs] == [400, 400]
        assert [completion.error_msg for completion in bad.outputs] == [bad.error_msg] * 2
        assert (good.is_ok, bad.is_ok, bad.error_code) == (True, False, 400)

    def test_unknown_option_suggests(self, tiny_folder):
        from mmdeploy_llm import LLM

        with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
            LLM(model=str(tiny_folder("qwen2")), max_model_length=64)

    def test_serving_options_warn(self, tiny_folder):
        from mmdeploy_llm import LLM

        with pytest.warns(UserWarning, match="without a meaning offline: metrics_port, port"):
            LLM(model=str(tiny_folder("qwen2")), port=8180, metrics_port=1).close()

    def test_no_such_model(self, tmp_path):
        from mmdeploy_llm import LLM, MMDeployLLMError

        with pytest.raises(MMDeployLLMError, match=r"config\.json"):
            LLM(model=str(tmp_path))

    def test_unsupported_architecture(self, tiny_folder, tmp_path):
        import json
        import shutil

        from mmdeploy_llm import LLM

        folder = tmp_path / "other"
        shutil.copytree(tiny_folder("qwen2"), folder)
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["Qwen2ForNothing"]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelNotSupportedError, match="Qwen2ForNothing"):
            LLM(model=str(folder))

    def test_a_closed_llm_says_so(self, tiny_folder):
        from mmdeploy_llm import LLM, EngineError

        llm = LLM(model=str(tiny_folder("qwen2")))
        llm.close()
        with pytest.raises(EngineError, match="closed"):
            llm.generate("a", use_tqdm=False)


class TestStreaming:
    def test_deltas_add_up(self, vl_llm, make_picture):
        params = SamplingParams(temperature=1.0, top_p=1.0, seed=5, max_tokens=40)
        prompt = {
            "prompt": f"A {IMAGE} B<think>",
            "multimodal_data": {"image": make_picture(1, 84, 84)},
        }
        (whole,) = vl_llm.generate(prompt, params, use_tqdm=False)
        deltas = list(vl_llm.stream(prompt, params))
        assert len(deltas) > 3
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert "".join(delta.outputs.text for delta in deltas) == whole.outputs.text
        reasoning = "".join(delta.outputs.reasoning_content for delta in deltas)
        assert reasoning == whole.outputs.reasoning_content
        ids = itertools.chain.from_iterable(delta.outputs.token_ids for delta in deltas)
        assert list(ids) == whole.outputs.token_ids
        assert [delta.outputs.send_idx for delta in deltas] == list(range(len(deltas)))

    def test_a_conversation_can_be_streamed(self, vl_llm):
        messages = [{"role": "user", "content": "fox"}]
        (whole,) = vl_llm.chat(messages, GREEDY, use_tqdm=False)
        deltas = list(vl_llm.stream(messages, GREEDY))
        ids = itertools.chain.from_iterable(delta.outputs.token_ids for delta in deltas)
        assert list(ids) == whole.outputs.token_ids

    def test_leaving_a_stream_early_frees_everything(self, text_llm):
        stream = text_llm.stream(["a", "b"], SamplingParams(max_tokens=500, ignore_eos=True))
        next(stream)
        stream.close()
        assert text_llm.generate("a", GREEDY, use_tqdm=False)[0].is_ok

    def test_generate_iter_takes_an_endless_iterable(self, text_llm):
        results = text_llm.generate_iter((f"dog {n}" for n in itertools.count()), GREEDY)
        found = [output.prompt for output in itertools.islice(results, 60)]
        results.close()
        assert len(set(found)) == 60

    def test_two_iterators_at_once(self, text_llm):
        one = text_llm.generate_iter((f"dog {n}" for n in range(5)), GREEDY)
        other = text_llm.generate_iter((f"fox {n}" for n in range(5)), GREEDY)
        pairs = list(zip(one, other, strict=True))
        assert all(a.prompt[:3] == "dog" and b.prompt[:3] == "fox" for a, b in pairs)
        assert len(pairs) == 5


class TestFastDeployBugs:
    """Bugs of FastDeploy's offline API that must not be copied."""

    def test_use_tqdm_false_works(self, text_llm):
        assert len(text_llm.generate("a", GREEDY, use_tqdm=False)) == 1

    def test_a_list_of_one_sampling_params_works(self, text_llm):
        outputs = text_llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
        assert len(outputs) == 2

    def test_dict_prompts_are_not_mutated(self, vl_llm, make_picture):
        picture = make_picture(1, 84, 84)
        prompt = {"prompt": f"A {IMAGE} B", "multimodal_data": {"image": [picture]}}
        before = copy.copy(prompt)
        vl_llm.generate(prompt, GREEDY, use_tqdm=False)
        assert prompt == before
        assert prompt["multimodal_data"]["image"][0] is picture

    def test_a_refused_request_leaves_no_orphans(self, text_llm):
        with pytest.raises(PromptTooLongError):
            text_llm.generate(["a", "b", "fox " * 5000], GREEDY, on_error="raise", use_tqdm=False)
        end = time.monotonic() + 60
        while text_llm._desk.engine._requests and time.monotonic() < end:
            time.sleep(0.01)
        assert not text_llm._desk.engine._requests

    def test_empty_text_is_a_result(self, vl_llm, tiny_folder):
        from transformers import AutoTokenizer

        eos = AutoTokenizer.from_pretrained(tiny_folder("ernie4_5_vl_moe")).eos_token_id
        params = SamplingParams(temperature=0, min_tokens=0, max_tokens=4, logit_bias={eos: 1e4})
        (output,) = vl_llm.generate("fox", params, use_tqdm=False)
        assert (output.outputs.text, output.outputs.finish_reason) == ("", "stop")
        assert tokens(output) == [eos]

    def test_temperature_zero_is_greedy(self, text_llm):
        runs = [
            text_llm.generate("The quick", SamplingParams(temperature=0, seed=s, max_tokens=8))[0]
            for s in range(4)
        ]
        assert len({tuple(tokens(output)) for output in runs}) == 1

    def test_chat_keeps_the_prompt(self, vl_llm):
        messages = [{"role": "user", "content": "The quick brown fox"}]
        (output,) = vl_llm.chat(messages, GREEDY, use_tqdm=False)
        assert output.item is messages
        assert "User: The quick brown fox" in output.prompt

    def test_prompt_token_ids_are_filled(self, text_llm):
        assert text_llm.generate([[21, 22]], GREEDY, use_tqdm=False)[0].prompt_token_ids == [21, 22]

    def test_media_limit_holds_in_chat(self, vl_llm, make_picture):
        part = {"type": "image", "image": make_picture(1, 84, 84)}
        messages = [{"role": "user", "content": [part] * 3}]
        (output,) = vl_llm.chat(messages, GREEDY, use_tqdm=False)
        assert output.error_code == MediaLimitError.code
        assert "got 3 but limit is 2" in output.error_msg

    def test_stream_splits_reasoning(self, vl_llm):
        deltas = list(vl_llm.stream("fox <think>", SamplingParams(temperature=0, max_tokens=8)))
        assert "".join(delta.outputs.reasoning_content for delta in deltas)

    def test_cached_media_are_counted(self, vl_llm, make_picture):
        picture = make_picture(9, 84, 84)
        prompt = {"prompt": f"A {IMAGE} B", "multimodal_data": {"image": picture}}
        counts = [vl_llm.generate(prompt, GREEDY)[0].num_input_image_tokens for _ in range(2)]
        assert counts == [9, 9]
        assert vl_llm.count_tokens(prompt).num_input_image_tokens == 9

    def test_a_failing_start_raises(self, tiny_folder, tmp_path):
        import shutil

        from mmdeploy_llm import LLM, CheckpointError

        folder = tmp_path / "broken"
        shutil.copytree(tiny_folder("qwen2"), folder)
        (folder / "model.safetensors").write_bytes(b"broken")
        with pytest.raises(CheckpointError):
            LLM(model=str(folder))

    def test_n_is_honoured(self, text_llm):
        (output,) = text_llm.generate("a", SamplingParams(n=4, max_tokens=2), use_tqdm=False)
        assert len(output.outputs) == 4


def test_the_progress_bar_shows_true_speeds(text_llm, capsys):
    text_llm.generate(["a", "b", "c"], GREEDY, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown
    assert "3/3" in shown
    speed = shown.rsplit("output: ", 1)[1].split(" toks/s")[0]
    assert float(speed) > 0


def test_metrics_are_sound(text_llm):
    (output,) = text_llm.generate("The quick brown", GREEDY, use_tqdm=False)
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.inference_start_time
    assert 0 < metrics.first_token_time <= metrics.model_forward_time <= metrics.model_execute_time
    assert metrics.time_in_queue >= 0
    assert metrics.preprocess_time > 0


def test_the_kv_cache_is_logged(tiny_folder, caplog):
    from mmdeploy_llm import LLM

    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        LLM(model=str(tiny_folder("qwen2")), num_gpu_blocks_override=12, block_size=8).close()
    assert "total_block_num:12, block size 8, 96 cacheable tokens" in caplog.text


def test_a_context_the_kv_cache_cannot_hold(tiny_folder):
    from mmdeploy_llm import LLM

    with pytest.raises(ConfigError, match="max_model_len = 2048, but the KV cache holds"):
        LLM(model=str(tiny_folder("qwen2")), max_model_len=2048, kv_cache_memory=200_000)
    with LLM(model=str(tiny_folder("qwen2")), kv_cache_memory=200_000) as llm:
        assert llm.runtime.max_model_len < 2048


def test_dummy_weights_need_no_files(tiny_folder, tmp_path):
    import shutil

    from mmdeploy_llm import LLM

    folder = tmp_path / "bare"
    shutil.copytree(tiny_folder("ernie4_5_vl_moe"), folder)
    (folder / "model.safetensors").unlink()
    with LLM(model=str(folder), load_format="dummy") as llm:
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].is_ok


def test_an_output_as_plain_data(text_llm):
    import json

    (output,) = text_llm.generate("a", GREEDY, use_tqdm=False)
    data = output.to_dict()
    assert json.loads(json.dumps(data))["outputs"][0]["token_ids"] == tokens(output)


def test_reasoning_is_capped(vl_llm):
    params = SamplingParams(temperature=0, max_tokens=20, reasoning_max_tokens=4, ignore_eos=True)
    messages = [{"role": "user", "content": "fox"}]
    (output,) = vl_llm.chat(messages, params, use_tqdm=False)
    end = vl_llm._desk.intake._ends._ids
    assert tokens(output)[4 : 4 + len(end)] == list(end)
    assert output.outputs.text


def test_the_models_own_reasoning_parser(tiny_folder):
    from mmdeploy_llm import LLM

    for family, reasoning in (("ernie4_5_vl_moe", ""), ("qwen2", None)):
        with LLM(model=str(tiny_folder(family)), reasoning_parser="auto") as llm:
            (output,) = llm.generate("fox</think>", GREEDY, use_tqdm=False)
        assert output.outputs.reasoning_content == reasoning


@pytest.mark.one_is_quick
@pytest.mark.parametrize("thinks", [True, False])
def test_auto_is_no_parser_where_the_template_never_thinks(tiny_folder, thinks):
    """Qwen3's instruct models share their architecture with those that think. Their text is
    streamed at once, where a parser would hold it back for a tag."""
    from mmdeploy_llm import LLM

    closing = "{# </think> #}" if thinks else ""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}" + closing
    options = {"chat_template": template, "reasoning_parser": "auto"}
    with LLM(model=str(tiny_folder("qwen3")), **options) as llm:
        pieces = [output.outputs.text for output in llm.stream("The quick brown fox", GREEDY)]
    assert (len([piece for piece in pieces if piece]) > 1) == (not thinks)


def test_prefix_cache_memory_bounds_what_is_kept(tiny_folder):
    """With one byte one block is kept, the minimum; by default a whole prompt is kept."""
    from mmdeploy_llm import LLM

    prompt, found = "The quick brown fox jumps over the lazy dog, twice.", []
    for options in ({}, {"prefix_cache_memory": 1}):
        with LLM(model=str(tiny_folder("qwen2")), block_size=4, **options) as llm:
            for _ in range(2):
                [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            found.append(output.num_cached_tokens)
            assert len(output.prompt_token_ids) > 12
    assert found[0] > 8
    assert found[1] <= 4
