"""speculative="mtp" over ranks, in engines of other processes, through AsyncLLM, with adapters and
with images: the answers of a run without it, and guesses that are right, since the draft layers of
these checkpoints are."""

import pytest
import torch
from PIL import Image

from mmdeploy_llm import LLM, AsyncLLM, GuidedDecodingParams, SamplingParams
from mmdeploy_llm.engine.schedule.lifecycle import Lifecycle
from mmdeploy_llm.engine.schedule.pace import Pace
from mmdeploy_llm.engine.schedule.trial import Trial
from tests.layers.adapters.lora import write_adapter
from tests.system.draft_layers import (
    KEYS,
    PARAMS,
    PROMPTS,
    answers,
    make_right,
    write_head,
)
from tests.system.test_speculation import OTHERS, completions_of
from tests.together import begin_together

SIZES = {"hidden_size": 128, "num_attention_heads": 4}  # heads that two ranks can share
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tiny_copy, tmp_path_factory):
    """folders(family, **sizes) -> a tiny checkpoint whose draft layer guesses right."""
    known = {}

    def of(family, **sizes):
        key = family, *sizes
        if key not in known:
            folder = tiny_copy(family, tmp_path_factory.mktemp("drafts") / family, **sizes)
            known[key] = make_right(write_head(folder, KEYS[family]), KEYS[family])
        return known[key]

    return of


@pytest.fixture
def always_drafts(monkeypatch):
    monkeypatch.setattr(Trial, "admits", lambda self: True)
    monkeypatch.setattr(Pace, "best_length", lambda self, num_requests, guesses: 4)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("ernie4_5", marks=pytest.mark.long),
        pytest.param("ernie4_5_moe", marks=pytest.mark.full),  # experts
        pytest.param("qwen3_5_text", marks=pytest.mark.full),  # states
        pytest.param("glm4v_moe", marks=pytest.mark.long),
    ],
)
def test_ranks(folders, family):
    """Ranks accept and guess what one process does, with grammars and stop texts among others."""
    sizes = SIZES if family.startswith("ernie") else {}
    folder = folders(family, **sizes)
    plain, _ = answers(folder)
    found, stats = answers(folder, speculative="mtp", tensor_parallel_size=2)
    for one, other in zip(plain, found, strict=True):
        assert one[:3] == other[:3]
    assert stats.num_accepted_drafts > stats.num_drafts / 2


@pytest.mark.full
def test_engines_in_other_processes(folders):
    folder = folders("ernie4_5")
    plain, _ = answers(folder)
    found, stats = answers(folder, speculative="mtp", data_parallel_size=2)
    for one, other in zip(plain, found, strict=True):
        assert one[:3] == other[:3]
    assert stats.num_drafts > 0


@pytest.mark.full
@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    "family", [pytest.param("qwen3_5_text", marks=pytest.mark.full), "glm_ocr"]
)
def test_handles(folders, family):
    folder, prompts = folders(family), PROMPTS[1:3]
    params = [PARAMS[3], PARAMS[4]]  # stop texts, a grammar
    plain, _ = answers(folder, prompts, params)
    options = {"dtype": "float32", "max_model_len": 512, "use_warmup": False, "quiet": True}
    with AsyncLLM(str(folder), speculative="mtp", **options) as llm:
        handles = [llm.submit(*pair) for pair in zip(prompts, params, strict=True)]
        parts = [[*handle] for handle in handles]
        stats = llm.stats()
    for deltas, wanted in zip(parts, plain, strict=True):
        assert "".join(delta.outputs.text for delta in deltas) == wanted[1]
        assert deltas[-1].outputs.finish_reason == wanted[2]
    assert stats.num_drafts > 0


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.full
def test_options_of_requests(folders):
    """Several completions, stop tokens, log-probabilities of the prompt, rules, penalties."""
    found = []
    for speculative in (None, "mtp"):
        with LLM(
            str(folders("ernie4_5")),
            dtype="float32",
            max_model_len=512,
            quiet=True,
            use_warmup=False,
            logits_processors=["logit_bias", "repetition_window"],
            enable_logprob=True,
            speculative=speculative,
        ) as llm:
            outputs = llm.generate([PROMPTS[0]] * len(OTHERS), [*OTHERS.values()], use_tqdm=False)
            found.append(completions_of(outputs))
            stats = llm.stats()
    for name, plain, drafted in zip(OTHERS, *found, strict=True):
        assert drafted[0] == plain[0], name
    assert stats.num_accepted_drafts > 20


