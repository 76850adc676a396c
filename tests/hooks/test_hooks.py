"""A test named test_hook_<name> for each hook, and the isolation of the calls after loading."""

import logging
from types import SimpleNamespace

import pytest

from mmdeploy_llm import hooks
from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    MediaTimeoutError,
    PluginError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import (
    ChatPartSpec,
    CorpusFormatSpec,
    LogitsProcessorSpec,
    MediaLimits,
    MediaProcessorSpec,
    MediaRef,
    ModelFileSpec,
    ModelSpec,
    OutputSinkSpec,
    PluginManager,
    ReadingPreset,
    ReasoningParserSpec,
    ToolParserSpec,
    WeightFormatSpec,
)

REF = MediaRef(kind="image", uri="cat.png")
LIMITS = MediaLimits()


@pytest.fixture
def manager(make_plugin):
    """Builds a manager with plugins given as {name: {hook: function}}, registered in this order."""

    def make(**plugins):
        manager = PluginManager()
        for name, given in plugins.items():
            manager.register(make_plugin(**given), name)
        return manager

    return make


def raising(*args):
    raise OSError("broken")


def exiting(*args):
    raise SystemExit(1)


def test_hook_provide_models(manager):
    spec = ModelSpec(name="m", architectures=("M",), factory="a:b")
    assert manager(one={"provide_models": lambda: iter([spec])}).models == (spec,)


def test_hook_provide_reasoning_parsers(manager):
    spec = ReasoningParserSpec(name="p", factory="a:b")
    plugins = manager(one={"provide_reasoning_parsers": lambda: (spec,)})
    assert plugins.reasoning_parsers == (spec,)


def test_hook_provide_tool_parsers(manager):
    spec = ToolParserSpec(name="p", factory="a:b", aliases=("pp",))
    plugins = manager(one={"provide_tool_parsers": lambda: iter([spec])})
    assert plugins.tool_parsers == (spec,)
    assert plugins.tool_parser("PP") is spec
    assert plugins.plugins[0].provides == ("tool parser p",)


def test_hook_provide_logits_processors(manager):
    spec = LogitsProcessorSpec(name="p", factory="a:b", aliases=("pp",), arguments=("x",))
    plugins = manager(one={"provide_logits_processors": lambda: iter([spec])})
    assert plugins.logits_processors == (spec,)
    assert plugins.logits_processor("PP") is spec
    assert plugins.plugins[0].provides == ("logits processor p",)


def test_hook_provide_media_processors(manager):
    spec = MediaProcessorSpec(name="q", kind="video", factory="a:b")
    plugins = manager(one={"provide_media_processors": lambda: [spec]})
    assert plugins.media_processors == (spec,)


def test_hook_provide_reading_presets(manager):
    both = [
        ReadingPreset(name="a", architectures=("X",), tasks={"page": "Read."}),
        ReadingPreset(name="b", architectures=("X",), tasks={"page": ""}, marks=("Ocr-B",)),
    ]
    plugins = manager(one={"provide_reading_presets": lambda: both})
    assert plugins.reading_presets == tuple(both)
    assert plugins.reading_preset("B") is both[1]
    assert plugins.reading_preset_for("X", "models/other") is both[0]
    assert plugins.reading_preset_for("X", "models/my-ocr-b") is both[1]
    assert plugins.reading_preset_for("Y", "my-ocr-b") is None
    assert plugins.plugins[0].provides == ("reading preset a", "reading preset b")


def test_hook_fetch_media(manager):
    asked = []

    def fetch(ref, limits):
        asked.append((ref, limits))
        return b"meow"

    plugins = manager(one={"fetch_media": fetch})
    assert plugins.fetch_media(REF, LIMITS) == b"meow"
    assert asked == [(REF, LIMITS)]


def test_hook_on_engine_start(manager):
    told = []
    plugins = manager(one={"on_engine_start": lambda info: told.append(info)})
    plugins.notify("on_engine_start", info="facts")
    assert told == ["facts"]


def test_hook_on_step(manager):
    told = []
    plugins = manager(one={"on_step": lambda stats: told.append(stats)})
    plugins.notify("on_step", stats="facts")
    assert told == ["facts"]


def test_hook_on_request_finished(manager):
    told = []
    plugins = manager(one={"on_request_finished": lambda record: told.append(record)})
    plugins.notify("on_request_finished", record="facts")
    assert told == ["facts"]


def test_hook_on_engine_stop(manager):
    told = []
    plugins = manager(one={"on_engine_stop": lambda info: told.append(info)})
    plugins.notify("on_engine_stop", info="facts")
    assert told == ["facts"]


def test_hook_extend_cli(manager):
    app = []
    manager(one={"extend_cli": lambda app: app.append("command")}).extend_cli(app)
    assert app == ["command"]


def test_implementation_may_leave_arguments_out(manager):
    plugins = manager(one={"fetch_media": lambda ref: b"x", "on_step": lambda: None})
    assert plugins.fetch_media(REF, LIMITS) == b"x"
    plugins.notify("on_step", stats=None)
    assert plugins.failures == ()


