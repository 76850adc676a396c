"""Single files as plugins: found by their paths, imported under names of their own, in every
process of an engine."""

import json
import logging
import os
import re

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ConfigError, MediaError, PluginConflictError, PluginLoadError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.hooks.files import load_file
from mmdeploy_llm.media.isolation import Workers
from mmdeploy_llm.values.options.config import EngineConfig

GREEDY = SamplingParams(temperature=0, max_tokens=4)
PARSER = """
from mmdeploy_llm.hooks import ReasoningParser, ReasoningParserSpec, Segment, hookimpl

class Parser(ReasoningParser):
    def feed(self, text):
        return [Segment(kind="content", text={text})]

    def finish(self):
        return []

@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name={name!r}, factory=f"{{__name__}}:Parser")]
"""


def parser(name="loud", text="text.upper()"):
    return PARSER.format(name=name, text=text)


@pytest.fixture
def write(tmp_path):
    """write(name, source): a file below tmp_path."""

    def make(name, source=None):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(parser() if source is None else source)
        return path

    return make


def built(manager, name):
    return manager.build(manager.reasoning_parser(name))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ["json.py", "my plugin.py", "mülleimer.py", "qwen.py", "a.b.py"])
def test_a_file_of_any_name(write, name):
    """It hides no module and no installed plugin."""
    path = write(name)
    manager = PluginManager.load(files=[path])
    assert built(manager, "loud").feed("a")[0].text == "A"
    assert manager.owner(manager.reasoning_parser("loud")) == name
    assert json.loads("1") == 1
    assert len(manager.models) > 40


def test_two_files_of_one_name(write):
    one, two = write("a/my.py", parser("one")), write("b/my.py", parser("two"))
    manager = PluginManager.load(files=[one, two, one])
    assert [manager.owner(manager.reasoning_parser(name)) for name in ("one", "two")] == [
        "a/my.py",
        "b/my.py",
    ]


def test_a_file_that_has_changed_is_loaded_anew(write):
    path = write("my.py")
    old = PluginManager.load(files=[path])
    path.write_text(parser(text="text.lower()"))
    new = PluginManager.load(files=[path])
    assert built(new, "loud").feed("Ab")[0].text == "ab"
    assert built(old, "loud").feed("Ab")[0].text == "AB"
    assert load_file(path) is load_file(path)


@pytest.mark.full
def test_a_file_comes_before_what_is_installed(write, caplog):
    path = write("my.py", parser("qwen3"))
    with caplog.at_level(logging.WARNING):
        manager = PluginManager.load(files=[path])
        assert manager.owner(manager.reasoning_parser("qwen3")) == "my.py"
    assert f"comes from plugin 'my.py' ({path}), added by you" in caplog.text
    for name in ("my", "my.py", str(path)):
        chosen = PluginManager.load(files=[path], use={"qwen3": name})
        assert chosen.owner(chosen.reasoning_parser("qwen3")) == "my.py"
    other = write("other.py", parser("qwen3"))
    with pytest.raises(PluginConflictError, match=r"'my.py'.*'other.py'"):
        PluginManager.load(files=[path, other]).reasoning_parser("qwen3")


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = (", r"my.py'.*import: .*SyntaxError: '\(' was never closed .my.py, line 2"),
        ("x = 1\n\ny = no_such", r"NameError: name 'no_such' is not defined \(line 3 of my.py\)"),
        ("import no_such_module", r"No module named 'no_such_module' \(line 1 of my.py\)"),
        ("raise SystemExit('no')", r"SystemExit: no \(line 1 of my.py\)"),
        ("x = '\0'", "null bytes"),
        ("# coding: no-such\n", "SyntaxError: encoding problem|unknown encoding"),
        ("x = 1", "implements no hook"),
        (
            "from mmdeploy_llm.hooks import hookimpl\n@hookimpl\ndef on_stop(info): ...",
            "no hook 'on_stop'",
        ),
        ("", "implements no hook"),
    ],
)
def test_a_broken_file(write, source, message):
    path = write("my.py", source)
    with pytest.raises(PluginLoadError, match=message) as found:
        PluginManager.load(files=[path])
    assert str(path) in str(found.value)
    path.write_text(parser())  # mended: it is not remembered as broken
    PluginManager.load(files=[path])


