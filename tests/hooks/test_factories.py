"""Specs become objects; a faulty factory is reported with its plugin's name and never replaced."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm.errors import (
    CheckpointError,
    MediaError,
    ModelNotSupportedError,
    PluginContractError,
    PluginError,
)
from mmdeploy_llm.hooks import LogitsProcessorSpec, PluginManager, ToolParserSpec, hookimpl

SOURCE = """
from mmdeploy_llm.errors import CheckpointError, MediaError

@hookimpl
def provide_models():
    return [ModelSpec(name="m", architectures=("M",), factory={model!r}, media={media!r})]

@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name="p", factory={parser!r})]

@hookimpl
def provide_media_processors():
    return [MediaProcessorSpec(name="q", kind="image", factory={processor!r})]

class Model:
    num_layers, num_kv_heads, head_dim, hidden_size = 1, 2, 3, 4
    def __init__(self, config): self.config = config
    def forward(self, inputs): pass
    def logits(self, hidden): pass
    def positions(self, num_tokens, media): pass
    def weight_targets(self, key): return ()

class MediaModel(Model):
    def encode_media(self, items): pass

class NoLogits(Model):
    logits = None
    head_dim = "3"

class Parser(ReasoningParser):
    def feed(self, text): return []
    def finish(self): return []

class Unfinished(ReasoningParser):
    def feed(self, text): return []

class Holder:
    Parser = Parser

class Processor(MediaProcessor):
    kind, token, markers = "image", "<image>", ("<image>",)
    def __init__(self, checkpoint, options): self.args = (checkpoint, options)
    def decode(self, source, limits): pass
    def process(self, item, options): pass
    def count_tokens(self, item, options): return 0

class VideoProcessor(Processor):
    kind = "video"

class NoToken(Processor):
    token = ""

class OddMarkers(Processor):
    markers = ["<image>"]

class NotAProcessor:
    def __init__(self, checkpoint, options): pass

