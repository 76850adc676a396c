"""The examples of docs/write_a_plugin.md and docs/write_for_the_engine.md, one for each hook, by
one pattern: each is a single file that does what it says, passes its check, and works by --plugin.
"""

import io
import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli import app
from mmdeploy_llm.hooks import (
    AttentionBackendSpec,
    AttentionSetup,
    BatchLayout,
    ChatPartContext,
    ChatPartSpec,
    Checkpoint,
    CorpusFile,
    CorpusFormatSpec,
    DamagedRow,
    KVCache,
    LogitsContext,
    LogitsProcessorSpec,
    LogitsRow,
    MediaLimits,
    MediaProcessorSpec,
    MediaRef,
    ModelFileSpec,
    ModelSpec,
    OutputSinkSpec,
    PluginManager,
    ReadingPreset,
    ToolCall,
    ToolParserSpec,
    WeightFormatSpec,
)
from mmdeploy_llm.testing import check_plugin
from mmdeploy_llm.testing.plugins.arguments import example_arguments
from mmdeploy_llm.weights.quantized import Entry, Stored

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ("write_a_plugin.md", "write_for_the_engine.md")
MAX_PAGE_LINES = 250
DOOR = re.compile(r"^## (.*)\n\n(.*)\n\n```python\n(# (\w+\.py).*\n(?:.*\n)*?)```$", re.MULTILINE)
FOUND = [door for page in PAGES for door in DOOR.findall((DOCS / page).read_text())]
EXAMPLES = {file: code for _, _, code, file in FOUND}
COMMAND = "greet.py"  # it needs a package


