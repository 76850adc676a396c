"""Each broken model fails its check, whose message says what to do.

The broken models are this package's Qwen2 and Qwen2.5-VL with one fault each.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from mmdeploy_llm_plugins.qwen import provide_models

from mmdeploy_llm.hooks import ModelSpec
from mmdeploy_llm.testing import (
    CheckFailed,
    CheckSkipped,
    ModelConformance,
    ModelVariantConformance,
    write_tiny,
)
from mmdeploy_llm.testing.models import equalities, models
from mmdeploy_llm.testing.models.base import factory_of
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.weights.folder import read_checkpoint

FACTORIES = {spec.name: factory_of(spec) for spec in provide_models()}
Text, VL = FACTORIES["qwen2"], FACTORIES["qwen2_5_vl"]
CHECKS = models.CHECKS + equalities.CHECKS
NAMES = [check.__name__ for check in CHECKS]
IN_A_BATCH = {
    "a_packed_batch_equals_single_sequences",
    "a_paged_batch_equals_singles",
    "paged_chunks_equal_the_whole",
    "a_preempted_request_equals_an_uninterrupted_one",
}
PAGED = (IN_A_BATCH - {"a_packed_batch_equals_single_sequences"}) | {
    "paged_equals_dense",
    "a_prefix_hit_equals_a_cold_start",
}
CASES = {
    "text": {"text": (), "other text": ()},
    "vl": {"text": (), "images": ((1, 4, 6), (1, 8, 4))},
}


class TakesMemory(Text):
    def __init__(self, config):
        super().__init__(config)
        self.extra = torch.nn.Parameter(torch.zeros(4, device="cpu"))


class ReadsValues(Text):
    def __init__(self, config):
        super().__init__(config)
        if torch.ones(3).sum().item() > 2:
            self.is_ready = True


class NoHeadSize(Text):
    head_dim = None

    def __setattr__(self, name, value):
        if name != "head_dim":
            super().__setattr__(name, value)


class DoesNotKnowAKey(Text):
    def weight_targets(self, key):
        return None if "q_proj.bias" in key else super().weight_targets(key)


class TakesAnyKey(Text):
    def weight_targets(self, key):
        return super().weight_targets(key) or ()


class ReadsNothing(Text):
    """Its weights are plain tensors, which no key of the checkpoint fills."""

    def __init__(self, config):
        super().__init__(config)
        for module in list(self.modules()):
            for name, weight in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                setattr(module, name, torch.zeros(weight.shape, device="cpu"))

    def weight_targets(self, key):
        return None if key == models.UNKNOWN_KEY else ()


class LeavesANormOut(Text):
    """Uses ones instead of the last norm's weight."""

    def __init__(self, config):
        super().__init__(config)
        del self.model.norm.weight
        self.model.norm.weight = torch.ones(config.hidden_size, device="cpu")

    def weight_targets(self, key):
        return () if key == "model.norm.weight" else super().weight_targets(key)


class RootOfAWeight(Text):
    """Yields finite logits only if no weight is negative."""

    def logits(self, hidden):
        weight = self.model.norm.weight
        return super().logits(hidden) * (weight.sqrt() / weight.sqrt()).mean()


class OneSequence(Text):
    def forward(self, inputs):
        return super().forward(inputs)[None]


class Doubles(Text):
    def logits(self, hidden):
        return super().logits(hidden).double()


class FewEmbeddings(VL):
    def encode_media(self, items):
        return [embed[1:] for embed in super().encode_media(items)]


class FlatPositions(VL):
    def positions(self, num_tokens, media):
        positions = super().positions(num_tokens, media)
        return None if positions is None else positions[0]


class MeanOfAllItems(VL):
    def encode_media(self, items):
        embeds = super().encode_media(items)
        mean = torch.cat(list(embeds)).mean(0)
        return [embed - mean for embed in embeds]


class LargerLogits(Text):
    def logits(self, hidden):
        return super().logits(hidden) * 1.001


class GeneratedLater(Text):
    """Shifts the positions of generated tokens by one."""

    def forward(self, inputs):
        return super().forward(replace(inputs, positions=inputs.positions + ~inputs.in_prompt))


class ShiftedPositions(VL):
    """Shifts all positions by one, to which rotary embeddings are invariant."""

    def positions(self, num_tokens, media):
        positions = super().positions(num_tokens, media)
        return None if positions is None else positions + 1


