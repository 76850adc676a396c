"""An attention backend in one file: engines compute with it, refuse it, and name it in errors."""

from pathlib import Path

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ConfigError, PluginConflictError, PluginError

SOURCE = (Path(__file__).parents[2] / "examples/plugins/sdpa.py").read_text()
OPTIONS = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": 64, "quiet": True}
OPTIONS |= {
    "native_kernels": False,
    "kv_cache_memory": 2**22,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
}
PROMPTS = [[70, 71, 72], list(range(80, 112)), [73]]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture
def use(monkeypatch, tmp_path):
    """use(folder, source, **options) -> tokens of an engine with this plugin file."""
    monkeypatch.chdir(tmp_path)

    def tokens(folder, source=SOURCE, **options):
        Path("sdpa.py").write_text(source)
        with LLM(str(folder), plugins=["./sdpa.py"], **OPTIONS, **options) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [one.error_msg for one in outputs] == [None] * len(PROMPTS)
        return [list(one.outputs.token_ids) for one in outputs]

    return tokens


@pytest.mark.full
def test_tokens_equal_those_of_plain_torch(use, tiny_folder):
    """Layers with a window, chunks of prompts, decode with others."""
    folder = tiny_folder("mistral", sliding_window=12)
    assert use(folder, attention_backend="sdpa") == use(folder, attention_backend="reference")


def test_a_high_priority_computes_and_the_log_says_so(use, tiny_folder, caplog):
    caplog.set_level("INFO", "mmdeploy_llm")
    use(tiny_folder("mistral"), SOURCE.replace('name="sdpa"', 'name="sdpa", priority=100', 1))
    assert "attention backend 'auto': 'sdpa' of plugin 'sdpa.py'" in caplog.text


def test_a_model_that_it_cannot_serve_is_refused(use, tiny_folder):
    message = "'sdpa' cannot cap attention scores, which the model does; use 'auto' or"
    with pytest.raises(ConfigError, match=message):
        use(tiny_folder("gemma2"), attention_backend="sdpa")


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return SdpaAttention()", "return 1 / 0", "'sdpa.py' .*building attention backend sdpa"),
        ("return SdpaAttention()", "return 7", "'sdpa.py' .*must be a AttentionBackend from"),
        (":new_backend", ":nobody", "'sdpa.py' .*cannot be imported"),
    ],
)
def test_a_factory_that_fails_ends_the_start(use, tiny_folder, old, new, message):
    with pytest.raises(PluginError, match=message):
        use(tiny_folder("mistral"), SOURCE.replace(old, new), attention_backend="sdpa")


def test_two_of_one_priority_are_an_error_that_names_both(monkeypatch, tmp_path, tiny_folder):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        source = SOURCE.replace('"sdpa"', f'"{name}"')
        Path(f"{name}.py").write_text(source.replace("media_spans", "priority=99, media_spans", 1))
    message = "'one' of plugin 'one.py' .* 'two' of plugin 'two.py' .* both|can both serve"
    with pytest.raises(PluginConflictError, match=message):
        LLM(str(tiny_folder("mistral")), plugins=["./one.py", "./two.py"], **OPTIONS)
