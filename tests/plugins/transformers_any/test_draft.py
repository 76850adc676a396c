"""speculative="mtp" of models that transformers computes: the answers of a run without it, and the
guesses of transformers' own draft layer."""

import re

import pytest
import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.engine.runner.drafter import Drafter
from mmdeploy_llm.engine.schedule import speculation
from mmdeploy_llm.engine.schedule.pace import Pace
from mmdeploy_llm.engine.schedule.trial import Trial
from mmdeploy_llm.errors import ConfigError
from tests.plugins.transformers_any.test_text import CONFIGS, write
from tests.system.draft_layers import (
    DEEPSEEK,
    PARAMS,
    PROMPTS,
    TABLE,
    Knowing,
    answers,
    write_head,
)

LATENT = CONFIGS["deepseek_v3"][1]
FAMILIES = {
    "deepseek_v3": CONFIGS["deepseek_v3"],
    # Its class says nothing of draft layers, published files do.
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, "num_nextn_predict_layers": 1}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folders(family) -> a tiny checkpoint with a draft layer."""
    known = {}

    def of(family):
        if family not in known:
            folder = tmp_path_factory.mktemp(family)
            write(family, folder, FAMILIES)
            known[family] = write_head(folder, DEEPSEEK)
        return known[family]

    return of


@pytest.fixture(autouse=True)
def always_drafts(monkeypatch):
    monkeypatch.setattr(Trial, "admits", lambda self: True)
    monkeypatch.setattr(Pace, "best_length", lambda self, num_requests, guesses: 4)
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)


FORMATS = {
    "float32": {},
    "few blocks": {"num_gpu_blocks_override": 20, "block_size": 16},
    "small chunks": {"max_num_batched_tokens": 40},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
CASES = [
    pytest.param(
        family, name, marks=[pytest.mark.full] * (family != "glm4_moe_lite" or bool(options))
    )
    for family in FAMILIES
    for name, options in FORMATS.items()
]


@pytest.mark.few_in_ci(3)
@pytest.mark.full
@pytest.mark.parametrize(("family", "name"), CASES)
def test_answers_are_those_without_drafts(folders, family, name, monkeypatch):
    plain, _ = answers(folders(family), **FORMATS[name])
    Knowing(monkeypatch, PROMPTS, plain)
    drafted, stats = answers(folders(family), speculative="mtp", **FORMATS[name])
    for one, other in zip(plain, drafted, strict=True):
        assert one[:3] == other[:3]
    assert len(plain) == len(PARAMS)
    assert 50 < stats.num_accepted_drafts < stats.num_drafts


class Oracle:
    """transformers' model of a folder with its MtpModel."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        # Its class names the layers of published checkpoints, which are larger.
        self.model._keys_to_ignore_on_load_unexpected = ["^" + re.escape(DEEPSEEK["layer"])]
        config = self.model.config
        config.num_mtp_layers = 1
        if hasattr(config, "mlp_layer_types"):  # its class says nothing of draft layers
            config.mtp_mlp_layer_types = ["sparse"]
        self.drafts = MtpModel.from_pretrained(self.model).eval()
        self.model.eval()

    @torch.no_grad()
    def guesses(self, token_ids, count):
        """Returns `count` guesses after token_ids, whose last one is not computed yet. The layer is
        used for all of them."""
        found, text = [], list(token_ids)
        hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state
        for _ in range(count):
            cache = MtpCache(config=self.model.config.get_mtp_config())
            places = torch.arange(1, len(text))[None]
            ids = torch.tensor([text[1:]])
            states = self.drafts.forward_layer(0, hidden, places, cache, input_ids=ids)
            last = states[:, -1:]
            found.append(int(self.drafts._project_to_logits(last)[0, -1].argmax()))
            text.append(found[-1])
            hidden = torch.cat([hidden, last], 1)
        return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("glm4_moe_lite", {}),
        pytest.param("glm4_moe_lite", {"max_num_batched_tokens": 32}, marks=pytest.mark.full),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.full),
        pytest.param("deepseek_v3", {"native_kernels": False}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_guesses_are_those_of_the_layer(folders, family, options, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [TABLE, [30, 31, 32, 33], [41] * 9]
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
    answers(folders(family), prompts, params, speculative="mtp", **options)
    oracle = Oracle(folders(family))
    wrong = [
        (len(text), found) for text, found in seen if found != oracle.guesses(text, len(found))
    ]
    assert len(seen) > 10
    assert len(wrong) <= len(seen) // 10, wrong  # ties of rounding


def test_a_model_whose_draft_layer_is_not_known_is_refused(tmp_path):
    write("granite_swa", tmp_path)
    with pytest.raises(ConfigError, match="no draft layer of GraniteSWAForCausalLM is known"):
        LLM(str(tmp_path), speculative="mtp", quiet=True)


@pytest.mark.full
def test_a_checkpoint_without_its_draft_layer_is_refused(tmp_path):
    write("deepseek_v3", tmp_path)
    with pytest.raises(ConfigError, match="no tensors of draft layers"):
        LLM(str(tmp_path), speculative="mtp", quiet=True)