def raising(*args): raise KeyError("lost")
def exiting(*args): raise SystemExit(4)
def interrupted(*args): raise KeyboardInterrupt
def missing_files(*args): raise CheckpointError("no weights here")
def bad_media(*args): raise MediaError("odd")
number = 3
"""

HERE = "site_acme_llm"


@pytest.fixture
def manager(site):
    """Returns a manager whose only plugin has these factories."""

    def load(model="Model", parser="Parser", processor="Processor", media=()):
        def full(name):
            return name if ":" in name else f"{HERE}:{name}"

        source = SOURCE.format(
            model=full(model), parser=full(parser), processor=full(processor), media=media
        )
        site.install("acme", source, version="1.5")
        return PluginManager.load()

    return load


def test_build_passes_the_arguments(manager):
    manager = manager()
    assert manager.build(manager.models[0], "config").config == "config"
    assert type(manager.build(manager.reasoning_parser("p"))).__name__ == "Parser"
    processor = manager.build(manager.media_processor("image", "m"), "checkpoint", {"a": 1})
    assert processor.args == ("checkpoint", {"a": 1})


def test_build_gives_a_new_object_each_time(manager):
    manager = manager()
    spec = manager.reasoning_parser("p")
    assert manager.build(spec) is not manager.build(spec)


def test_resolve_follows_attributes(manager):
    manager = manager(parser="Holder.Parser")
    assert manager.resolve(manager.reasoning_parser("p")).__name__ == "Parser"


@pytest.mark.parametrize(
    ("factory", "error"),
    [
        ("no_such_module:X", "ModuleNotFoundError"),
        (f"{HERE}:Nothing", "AttributeError"),
        (f"{HERE}:Holder.Nothing", "AttributeError"),
    ],
)
def test_factory_that_cannot_be_imported(manager, factory, error):
    manager = manager(model=factory)
    with pytest.raises(PluginError) as failed:
        manager.resolve(manager.models[0])
    message = str(failed.value)
    assert message.startswith("plugin 'acme' (acme-llm 1.5): ")
    assert f"{factory}, the factory of model m, cannot be imported: {error}" in message
    assert failed.value.__cause__ is not None


def test_exit_in_a_heavy_import(manager, site):
    (site.folder / "site_heavy.py").write_text("import sys; sys.exit('no driver')")
    manager = manager(model="site_heavy:Model")
    with pytest.raises(PluginError, match="SystemExit: no driver"):
        manager.build(manager.models[0], None)
    assert manager.build(manager.reasoning_parser("p"))  # the plugin's other specs work


def test_factory_that_cannot_be_called(manager):
    manager = manager(parser="number")
    with pytest.raises(PluginContractError, match=r"must be a class or a function, got int"):
        manager.build(manager.reasoning_parser("p"))


@pytest.mark.parametrize(
    ("factory", "error", "kind"),
    [
        ("raising", "KeyError: 'lost'", ModelNotSupportedError),
        ("exiting", "SystemExit: 4", PluginError),
    ],
)
def test_raising_factory_names_the_plugin(manager, factory, error, kind):
    manager = manager(model=factory)
    with pytest.raises(kind) as failed:
        manager.build(manager.models[0], None)
    assert str(failed.value) == (
        f"plugin 'acme' (acme-llm 1.5): building model m with {HERE}:{factory} failed: {error}"
    )
    assert failed.value.__cause__ is not None


def test_factory_with_other_arguments_names_the_plugin(manager):
    manager = manager(model="Model")
    with pytest.raises(ModelNotSupportedError, match=r"'acme'.*TypeError"):
        manager.build(manager.models[0])


def test_raising_factory_is_never_replaced_by_another_plugin(manager, site, model_plugin):
    site.install("backup", model_plugin("backup", "M", priority=-1))
    manager = manager(model="raising")
    with pytest.raises(ModelNotSupportedError, match="'acme'"):
        manager.build(manager.model_for(["M"]), None)


@pytest.mark.parametrize(
    ("factory", "error"), [("missing_files", CheckpointError), ("bad_media", MediaError)]
)
def test_errors_of_this_package_pass_through(manager, factory, error):
    manager = manager(model=factory)
    with pytest.raises(error, match=r"^(no weights here|odd)$"):
        manager.build(manager.models[0], None)


def test_keyboard_interrupt_passes_through(manager):
    manager = manager(model="interrupted")
    with pytest.raises(KeyboardInterrupt):
        manager.build(manager.models[0], None)


def test_abstract_parser_cannot_be_built(manager):
    manager = manager(parser="Unfinished")
    with pytest.raises(PluginError, match=r"'acme'.*abstract.*finish"):
        manager.build(manager.reasoning_parser("p"))


def test_tool_parser_of_another_type():
    manager = PluginManager()
    spec = ToolParserSpec(name="t", factory="builtins:list")
    manager.register(SimpleNamespace(provide_tool_parsers=hookimpl(lambda: [spec])), "acme")
    with pytest.raises(PluginContractError, match=r"'acme'.*must be a ToolParser .*got list"):
        manager.build(spec)


def test_logits_processor_of_another_type():
    manager = PluginManager()
    spec = LogitsProcessorSpec(name="l", factory="builtins:list")
    manager.register(SimpleNamespace(provide_logits_processors=hookimpl(lambda: [spec])), "acme")
    with pytest.raises(PluginContractError, match=r"'acme'.*must be a LogitsProcessor .*got list"):
        manager.build(spec)


def test_parser_of_another_type(manager):
    manager = manager(parser="builtins:list")
    with pytest.raises(PluginContractError, match=r"'acme'.*must be a ReasoningParser.*got list"):
        manager.build(manager.reasoning_parser("p"))


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("NotAProcessor", "must be a MediaProcessor from mmdeploy_llm.hooks, got NotAProcessor"),
        ("VideoProcessor", "has kind 'video', but its spec says 'image'"),
        ("NoToken", "must have a `token` text that is not empty, got ''"),
        ("OddMarkers", "must have `markers`, a tuple of texts"),
    ],
)
def test_processor_that_breaks_its_contract(manager, factory, problem):
    manager = manager(processor=factory)
    with pytest.raises(PluginContractError) as failed:
        manager.build(manager.media_processor("image", "m"), None, {})
    assert "plugin 'acme'" in str(failed.value)
    assert problem in str(failed.value)


def test_model_that_breaks_its_contract(manager):
    manager = manager(model="NoLogits")
    with pytest.raises(PluginContractError, match=r"\(NoLogits\) lacks head_dim, logits$"):
        manager.build(manager.models[0], None)


@pytest.mark.parametrize(("model", "is_good"), [("Model", False), ("MediaModel", True)])
def test_model_with_media_must_encode_them(manager, model, is_good):
    manager = manager(model=model, media=("image",))
    if is_good:
        assert manager.build(manager.models[0], None)
        return
    with pytest.raises(PluginContractError, match="lacks encode_media"):
        manager.build(manager.models[0], None)
