"""What another plugin serves is found for every kind of spec."""

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.testing.scaffold.rivals import rivals_of


def test_every_spec_is_looked_for_among_its_own_kind():
    """`plugins list` ended with an error when a new hook's specs were taken for reading presets."""
    manager = PluginManager.load()
    told = {plugin.name: rivals_of(manager, plugin.name) for plugin in manager.plugins}
    found = {name: lines for name, lines in told.items() if lines}
    assert list(found) == ["transformers_any"]
    assert found["transformers_any"] == ("Gemma3ForConditionalGeneration is served by 'gemma'",)
