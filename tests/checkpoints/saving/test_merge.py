"""merge: the weights that PEFT's own merge gives, in the folder of a model."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mmdeploy_llm.checkpoints.saving import merge_adapter, writer
from mmdeploy_llm.cli import app
from mmdeploy_llm.errors import CheckpointError, ConfigError
from mmdeploy_llm.testing.tiny import write_tiny

pytestmark = [pytest.mark.filterwarnings("ignore")]

TEXT, VISION = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
UNTIED = {"tie_word_embeddings": False}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {
    "dense": ("qwen2", TEXT, UNTIED, {"target_modules": LINEAR}),
    "dora": ("qwen3", TEXT, UNTIED, {"target_modules": LINEAR, "use_dora": True}),
    "biases": ("qwen2", TEXT, UNTIED, {"target_modules": ["q_proj"], "bias": "all"}),
    "all linear": ("llama", TEXT, UNTIED, {"target_modules": "all-linear"}),
    "head": ("qwen2", TEXT, UNTIED, {"target_modules": ["lm_head", "embed_tokens"]}),
    "saved": ("qwen2", TEXT, UNTIED, {"target_modules": LINEAR, "modules_to_save": ["lm_head"]}),
    "tokens": (
        "qwen2",
        TEXT,
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    ),
    "experts": (
        "qwen3_moe",
        TEXT,
        UNTIED,
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
    "fused": ("phi3", TEXT, UNTIED, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "hybrid": ("qwen3_5", VISION, UNTIED, {"target_modules": ["in_proj_qkv", "out_proj"]}),
    "vision": (
        "qwen2_5_vl",
        VISION,
        {},
        {"target_modules": r".*(visual|layers).*\.(qkv|q_proj|proj|fc1)"},
    ),
}


def trained(model, folder, **settings):
    """Saves an adapter with random values; returns the model with it merged by PEFT."""
    peft = pytest.importorskip("peft")  # imports much
    own = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **settings))
    with torch.no_grad():
        for parameter in own.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    own.save_pretrained(folder)
    return own.merge_and_unload()


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_it_is_pefts_merge(tmp_path, case):
    family, kind, sizes, settings = CASES[case]
    torch.manual_seed(0)
    folder = write_tiny(family, tmp_path / "model", **sizes)
    expected = trained(
        kind.from_pretrained(folder, dtype=torch.float32), tmp_path / "a", **settings
    )
    begun = kind.from_pretrained(folder, dtype=torch.float32).state_dict()
    merged = merge_adapter(str(folder), tmp_path / "a", tmp_path / "out")
    found = kind.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    expected = expected.state_dict()
    assert found.keys() == expected.keys()
    assert any(not torch.equal(begun[name], expected[name]) for name in begun)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)
    assert (merged.folder, merged.is_untied, merged.taken) == (tmp_path / "out", False, ())
    names = {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}


MLP = "model.layers.0.mlp"
Q = "model.layers.0.self_attn.q_proj"


def adapter(folder, sizes, **config):
    """Writes an adapter of rank 2 of these modules, [out, in] each; returns their changes."""
    folder.mkdir()
    tensors, changes = {}, {}
    for path, (out, size) in sizes.items():
        a, b = torch.randn(2, size), torch.randn(out, 2)
        changes[path] = b @ a
        tensors |= {f"base_model.model.{path}.lora_A.weight": a}
        tensors |= {f"base_model.model.{path}.lora_B.weight": b}
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return changes


def weights(folder):
    """Returns all tensors of a model's folder."""
    return {
        key: tensor
        for path in folder.glob("*.safetensors")
        for key, tensor in load_file(path).items()
    }


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_tiny("qwen2", tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_tiny("qwen2", tmp_path_factory.mktemp("dense"), **UNTIED)


def test_projections_that_the_checkpoint_has_fused_are_found_by_the_model(tmp_path):
    """Trained where they are divided, as others write this family."""
    folder = write_tiny("phi3", tmp_path / "model", **UNTIED)
    begun = weights(folder)
    n, k = begun[f"{MLP}.gate_up_proj.weight"].shape
    half = n // 2, k
    changes = adapter(tmp_path / "a", {f"{MLP}.up_proj": half, f"{MLP}.gate_proj": half})
    merge_adapter(str(folder), tmp_path / "a", tmp_path / "out")
    expected = begun[f"{MLP}.gate_up_proj.weight"].clone()
    expected[: n // 2] += changes[f"{MLP}.gate_proj"]
    expected[n // 2 :] += changes[f"{MLP}.up_proj"]
    found = weights(tmp_path / "out")
    torch.testing.assert_close(found[f"{MLP}.gate_up_proj.weight"], expected)


def test_projections_that_the_adapter_has_fused_are_divided(tmp_path, dense):
    begun = weights(dense)
    n, k = begun[f"{MLP}.gate_proj.weight"].shape
    changes = adapter(tmp_path / "a", {f"{MLP}.gate_up_proj": (2 * n, k)})
    merge_adapter(str(dense), tmp_path / "a", tmp_path / "out")
    found, change = weights(tmp_path / "out"), changes[f"{MLP}.gate_up_proj"]
    for name, rows in (("gate_proj", change[:n]), ("up_proj", change[n:])):
        key = f"{MLP}.{name}.weight"
        torch.testing.assert_close(found[key], begun[key] + rows)


@pytest.mark.parametrize("changed", ["lm_head", "model.embed_tokens"])
def test_a_tied_head_is_written_where_it_is_another_now(tmp_path, tied, changed):
    begun = weights(tied)["model.embed_tokens.weight"]
    adapter(tmp_path / "a", {"lm_head": tuple(begun.shape)})
    if changed != "lm_head":
        new = {"base_model.model.model.embed_tokens.weight": torch.randn(*begun.shape)}
        save_file(new, tmp_path / "a" / "adapter_model.safetensors")
    merged = merge_adapter(str(tied), tmp_path / "a", tmp_path / "out")
    found = weights(tmp_path / "out")
    assert merged.is_untied
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    kept = {"lm_head": "model.embed_tokens", "model.embed_tokens": "lm_head"}[changed]
    assert torch.equal(found[f"{kept}.weight"], begun)
    assert not torch.equal(found[f"{changed}.weight"], begun)


def test_modules_that_the_adapter_has_lost_are_told(tmp_path, dense, caplog):
    """An adapter that is whole is merged without a word."""
    size = tuple(weights(dense)[f"{Q}.weight"].shape)
    queries = sorted(key for key in weights(dense) if key.endswith("q_proj.weight"))
    layers = [key.removesuffix(".weight") for key in queries]
    for name, paths in (("whole", layers), ("half", layers[:-1])):
        caplog.clear()
        adapter(tmp_path / name, dict.fromkeys(paths, size), target_modules=["q_proj"])
        merge_adapter(str(dense), tmp_path / name, tmp_path / f"out {name}")
        told = [text for text in caplog.messages if "has no tensors for" in text]
        assert len(told) == (name == "half")
    assert "'half' has no tensors for 1 modules" in told[0]
    assert layers[-1] in told[0]


def test_a_vocabulary_that_grew_and_the_tokenizer_of_the_adapter_are_taken(tmp_path, dense):
    hidden = weights(dense)["lm_head.weight"].shape[1]
    adapter(tmp_path / "a", {Q: (hidden, hidden)})
    path = tmp_path / "a" / "adapter_model.safetensors"
    names = ("model.embed_tokens", "lm_head")
    more = {f"base_model.model.{x}.weight": torch.randn(999, hidden) for x in names}
    save_file(load_file(path) | more, path)
    (tmp_path / "a" / "chat_template.jinja").write_text("hello")
    merged = merge_adapter(str(dense), tmp_path / "a", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 999
    assert merged.taken == ("chat_template.jinja",)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "hello"


def test_a_tokenizer_that_is_a_link_out_of_the_folder_is_not_copied(tmp_path, dense):
    adapter(tmp_path / "a", {Q: tuple(weights(dense)[f"{Q}.weight"].shape)})
    (tmp_path / "secret").write_text("a key")
    (tmp_path / "a" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link out of the adapter's folder"):
        merge_adapter(str(dense), tmp_path / "a", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_run_that_was_cut_off_is_continued(tmp_path, dense, monkeypatch):
    adapter(tmp_path / "a", {Q: tuple(weights(dense)[f"{Q}.weight"].shape)})
    merge_adapter(str(dense), tmp_path / "a", tmp_path / "whole")
    monkeypatch.setattr(writer, "SHARD_BYTES", 2000)
    flush, done = writer.Writer._flush, []

    def flush_two(self):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(flush(self))

    with monkeypatch.context() as patch:
        patch.setattr(writer.Writer, "_flush", flush_two)
        with pytest.raises(KeyboardInterrupt):
            merge_adapter(str(dense), tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    first = tmp_path / "out.partial" / "model-00001.safetensors"
    begun = first.stat().st_mtime_ns
    merge_adapter(str(dense), tmp_path / "a", tmp_path / "out")
    assert (tmp_path / "out" / first.name).stat().st_mtime_ns == begun
    found, expected = weights(tmp_path / "out"), weights(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({Q: (64, 31)}, [f"{Q}.weight", "[64, 31]", "another model"]),
        ({"model.layers.9.self_attn.q_proj": (64, 64)}, ["layers.9", "does not have"]),
        ({"model.norm": (64, 64)}, ["model.norm.weight", "[64, 64]"]),
    ],
    ids=str,
)
def test_an_adapter_of_another_model_is_refused_by_tensor(tmp_path, dense, sizes, words):
    adapter(tmp_path / "a", sizes)
    with pytest.raises(CheckpointError) as error:
        merge_adapter(str(dense), tmp_path / "a", tmp_path / "out")
    assert all(word in str(error.value) for word in words)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_what_is_quantised_is_refused_with_advice(tmp_path, dense):
    adapter(tmp_path / "a", {Q: (64, 64)})
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        merge_adapter(str(dense), tmp_path / "a", tmp_path / "there")
    coded = tmp_path / "coded"
    shutil.copytree(dense, coded)
    values = json.loads((dense / "config.json").read_text()) | {"quantization_config": {}}
    (coded / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="quantised: merge the adapter into"):
        merge_adapter(str(coded), tmp_path / "a", tmp_path / "out")


def test_the_command_says_what_it_did(tmp_path, tied):
    adapter(tmp_path / "a", {"lm_head": tuple(weights(tied)["model.embed_tokens.weight"].shape)})
    (tmp_path / "a" / "tokenizer_config.json").write_text("{}")
    command = ["merge", str(tied), str(tmp_path / "a"), str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "tokenizer_config.json: from" in done.output
    assert "tie_word_embeddings is false" in done.output
    assert "1 tensors changed" in done.output
    assert CliRunner().invoke(app, command).exit_code
