"""Several questions about one picture, asked at once: it is encoded once, its tokens are computed
once, and the answers are those of the questions asked alone. By counts, for each kind of cache."""

import shutil
from pathlib import Path

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.engine.desk.ask import Ask

from .image_chats import noise

GREEDY = SamplingParams(temperature=0, max_tokens=6, min_tokens=0, ignore_eos=True)
QUESTIONS = ("What is this?", "List tags of the picture, please.", "Is it a cat? Answer no or yes.")
BLOCK = 8
OPTIONS = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 1024,  # an eighth of them may keep what no request uses for now
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "num_threads": 1,
    "use_warmup": False,
    "dtype": "float32",
}
KINDS = {  # family: which kind of cache it stands for
    "qwen2_5_vl": "one cache",
    "qwen3_5": "states of linear attention",
    "lfm2_vl": "states of convolutions",
    "gemma3": "windows, media that attend in both directions",
    "gemma4": "windows, keys of a layer shared by others",
}
OTHERS = ("ernie4_5_vl_moe", "glm4v", "internvl", "minicpmv4_6", "paddleocr_vl", "qwen3_vl")


def asks(pictures):
    """The questions about each picture, one group for each."""
    for number, picture in enumerate(pictures):
        for question in QUESTIONS:
            content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
            prompt = {"messages": [{"role": "user", "content": content}]}
            yield Ask(prompt=prompt, params=GREEDY, item=(number, question), group=number)


def answered(llm, given):
    outputs = {answer.ask.item: answer.output for answer in llm.answer_each(given)}
    assert [output.error_msg for output in outputs.values()] == [None] * len(outputs)
    return outputs


@pytest.mark.few_in_ci(4)
@pytest.mark.full
@pytest.mark.parametrize(
    "family", [*KINDS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_a_picture_is_encoded_and_computed_once(tiny_folder, family):
    pictures = [noise(seed, 320, 256) for seed in range(3)]
    folder = str(tiny_folder(family))
    with LLM(folder, enable_prefix_caching=False, **OPTIONS) as llm:
        alone = answered(llm, asks(pictures))
    with LLM(folder, **OPTIONS) as llm:
        encoded, encode = [], llm.model.encode_media
        llm.model.encode_media = lambda items: (encoded.extend(items), encode(items))[1]
        found = answered(llm, asks(pictures))
    assert len(encoded) == len(pictures)
    for key, output in found.items():
        assert output.outputs.token_ids == alone[key].outputs.token_ids
    for number in range(len(pictures)):
        first, *later = sorted(
            (output for (own, _), output in found.items() if own == number),
            key=lambda output: output.num_cached_tokens,
        )
        for output in later:
            pairs = zip(first.prompt_token_ids, output.prompt_token_ids, strict=False)
            alike = next(place for place, (a, b) in enumerate(pairs) if a != b)
            assert alike > output.num_input_image_tokens
            assert output.num_cached_tokens > alike - 2 * BLOCK
            assert output.num_cached_tokens > first.num_cached_tokens


@pytest.mark.full
def test_a_batch_asks_several_questions(tmp_path):
    """The bundled model, on two pictures of the examples and one that cannot be read."""
    images = Path(__file__).parents[2] / "examples" / "images"
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("picture-1.png", "picture-2.jpg", "truncated-on-purpose.jpg"):
        shutil.copy(images / name, folder)
    asked = {"caption": "Describe the image.", "count": "How many shapes are there?"}
    with LLM("shapes-vl", quiet=True, block_size=16) as llm:
        summary = llm.run_batch(
            folder,
            tmp_path / "out.jsonl",
            ask=asked,
            system="Answer briefly.",
            sampling_params=SamplingParams(temperature=0, max_tokens=60),
            chat_template_kwargs={"enable_thinking": False},
            use_tqdm=False,
        )
    bad, *good = sorted(summary.records(), key=lambda record: record.is_ok)
    assert summary.run.answers == {"caption": 2, "count": 2}
    for record in good:
        assert list(record.answers) == ["caption", "count"]
        assert record.text == record.answers["caption"] != record.answers["count"]
        assert record.num_cached_tokens > record.num_image_tokens / 2
    assert bad.error.code == 400
    assert "question 'caption'" in bad.error.message
    assert "question 'count'" in bad.error.message
