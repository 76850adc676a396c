import types

import pytest

from mmdeploy_llm.errors import (
    ConfigError,
    ModelNotSupportedError,
    PluginConflictError,
    PluginContractError,
    PluginError,
)
from mmdeploy_llm.hooks import PluginManager, ReasoningParserSpec, ToolParserSpec, hookimpl

PROCESSORS = """
@hookimpl
def provide_media_processors():
    return [MediaProcessorSpec(name={name!r}, kind={kind!r}, models={models!r}, factory="a:b",
                               priority={priority})]
"""

PARSER = """
@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name={name!r}, factory="a:b", priority={priority})]
"""


def processor(name, kind="image", models=("*",), priority=0):
    return PROCESSORS.format(name=name, kind=kind, models=models, priority=priority)


def parser(name, priority=0):
    return PARSER.format(name=name, priority=priority)


def test_model_is_found_by_architecture(site, model_plugin):
    site.install("one", model_plugin("one", "One"))
    site.install("two", model_plugin("two", "Two"))
    manager = PluginManager.load()
    assert manager.model_for(["Two"]).name == "two"
    assert manager.model_for(["Unknown", "Two", "One"]).name == "two"


def test_higher_priority_wins_whatever_the_names(site, model_plugin):
    site.install("a", model_plugin("low", "Same", priority=-1))
    site.install("b", model_plugin("high", "Same", priority=5))
    site.install("c", model_plugin("mid", "Same", priority=0))
    manager = PluginManager.load()
    assert manager.model_for(["Same"]).name == "high"
    assert manager.owner(manager.model_for(["Same"])) == "b"


def test_any_architecture_comes_after_every_name(site, model_plugin):
    site.install("any", model_plugin("any", "*", priority=9))
    site.install("one", model_plugin("one", "One", priority=-9))
    manager = PluginManager.load()
    assert manager.model_for(["One"]).name == "one"
    assert manager.model_for(["Unknown", "One"]).name == "one"
    assert manager.model_for(["Unknown"]).name == "any"
    with pytest.raises(ModelNotSupportedError, match="names no architecture"):
        manager.model_for([])


def test_tie_at_the_top_names_both_and_the_ways_out(site, model_plugin):
    site.install("low", model_plugin("x", "Same", priority=-1))
    site.install("one", model_plugin("x", "Same"), version="1.1")
    site.install("two", model_plugin("y", "Same"), version="2.2")
    manager = PluginManager.load()
    with pytest.raises(PluginConflictError) as conflict:
        manager.model_for(["Same"])
    message = str(conflict.value)
    assert "architecture 'Same'" in message
    assert "plugin 'one' (one-llm 1.1) and from plugin 'two' (two-llm 2.2)" in message
    assert "priority 0" in message
    assert "low" not in message
    assert "blocked_plugins=['two']" in message
    assert "`plugins`" in message
    # both solutions that the message names
    assert PluginManager.load(blocked=("two",)).model_for(["Same"]).name == "x"
    assert PluginManager.load(("two",)).model_for(["Same"]).name == "y"


def test_tie_elsewhere_harms_nobody(site, model_plugin):
    site.install("one", model_plugin("x", "Same"))
    site.install("two", model_plugin("y", "Same"))
    site.install("other", model_plugin("z", "Other"))
    assert PluginManager.load().model_for(["Other"]).name == "z"


def test_unsupported_model_lists_the_supported_ones(site, model_plugin):
    site.install("one", model_plugin("qwen3", "Qwen3ForCausalLM"))
    site.install("broken", "import no_such_module")
    manager = PluginManager.load()
    with pytest.raises(ModelNotSupportedError) as missing:
        manager.model_for(["Qwen2ForCausalLM"])
    message = str(missing.value)
    assert "'Qwen2ForCausalLM'; did you mean 'Qwen3ForCausalLM'?" in message
    assert "Supported: Qwen3ForCausalLM." in message
    assert "Loaded plugins: one" in message
    assert "'broken' (broken-llm): import: ModuleNotFoundError" in message


