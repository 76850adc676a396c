"""The kit from an author's view: a short test file, the report of a failure, cheap imports, a
checkpoint of any config, fakes in a real engine."""

import re
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
import transformers
from mmdeploy_llm_plugins import attention
from safetensors.torch import load_file

from mmdeploy_llm import LLM, SamplingParams, testing
from mmdeploy_llm.errors import ConfigError, PluginLoadError
from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, ReasoningParserSpec, hookimpl
from mmdeploy_llm.testing import (
    FakeReasoningParser,
    MediaProcessorConformance,
    ReasoningParserConformance,
    fake_manager,
    make_tokenizer,
    write_checkpoint,
    write_tiny,
)

FAKES = "mmdeploy_llm.testing.fakes"
FAKE_MODEL = ModelSpec(
    name="fake",
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    factory=f"{FAKES}:FakeModel",
    media=("image",),
    priority=100,
)
FAKE_PROCESSOR = MediaProcessorSpec(
    name="fake", kind="image", factory=f"{FAKES}:FakeMediaProcessor", models=("fake",)
)
FAKE_PARSER = ReasoningParserSpec(name="fake", factory=f"{FAKES}:FakeReasoningParser")

AUTHORS_FILE = """
from acme import provide_reasoning_parsers
from mmdeploy_llm.testing import ParserExample, PluginConformance, ReasoningParserConformance

class TestPlugin(PluginConformance):
    plugin = "acme"

class TestParser(ReasoningParserConformance):
    spec = provide_reasoning_parsers()[0]
    examples = (ParserExample(text="why</think>so", reasoning="why", content="{content}"),)

def test_fixtures(plugin_manager, tiny_checkpoint):
    import acme
    assert plugin_manager(acme).reasoning_parsers[0].name == "acme"
"""
ACME = f"""
from mmdeploy_llm.hooks import ReasoningParserSpec, hookimpl

@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name="acme", factory="{FAKES}:FakeReasoningParser")]
"""


class TestFakeParser(ReasoningParserConformance):
    """The fake parser keeps the contract of parsers."""

    spec = FAKE_PARSER


class TestFakeProcessor(MediaProcessorConformance):
    spec = FAKE_PROCESSOR
    samples = {"small": b"FAKE 8x8 ...", "large": b"FAKE 64x64 abc"}  # noqa: RUF012
    other_options = {"size": 3}  # noqa: RUF012


RUNS = """
import sys, pytest
for options in {runs!r}:
    print("CODE", int(pytest.main(["-p", "no:cacheprovider", *options])), flush=True)
"""


@pytest.mark.full  # processes that import torch
def test_a_test_file_of_fifteen_lines(tmp_path, run_program):
    """An author's test file passes; a failure is reported by its message, without our frames."""
    assert len(AUTHORS_FILE.strip().splitlines()) <= 15
    (tmp_path / "acme.py").write_text(ACME)
    for name, content in (("test_good.py", "so"), ("test_bad.py", "no")):
        (tmp_path / name).write_text(AUTHORS_FILE.format(content=content))
    bad = ["test_bad.py", "-k", "TestParser"]
    code = RUNS.format(runs=[["test_good.py"], bad, [*bad, "--full-trace"]])
    done = run_program(code, cwd=tmp_path)
    good, short, full, _ = re.split(r"(?m)^CODE", done.stdout)
    assert re.search(r"\b2[0-9] passed", good), good
    assert "failed" not in good
    assert re.findall(r"(?m)^CODE (\d)", done.stdout) == ["0", "1", "1"], done.stdout
    assert "1 failed" in short
    message = "('why', 'so'), but the example says ('why', 'no'); correct the parser or the example"
    assert message in short
    assert "plugins/parsers.py" not in short
    assert "plugins/parsers.py" in full