class CountsItsOwnRows(Text):
    def forward(self, inputs):
        rows = torch.arange(len(inputs.token_ids))
        return super().forward(replace(inputs, positions=rows))


class AveragesOverSequences(Text):
    """Is correct for a single sequence only."""

    def forward(self, inputs):
        hidden = super().forward(inputs)
        is_one = (inputs.positions.diff() == 1).all()
        return hidden if is_one else hidden - hidden.mean(0)


class FewerLayersThanItHas(Text):
    def __init__(self, config):
        super().__init__(config)
        self.num_layers = config.num_hidden_layers - 1


class NarrowerHeadsThanItHas(Text):
    def __init__(self, config):
        super().__init__(config)
        self.head_dim //= 2


class RemembersWhereItWas(Text):
    """Is wrong when a prompt's first step does not start at position 0."""

    next_position = 0

    def forward(self, inputs):
        hidden = super().forward(inputs)
        first = int(inputs.positions[0])
        is_known = first in (0, self.next_position)
        self.next_position = int(inputs.positions[-1]) + 1
        return hidden if is_known else hidden * 0.9


class GeneratedTokensComeAlone(Text):
    """Is wrong for generated tokens in a step of several tokens."""

    def forward(self, inputs):
        is_decode = len(inputs.token_ids) == 1 or inputs.in_prompt.all()
        hidden = super().forward(inputs)
        return hidden if is_decode else torch.where(inputs.in_prompt[:, None], hidden, hidden * 0.5)


class LargeSum(Text):
    """Loses precision in bfloat16 by adding and subtracting a large constant."""

    def forward(self, inputs):
        return (super().forward(inputs) + 200) - 200


class FloatHidden(Text):
    def forward(self, inputs):
        return super().forward(inputs).float()


BROKEN = [
    # model, failing checks, regex for the message of the first
    (TakesMemory, {"builds_on_meta", "*"}, "extra allocated memory.*; create parameters with"),
    (ReadsValues, {"builds_on_meta", "*"}, "meta device raised .*read no values while building"),
    (NoHeadSize, {"has_what_the_engine_asks_for", "*"}, "lacks head_dim; the Model protocol"),
    (DoesNotKnowAKey, {"loads_the_checkpoint", "*"}, "q_proj.bias.*name the keys that it needs"),
    (TakesAnyKey, {"unknown_keys_are_refused"}, "return None for a key that the model does not"),
    (ReadsNothing, {"missing_keys_are_refused", "*"}, "reads no key .*; make its weights param"),
    (
        LeavesANormOut,
        {"ignored_keys_are_not_needed", "*"},
        "model.norm.weight are ignored, but transformers' model computes with them",
    ),
    (RootOfAWeight, {"dummy_weights_give_finite_logits"}, "compute buffers in init_buffers"),
    (OneSequence, {"shapes_are_right", "*"}, r"\(1, \d+, 60\), must be \(\d+, 60\); hidden states"),
    (Doubles, {"shapes_are_right", "*"}, "logits returns torch.float64.*; keep the dtype"),
    (FewEmbeddings, {"shapes_are_right", "*"}, r"encode_media returns \(5, .* of 6 tokens, must"),
    (FlatPositions, {"shapes_are_right", "*"}, r"positions returns torch.int64 .*of shape \(3"),
    (
        MeanOfAllItems,
        {"encoding_together_equals_one_by_one", "*"},
        "when it is encoded among others; restrict the encoder's attention",
    ),
    (
        LargerLogits,
        {"logits_equal_the_reference"},
        "differ from the reference by .*, 0.0001 is allowed; compare layer by layer",
    ),
    (
        GeneratedLater,
        {"greedy_tokens_equal_the_reference"},
        "from index \\d+ on, .*; if the logits of the prompt agree, the positions",
    ),
    (
        ShiftedPositions,
        {"positions_equal_the_reference"},
        "differ from the reference from token 0 on; see get_rope_index",
    ),
    (CountsItsOwnRows, {"chunks_equal_the_whole", "*"}, "take positions from inputs.positions"),
    (AveragesOverSequences, IN_A_BATCH, "rows of other sequences must not count"),
    (NarrowerHeadsThanItHas, PAGED, "in the paged runner"),
    (FewerLayersThanItHas, {"shapes_are_right", "*"}, "forward .*IndexError"),
    (
        RemembersWhereItWas,
        {"a_prefix_hit_equals_a_cold_start", "*"},
        "a prompt's first step can start at any token",
    ),
    (
        GeneratedTokensComeAlone,
        {"a_preempted_request_equals_an_uninterrupted_one", "*"},
        "generated tokens that are computed again come in one step with the prompt",
    ),
    (LargeSum, {"bf16_stays_near_float32"}, "standard deviation, 15% is allowed; compute norms"),
    (FloatHidden, {"bf16_stays_near_float32"}, "cast back to the dtype of the weights after"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    families = {"text": "qwen2", "vl": "qwen2_5_vl"}
    return {
        kind: write_tiny(family, tmp_path_factory.mktemp(family))
        for kind, family in families.items()
    }


@pytest.fixture(scope="module")
def subject(folders, factory):
    references = {}

    def reference(folder):
        if folder not in references:
            references[folder] = models.transformers_reference(folder)
        return references[folder]

    def make(model):
        kind = "vl" if issubclass(model, VL) else "text"
        media = ("image",) if kind == "vl" else ()
        return models.ModelSubject(
            spec=ModelSpec(
                name="made-up", architectures=("MadeUp",), factory=factory(model), media=media
            ),
            folder=folders[kind],
            config=read_checkpoint(folders[kind]).config,
            cases=CASES[kind],
            tolerance=1e-4,
            make_prompt=make_prompt,
            make_reference=reference,
        )

    return make


@pytest.fixture
def all_failures(failures):
    """Like `failures`, and also returns checks that raise other exceptions than CheckFailed."""

    def run(subject):
        found = {}
        for check in CHECKS:
            try:
                found |= failures([check], subject)
            except Exception as error:
                found[check.__name__] = f"{type(error).__name__}: {error}"
        return found

    return run


@pytest.mark.few_in_ci(10)
@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "checks", "message"),
    [BROKEN[0], *(pytest.param(*broken, marks=pytest.mark.full) for broken in BROKEN[1:])],
)
def test_a_broken_model_fails(subject, all_failures, demand_failures, model, checks, message):
    demand_failures(all_failures(subject(model)), CHECKS, checks, message)