def test_unsupported_model_without_any_plugin():
    with pytest.raises(ModelNotSupportedError, match=r"Supported: none.*Loaded plugins: none$"):
        PluginManager().model_for(["A"])
    with pytest.raises(ModelNotSupportedError, match=r"config\.json .* names no architecture"):
        PluginManager().model_for([])


@pytest.mark.parametrize("name", ["ernie-45-vl", "ernie_45_vl", "ERNIE-45_vl"])
def test_parser_names_are_normalised_on_both_sides(site, name):
    site.install("one", parser("Ernie_45-VL"))
    assert PluginManager.load().reasoning_parser(name).name == "Ernie_45-VL"


def test_unknown_parser(site):
    site.install("one", parser("qwen3"))
    site.install("broken", "import no_such_module")
    with pytest.raises(ConfigError) as unknown:
        PluginManager.load().reasoning_parser("qwen33")
    message = str(unknown.value)
    assert "'qwen33'; did you mean 'qwen3'?" in message
    assert "Known: qwen3" in message
    assert "'broken' (broken-llm): import:" in message


def test_named_family_beats_any_model_whatever_the_priority(site):
    site.install("any", processor("any", priority=9))
    site.install("named", processor("named", models=("ernie4_5_vl_moe", "other")))
    manager = PluginManager.load()
    assert manager.media_processor("image", "ernie4_5_vl_moe").name == "named"
    assert manager.media_processor("image", "ernie4-5-VL-moe").name == "named"
    assert manager.media_processor("image", "qwen2_5_vl").name == "any"


def test_no_processor(site):
    site.install("named", processor("named", models=("ernie",)))
    manager = PluginManager.load()
    assert manager.media_processor("image", "qwen") is None
    assert manager.media_processor("video", "ernie") is None


def test_processor_priority_and_tie(site):
    site.install("one", processor("one"))
    site.install("two", processor("two", priority=1))
    assert PluginManager.load().media_processor("image", "x").name == "two"
    site.install("three", processor("three", priority=1))
    with pytest.raises(PluginConflictError, match="the image processor for model 'x'"):
        PluginManager.load().media_processor("image", "x")


def test_parsers_by_other_names():
    """A name and an alias weigh the same: priority decides, a tie is an error."""
    manager = PluginManager()

    def add(plugin_name, **fields):
        spec = ToolParserSpec(factory="a:b", **fields)
        plugin = types.SimpleNamespace(provide_tool_parsers=hookimpl(lambda: [spec]))
        manager.register(plugin, plugin_name)
        return spec

    one = add("one", name="one", aliases=("Same_Name",))
    assert manager.tool_parser("same-name") is one
    two = add("two", name="same_name", priority=1)
    assert manager.tool_parser("SAME-NAME") is two
    add("three", name="three", aliases=("same-name",), priority=1)
    with pytest.raises(PluginConflictError, match="tool parser 'same-name' comes from"):
        manager.tool_parser("same-name")
    with pytest.raises(ConfigError, match=r"no tool parser 'thre'; did you mean 'three'\?"):
        manager.tool_parser("thre")


def test_owner_of_a_foreign_spec():
    spec = ReasoningParserSpec(name="p", factory="a:b")
    with pytest.raises(PluginError, match="reasoning parser p comes from no plugin"):
        PluginManager().owner(spec)


PICKY = """
def refusal(config):
    if config.get("raises"):
        raise config["raises"]
    return config.get("reason")


@hookimpl
def provide_models():
    return [ModelSpec(name={name!r}, architectures=("Same",), factory="json:loads",
                      refuses=f"{{__name__}}:refusal", priority={priority})]
"""
ODD = {"reason": "odd heads are not supported"}