IMAGE = "<|begin_of_image|><|image|><|end_of_image|> what is it? "
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
# What the tests above do not ask for.
MORE = {
    "draws of several completions": SamplingParams(
        temperature=0.8, seed=7, n=3, top_p=0.9, top_k=20, min_p=0.02, max_tokens=24
    ),
    "penalties of several completions": SamplingParams(
        temperature=0.3, seed=1, n=2, presence_penalty=0.4, frequency_penalty=0.2, max_tokens=24
    ),
    "forbidden words": SamplingParams(
        temperature=0, max_tokens=30, bad_words=["a", "the fox"], ignore_eos=True
    ),
    "a JSON schema": SamplingParams(
        temperature=0,
        max_tokens=60,
        reasoning_max_tokens=4,
        guided_decoding=GuidedDecodingParams(json=SCHEMA),
    ),
    "a stop text that stays": SamplingParams(
        temperature=0, max_tokens=40, stop=["e"], include_stop_str_in_output=True, logprobs=1
    ),
    "thinking": SamplingParams(temperature=0, max_tokens=30, reasoning_max_tokens=6),
    "one token": SamplingParams(temperature=0, max_tokens=1),
    "biases": SamplingParams(temperature=0, max_tokens=30, logit_bias={7: 2.0, 9: -3.0}),
}


@pytest.mark.full
@pytest.mark.usefixtures("always_drafts")
def test_more_options_with_images_in_a_tight_pool(folders, monkeypatch):
    """Each option once with an image and once without, after a prompt that the cache holds, with
    too few blocks for all, so that some are preempted."""
    pixels = torch.randint(0, 256, (48, 64, 3), generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(pixels.to(torch.uint8).numpy())
    text = "the fox jumps over the lazy dog " * 2
    with_image = {"prompt": IMAGE + text, "multimodal_data": {"image": [image]}}
    params = [*MORE.values()] * 2
    prompts = [with_image] * len(MORE) + [text] * len(MORE)
    options = {"dtype": "float32", "max_model_len": 256, "use_warmup": False, "quiet": True}
    options |= {"block_size": 4, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 40}
    found, preempted = [], []
    real = Lifecycle.preempt
    monkeypatch.setattr(
        Lifecycle, "preempt", lambda self, state: (preempted.append(state), real(self, state))[1]
    )
    for speculative in (None, "mtp"):
        preempted.clear()
        with LLM(
            str(folders("glm_ocr")),
            enable_logprob=True,
            reasoning_parser="glm-4.5",
            speculative=speculative,
            **options,
        ) as llm:
            first = llm.generate([with_image, text], MORE["one token"], use_tqdm=False)
            begin_together(llm, len(prompts))
            rest = llm.generate(prompts, params, use_tqdm=False)
            found.append(completions_of([*first, *rest]))
            stats = llm.stats()
        assert preempted
        assert stats.num_cached_tokens > 0
    names = ["one token"] * 2 + [*MORE] * 2
    for name, plain, drafted in zip(names, *found, strict=True):
        assert drafted[0] == plain[0], name
    assert stats.num_accepted_drafts > 20


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.full
def test_adapters(folders, tmp_path):
    """The draft layer has none, so it guesses for another model: only the answers count."""
    folder = folders("ernie4_5")
    write_adapter(folder, tmp_path / "one")
    adapters = {"one": tmp_path / "one"}
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 2
    prompts = [
        {"prompt_token_ids": PROMPTS[1], "adapter": "one"},
        {"prompt_token_ids": PROMPTS[1]},
    ]
    plain, _ = answers(folder, prompts, params, adapters=adapters)
    found, stats = answers(folder, prompts, params, adapters=adapters, speculative="mtp")
    assert plain[0][0] != plain[1][0]
    assert [one[0] for one in found] == [one[0] for one in plain]
    assert stats.num_drafts > 0


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "marker"),
    [
        ("glm_ocr", "<|begin_of_image|><|image|><|end_of_image|>"),
        ("glm4v_moe", "<|begin_of_image|><|image|><|end_of_image|>"),
        ("qwen3_5", "<|vision_start|><|image_pad|><|vision_end|>"),
        ("ernie4_5_vl_moe", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
    ],
)
def test_images(folders, family, marker):
    """Also in chunks, where a prefix is found in the cache, and with too few blocks for both."""
    pixels = torch.randint(0, 256, (48, 64, 3), generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(pixels.to(torch.uint8).numpy())
    prompt = {"prompt": f"{marker} what is it?", "multimodal_data": {"image": [image]}}
    options = {"block_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    options["num_gpu_blocks_override"] = 16
    plain, _ = answers(folders(family), [prompt] * 3, GREEDY, **options)
    found, stats = answers(folders(family), [prompt] * 3, GREEDY, speculative="mtp", **options)
    assert [one[0] for one in found] == [one[0] for one in plain]
    assert stats.num_accepted_drafts > 20