def test_what_is_no_python_file(tmp_path, write):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "folder.py").mkdir()
    write("large.py").write_bytes(b"#" * (16 * 2**20 + 1))
    for name, message in {
        "missing.py": "does not exist",
        "pipe.py": "is no file",
        "folder.py": "is no file",
        "large.py": "more than",
        "my.txt": "must end in .py",
    }.items():
        with pytest.raises(PluginLoadError, match=message):
            PluginManager.load(files=[tmp_path / name])


def test_a_factory_written_as_in_a_package(write):
    path = write("my.py", parser().replace('f"{__name__}:Parser"', '"my:Parser"'))
    manager = PluginManager.load(files=[path])
    with pytest.raises(Exception, match=r"a file names with its __name__.*No module named 'my'"):
        built(manager, "loud")


def test_which_plugins_the_options_name(write, tmp_path, monkeypatch):
    """Paths in `plugins` are files; they are added to all that are installed, or to the named."""
    monkeypatch.chdir(tmp_path)
    path = str(write("my.py"))
    for given, plugins in {
        ("./my.py",): None,
        ("llama", "my.py"): ("llama",),
        (str(path),): None,
        (): (),
    }.items():
        config = EngineConfig(model="m", plugins=given)
        assert config.plugins == plugins
        assert config.plugin_files == ((path,) if given else ())
    assert EngineConfig(model="m", plugins="llama, ./my.py").plugin_files == (path,)
    alone = EngineConfig(model="m", plugins=(), plugin_files=["my.py"])
    assert PluginManager.of(alone).plugins[-1].name == "my.py"
    both = EngineConfig(model="m", plugins=["./my.py"], plugin_files="my.py")
    assert both.plugin_files == (path,)
    with pytest.raises(ConfigError):
        EngineConfig(model="m", plugin_files=3)
    with pytest.raises(ConfigError, match="is in blocked_plugins"):
        PluginManager.of(EngineConfig(model="m", plugin_files=[path], blocked_plugins=["my"]))


def test_a_name_means_the_installed_plugin_and_with_py_the_file(write):
    path = write("pdf.py")
    manager = PluginManager.load(blocked=("pdf",), files=[path])
    loaded = {info.name for info in manager.plugins}
    assert "pdf.py" in loaded
    assert "pdf" not in loaded
    with pytest.raises(ConfigError, match="is in blocked_plugins"):
        PluginManager.load(("pdf",), blocked=("pdf.py",), files=[path])
    with pytest.raises(ConfigError, match=r"'pdf' .*does not provide 'loud'"):
        PluginManager.load(("pdf",), use={"loud": "pdf"}, files=[path])
    PluginManager.load(("pdf",), use={"loud": "pdf.py"}, files=[path])


def test_files_of_one_name(write):
    paths = [write("a/my.py"), write("b/my.py")]
    manager = PluginManager.load((), files=paths, use={"loud": "b/my.py"})
    assert [info.name for info in manager.plugins][-2:] == ["a/my.py", "b/my.py"]
    assert manager.owner(manager.reasoning_parser("loud")) == "b/my.py"
    with pytest.raises(ConfigError, match="no loaded plugin is named 'my'"):
        PluginManager.load((), files=paths, use={"loud": "my"})
    with pytest.raises(ConfigError, match="is in blocked_plugins"):
        PluginManager.load((), files=paths, blocked=("my",))


def test_an_engine_with_a_file(write, tiny_folder):
    path = write("my.py")
    with LLM(
        str(tiny_folder("llama")), plugins=[str(path)], reasoning_parser="loud", quiet=True
    ) as llm:
        (output,) = llm.generate("The quick brown fox", GREEDY, use_tqdm=False)
    text = output.outputs.text
    assert text
    assert text == text.upper()


