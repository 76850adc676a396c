"""Methods of LLM for whole batches: what is given with its default is given."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm import EngineConfig
from mmdeploy_llm.client.bulk.reading import _warn_of_budget


@pytest.mark.parametrize(
    ("options", "wanted", "is_told"),
    [
        ({}, 512, True),
        ({"image_tokens": None}, 512, True),  # None is the same as nothing
        ({"image_tokens": "full"}, 512, False),
        ({"image_tokens": 64}, 512, False),
        ({}, "full", False),
        ({}, None, False),
    ],
)
def test_a_budget_that_a_preset_is_not_made_for_is_told_unless_the_caller_has_one(
    options, wanted, is_told, caplog
):
    preset = SimpleNamespace(name="acme", image_tokens=wanted)
    reader = SimpleNamespace(image_tokens=wanted, asking=SimpleNamespace(preset=preset))
    _warn_of_budget(EngineConfig(model="m", **options), reader)
    assert ("which is not given" in caplog.text) is is_told