@pytest.mark.full  # a process of its own
def test_importing_is_cheap():
    """Importing the kit imports nothing heavy."""
    code = """
        import sys
        import mmdeploy_llm.testing, mmdeploy_llm.testing.pytest_plugin
        assert set(mmdeploy_llm.testing.__all__) <= set(dir(mmdeploy_llm.testing))
        assert not {"torch", "transformers", "numpy"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", dedent(code)], check=True)


@pytest.mark.full  # a process that has imported torch
def test_without_pytest_the_test_classes_say_what_to_install(run_program):
    """Checks and writers work."""
    code = """
        import sys
        assert "pytest" not in sys.modules
        sys.modules["pytest"] = None
        from mmdeploy_llm.testing import CheckFailed, ParserExample, Verdict, write_checkpoint
        try:
            from mmdeploy_llm.testing import ModelConformance
        except ModuleNotFoundError as error:
            assert "pip install 'mmdeploy-llm[testing]'" in str(error), error
        else:
            raise SystemExit("no error")
    """
    done = run_program(dedent(code))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", testing.__all__)
def test_every_name_can_be_imported(name):
    assert getattr(testing, name) is not None


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'Conform'"):
        testing.Conform  # noqa: B018


@pytest.mark.one_is_quick
@pytest.mark.parametrize("config_class", ["GPTNeoXConfig", "Gemma2Config", "OlmoConfig"])
def test_a_checkpoint_of_any_config(tiny_checkpoint, config_class):
    """transformers reads model and tokenizer back; equal seeds yield equal weights."""
    tokenizer = make_tokenizer()
    config = getattr(transformers, config_class)(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    folder = tiny_checkpoint(config, tokenizer=tokenizer, files={"note.txt": "hello"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)("Hello there").input_ids
    assert model(torch.tensor([ids])).logits.isfinite().all()
    assert (folder / "note.txt").read_text() == "hello"
    again, other = tiny_checkpoint(config), tiny_checkpoint(config, seed=1)
    first, second, third = (load_file(at / "model.safetensors") for at in (folder, again, other))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not any(torch.equal(first[key], third[key]) for key in first)


def test_a_config_that_does_not_fit(tmp_path):
    small = transformers.LlamaConfig(vocab_size=10)
    with pytest.raises(ConfigError, match="make the config with vocab_size=len"):
        write_checkpoint(small, tmp_path)
    config = transformers.LlamaConfig(vocab_size=1000)
    with pytest.raises(ConfigError, match="has no class 'NoSuchForCausalLM'"):
        write_checkpoint(config, tmp_path, architecture="NoSuchForCausalLM")
    vision = transformers.CLIPVisionConfig()
    vision.vocab_size = 1000
    with pytest.raises(ConfigError, match="no model that generates text for CLIPVisionConfig"):
        write_checkpoint(vision, tmp_path)


def test_a_manager_of_what_was_given():
    class Plugin:
        @hookimpl
        def provide_models(self):
            return [FAKE_MODEL]

    manager = fake_manager(Plugin(), reasoning_parsers=[FAKE_PARSER])
    assert manager.model_for(FAKE_MODEL.architectures) is FAKE_MODEL
    assert isinstance(manager.build(manager.reasoning_parser("Fake")), FakeReasoningParser)
    assert manager.failures == ()
    with pytest.raises(PluginLoadError, match="mark its functions with @hookimpl"):
        fake_manager(object())


def test_the_fakes_in_an_engine(tmp_path, monkeypatch):
    """An engine without weights counts: each token is the last one + 1."""
    folder = write_tiny("qwen2_5_vl", tmp_path)
    (folder / "model.safetensors").unlink()
    placeholder = make_tokenizer("qwen2_5_vl").convert_tokens_to_ids("<|image_pad|>")
    given = {"models": [FAKE_MODEL], "media_processors": [FAKE_PROCESSOR]}
    manager = fake_manager(attention, **given, reasoning_parsers=[FAKE_PARSER])
    monkeypatch.setattr("mmdeploy_llm.hooks.PluginManager.load", lambda *args, **core: manager)
    llm = LLM(model=str(folder), load_format="dummy", block_size=16, use_warmup=False)
    try:
        prompt = {
            "prompt_token_ids": [50, placeholder, 60],
            "multimodal_data": {"image": b"FAKE 16x4 any"},
        }
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=5))
    finally:
        llm.close()
    assert output.error_msg is None
    assert output.num_input_image_tokens == 4
    assert list(output.outputs.token_ids) == [61, 62, 63, 64, 65]
