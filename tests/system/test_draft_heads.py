"""speculative="mtp": the answers of a run without it, and the guesses of the draft layer."""

import itertools
import json

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.engine.runner.drafter import Drafter
from mmdeploy_llm.engine.schedule import speculation
from mmdeploy_llm.engine.schedule.pace import Pace
from mmdeploy_llm.engine.schedule.trial import Trial
from mmdeploy_llm.errors import ConfigError
from tests.system.draft_layers import (
    KEYS,
    PROMPTS,
    QWEN,
    TABLE,
    Knowing,
    Oracle,
    answers,
    write_head,
)

# Heads that the engine's kernels serve: in torch's products the number of rows decides the last
# bits, and integers of 4 bits make these differences large.
SIZES = {"qwen3_5_text": {"linear_value_head_dim": 16}}


@pytest.fixture(scope="module")
def folders(tiny_copy, tmp_path_factory):
    """folders(family) -> a tiny checkpoint with a draft layer."""
    known = {}

    def of(family):
        if family not in known:
            folder = tmp_path_factory.mktemp("drafts") / family
            tiny_copy(family, folder, **SIZES.get(family, {}))
            known[family] = write_head(folder, KEYS[family])
        return known[family]

    return of


@pytest.fixture
def always_drafts(monkeypatch):
    monkeypatch.setattr(Trial, "admits", lambda self: True)
    monkeypatch.setattr(Pace, "best_length", lambda self, num_requests, guesses: 4)
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)


FORMATS = {
    "float32": {},
    "deterministic": {"dtype": "bfloat16", "deterministic": True},
    "few blocks": {"num_gpu_blocks_override": 20, "block_size": 16},
    "small chunks": {"max_num_batched_tokens": 40},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int4"},
    "no kernels": {"native_kernels": False},
}
QUICK = {("qwen3_5_text", "float32"), ("ernie4_5", "few blocks")}
CASES = [
    pytest.param(family, name, marks=[pytest.mark.full] * ((family, name) not in QUICK))
    for family in ("qwen3_5_text", "ernie4_5")
    for name in FORMATS
    # Qwen3.5 refuses deterministic, and without kernels one step is a tie of 1e-6.
    if (family, name) not in {("qwen3_5_text", "deterministic"), ("qwen3_5_text", "no kernels")}
]


@pytest.mark.few_in_ci(4)
@pytest.mark.full
@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(("family", "name"), CASES)
def test_answers_are_those_without_drafts(folders, family, name, monkeypatch):
    folder, options = folders(family), FORMATS[name]
    plain, _ = answers(folder, **options)
    Knowing(monkeypatch, PROMPTS, plain)
    drafted, stats = answers(folder, speculative="mtp", **options)
    if name == "no kernels":  # products of torch
        plain, drafted = ([one[:3] for one in found] for found in (plain, drafted))
    assert plain == drafted
    assert 50 < stats.num_accepted_drafts < stats.num_drafts


@pytest.mark.full
@pytest.mark.usefixtures("always_drafts")
def test_requests_that_the_head_is_not_ready_for(folders, monkeypatch):
    """They answer as without drafts, beside others and alone, and nothing is drafted for them."""
    folder, turns = folders("ernie4_5"), itertools.cycle([False, True, False])
    plain, _ = answers(folder)
    monkeypatch.setattr(Trial, "admits", lambda self: next(turns))
    drafted, stats = answers(folder, speculative="mtp")
    assert drafted == plain
    assert stats.num_drafts > 20
    monkeypatch.setattr(Trial, "admits", lambda self: False)
    drafted, stats = answers(folder, speculative="mtp")
    assert drafted == plain
    assert stats.num_drafts == 0


LOOKED_AT = {"ernie4_5", "glm4_moe", "glm4v_moe", "glm_ocr", "qwen3_5_text"}  # each guess, below


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.full
@pytest.mark.parametrize("family", sorted({*KEYS} - LOOKED_AT))
def test_other_families_with_a_draft_layer(folders, family):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = PROMPTS[1:3]  # without tokens that stand for media
    plain, _ = answers(folders(family), prompts, params)
    drafted, stats = answers(folders(family), prompts, params, speculative="mtp")
    assert [one[0] for one in drafted] == [one[0] for one in plain]
    assert stats.num_drafts > 40


@pytest.mark.few_in_ci(3)
@pytest.mark.full
@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("ernie4_5", {}),
        pytest.param("ernie4_5", {"native_kernels": False}, marks=pytest.mark.full),
        pytest.param("ernie4_5", {"max_num_batched_tokens": 32}, marks=pytest.mark.full),
        ("glm_ocr", {}),
        ("glm4_moe", {}),
        pytest.param("glm4v_moe", {}, marks=pytest.mark.full),
        ("qwen3_5_text", {}),
        pytest.param("qwen3_5_text", {"max_num_batched_tokens": 32}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_guesses_are_those_of_the_layer(folders, family, options, monkeypatch):
    """They are so in every step, with other requests beside it, also where earlier guesses were
    right."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [TABLE, [30, 31, 32, 33], [41] * 9]
    plain, _ = answers(folders(family), prompts, params, **options)
    seen = []
    real = Drafter._guesses

    def noted(drafter, items):
        found = real(drafter, items)
        for item in items:
            slot = drafter._slots[item.request_id].index
            text = drafter._slots.token_ids[slot, : item.start + 1].tolist()
            seen.append((text, list(found[item.request_id])))
        return found

    monkeypatch.setattr(Drafter, "_guesses", noted)
    Knowing(monkeypatch, prompts, plain)
    drafted, _ = answers(folders(family), prompts, params, speculative="mtp", **options)
    assert [one[0] for one in drafted] == [one[0] for one in plain]
    oracle = Oracle(folders(family), family)
    wrong = [
        (len(text), found) for text, found in seen if found != oracle.guesses(text, len(found))
    ]
    assert len(seen) > 10
    assert len(wrong) <= len(seen) // 10, wrong  # ties of rounding


@pytest.mark.full
def test_a_layer_that_guesses_wrong_is_soon_left(folders):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    _, stats = answers(folders("ernie4_5"), PROMPTS[:1], params, speculative="mtp")
    assert stats.num_drafts < 60


def test_a_checkpoint_without_draft_layers_is_refused(tiny_folder):
    for family in ("ernie4_5", "qwen3_5_text"):
        with pytest.raises(ConfigError, match="no tensors of draft layers"):
            LLM(str(tiny_folder(family)), speculative="mtp", quiet=True)


def test_a_family_without_draft_layers_is_refused(tiny_folder):
    with pytest.raises(ConfigError, match=r"layer of Qwen2ForCausalLM is known, only of Deep.*"):
        LLM(str(tiny_folder("qwen2")), speculative="mtp", quiet=True)


def test_an_embedding_of_its_own_is_refused(tiny_copy, tmp_path):
    folder = write_head(tiny_copy("qwen3_5_text", tmp_path), QWEN)
    config = json.loads((folder / "config.json").read_text())
    config["mtp_use_dedicated_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mtp_use_dedicated_embeddings"):
        LLM(str(folder), speculative="mtp", quiet=True)