def test_a_model_that_a_plugin_refuses_is_taken_by_the_next(site, model_plugin, caplog):
    site.install("picky", PICKY.format(name="picky", priority=5))
    site.install("any", model_plugin("any", "*"))
    manager = PluginManager.load()
    assert [manager.model_for(["Same"], config).name for config in (None, {})] == ["picky"] * 2
    assert caplog.messages == []
    assert [manager.model_for(["Same"], ODD).name for _ in range(2)] == ["any"] * 2
    assert caplog.messages == [
        "architecture 'Same' comes from plugin 'any' (any-llm 1.0): plugin 'picky' (picky-llm 1.0) "
        "refuses it: odd heads are not supported"
    ]
    chosen = PluginManager.load(use={"Same": "picky"})
    assert chosen.model_for(["Same"], ODD).name == "picky"


def test_a_refusal_is_told_after_a_choice_for_the_same_name(site, model_plugin, caplog):
    """Each reason is told once; processes that are told the choices take what runs the model."""
    site.install("picky", PICKY.format(name="picky", priority=5))
    site.install("low", model_plugin("low", "Same"))
    manager = PluginManager.load()
    others = {"reason": "other heads"}
    found = [manager.model_for(["Same"], config).name for config in ({}, ODD, others, ODD)]
    assert found == ["picky", "low", "low", "low"]
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [message.partition("refuses it: ")[2] for message in told] == [
        "odd heads are not supported",
        "other heads",
    ]
    assert manager.choices == {"Same": "low"}


def test_a_plugin_that_use_names_is_built_without_an_earlier_refusal(site, model_plugin):
    """The error of its factory, json.loads, does not name who refused another model."""
    site.install("picky", PICKY.format(name="picky", priority=5))
    site.install("any", model_plugin("any", "*"))
    manager = PluginManager.load(use={"Other": "any"})
    manager.model_for(["Same"], ODD)
    with pytest.raises(ModelNotSupportedError, match=r"^((?!picky).)*$"):
        manager.build(manager.model_for(["Other"], ODD), ODD)


def test_of_two_at_one_priority_one_that_takes_the_model_is_no_tie(site, model_plugin):
    site.install("picky", PICKY.format(name="picky", priority=0))
    site.install("same", model_plugin("same", "Same"))
    assert PluginManager.load().model_for(["Same"], ODD).name == "same"


def test_a_model_that_all_refuse_is_an_error_with_their_reasons(site, model_plugin):
    site.install("one", PICKY.format(name="one", priority=5))
    site.install("two", PICKY.format(name="two", priority=0))
    with pytest.raises(ModelNotSupportedError) as missing:
        PluginManager.load().model_for(["Same"], ODD)
    message = str(missing.value)
    assert message.startswith("no loaded plugin takes this model of the architecture 'Same': ")
    assert message.index("plugin 'one' (one-llm 1.0) refuses it: odd heads") < message.index(
        "plugin 'two' (two-llm 1.0) refuses it: odd heads"
    )


def test_the_error_of_the_next_plugin_names_the_first(site, model_plugin):
    """Its factory, json.loads, takes no config."""
    site.install("picky", PICKY.format(name="picky", priority=5))
    site.install("any", model_plugin("any", "*"))
    manager = PluginManager.load()
    with pytest.raises(ModelNotSupportedError, match=r"'any'.*failed.*'picky'.*: odd heads"):
        manager.build(manager.model_for(["Same"], ODD), ODD)
    with pytest.raises(ModelNotSupportedError, match=r"^((?!picky).)*$"):
        manager.build(manager.model_for(["Other"], ODD), ODD)


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({"reason": 3}, PluginContractError, "must return a text or None, got 3"),
        ({"raises": KeyError("heads")}, PluginError, "failed: KeyError: 'heads'"),
        ({"raises": ConfigError("no heads")}, ConfigError, "^no heads$"),
    ],
)
def test_a_refusal_that_fails_names_the_plugin(site, config, kind, words):
    site.install("picky", PICKY.format(name="picky", priority=5))
    with pytest.raises(kind, match=words) as failed:
        PluginManager.load().model_for(["Same"], config)
    assert kind is ConfigError or "plugin 'picky' (picky-llm 1.0)" in str(failed.value)