def picture():
    """Returns a picture that is 21 pixels wide."""
    held = io.BytesIO()
    Image.linear_gradient("L").resize((21, 9)).save(held, "PNG")
    return held.getvalue()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(file) writes an example, into the folder of the test; returns its path."""
    monkeypatch.chdir(tmp_path)

    def one(file):
        (tmp_path / file).write_text(EXAMPLES[file])
        return tmp_path / file

    return one


@pytest.mark.parametrize("page", [*PAGES, "plugin_reference.md", "media.md"])
def test_the_page_is_short(page):
    assert len((DOCS / page).read_text().splitlines()) <= MAX_PAGE_LINES


def test_every_hook_has_an_example():
    marked = re.compile(r"^@hookimpl\ndef (\w+)", re.MULTILINE)
    hooks = {hook for code in EXAMPLES.values() for hook in marked.findall(code)}
    assert hooks == set(PluginManager()._registry.hooks)


@pytest.mark.parametrize("door", FOUND, ids=lambda door: door[0])
def test_every_door_has_the_same_parts_in_the_same_order(door):
    """The hook, what it gives, the line of pyproject.toml, the check."""
    _, words, code, file = door
    own = file.removesuffix(".py")
    line = rf"`{own} = \"{own}\"`; `mmdeploy-llm plugins check {own}( --model FOLDER)?`\."
    assert re.match(rf"`(\w+)`.* gives? .*\. {line}|`(\w+)`.* gives? .*{line}", words), words
    for hook in re.findall(r"`(\w+)`", words.partition(" give")[0]):
        assert f"@hookimpl\ndef {hook}(" in code
    for given in re.findall(r"gives an? `(\w+)`", words):
        assert f"{given}(" in code


@pytest.mark.one_is_quick
@pytest.mark.parametrize("file", EXAMPLES)
def test_the_example_does_what_it_says(file, write, tmp_path, capsys):
    manager = PluginManager.load(plugins=(), files=[write(file)])
    (plugin,) = [each for each in manager.plugins if each.name == file]
    specs = [each for each in manager.specs if manager.owner(each) == plugin.name]
    if specs:
        assert use(manager, specs[0], tmp_path)
    elif file == "shelf.py":
        shelf = MediaRef(kind="image", uri="shelf://cat")
        assert manager.fetch_media(shelf, MediaLimits()) == b"the bytes of a picture"
    elif file == COMMAND:
        made = typer.Typer()
        made.callback()(lambda: None)
        manager.extend_cli(made)
        assert CliRunner().invoke(made, ["greet", "Ada"]).stdout == "Hello, Ada!\n"
    else:
        for hook in ("on_engine_start", "on_step", "on_request_finished", "on_engine_stop"):
            manager.notify(hook, **example_arguments()[hook])
        assert "'tokens': " in capsys.readouterr().out
    assert manager.failures == ()


def use(manager, spec, folder):
    """Builds and tries what an example provides."""
    match spec:
        case ModelSpec():
            from transformers import LlamaConfig

            with torch.device("meta"):
                sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
                return manager.build(spec, LlamaConfig(**sizes)).num_layers == 1
        case LogitsProcessorSpec():
            made = manager.build(spec, LogitsContext(vocab_size=9, tokenizer=None))
            row = LogitsRow(arguments={"never": 7}, prompt_token_ids=(), output_token_ids=())
            return made.apply(torch.zeros(1, 9), [row])[0, 7] == float("-inf")
        case MediaProcessorSpec():
            made = manager.build(spec, Checkpoint(folder=Path(), config=SimpleNamespace()), {})
            if spec.yields is not None:
                parts = made.split(picture(), {}, MediaLimits())
                return [part.source.size for part in parts] == [(10, 9), (11, 9)]
            item = made.decode(b"1 " * 16, MediaLimits())
            assert manager.kinds.of_name("a.numbers") == "numbers"
            return made.process(item, {}).num_tokens == made.count_tokens(item, {})
        case ReadingPreset():
            return manager.reading_preset_for("AcmeOcrForCausalLM", "") is spec
        case ChatPartSpec():
            about = ChatPartContext(kinds=manager.kinds.kinds, kind_of=manager.kinds.of_name)
            made = manager.resolve(spec)({"type": "location", "lat": 1, "lon": 2.5}, about)
            return made == ["At 1.0000, 2.5000. "]
        case AttentionBackendSpec():
            cpu = torch.device("cpu")
            made = manager.build(
                spec, AttentionSetup(device=cpu, dtype="float32", kv_cache_dtype="float32")
            )
            cache = KVCache(keys=(torch.zeros(3, 4, 1, 8),), values=(torch.zeros(3, 4, 1, 8),))
            layout = BatchLayout(
                num_decode=1,
                query_lens=(1,),
                context_lens=(1,),
                block_tables=torch.tensor([[2]], dtype=torch.int32),
                slots=torch.tensor([8]),
            )
            rows = [torch.rand(1, heads, 8) for heads in (2, 1, 1)]
            found = made.begin(layout, cache).attend(0, *rows)
            return torch.equal(found, rows[2].repeat(1, 2, 1))
        case CorpusFormatSpec():
            file = CorpusFile(path="a.bars", max_bytes=9, open=lambda: io.BytesIO(b"a|Hi\nb\n"))
            read = list(manager.resolve(spec)(file))
            return read == [{"id": "a", "prompt": "Hi"}, DamagedRow(message="it has no |")]
        case OutputSinkSpec():
            path = folder / "a.rows"
            with closing(manager.build(spec, path, True)) as store:
                written = [store.append(f'{{"id": {n}}}', {}) for n in range(3)]
                store.delete([written[1]])
            with closing(manager.build(spec, path, False)) as store:
                return list(store.entries()) == [(1, '{"id": 0}'), (3, '{"id": 2}')]
        case ModelFileSpec():
            (folder / "parts").mkdir()
            (folder / "parts/config.json").write_text('{"model_type": "llama"}')
            (folder / "post").write_text(f"signpost\n{folder / 'parts'}\n")
            found = manager.build(spec, folder / "post")
            return found.read_json("config.json") == {"model_type": "llama"}
        case WeightFormatSpec():
            codes, scales = torch.ones(2, 4).half(), torch.tensor([[1.0], [3.0]])
            entry = Entry(dtype=torch.float16, shape=(2, 4), offset=0)
            row = Entry(dtype=torch.float32, shape=(2, 1), offset=0)
            entries = {"a.halves": entry, "a.halves_scale": row}
            (layer,) = manager.resolve(spec)({"quant_method": "halves"}, Stored(entries, {}))
            weight = layer.decode({"codes": codes, "scales": scales})
            return torch.equal(weight, torch.tensor([[1.0], [3.0]]).expand(2, 4))
        case ToolParserSpec():
            found = manager.build(spec).parse("call f {}")
            return found == [ToolCall(name="f", arguments="{}")]
        case _:
            found = manager.build(spec).parse("A§B")
            return [(own.kind, own.text) for own in found] == [("reasoning", "A"), ("content", "B")]


# What the check of an example cannot make up.
GIVEN = {
    "strips.py": """