# fetch_media


def test_first_answer_wins_and_none_declines(manager):
    calls = []

    def fetcher(name, answer):
        return {"fetch_media": lambda ref: calls.append(name) or answer}

    plugins = manager(
        first=fetcher("first", b"1"), second=fetcher("second", b"2"), third=fetcher("third", None)
    )
    assert plugins.fetch_media(REF, LIMITS) == b"2"
    assert calls == ["third", "second"]  # the last registered is called first


def test_trylast_is_called_last(site):
    fetch = "@hookimpl({options})\ndef fetch_media(ref): return {answer!r}"
    site.install("own", fetch.format(options="", answer=b"own"))
    site.install("zzz", fetch.format(options="trylast=True", answer=b"default"))
    assert PluginManager.load().fetch_media(REF, LIMITS) == b"own"


def test_empty_bytes_are_an_answer(manager):
    plugins = manager(one={"fetch_media": lambda: b"other"}, two={"fetch_media": lambda: b""})
    assert plugins.fetch_media(REF, LIMITS) == b""


def test_refusal_of_a_fetcher_passes_through(manager):
    def refuse(ref):
        raise MediaTimeoutError("too slow")

    plugins = manager(one={"fetch_media": lambda ref: b"other"}, two={"fetch_media": refuse})
    with pytest.raises(MediaTimeoutError, match=r"^too slow$"):
        plugins.fetch_media(REF, LIMITS)


@pytest.mark.parametrize(
    ("fault", "text"), [(raising, "OSError: broken"), (exiting, "SystemExit: 1")]
)
def test_raising_fetcher_is_that_request_s_error(manager, fault, text):
    plugins = manager(bad={"fetch_media": lambda ref: fault()})
    for _ in range(2):  # and is called again: the next item may be fine
        with pytest.raises(MediaError) as failed:
            plugins.fetch_media(REF, LIMITS)
        assert type(failed.value) is MediaError
        assert "plugin 'bad'" in str(failed.value)
        assert f"failed to fetch 'cat.png': {text}" in str(failed.value)
        assert failed.value.__cause__ is not None
    assert plugins.failures == ()


@pytest.mark.parametrize("answer", ["text", bytearray(b"x"), 3, False])
def test_fetcher_that_returns_something_else(manager, answer):
    plugins = manager(bad={"fetch_media": lambda: answer})
    with pytest.raises(MediaError, match=r"'bad'.* must return bytes or None .*got \w+$"):
        plugins.fetch_media(REF, LIMITS)


def test_more_bytes_than_allowed(manager):
    plugins = manager(one={"fetch_media": lambda: b"12345"})
    assert plugins.fetch_media(REF, MediaLimits(max_bytes=5)) == b"12345"
    with pytest.raises(MediaLimitError, match=r"'cat\.png' has 5 bytes, 4 are allowed"):
        plugins.fetch_media(REF, MediaLimits(max_bytes=4))


def test_nobody_answers(manager):
    plugins = manager(disk={"fetch_media": lambda: None}, web={"fetch_media": lambda: None})
    with pytest.raises(UnsupportedMediaError) as refused:
        plugins.fetch_media(MediaRef(kind="video", uri="gopher://x"), LIMITS)
    message = str(refused.value)
    assert message.startswith("video 'gopher://x' has no accepted form")
    for form in ("a path", "file://", "data: URL", "http(s)://", "bytes", "loaded object"):
        assert form in message
    assert message.endswith("Plugins tried: disk, web")


def test_nobody_is_there_to_answer(site):
    site.install("sources", "import no_such_module")
    with pytest.raises(UnsupportedMediaError) as refused:
        PluginManager.load().fetch_media(REF, LIMITS)
    assert "Plugins tried: none" in str(refused.value)
    assert "'sources' (sources-llm): import: ModuleNotFoundError" in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("folder/cat.png", "image 'folder/cat.png' has"),
        ("/home/someone/cat.png", "image '/home/someone/cat.png' has"),
        ("/home/" + "a" * 5000 + "/cat.png", "image '/home/aaa"),
        ("file:///home/someone/cat.png", "image 'file:///home/someone/cat.png' has"),
        ("file://user:secret@host/cat.png", "image 'file://host/cat.png' has"),
        ("a_b://user:secret@host/cat.png?token=1", "image 'a_b://host/cat.png' has"),
        ("ftp://user:secret@host/cat.png?token=1", "image 'ftp://host/cat.png' has"),
        ("data:image/png;base64,AAAA", "image 'data:image/png;base64,AAAA' has"),
    ],
)
def test_messages_show_paths_as_given_and_no_secrets(uri, shown):
    with pytest.raises(UnsupportedMediaError) as refused:
        PluginManager().fetch_media(MediaRef(kind="image", uri=uri), LIMITS)
    assert str(refused.value).startswith(shown)
    assert len(str(refused.value)) < 800


def test_a_long_uri_is_truncated_in_messages():
    with pytest.raises(UnsupportedMediaError) as refused:
        PluginManager().fetch_media(MediaRef(kind="image", uri="data:," + "x" * 10**6), LIMITS)
    assert len(str(refused.value)) < 500


