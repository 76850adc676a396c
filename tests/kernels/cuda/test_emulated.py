"""LLM(device="cuda") as a whole on the emulated card: its tokens equal the CPU's, its tensors are
on the right device, and the host never waits without need."""

import importlib.util

import numpy as np
import pytest
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.values.params import GuidedDecodingParams

needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs llguidance: the extra 'guided'"
)
OPTIONS = {
    "max_num_seqs": 3,
    "max_model_len": 160,
    "num_gpu_blocks_override": 40,
    "block_size": 16,
    "max_num_batched_tokens": 64,
    "limit_mm_per_prompt": {"image": 2, "video": 1},
    "enable_logprob": True,
    "seed": 1,
    "use_warmup": False,  # the same once more
}
IMAGE = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "ernie4_5_vl_moe": "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
}
VIDEO = {
    "qwen2_5_vl": "<|vision_start|><|video_pad|><|vision_end|>",
    "qwen3_vl_moe": "<|vision_start|><|video_pad|><|vision_end|>",
    "ernie4_5_vl_moe": "<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>",
}
STEP_STARTS = ("aten::embedding", "graph")
GREEDY = {"temperature": 0.0}
CHOICES = (
    GREEDY,
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 3, "logit_bias": {70: 2.0}},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 5, "no_repeat_ngram_size": 2, "bad_words_token_ids": [71, 72]},
    {"temperature": 0.0, "guided_decoding": GuidedDecodingParams(regex="[a-f ]{4,40}")},
    {"temperature": 0.9, "seed": 6, "logits_processors": "repetition-window", "logprobs": 1},
    {"temperature": 0.0, "early_stop": {"window_size": 2, "threshold": 0.0}},
)


def picture(seed, width, height):
    rng = np.random.RandomState(seed)
    return Image.fromarray(rng.randint(0, 255, (height, width, 3), dtype=np.uint8))


def params(number=0, **values):
    choice = CHOICES[number % len(CHOICES)]
    base = {"max_tokens": 4 - number % 2}
    if "guided_decoding" not in choice:
        base["ignore_eos"] = True
    return SamplingParams(**{**base, **choice, **values})


def texts(number):
    lengths = (3, 18, 1, 5, 40, 2, 9)
    return [list(range(60 + at, 60 + at + lengths[at % 7])) for at in range(number)]


def results(llm, prompts, chosen):
    outputs = llm.generate(prompts, chosen, use_tqdm=False)
    assert all(output.error_code == 200 for output in outputs), [o.error_msg for o in outputs]
    return outputs


def check(outputs, expected, within=1e-4):
    """within: tolerance of log-probabilities; if it is small, their order is checked too."""
    for found, wanted in zip(outputs, expected, strict=True):
        assert found.outputs.token_ids == wanted.outputs.token_ids
        near(found.outputs.logprobs, wanted.outputs.logprobs, within)
        near(found.prompt_logprobs, wanted.prompt_logprobs, within)


def near(found, expected, within):
    """Compares log-probabilities of the same tokens."""
    for one, other in zip(found or (), expected or (), strict=True):
        if within < 1e-3:
            assert (one and [*one]) == (other and [*other])
        for token_id in {*(one or {})} & {*(other or {})}:
            assert within > 1e-3 or one[token_id].rank == other[token_id].rank
            assert one[token_id].logprob == pytest.approx(other[token_id].logprob, abs=within)


def kinds(card):
    return {what for what, _, _ in card.waits}


@pytest.mark.full
@needs_llguidance
@pytest.mark.parametrize(
    ("family", "eager", "choices"),
    [
        ("qwen3", False, (1, 2, 4, 6, 7, 8)),
        ("ernie4_5", True, (0, 2, 3, 5, 7)),
    ],
)
def test_text(folder_of, new_card, family, eager, choices):
    """Covers all kinds of sampling, windows, and a prompt whose blocks are in the prefix cache."""
    prompts, chosen = texts(len(choices)), [params(number) for number in choices]
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    own = window if family == "qwen3" else {}
    folder = folder_of(family, head_dim=16, num_hidden_layers=2, **own)
    with LLM(model=folder, device="cpu", **OPTIONS) as llm:
        expected = results(llm, prompts, chosen)
    card = new_card()
    with LLM(model=folder, device="cuda", enforce_eager=eager, **OPTIONS) as llm:
        outputs = results(llm, prompts, chosen)
        again = results(llm, prompts[1:2], chosen[:1])
    check(outputs, expected)
    assert again[0].num_cached_tokens == 16
    assert bool(sum(graph.num_replays for graph in card.graphs)) != eager