@pytest.mark.full
@pytest.mark.parametrize("model", [Text, VL])
def test_the_unbroken_models_pass(subject, all_failures, model):
    assert all_failures(subject(model)) == {}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "model", [LargerLogits, GeneratedLater, AveragesOverSequences, NarrowerHeadsThanItHas]
)
def test_a_broken_variant_fails(subject, model):
    """It fails in the one check that compares what is paged with the reference."""
    with pytest.raises(CheckFailed, match=r"compared with the reference|in the paged runner"):
        equalities.paged_equals_the_reference(subject(model))


def test_a_variant_runs_its_own_checks_only():
    def tests(of):
        return {name for name in dir(of) if name.startswith("test_") and getattr(of, name)}

    assert tests(ModelVariantConformance) == {
        "test_loads_the_checkpoint",
        "test_logits_equal_the_reference",
        "test_paged_equals_the_reference",
    }
    assert {f"test_{name}" for name in NAMES} < tests(ModelConformance)


@pytest.mark.full
def test_media_that_are_seen_in_both_directions(subject, all_failures):
    """Dense and paged runs agree with each other; only transformers' causal model differs."""
    made = subject(VL)
    made.spec = replace(made.spec, atomic_media=True)
    found = set(all_failures(made)) - {"greedy_tokens_equal_the_reference"}
    assert found == {"logits_equal_the_reference"}


@pytest.mark.full
def test_a_model_that_transformers_does_not_have(subject, all_failures, folders, tmp_path):
    """Checks that need the reference are skipped and say how to provide one; others run."""
    made = subject(TakesAnyKey)
    made.folder = shutil.copytree(folders["text"], tmp_path / "acme")
    config = (made.folder / "config.json").read_text()
    (made.folder / "config.json").write_text(config.replace("Qwen2ForCausalLM", "AcmeForCausalLM"))
    with pytest.raises(CheckSkipped, match=r"has no AcmeForCausalLM; .* in `make_reference`"):
        equalities.logits_equal_the_reference(made)
    assert set(all_failures(made)) == {"unknown_keys_are_refused"}


def test_every_check_has_a_broken_model():
    covered = {next(name for name in NAMES if name in checks) for _, checks, _ in BROKEN}
    covered |= PAGED | IN_A_BATCH  # some models fail exactly these
    assert covered == set(NAMES)
