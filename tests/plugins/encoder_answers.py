"""Whole answers of models whose encoder reads the media, against transformers: at once and with
prefixes that are cached, and for the families that stand for all, with other settings too."""

import pytest

from mmdeploy_llm import LLM, SamplingParams
from tests.plugins.pictures import picture


class EncoderAnswers:
    """Compares answers of a family; its test file subclasses it and has a fixture `folder`.

    prompts: (text, seeds of its pictures). num_different: how many of the answers differ, which
    shows that texts and pictures are read. num_tokens: of an answer. repetition_penalty: for tied
    embeddings, which repeat the first token for ever. sizes: of the picture of each seed.
    """

    prompts = ()
    num_different = 0
    num_tokens = 24
    repetition_penalty = 1.0
    sizes = ((80, 50),) * 5
    max_model_len = None

    @classmethod
    def reference(cls, folder):
        """Returns transformers' model, and a function (text, pictures) -> inputs of its
        `generate`."""
        raise NotImplementedError

    def prompt(self, text, pictures, ids):
        """Returns what this engine gets. ids: the tokens of the prompt in transformers."""
        return {"prompt": text, "multimodal_data": {"image": pictures}} if pictures else text

    @pytest.fixture(scope="class")
    @classmethod
    def asked(cls):
        return [
            (text, [picture(seed, cls.sizes[seed]) for seed in seeds])
            for text, seeds in cls.prompts
        ]

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, folder, asked):
        """The tokens of each prompt and its answer, as transformers gives them."""
        model, inputs = cls.reference(folder)
        found = [
            model.generate(
                **inputs(text, pictures),
                max_new_tokens=cls.num_tokens,
                eos_token_id=None,
                do_sample=False,
                repetition_penalty=cls.repetition_penalty,
            )[0].tolist()
            for text, pictures in asked
        ]
        assert len({tuple(ids) for ids in found}) == cls.num_different
        return found

    def started(self, folder, **options):
        options = {"max_model_len": self.max_model_len, **options}
        options |= {"kv_cache_memory": 2**22, "limit_mm_per_prompt": {"image": 3}}
        return LLM(str(folder), dtype="float32", use_warmup=False, **options)

    def assert_equal(self, llm, asked, expected):
        params = SamplingParams(
            temperature=0,
            max_tokens=self.num_tokens,
            ignore_eos=True,
            repetition_penalty=self.repetition_penalty,
        )
        prompts = [
            self.prompt(*one, ids[: -self.num_tokens])
            for one, ids in zip(asked, expected, strict=True)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = [[*out.prompt_token_ids, *out.outputs.token_ids] for out in outputs]
        assert found == expected, [out.error_msg for out in outputs]
        for prompt, out in zip(prompts, outputs, strict=True):
            counted = llm.count_tokens(prompt)
            assert counted.num_input_tokens_by_kind == out.num_input_tokens_by_kind
            assert counted.num_prompt_tokens == len(out.prompt_token_ids)

    def test_answers_equal_those_of_transformers(self, folder, asked, expected):
        with self.started(folder) as llm:
            for _ in range(2):  # the second time with prefixes that are cached
                self.assert_equal(llm, asked, expected)


class EncoderAnswersInAllSettings(EncoderAnswers):
    """Compares them in other settings too, for a family that stands for others.

    tight: (blocks of 16 tokens, max_model_len) with which requests are preempted. few: bytes of the
    encoder cache, with which few items are encoded at a time.
    """

    tight = (0, 0)
    few = 0

    @pytest.mark.full
    @pytest.mark.parametrize("setting", ["plain torch", "chunks", "preempted", "few items"])
    def test_a_setting_changes_no_answer(self, folder, asked, expected, setting):
        blocks, length = self.tight
        options = {
            "plain torch": {"native_kernels": False},
            "chunks": {"max_num_batched_tokens": 3, "max_num_seqs": 3},
            "preempted": {
                "num_gpu_blocks_override": blocks,
                "block_size": 16,
                "max_model_len": length,
            },
            "few items": {"encoder_cache_memory": self.few},
        }[setting]
        with self.started(folder, **options) as llm:
            self.assert_equal(llm, asked, expected)