@pytest.mark.full
@needs_llguidance
@pytest.mark.parametrize(
    ("family", "eager"),
    [
        ("qwen2_5_vl", False),
        pytest.param("ernie4_5_vl_moe", False, marks=pytest.mark.full),
        pytest.param("qwen3_vl_moe", True, marks=pytest.mark.full),
    ],
)
def test_media(folder_of, new_card, family, eager):
    """Large media, and small ones with them, never make the host wait."""
    folder = folder_of(family, num_hidden_layers=2)
    images = [picture(1, 56, 84), picture(2, 28, 28)]
    video = {"video": [picture(3 + number, 84, 56) for number in range(2)], "source_fps": 2}
    image, clip = IMAGE[family], VIDEO[family]
    prompts = [
        {"prompt": f"see {image} and {image}", "multimodal_data": {"image": images}},
        {"prompt": f"see {clip}", "multimodal_data": {"video": video}},
        {"prompt_token_ids": texts(2)[1]},
    ]
    chosen = [params(0, logprobs=3), params(2, max_tokens=2), params(6)]
    with LLM(model=folder, device="cpu", **OPTIONS) as llm:
        expected = results(llm, prompts, chosen)
    card = new_card()
    with LLM(model=folder, device="cuda", enforce_eager=eager, **OPTIONS) as llm:
        card.waits.clear()
        outputs = results(llm, prompts, chosen)
    check(outputs, expected)
    assert kinds(card) == {"Event.synchronize"}
    assert bool(sum(graph.num_replays for graph in card.graphs)) != eager


@pytest.mark.full
@pytest.mark.parametrize("eager", [True, False])
def test_steps_start_before_the_host_waits_for_the_previous_one(folder_of, new_card, eager):
    """Each step has one wait, for the sampled tokens; by then the card has the next step."""
    folder = folder_of("ernie4_5", head_dim=16, num_hidden_layers=1)
    card = new_card()
    with LLM(model=folder, device="cuda", enforce_eager=eager, **OPTIONS) as llm:
        for choice in (CHOICES[2], CHOICES[3], {**GREEDY, "logprobs": 2}):
            card.waits.clear()
            card.launches.clear()
            together = SamplingParams(n=3, max_tokens=4, ignore_eos=True, **choice)
            results(llm, [[66, 67]], together)
            assert [what for what, _, _ in card.waits] == ["Event.synchronize"] * 4
            steps = [place for place, name in enumerate(card.launches) if name in STEP_STARTS]
            assert len(steps) == 4
            for (_, _, place), following in zip(card.waits, steps[1:], strict=False):
                assert following < place


@pytest.mark.full
def test_a_greedy_step_without_rules_samples_in_its_graph(folder_of, new_card):
    folder = folder_of("ernie4_5", head_dim=16, num_hidden_layers=1)
    card = new_card()
    with LLM(model=folder, device="cuda", **{**OPTIONS, "max_num_seqs": 1}) as llm:
        card.launches.clear()
        results(llm, [[66, 67]], SamplingParams(max_tokens=4, ignore_eos=True, **GREEDY))
        assert card.launches.count("graph") == 3
        assert card.launches.count("choose") == 1  # of the prompt


@pytest.mark.full
def test_what_a_step_sends(folder_of, new_card):
    """A request that starts, one copy for its rows; log-probabilities, three beside the tokens."""
    folder = folder_of("ernie4_5", head_dim=16, num_hidden_layers=1)
    card = new_card()
    options = {**OPTIONS, "enforce_eager": True, "enable_prefix_caching": False}
    with LLM(model=folder, device="cuda", **options) as llm:

        def copies(way, **values):
            card.launches.clear()
            results(llm, [[66, 67]], SamplingParams(max_tokens=1, ignore_eos=True, **values))
            return card.launches.count(f"copy to the {way}")

        copies("card", temperature=0.9, seed=1)
        assert copies("host", temperature=0.9, seed=1, logprobs=2) == 4
        assert copies("card", temperature=0.9, seed=1) == 4  # with three of the step's
