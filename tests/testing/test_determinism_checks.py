"""Models that compute rows together fail the check of determinism, which names the operation."""

import pytest
import torch
from mmdeploy_llm_plugins.qwen import provide_models

from mmdeploy_llm.hooks import ModelSpec
from mmdeploy_llm.testing import CheckSkipped, write_tiny
from mmdeploy_llm.testing.models.base import CheckFailed, factory_of
from mmdeploy_llm.testing.models.determinism import no_bit_depends_on_the_batch
from mmdeploy_llm.testing.models.models import ModelSubject
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.weights.folder import read_checkpoint

FACTORIES = {spec.name: factory_of(spec) for spec in provide_models()}
Text, VL = FACTORIES["qwen2"], FACTORIES["qwen2_5_vl"]
CASES = {
    "qwen2": {"text": (), "other text": ()},
    "qwen2_5_vl": {"text": (), "images": ((1, 4, 6), (1, 8, 4))},
}


def shifted(module, shift):
    """Adds shift(out) to what the module returns."""
    own = module.forward
    module.forward = lambda x, *others: (out := own(x, *others)) + shift(out)


def mean_of_rows(out):
    """The smallest sum over rows that a model could make."""
    return (out.float().mean(0) * 1e-3).to(out.dtype)


class AddsOverRows(Text):
    def __init__(self, config):
        super().__init__(config)
        shifted(self.model.layers[1].mlp.down_proj, mean_of_rows)


class CountsRows(Text):
    """The logits depend on how many there are."""

    def logits(self, hidden):
        return super().logits(hidden) * (1 + 2**-6 * hidden.shape[0])


class AddsOverImages(VL):
    def __init__(self, config):
        super().__init__(config)
        shifted(self.visual.blocks[0].attn.proj, mean_of_rows)


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory, factory):
    """Returns the subject of a model class, served on a tiny checkpoint of its family."""

    def subject(model, family, *, deterministic=True):
        folder = tmp_path_factory.mktemp(family)
        write_tiny(family, folder)
        spec = ModelSpec(
            name=family,
            architectures=("Any",),
            factory=factory(model),
            media=("image",),
            deterministic=deterministic,
        )
        return ModelSubject(
            spec=spec,
            folder=folder,
            config=read_checkpoint(folder).config,
            cases=CASES[family],
            tolerance=1e-4,
            make_prompt=make_prompt,
            make_reference=lambda folder: None,
        )

    return subject


@pytest.mark.full
@pytest.mark.parametrize("family", CASES)
def test_models_that_keep_the_promise(subject_of, family):
    no_bit_depends_on_the_batch(subject_of(FACTORIES[family], family))


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "family", "cause"),
    [
        (AddsOverRows, "qwen2", r"from model\.layers\.1\.mlp\.down_proj on"),
        (CountsRows, "qwen2", "from the output head on"),
        (AddsOverImages, "qwen2_5_vl", r"from visual\.blocks\.0\.attn\.proj on"),
    ],
)
def test_a_model_that_breaks_the_promise_is_named(subject_of, model, family, cause):
    with pytest.raises(CheckFailed, match=cause):
        no_bit_depends_on_the_batch(subject_of(model, family))


def test_a_spec_that_promises_nothing_is_not_checked(subject_of):
    with pytest.raises(CheckSkipped, match="does not promise it"):
        no_bit_depends_on_the_batch(subject_of(AddsOverRows, "qwen2", deterministic=False))


def test_a_product_of_torch_is_found_before_anything_runs(subject_of):
    subject = subject_of(Text, "qwen2")
    model = subject.build(torch.float32)
    model.extra = torch.nn.Linear(4, 4)
    subject.build = lambda *_: model
    with pytest.raises(CheckFailed, match="torch computes extra in an order"):
        no_bit_depends_on_the_batch(subject)
