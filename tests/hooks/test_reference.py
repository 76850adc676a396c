"""The reference of the plugin API: a working example for each hook, and all that is recorded."""

import importlib.util
import io
import json
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from mmdeploy_llm.hooks import (
    API_VERSION,
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
    WeightFormatSpec,
)
from mmdeploy_llm.testing.plugins.arguments import example_arguments
from mmdeploy_llm.weights.quantized import Entry, Stored

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/plugin_reference.md").read_text()
EXAMPLES = dict(
    re.findall(r"^### `(\w+)\(.*?^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
)


@pytest.fixture(scope="module")
def pages():
    """The module that writes the generated part of the page."""
    path = ROOT / "docs/surface_pages.py"
    spec = importlib.util.spec_from_file_location("surface_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_hook_has_an_example():
    assert set(EXAMPLES) == set(PluginManager()._registry.hooks)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("hook", EXAMPLES)
def test_the_example_of_a_hook(hook, tmp_path, capsys):
    """It is a file that loads as a plugin, implements the hook, and does what it says."""
    (tmp_path / "my_plugin.py").write_text(EXAMPLES[hook])
    manager = PluginManager.load(plugins=(), files=[tmp_path / "my_plugin.py"])
    (plugin,) = [each for each in manager.plugins if each.name == "my_plugin.py"]
    if hook.startswith("provide_"):
        (spec,) = [each for each in manager.specs if manager.owner(each) == plugin.name]
        assert use(manager, spec, tmp_path)
        return
    assert plugin.provides == (f"hook {hook}",)
    if hook == "fetch_media":
        shelf = MediaRef(kind="image", uri="shelf://cat")
        assert manager.fetch_media(shelf, MediaLimits()) == b"the bytes of a picture"
    elif hook == "extend_cli":
        app = typer.Typer()
        app.callback()(lambda: None)
        manager.extend_cli(app)
        assert CliRunner().invoke(app, ["greet", "Ada"]).stdout == "Hello, Ada!\n"
    else:
        manager.notify(hook, **example_arguments()[hook])
        printed = capsys.readouterr().out
        assert bool(printed) == (hook in ("on_engine_start", "on_engine_stop"))
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
            path = folder / "a.numbered"
            with closing(manager.build(spec, path, True)) as store:
                written = [store.append(f'{{"id": {n}}}', {}) for n in range(3)]
                store.delete([written[1]])
            with closing(manager.build(spec, path, False)) as store:
                return list(store.entries()) == [(0, '{"id": 0}'), (2, '{"id": 2}')]
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
        case _:
            found = manager.build(spec).parse("call f {}")
            return found == [ToolCall(name="f", arguments="{}")] or found[0].text == "call f {}"


def test_all_that_is_recorded_is_in_the_reference(pages):
    recorded = json.loads((ROOT / "tests/hooks/surface.json").read_text())
    text = pages.fill(PAGE)
    entries = set(re.findall(r"^#### (\w+)$", text, re.MULTILINE))
    members = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    lost = [name for name in recorded if name.rpartition(".")[2] not in entries | members]
    assert lost == []
    assert "Turns one kind of media into model inputs" in text
    assert "Returns the model inputs of an item from `decode`" in text


def test_the_version_stands_beside_the_policy():
    assert f"`MMDEPLOY_LLM_API = {API_VERSION}`" in PAGE
