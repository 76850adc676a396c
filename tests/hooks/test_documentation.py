"""The pages for plugin authors say what the code says, and their examples run."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from mmdeploy_llm import errors, hooks
from mmdeploy_llm.hooks import MediaLimits, MediaProcessor, MediaRef, PluginManager, specs

ROOT = Path(__file__).parents[2]
PAGES = (
    "plugins/mmdeploy_llm_plugins/README.md",
    "docs/plugin_specs.md",
    "docs/plugin_objects.md",
    "docs/architectures.md",
)
PLUGINS = "\n".join((ROOT / page).read_text() for page in PAGES)
REFERENCE = (ROOT / "docs/plugin_reference.md").read_text()
PROCESSORS = (ROOT / "processors/mmdeploy_llm_processors/README.md").read_text()

# The frozen surface: a change here is a change of the plugin API and belongs in the CHANGELOG.
HOOKS = {
    "provide_models": (),
    "provide_reasoning_parsers": (),
    "provide_tool_parsers": (),
    "provide_logits_processors": (),
    "provide_media_processors": (),
    "provide_reading_presets": (),
    "provide_corpus_formats": (),
    "provide_output_sinks": (),
    "provide_attention_backends": (),
    "provide_weight_formats": (),
    "provide_model_files": (),
    "provide_chat_parts": (),
    "fetch_media": ("ref", "limits"),
    "on_engine_start": ("info",),
    "on_step": ("stats",),
    "on_request_finished": ("record",),
    "on_engine_stop": ("info",),
    "extend_cli": ("app",),
}


def written_signature(function):
    """Returns the signature as in a heading: name(argument: type) -> type, without self."""
    signature = inspect.signature(function)
    arguments = [item for item in signature.parameters.values() if item.name != "self"]
    text = str(signature.replace(parameters=arguments)).replace("'", "")
    return f"{function.__name__}{text}"


def headings(text):
    return re.findall(r"^### `(.*)`$", text, re.MULTILINE)


def table_after(text, introduction):
    """Returns the first cell of each row of the first table after `introduction`, unquoted."""
    rows = re.search(r"(?:^\|.*\n)+", text[text.index(introduction) :], re.MULTILINE)[0]
    return [row.split("|")[1].strip(" `") for row in rows.splitlines()[2:]]


def code_blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def hookspecs():
    return [item for item in vars(specs).values() if hasattr(item, f"{specs.PROJECT}_spec")]


def test_frozen_surface():
    found = {spec.__name__: tuple(inspect.signature(spec).parameters) for spec in hookspecs()}
    assert found == HOOKS


def test_hooks_have_no_default_values():
    for spec in hookspecs():
        for parameter in inspect.signature(spec).parameters.values():
            assert parameter.default is parameter.empty


def test_every_heading_is_the_exact_signature_and_no_hook_is_missing():
    assert headings(REFERENCE) == [written_signature(spec) for spec in hookspecs()]


def test_every_hook_says_since_when_there_is_one():
    for spec in hookspecs():
        assert ".. versionadded::" in inspect.getdoc(spec)


def test_every_method_of_a_processor_is_a_heading():
    found = [getattr(MediaProcessor, name) for name in vars(MediaProcessor) if name[0] != "_"]
    methods = [method for method in found if callable(method)]
    assert headings(PROCESSORS) == [written_signature(method) for method in methods]


@pytest.mark.parametrize(
    ("text", "introduction", "name"),
    [
        (PLUGINS, "`ModelSpec`:", "ModelSpec"),
        (PLUGINS, "`ReasoningParserSpec`:", "ReasoningParserSpec"),
        (PLUGINS, "`ToolParserSpec`:", "ToolParserSpec"),
        (PLUGINS, "`LogitsProcessorSpec`:", "LogitsProcessorSpec"),
        (PLUGINS, "`MediaProcessorSpec`:", "MediaProcessorSpec"),
        (PLUGINS, "`ReadingPreset`:", "ReadingPreset"),
        (PLUGINS, "`CorpusFormatSpec`:", "CorpusFormatSpec"),
        (PLUGINS, "`ChatPartSpec`:", "ChatPartSpec"),
        (PROCESSORS, "## MediaInput", "MediaInput"),
        (PROCESSORS, "## Limits", "MediaLimits"),
    ],
)
def test_every_field_is_in_the_table(text, introduction, name):
    assert table_after(text, introduction) == [item.name for item in fields(getattr(hooks, name))]


@pytest.mark.parametrize(
    "name",
    [
        "ModelSpec",
        "ReasoningParserSpec",
        "ToolParserSpec",
        "LogitsProcessorSpec",
        "MediaProcessorSpec",
        "ReadingPreset",
        "CorpusFormatSpec",
        "ChatPartSpec",
    ],
)
def test_types_in_the_tables(name):
    rows = PLUGINS[PLUGINS.index(f"`{name}`:") :].split("\n\n")[1].splitlines()[2:]
    cells = [re.split(r"(?<!\\)\|", row) for row in rows]
    written = [cell[2].strip(" `").replace("\\|", "|") for cell in cells]
    assert written == [item.type for item in fields(getattr(hooks, name))]


def test_methods_of_a_model_stand_in_the_table():
    written = table_after(PLUGINS, "`Model` is an ordinary")
    methods = [name for name, item in vars(hooks.Model).items() if inspect.isfunction(item)]
    methods = [name for name in methods if name[0] != "_"]
    signatures = [
        f"{name}({', '.join(list(inspect.signature(getattr(hooks.Model, name)).parameters)[1:])})"
        for name in methods
    ]
    assert written == signatures


@pytest.mark.parametrize("kind", ["reasoning", "tool"])
def test_every_parser_is_in_the_table(kind):
    """The table has the names and aliases of the parsers in this package."""
    plugin = "reasoning" if kind == "reasoning" else "tools"
    manager = PluginManager.load([plugin])
    specs = manager.reasoning_parsers if kind == "reasoning" else manager.tool_parsers
    text = PLUGINS[PLUGINS.index(f"{kind.capitalize()} parsers:\n") :]
    rows = text.split("\n\n")[1].splitlines()[2:]
    cells = [re.split(r"(?<!\\)\|", row)[1:4] for row in rows]
    written = {name.strip(" `"): tuple(re.findall("`(.+?)`", also)) for name, also, _ in cells}
    assert written == {spec.name: spec.aliases for spec in specs}
    assert list(written) == sorted(written)
    assert all(about.strip() for _, _, about in cells)


def test_every_logits_processor_is_in_the_table():
    text = PLUGINS[PLUGINS.index("## Built-in logits processors") :]
    cells = [row.split("|")[1:4] for row in text.split("\n\n")[1].splitlines()[2:]]
    written = {
        name.strip(" `"): [tuple(re.findall("`(.+?)`", cell)) for cell in rest]
        for name, *rest in cells
    }
    specs = PluginManager.load(["logits"]).logits_processors
    assert written == {spec.name: [spec.aliases, spec.arguments] for spec in specs}


def test_error_codes_in_the_table():
    rows = PROCESSORS[PROCESSORS.index("## Errors") :].split("\n\n")[2].splitlines()[2:]
    for row in rows:
        name, _, code = (cell.strip(" `") for cell in row.strip("|").split("|"))
        assert getattr(errors, name).code == int(code)


@pytest.mark.full
def test_the_first_plugin_answers(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(code_blocks(PLUGINS, "python")[0], {"__name__": "__main__"})
    assert re.search(r"[Aa] large green cross", capsys.readouterr().out)


def test_the_single_file_of_the_readme_works(tmp_path):
    (source,) = [code for code in code_blocks(PLUGINS, "python") if 'name="loud"' in code]
    (tmp_path / "my_plugin.py").write_text(source)
    manager = PluginManager.load(files=[tmp_path / "my_plugin.py"])
    assert manager.build(manager.reasoning_parser("loud")).parse("a")[0].text == "A"


def test_the_fetcher_of_the_readme_works(site):
    (source,) = [code for code in code_blocks(PROCESSORS, "python") if "fetch_media" in code]
    site.install("store", source)
    manager = PluginManager.load()
    limits = MediaLimits()
    assert manager.fetch_media(MediaRef(kind="image", uri="store://cat"), limits) == b"..."
    with pytest.raises(errors.MediaError, match="the store has no image 'store://dog'"):
        manager.fetch_media(MediaRef(kind="image", uri="store://dog"), limits)
    with pytest.raises(errors.UnsupportedMediaError):
        manager.fetch_media(MediaRef(kind="image", uri="other://cat"), limits)
