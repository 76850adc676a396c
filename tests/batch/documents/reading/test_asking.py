"""How a model is asked: by the preset for it, by name, or by the caller's own words; and what
becomes of its answers."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm.batch.documents.reading.asking import GENERAL, about_of, choose_asking
from mmdeploy_llm.batch.documents.reading.finishing import Finishing
from mmdeploy_llm.batch.documents.reading.plan import Reader, Wish
from mmdeploy_llm.data.files.question_fields import filled
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager, ReadingPreset, hookimpl

PRESET = ReadingPreset(
    name="acme-ocr",
    architectures=("AcmeVL",),
    marks=("acme ocr",),
    tasks={"page": "Read page {page} of {pages}: {text_layer} {other}", "table": "Table:"},
    longest_side=1000,
    sampling={"no_repeat_ngram_size": 20, "top_k": 3},
    convert=f"{__name__}:converted",
)


def converted(answer, page):
    if answer == "broken":
        raise ValueError("it is no Acme")
    if answer == "worse":
        raise KeyError("secret")
    return answer.upper()


@pytest.fixture
def files(tmp_path):
    """Model files of an AcmeVL whose card calls it Acme OCR."""
    (tmp_path / "README.md").write_text("---\nlicense: x\n---\nHello\n# Acme OCR\n\nNot glm-ocr.")
    plugins = PluginManager.load(())
    provides = SimpleNamespace(provide_reading_presets=hookimpl(lambda: [PRESET]))
    plugins.register(provides, "acme")
    config = SimpleNamespace(architectures=["AcmeVL"], to_dict=lambda: {"model_type": "acme"})
    checkpoint = SimpleNamespace(architecture="AcmeVL", folder=tmp_path, config=config)
    return SimpleNamespace(plugins=plugins, checkpoint=checkpoint)


def ask(files, name=None, task=None, prompt=None, tables=None, options=None):
    return choose_asking(files, name, task, prompt, tables, options or {})


def test_the_preset_for_the_model_is_taken(files):
    asking = ask(files, options={"dpi": 300, "password": "secret"})
    assert asking.preset is PRESET
    assert asking.options == {"dpi": 300, "longest_side": 1000, "password": "secret"}
    assert "secret" not in str(asking.configuration())
    values = {"page": 2, "pages": 9, "text_layer": "{page} words", "width": 1, "height": 1}
    assert filled(asking.prompt, values) == "Read page 2 of 9: {page} words {other}"


def test_only_the_head_of_a_card_counts(files):
    assert "glm-ocr" not in about_of(files, "models/x")
    (files.checkpoint.folder / "README.md").unlink()
    assert ask(files).preset is GENERAL
    assert "no preset" in ask(files).about


def test_what_the_caller_says_counts(files):
    assert ask(files, "ACME_OCR", "table").prompt == "Table:"
    assert ask(files, prompt="Read {page}.").prompt == "Read {page}."
    with pytest.raises(ConfigError, match=r"did you mean 'acme-ocr'"):
        ask(files, "acme-oc")
    with pytest.raises(ConfigError, match="a task 'chart'; they have page, table"):
        ask(files, task="chart")
    with pytest.raises(ConfigError, match="contradict"):
        ask(files, task="table", prompt="x")


def test_parameters_are_the_presets_unless_the_caller_has_others(files):
    reader = Reader(asking=ask(files), documents=None)
    own = reader.sampling_params(Wish(options={}, sampling={}))
    assert (own.max_tokens, own.top_k, own.no_repeat_ngram_size) == (8192, 3, 20)
    own = reader.sampling_params(
        Wish(options={}, sampling={"max_tokens": 5, "no_repeat_ngram": False, "temperature": 0.5})
    )
    assert (own.max_tokens, own.no_repeat_ngram_size, own.temperature) == (5, 0, 0.5)


def test_answers_become_markdown_or_stay_as_they_are(files):
    finish = Finishing(ask(files))
    item = BadItem(line=1, id="x", message="")
    made = finish(Record(id="x", text="words"), item)
    assert (made.text, made.columns) == ("WORDS", {"answer": "words"})
    kept = finish(Record(id="x", text="broken", columns={"page": 1}), item)
    assert kept.text == "broken"
    assert kept.columns == {"page": 1, "notes": "the answer stays as it was: it is no Acme"}
    assert "secret" not in finish(Record(id="x", text="worse"), item).columns["notes"]
    error = ItemError(code=400, kind="MediaError", message="x")
    failed = Record(id="x", text="words", error=error)
    assert finish(failed, item) is failed
    assert finish.counts == {"the answer stays as it was": 2}


def test_tables_are_written_as_the_caller_wants(files):
    finish = Finishing(ask(files, tables="markdown"))
    made = finish(Record(id="x", text="<table><tr><td>a</td></tr></table>"), None)
    assert made.text == "| A |\n| --- |"
