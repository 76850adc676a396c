"""The plugin decoders: what the standard decoder lacks is refused.
test_text_models.py compares each family with transformers."""

import pytest
import transformers

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.model_folder import read_checkpoint
from mmdeploy_llm_plugins.decoders import CLASSES
from mmdeploy_llm_plugins.decoders.families import FAMILIES
from mmdeploy_llm_plugins.decoders.model import decoder_config, new_model


def test_every_class_has_a_family_that_reads_what_transformers_declares():
    """With the defaults of its config, those of the published models."""
    assert FAMILIES.keys() == CLASSES.keys()
    for name, architecture in CLASSES.items():
        config = getattr(transformers, architecture).config_class()
        assert decoder_config(FAMILIES[name], config).num_layers == config.num_hidden_layers


@pytest.mark.parametrize(
    ("family", "options"),
    [("arcee", {"hidden_act": "softsign"}), ("smollm3", {"hidden_act": "tanh"})],
)
def test_what_the_decoder_lacks_is_left_to_transformers_any(tiny_folder, family, options):
    config = read_checkpoint(tiny_folder(family)).config
    for name, value in options.items():
        setattr(config, name, value)
    words = rf"{next(iter(options))} .*blocked_plugins=\('decoders',\)"
    with pytest.raises(ModelNotSupportedError, match=words):
        new_model(config)
