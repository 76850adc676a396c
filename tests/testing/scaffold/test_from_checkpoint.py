"""`plugins new --from` says what a checkpoint needs, and begins with what the blocks cover."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from mmdeploy_llm import ConfigError
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.testing.scaffold import write_package
from mmdeploy_llm.testing.scaffold.decoder_trial import find_decoder
from mmdeploy_llm.testing.scaffold.small_config import one_of_each
from mmdeploy_llm.testing.scaffold.survey import survey

ROOT = Path(__file__).parents[3]
GLOBAL = 'frozenset(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")'
AFTER = {"pre_norms": "False", "post_norms": "True"}
PARALLEL = {"is_parallel": "True"}
BIASES = {"qkv_bias": "True", "out_bias": "True", "mlp_bias": "True", "head_bias": "True"}
FOUND = {
    "Cohere2": {"has_norm_biases": "False", **PARALLEL, "nope_layers": GLOBAL},
    "Exaone4": {"qk_norm": "True", **AFTER, "nope_layers": GLOBAL},
    "GPTNeoX": {"mlp_bias": "True", "has_mlp_norm": "True", "has_gate": "False"},
    "Gemma2": {
        "post_norms": "True",
        "zero_centered_norms": "True",
        "embed_scale": "config.hidden_size**0.5",
    },
    "Gemma3": {
        "qk_norm": "True",
        "post_norms": "True",
        "zero_centered_norms": "True",
        "embed_scale": "config.hidden_size**0.5",
    },
    "Glm4": {"out_bias": "False", "post_norms": "True"},
    "Helium": {"rounds_norms_late": "True"},
    "Llama": {},
    "Nemotron": {
        "zero_centered_norms": "True",
        "layer_norms": "True",
        "has_norm_biases": "True",
        "has_gate": "False",
    },
    "Olmo": {"has_norm_biases": "False", "has_norm_weights": "False"},
    "Olmo2": {"has_full_qk_norm": "True", "rounds_norms_late": "True", **AFTER},
    "Phi": {**BIASES, **PARALLEL, "has_gate": "False"},
    "Qwen3": {"qk_norm": "True"},
    "SmolLM3": {},
    "Starcoder2": {"has_gate": "False"},
}
INTERLEAVED = {"Cohere2", "Glm4", "Helium"}


def find(kind, **options):
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**options)
    return find_decoder(config, f"{kind}ForCausalLM")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("kind", FOUND)
def test_what_no_config_says_is_found(kind):
    found = find(kind)
    assert (found.missing, dict(found.own)) == ((), {})
    assert dict(found.options) == FOUND[kind]
    assert found.is_interleaved == (kind in INTERLEAVED)
    assert found.has_fused_heads == (kind == "GPTNeoX")
    assert found.difference < 1e-4


@pytest.mark.full
def test_what_the_decoder_lacks_is_named():
    found = find("Olmo", clip_qkv=0.01)
    assert dict(found.own) == {"clip_qkv": 0.01}
    assert "the logits differ by up to" in found.missing[0]
    found = find("Olmo", clip_qkv=8.0)  # a small model does not show it
    assert "the key clip_qkv = 8.0: random weights show no effect" in found.missing[0]
    found = find("Mixtral", num_local_experts=3)
    assert any(".experts." in text for text in found.missing)
    found = find("DeepseekV2", moe_intermediate_size=10**6)
    assert "parameters, since its config has sizes of its own" in found.missing[0]


def test_a_small_config_has_each_type_of_layer():
    assert one_of_each(["a"] * 5 + ["b"] + ["a"] * 5) == ["a", "a", "a", "b"]
    assert one_of_each(list("abcdef")) == list("abcd")


class TestSurvey:
    def test_a_text_model(self, tiny_folder):
        found = survey(tiny_folder("phi3"))
        assert (found.architecture, found.kind, found.served_by) == (
            "Phi3ForCausalLM",
            "model",
            "phi",
        )
        text = "\n".join(found.lines)
        assert "Phi3ForCausalLM (phi3), served by phi so far" in text
        assert "text: the standard decoder, its logits equal transformers'" in text

    def test_a_model_with_media(self, tiny_folder):
        found = survey(tiny_folder("qwen2_5_vl"))
        assert (found.kind, found.media) == ("vision-model", ("image", "video"))
        text = "\n".join(found.lines)
        assert "layers.VisionEncoder and layers.GridLM" in text
        assert "tokens: " in text
        assert "<|image_pad|>" in text

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("kind", "suffix", "said"),
        [
            ("Mamba", "ForCausalLM", "not covered: "),
            ("T5", "ForConditionalGeneration", "(cross attention)"),
            ("GPT2", "LMHeadModel", "positions that are not rotary"),
        ],
    )
    def test_what_no_block_covers(self, tmp_path, kind, suffix, said):
        config = getattr(transformers, f"{kind}Config")()
        config.architectures = [f"{kind}{suffix}"]
        config.save_pretrained(tmp_path)
        assert any(said in line for line in survey(tmp_path).lines)

    def test_an_architecture_of_someone_else_is_tried_as_what_it_is_made_of(self, tmp_path):
        config = transformers.LlamaConfig(num_hidden_layers=2, architectures=["AcmeForCausalLM"])
        config.save_pretrained(tmp_path / "config")
        made = write_package("acme", None, tmp_path, checkpoint=tmp_path / "config")
        assert '"LlamaForCausalLM"' in (made.folder / "src/acme_llm/tiny.py").read_text()

    def test_what_is_no_checkpoint_is_an_error(self, tmp_path):
        with pytest.raises(CheckpointError):
            survey(tmp_path)
        values = {"model_type": "llama", "architectures": ["../Llama"]}
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(ConfigError, match="names no architecture"):
            survey(tmp_path)


def write_config(folder, kind, **options):
    config = getattr(transformers, f"{kind}Config")(**options)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def test_the_package_begins_with_what_was_found(tmp_path):
    folder = write_config(tmp_path / "made", "Cohere2", num_hidden_layers=4)
    made = write_package("acme", None, tmp_path, checkpoint=folder)
    model = (made.folder / "src/acme_llm/model.py").read_text()
    assert "standard_decoder(config, rotary_config(config, is_interleaved=True), own=())" in model
    assert "        has_norm_biases=False," in model
    assert "## What the checkpoint needs" in (made.folder / "README.md").read_text()
    assert (
        'architectures=("Cohere2ForCausalLM",)'
        in (made.folder / "src/acme_llm/__init__.py").read_text()
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Cohere2", "GPTNeoX"])
def test_its_code_keeps_the_rules_of_this_repository(kind, tmp_path):
    folder = write_config(tmp_path / "made", kind, num_hidden_layers=4)
    made = write_package("my-own", None, tmp_path, checkpoint=folder)
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for command in (["check", *settings, "src"], ["format", "--check", *settings, "src"]):
        ruff = [sys.executable, "-m", "ruff", *command]
        done = subprocess.run(ruff, cwd=made.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_what_is_missing_is_written_into_the_readme_and_refused_at_load(tmp_path):
    folder = write_config(tmp_path / "made", "Olmo", clip_qkv=8.0, num_hidden_layers=2)
    made = write_package("acme", "model", tmp_path, checkpoint=folder)
    assert "own=()" in (made.folder / "src/acme_llm/model.py").read_text()
    readme = (made.folder / "README.md").read_text()
    assert "- not covered: the key clip_qkv = 8.0" in readme
    assert "- try: clipped q, k and v: subclass layers.Attention" in readme


def test_only_models_begin_with_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="--from is for models, not for a fetcher"):
        write_package("acme", "fetcher", tmp_path, checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="give --kind, or --from"):
        write_package("acme", None, tmp_path)