# on_*


@pytest.mark.parametrize("fault", [raising, exiting])
def test_raising_observer_is_logged_once_and_muted(manager, caplog, fault):
    told = []
    calls = []

    def observe(stats):
        calls.append(stats)
        fault()

    plugins = manager(
        a={"on_step": lambda stats: told.append("a")},
        bad={"on_step": observe, "on_engine_stop": lambda info: told.append("bad")},
        z={"on_step": lambda stats: told.append("z")},
    )
    for _ in range(3):
        plugins.notify("on_step", stats=None)
    assert sorted(told) == ["a"] * 3 + ["z"] * 3
    assert len(calls) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'bad'" in record.getMessage()
    assert "its on_step is not called again" in record.getMessage()
    (failure,) = plugins.failures
    assert (failure.plugin, failure.phase) == ("bad", "observe")
    plugins.notify("on_engine_stop", info=None)  # only the observer that raised is muted
    assert told[-1] == "bad"


def test_muting_is_a_matter_of_one_manager(manager):
    hooks = {"bad": {"on_step": lambda stats: raising()}}
    first, second = manager(**hooks), manager(**hooks)
    first.notify("on_step", stats=None)
    assert len(first.failures) == 1
    assert second.failures == ()


def test_observer_does_not_catch_keyboard_interrupt(manager):
    def interrupt(stats):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager(one={"on_step": interrupt}).notify("on_step", stats=None)


def test_notify_is_for_observers_only(manager):
    with pytest.raises(AssertionError, match="fetch_media"):
        manager().notify("fetch_media", ref=REF, limits=LIMITS)


# extend_cli


def test_raising_extension_costs_only_its_own_commands(manager, caplog):
    app = []
    plugins = manager(
        a={"extend_cli": lambda app: app.append("a")},
        bad={"extend_cli": lambda app: raising()},
        z={"extend_cli": lambda app: app.append("z")},
    )
    plugins.extend_cli(app)
    assert sorted(app) == ["a", "z"]
    assert "its commands are missing" in caplog.text
    assert [failure.phase for failure in plugins.failures] == ["extend"]


def test_hook_provide_output_sinks():
    spec = OutputSinkSpec(name="rows", suffixes=(".rows",), factory="json:loads")
    plugin = SimpleNamespace(provide_output_sinks=hooks.hookimpl(lambda: [spec]))
    manager = PluginManager()
    manager.register(plugin, "rows")
    assert manager.provided(OutputSinkSpec) == (spec,)
    assert manager.kinds.output_of(".rows").origin.name == "rows"
    with pytest.raises(PluginError, match=r"'rows'.*output sink rows.*json:loads failed"):
        manager.build(spec, object(), True)


def test_hook_provide_attention_backends():
    spec = hooks.AttentionBackendSpec(name="mine", factory="json:loads", aliases=("my_own",))
    plugin = SimpleNamespace(provide_attention_backends=hooks.hookimpl(lambda: [spec]))
    manager = PluginManager()
    manager.register(plugin, "mine")
    assert manager.provided(hooks.AttentionBackendSpec) == (spec,)
    assert manager.named(hooks.AttentionBackendSpec, "attention backend", "My-Own") is spec


def test_hook_provide_weight_formats():
    spec = WeightFormatSpec(name="acme_4", factory="json:loads", suffixes=(".codes",))
    plugin = SimpleNamespace(provide_weight_formats=hooks.hookimpl(lambda: [spec]))
    manager = PluginManager()
    manager.register(plugin, "acme")
    assert manager.provided(WeightFormatSpec) == (spec,)
    assert manager.named(WeightFormatSpec, "weight format", "Acme-4") is spec
    assert manager.plugins[0].provides == ("weight format acme_4",)


def test_hook_provide_model_files():
    spec = ModelFileSpec(name="acme", factory="json:loads", first_bytes=(b"acme",))
    plugin = SimpleNamespace(provide_model_files=hooks.hookimpl(lambda: [spec]))
    manager = PluginManager()
    manager.register(plugin, "acme")
    assert manager.provided(ModelFileSpec) == (spec,)
    assert manager.plugins[0].provides == ("model file acme",)


def test_hook_provide_chat_parts():
    spec = ChatPartSpec(name="place", types=("place",), factory="json:loads")
    plugin = SimpleNamespace(provide_chat_parts=hooks.hookimpl(lambda: [spec]))
    manager = PluginManager()
    manager.register(plugin, "acme")
    assert manager.provided(ChatPartSpec) == (spec,)
    assert manager.kinds.chat_part("place").origin.name == "acme"


def test_hook_provide_corpus_formats():
    spec = CorpusFormatSpec(name="bars", suffixes=(".bars",), reader="json:loads")
    plugin = SimpleNamespace(provide_corpus_formats=hooks.hookimpl(lambda: [spec]))
    manager = PluginManager()
    manager.register(plugin, "bars")
    assert manager.provided(CorpusFormatSpec) == (spec,)
    assert manager.kinds.format_of(".bars").origin.name == "bars"
