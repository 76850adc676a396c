"""Scripts of FastDeploy, vLLM and DashInfer call more than generate and chat: this works too."""

import io
import itertools
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmdeploy_llm import LLM, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)
DRAWN = SamplingParams(temperature=1.0, top_p=1.0, seed=3, max_tokens=8, ignore_eos=True)
IMAGE = "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>"


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("qwen2")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(model=str(folder), block_size=16, dtype="float32", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def vl_llm(tiny_folder):
    with LLM(model=str(tiny_folder("ernie4_5_vl_moe")), block_size=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def answers(llm, prompts, params=GREEDY, **kwargs):
    outputs = llm.generate(prompts, params, use_tqdm=False, **kwargs)
    return [completion.token_ids for output in outputs for completion in output.outputs]


class TestTokenizer:
    def test_it_is_that_of_the_model(self, llm, tokenizer):
        found = llm.get_tokenizer()
        assert (
            found("The quick brown fox")["input_ids"]
            == tokenizer("The quick brown fox")["input_ids"]
        )

    def test_settings_of_it_change_no_prompt(self, folder):
        with LLM(model=str(folder), block_size=16, quiet=True) as llm:
            before = answers(llm, "The quick brown fox")
            found = llm.get_tokenizer()
            found(["a", "The quick brown fox"], padding="max_length", max_length=3, truncation=True)
            found.add_tokens(["quick"])
            found.chat_template = "changed"
            assert llm.get_tokenizer() is found
            assert answers(llm, "The quick brown fox") == before
            assert llm.count_tokens("The quick brown fox").num_prompt_tokens > 3

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_its_batches_are_prompts(self, llm, side):
        words = ["The quick brown fox", "a", "The lazy"]
        tokenizer = llm.get_tokenizer()
        tokenizer.padding_side = side
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        batch = tokenizer(words, padding=True, return_tensors="pt")
        outputs = llm.generate(batch, GREEDY, use_tqdm=False)
        expected = llm.generate(words, GREEDY, use_tqdm=False)
        assert [one.prompt_token_ids for one in outputs] == [
            one.prompt_token_ids for one in expected
        ]
        assert [one.outputs.text for one in outputs] == [one.outputs.text for one in expected]
        assert [one.prompt for one in outputs] == [None] * 3
        single = tokenizer(words[0], return_tensors="np")
        (output,) = llm.generate_iter([single], GREEDY)
        assert output.item is single
        assert output.outputs == expected[0].outputs

    def test_of_a_rendered_conversation(self, llm):
        messages = [{"role": "user", "content": "fox"}]
        encoded = llm.get_tokenizer().apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
        assert answers(llm, encoded) == [chat.outputs.token_ids]


class TestCacheLine:
    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("dtype", ["auto", "float32"])
    def test_lines_unless_quiet(self, folder, capfd, dtype):
        for quiet in (False, True):
            with LLM(
                model=str(folder),
                num_gpu_blocks_override=12,
                block_size=8,
                quiet=quiet,
                dtype=dtype,
            ) as llm:
                assert llm.num_kv_blocks == 12
            found = capfd.readouterr()
            line = "total_block_num:12, block size 8, 96 cacheable tokens\n"
            choice = "" if dtype != "auto" else f"{llm.runtime.dtype_choice}\n"
            assert found.err == ("" if quiet else choice + line)
            assert found.out == ""

    def test_a_log_has_it_instead(self, folder, capfd, caplog):
        with caplog.at_level("INFO", logger="mmdeploy_llm"):
            LLM(model=str(folder), num_gpu_blocks_override=12, block_size=8).close()
        assert caplog.text.count("total_block_num:12") == 1
        assert "total_block_num" not in capfd.readouterr().err

    def test_a_closed_stderr_is_no_error(self, folder, monkeypatch):
        closed = io.StringIO()
        closed.close()
        for stream in (closed, None):
            monkeypatch.setattr(sys, "stderr", stream)
            LLM(model=str(folder), num_gpu_blocks_override=12).close()


def test_code_of_a_checkpoint_is_never_run_with_the_reason(folder):
    with pytest.warns(UserWarning, match=r"trust_remote_code = True is ignored: .* never run"):
        LLM(model=str(folder), trust_remote_code=True).close()
    assert EngineConfig(model="m", trust_remote_code=False).trust_remote_code is False


class TestTemplateFlags:
    MESSAGES = (
        {"role": "user", "content": "The quick"},
        {"role": "assistant", "content": "brown fox"},
    )

    @pytest.mark.parametrize(
        "flags",
        [
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
            {"add_generation_prompt": False},
            {"add_generation_prompt": True},
        ],
        ids=str,
    )
    def test_the_prompt_is_that_of_transformers(self, llm, tokenizer, flags):
        messages = list(self.MESSAGES)
        expected = tokenizer.apply_chat_template(messages, tokenize=False, **flags)
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False, **flags)
        assert output.prompt == expected
        deltas = list(llm.stream(messages, GREEDY, **flags))
        assert {delta.prompt for delta in deltas} == {expected}
        prompt = {"messages": messages, "chat_template_kwargs": flags}
        (same,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert same.prompt == expected

    def test_both_are_refused(self, llm):
        flags = {"add_generation_prompt": True, "continue_final_message": True}
        with pytest.raises(ValueError, match="give one of them"):
            llm.chat(list(self.MESSAGES), GREEDY, **flags)
        prompt = {"messages": list(self.MESSAGES), "chat_template_kwargs": flags}
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.error_code == 400
        assert "give one of them" in output.error_msg

    def test_only_an_assistants_message_is_continued(self, llm):
        chats = [list(self.MESSAGES), list(self.MESSAGES[:1])]
        good, bad = llm.chat(chats, GREEDY, use_tqdm=False, continue_final_message=True)
        assert good.is_ok
        assert bad.error_code == 400
        assert "message 0, has role 'user'" in bad.error_msg

    def test_a_stream_of_no_conversation_has_no_such_options(self, llm):
        with pytest.raises(ValueError, match="used with one conversation"):
            llm.stream(["a"], GREEDY, continue_final_message=True)

    def test_a_batch_takes_them_from_its_lines(self, llm, tokenizer, tmp_path):
        flags = {"continue_final_message": True}
        lines = [
            {"id": "good", "messages": self.MESSAGES, "chat_template_kwargs": flags},
            {"id": "bad", "messages": self.MESSAGES[:1], "chat_template_kwargs": flags},
        ]
        summary = llm.run_batch(
            lines, tmp_path / "out.jsonl", sampling_params=GREEDY, use_tqdm=False
        )
        assert summary.run.outcomes == {"truncated": 1}
        assert summary.num_failed == 1


class TestLogprobs:
    def test_their_sum_is_that_of_transformers(self, llm, folder):
        params = DRAWN.model_copy(update={"logprobs": 0, "n": 2})
        (output,) = llm.generate("The quick brown fox", params, use_tqdm=False)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for completion in output.outputs:
            ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
            with torch.no_grad():
                scores = model(ids).logits[0].log_softmax(-1)
            start = len(output.prompt_token_ids)
            expected = sum(
                float(scores[start + at - 1, token])
                for at, token in enumerate(completion.token_ids)
            )
            assert completion.cumulative_logprob == pytest.approx(expected, abs=1e-3)
        assert output.outputs.cumulative_logprob == output.outputs[0].cumulative_logprob

    def test_none_without_logprobs(self, llm):
        (output,) = llm.generate("a", GREEDY, use_tqdm=False)
        assert output.outputs.cumulative_logprob is None

    def test_a_stream_adds_up(self, llm):
        params = DRAWN.model_copy(update={"logprobs": 2})
        (whole,) = llm.generate("a", params, use_tqdm=False)
        total = 0.0
        for delta in llm.stream("a", params):
            entries = zip(delta.outputs.token_ids, delta.outputs.logprobs, strict=True)
            total += sum(entry[token].logprob for token, entry in entries)
            assert delta.outputs.cumulative_logprob == pytest.approx(total)
        assert total == pytest.approx(whole.outputs.cumulative_logprob)
        assert not math.isnan(total)


class TestIterators:
    def test_parameters_for_each_prompt(self, llm):
        lengths = [1 + index % 5 for index in range(40)]
        params = (GREEDY.model_copy(update={"max_tokens": n, "ignore_eos": True}) for n in lengths)
        prompts = [f"dog {index}" for index in range(40)]
        found = {out.item: len(out.outputs.token_ids) for out in llm.generate_iter(prompts, params)}
        assert found == dict(zip(prompts, lengths, strict=True))

    @pytest.mark.parametrize(("num_params", "num_results"), [(2, 2), (4, 3)])
    def test_another_length_raises_after_the_results(self, llm, num_params, num_results):
        results = llm.generate_iter(["a", "b", "c"], [GREEDY] * num_params)
        found = []
        with pytest.raises(ValueError, match="give one for each prompt, or one for all"):
            found.extend(results)
        assert len(found) == num_results

    def test_n_completions_in_bounded_memory(self, llm):
        params = DRAWN.model_copy(update={"n": 3, "max_tokens": 3})
        taken = itertools.count()
        results = llm.generate_iter((f"dog {next(taken)}" for _ in itertools.count()), params)
        for output in itertools.islice(results, 100):
            assert [completion.index for completion in output.outputs] == [0, 1, 2]
        # The prompts of unfinished outputs are those in the engine and ahead of it.
        assert next(taken) <= 100 + 8 + 2 * llm.runtime.num_intake_threads
        results.close()

    def test_n_is_the_same_in_every_way(self, llm):
        params = DRAWN.model_copy(update={"n": 3})
        expected = answers(llm, "fox", params)
        (iterated,) = llm.generate_iter(["fox"], params)
        assert [own.token_ids for own in iterated.outputs] == expected
        found, names = {}, set()
        for delta in llm.stream("fox", params):
            assert len(delta.outputs) == 1
            found.setdefault(delta.outputs.index, []).extend(delta.outputs.token_ids)
            names.add(delta.request_id)
        assert [found[index] for index in range(3)] == expected
        assert len(names) == 1

    def test_on_error_raise_with_several_completions(self, llm):
        params = DRAWN.model_copy(update={"n": 2})
        with pytest.raises(ValueError, match="too long"):
            llm.generate(["a", "fox " * 5000], params, use_tqdm=False, on_error="raise")


class TestMessages:
    @pytest.mark.parametrize(
        ("chats", "message"),
        [
            ([{"content": "x"}], "conversation 0, message 0 has no 'role'"),
            (
                [[{"role": "user", "content": "x"}]] * 2 + [[{"content": "x"}]],
                "conversation 2, mes",
            ),
            ([{"role": "user"}], "conversation 0, message 0 of role 'user' has no 'content'"),
            (
                [{"role": "user", "content": [{"type": "sound"}]}],
                "conversation 0, messages[0].content[0]: Unknown content part type: 'sound'",
            ),
            (
                [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}],
                "conversation 0, messages[0].content[1]: a part of type 'image' has no image",
            ),
            ([[], []], "conversation 1, messages must not be empty"),
            (
                [{"role": "user", "content": {"type": "text"}}],
                "conversation 0, message 0: 'content",
            ),
        ],
    )
    def test_wrong_messages_are_named(self, llm, chats, message):
        *good, bad = llm.chat(chats, GREEDY, use_tqdm=False)
        assert all(output.is_ok for output in good if output.item)
        assert bad.error_code == 400
        assert message in bad.error_msg
        assert bad.error_msg.startswith("conversation ")
        assert (bad.prompt, bad.prompt_token_ids) == (None, [])

    def test_in_a_stream_too(self, llm):
        (output,) = llm.stream([{"content": "x"}], GREEDY)
        assert "message 0 has no 'role'" in output.error_msg


class TestProcessorOptions:
    @pytest.fixture
    def prompt(self, make_picture):
        return {"prompt": f"A {IMAGE} B", "multimodal_data": {"image": make_picture(3, 280, 280)}}

    @pytest.mark.full
    def test_of_a_prompt_are_those_of_an_engine(self, vl_llm, prompt, tiny_folder):
        kwargs = {"max_pixels": 112 * 112}
        options = {"block_size": 16, "mm_processor_kwargs": kwargs}
        with LLM(model=str(tiny_folder("ernie4_5_vl_moe")), **options) as other:
            (expected,) = other.generate(prompt, GREEDY, use_tqdm=False)
        own = {**prompt, "mm_processor_kwargs": kwargs}
        free, found, again = vl_llm.generate([prompt, own, prompt], GREEDY, use_tqdm=False)
        assert found.num_input_image_tokens == expected.num_input_image_tokens
        assert found.outputs == expected.outputs
        assert free.num_input_image_tokens > found.num_input_image_tokens
        assert again.num_input_image_tokens == free.num_input_image_tokens
        assert vl_llm.count_tokens(own).num_input_image_tokens == found.num_input_image_tokens

    def test_in_a_conversation(self, vl_llm, prompt):
        part = {"type": "image", "image": prompt["multimodal_data"]["image"]}
        sizes = []
        for kwargs, own in (
            (None, {}),
            ({"max_pixels": 112 * 112}, {}),
            (None, {"max_pixels": 12544}),
        ):
            message = {"role": "user", "content": [{**part, **own}]}
            asked = {"messages": [message], "mm_processor_kwargs": kwargs}
            (output,) = vl_llm.generate(asked, GREEDY, use_tqdm=False)
            assert output.is_ok, output.error_msg
            sizes.append(output.num_input_image_tokens)
        assert sizes[0] > sizes[1] == sizes[2]

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"max_pixels": 10**9}, "above the engine's"),
            ({"min_pixels": 5000, "max_pixels": 4000}, "is above max_pixels"),
            ({"do_resize": False}, "cannot set do_resize"),
            ({"max_pixel": 5}, "did you mean 'max_pixels'"),
            ({"max_pixels": "many"}, "must be a whole number"),
            ({"video_fps": 2}, "sets 'video_fps', but the prompt has no video"),
            ("max_pixels", "must be a dict"),
            ({5: 6}, "must be a dict"),
        ],
        ids=str,
    )
    def test_wrong_ones_are_that_prompts_error(self, vl_llm, prompt, kwargs, message):
        bad = {**prompt, "mm_processor_kwargs": kwargs}
        good, output = vl_llm.generate([prompt, bad], GREEDY, use_tqdm=False)
        assert good.is_ok
        assert output.error_code == 400
        assert message in output.error_msg

    def test_options_of_no_image(self, vl_llm):
        bad = {"prompt": "A", "mm_processor_kwargs": {"max_pixels": 9999}}
        (output,) = vl_llm.generate(bad, GREEDY, use_tqdm=False)
        assert "the prompt has no image" in output.error_msg