from pathlib import Path
CHECKED_WITH = {"strips": {"samples": {"one": Path("a.strip").read_bytes()}}}
"""
}
WITHOUT_TORCH = (
    *("bars.py", "rows.py", "section.py", "lines.py", "location.py", "shelf.py", "tally.py"),
    *("pages.py", "greet.py"),
)
CHECK = """
import sys
from mmdeploy_llm.testing.check import check_plugin
for file in sys.argv[1:]:
    for verdict in check_plugin(file):
        print("VERDICT", file, verdict.outcome, verdict.check, verdict.message)
print("HEAVY", sorted({"torch", "transformers"} & {*sys.modules}))
"""


@pytest.mark.full
@pytest.mark.parametrize("file", [file for file in EXAMPLES if file not in WITHOUT_TORCH])
def test_the_check_of_the_example_finds_nothing(file, write, tmp_path):
    (tmp_path / "a.strip").write_bytes(picture())
    path = write(file)
    path.write_text(path.read_text() + GIVEN.get(file, ""))
    verdicts = list(check_plugin(str(path)))
    assert [found for found in verdicts if found.outcome == "fail"] == []
    assert any(found.outcome == "pass" for found in verdicts)


@pytest.mark.full  # a process for each
def test_the_check_of_what_needs_no_torch_imports_none(write, tmp_path):
    files = [str(write(file)) for file in WITHOUT_TORCH]
    done = subprocess.run([sys.executable, "-c", CHECK, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *verdicts, last = re.findall(r"^(?:VERDICT|HEAVY) .*$", done.stdout, re.MULTILINE)
    assert last == "HEAVY []"
    assert [line for line in verdicts if line.split()[2] == "fail"] == []
    assert {line.split()[1] for line in verdicts if line.split()[2] == "pass"} == {*files}


@pytest.mark.full
def test_a_single_file_works_at_each_door_of_the_page(write, tmp_path, capfd):
    """Conversations with all plugins at once, and a batch by the program."""
    files = [str(write(file)) for file in EXAMPLES if file not in (COMMAND, "acme.py")]
    (tmp_path / "a.strip").write_bytes(picture())
    shelf = write("shelf.py").read_text().replace('b"the bytes of a picture"', repr(picture()))
    (tmp_path / "shelf.py").write_text(shelf)
    parts = [
        {"type": "location", "lat": 47.37, "lon": 8.54},
        {"type": "strip", "strip": str(tmp_path / "a.strip")},
        {"type": "image", "image": "shelf://cat"},
        {"type": "text", "text": "What is it?"},
    ]
    params = SamplingParams(
        temperature=0,
        max_tokens=4,
        logits_processors=["never"],
        logits_processors_args={"never": 7},
    )
    options = {"reasoning_parser": "section", "tool_call_parser": "lines"}
    options |= {"attention_backend": "by-sequence", "limit_mm_per_prompt": {"image": 4}}
    with LLM("shapes-vl", plugins=files, quiet=True, **options) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    assert output.error_msg is None
    assert "At 47.3700, 8.5400." in output.prompt
    assert output.num_input_tokens_by_kind["image"] > 0
    assert 7 not in output.outputs.token_ids
    assert "'tokens': 4" in capfd.readouterr().out


@pytest.mark.full
def test_the_program_reads_and_writes_by_files(write, tmp_path):
    write("bars.py"), write("rows.py"), write("never.py")
    (tmp_path / "questions.bars").write_text("a|Say hello.\nno bar\nb|Say goodbye.\n")
    words = ["batch", "questions.bars", "-o", "answers.rows", "--model", "shapes-vl"]
    for file in ("bars.py", "rows.py", "never.py"):
        words += ["--plugin", file]
    done = CliRunner().invoke(app, [*words, "--max-tokens", "3"])
    assert done.exit_code == 1, done.output  # one of three rows is damaged
    manager = PluginManager.load(plugins=(), files=[tmp_path / "rows.py"])
    (spec,) = manager.provided(OutputSinkSpec)
    with closing(manager.build(spec, tmp_path / "answers.rows", False)) as store:
        found = [json.loads(line) for _, line in store.entries()]
    assert {row["id"] for row in found if row["error"] is None} == {"a", "b"}
    assert len(found) == 3