DECODER = """
import numpy as np
from mmdeploy_llm.hooks import hookimpl

def doubled(blob, factor):
    yield {"module": __name__}, np.frombuffer(blob, np.uint8) * factor

@hookimpl
def on_step(stats):
    pass
"""


def test_an_isolated_decoder_of_a_file(write):
    path = write("my.py", DECODER)
    module = load_file(path).__name__
    workers = Workers()
    limits = {"timeout": 60, "max_memory": 2**32}

    def decode():
        return list(workers.stream(f"{module}:doubled", b"\1\2", {"factor": 2}, **limits))

    ((fields, array),) = decode()
    assert fields == {"module": module}
    assert array.tolist() == [2, 4]
    path.write_text(DECODER + "\n# changed\n")
    assert decode()[0][0] == fields  # the process keeps what it has
    workers.close()
    workers = Workers()
    with pytest.raises(MediaError, match="has changed since it was loaded"):
        decode()
    workers.close()


LOGITS = """
import os
from mmdeploy_llm.hooks import LogitsProcessor, LogitsProcessorSpec, hookimpl

class Only(LogitsProcessor):
    def __init__(self, context):
        open(f"{FOLDER}/{os.getpid()}", "w").close()

    def apply(self, logits, rows):
        logits[:, :7] = logits[:, 8:] = float("-inf")
        return logits

@hookimpl
def provide_logits_processors():
    return [LogitsProcessorSpec(name="only", factory=f"{__name__}:Only")]
"""


@pytest.mark.full  # two processes, each with an engine or a rank
@pytest.mark.parametrize("option", ["tensor_parallel_size", "data_parallel_size"])
def test_other_processes_of_an_engine(write, tiny_folder, tmp_path, monkeypatch, option):
    """A relative path, and ranks and engines that import the file themselves."""
    (tmp_path / "made").mkdir()
    write("my.py", f"FOLDER = {str(tmp_path / 'made')!r}\n{LOGITS}")
    monkeypatch.chdir(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=3, logits_processors="only")
    with LLM(str(tiny_folder("llama")), plugins=["my.py"], quiet=True, **{option: 2}) as llm:
        outputs = llm.generate(["A", "B", "C", "D"], params, use_tqdm=False)
    assert [output.outputs.token_ids for output in outputs] == [[7, 7, 7]] * 4
    assert len(list((tmp_path / "made").iterdir())) >= 2
    assert str(os.getpid()) not in {path.name for path in (tmp_path / "made").iterdir()} or (
        option == "tensor_parallel_size"
    )


@pytest.mark.full
def test_a_resumed_batch_is_told_of_another_file(write, tiny_folder, tmp_path, caplog):
    path, output = write("my.py"), tmp_path / "out.jsonl"
    options = {"plugins": [str(path)], "reasoning_parser": "loud", "quiet": True}

    def run(**more):
        with LLM(str(tiny_folder("llama")), **options) as llm:
            llm.run_batch([{"prompt": "A"}], output=output, sampling_params=GREEDY, **more)

    run()
    saved = json.loads(output.with_name("out.jsonl.config.json").read_text())
    (entry,) = saved.values()
    assert list(entry["plugin_files"]) == [str(path)]
    run(resume=True)
    assert "plugin files" not in caplog.text
    path.write_text(path.read_text() + "# newer\n")
    run(resume=True)
    assert re.search(rf"has results with other plugin files: '{path}' has changed", caplog.text)


def test_use_is_part_of_the_configuration(tiny_folder):
    from mmdeploy_llm.batch.engine import describe_engine

    folder = str(tiny_folder("llama"))
    use = {"LlamaForCausalLM": "transformers_any"}
    plain, chosen = (describe_engine(EngineConfig(model=folder, use=given)) for given in ({}, use))
    assert chosen.values["use"] == use
    assert plain.digest != chosen.digest
