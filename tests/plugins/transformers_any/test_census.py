"""The census in the guide is complete and without faults, its page up to date; a sample holds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

# A class for each way to run or to be refused; the script runs them all.
SAMPLE = (
    "FalconForCausalLM",
    "GptOssForCausalLM",
    "BloomForCausalLM",
    "DiffLlamaForCausalLM",
    "Llama4ForCausalLM",
    "LlavaForConditionalGeneration",
    "CohereCompassForConditionalGeneration",
    "Ovis2ForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "MistralLarge4ForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "MoshiForCausalLM",
    "MambaForCausalLM",
    "OlmoHybridForCausalLM",
    "BigBirdForCausalLM",
    "ModernBertDecoderForCausalLM",
    "RwkvForCausalLM",
)


@pytest.fixture(scope="module")
def census(load_file):
    return load_file("plugins/transformers_any/census/census.py")


@pytest.fixture(scope="module")
def page(load_file):
    return load_file("plugins/transformers_any/census/page.py")


@pytest.fixture(scope="module")
def data(page):
    return json.loads(page.DATA.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def table(data):
    """Returns class -> outcomes of text, of odd sizes, and of images."""
    classes = data["classes"].items()
    return {name: (row["text"], row["odd"], row["images"]) for name, row in classes}


def test_the_table_has_every_class(census, data, table):
    known = {name for name in table if name in census.ALL}
    assert len(known) > 0.9 * len(table)
    if data["transformers"] == transformers.__version__:
        assert set(table) == set(census.ALL)


def test_the_table_has_no_faults(census, page, table):
    for name, (text, odd, images) in table.items():
        assert text in page.EXPECTED, name
        assert odd in (*page.EXPECTED, ""), name
        assert images in (page.EXPECTED if name in census.IMAGE_TEXT else ("",)), name


def test_every_class_that_runs_says_what_serves_it(page, data):
    """A way for each, and the plugin where only that runs it."""
    for name, row in data["classes"].items():
        outcomes = {row["text"], row["images"]}
        if outcomes & {page.EQUAL, page.BY_SEQUENCE, page.BY_PLUGIN}:
            assert {"attention of the engine", "by sequence"} & set(row["served"]), name
        if page.BY_PLUGIN in outcomes:
            assert row["plugin"], name


def test_the_page_is_made_of_the_data(page, data):
    again = "run: python tests/plugins/transformers_any/census/page.py"
    assert page.PAGE.read_text(encoding="utf-8") == page.page(data), again
    assert page.DATA.read_text(encoding="utf-8") == page.dumps(data), again


def test_every_class_is_counted_in_the_page(page, data):
    """A refused class stands in the table of reasons, and a fault in its column."""
    classes = {name: dict(row) for name, row in data["classes"].items()}
    classes["Faulty"] = {"text": "died", "odd": "", "images": "", "reason": ""}
    classes["RefusedForCausalLM"] = classes["Faulty"] | {"text": "refused", "reason": "it takes x"}
    written = page.page({**data, "classes": classes})
    assert re.search(r"^\| text, to models of text \|.*\| 1 \|$", written, re.MULTILINE)
    before, after = (
        int(re.search(r"more than tokens and positions \| (\d+)", text)[1])
        for text in (page.page(data), written)
    )
    assert after == before + 1


@pytest.mark.long
def test_a_sample_of_the_table(census, table):
    """Runs in a process of its own, which may fork: this one has threads."""
    kinds = ("--only", "text", "odd", "images")
    command = [sys.executable, "-W", "ignore", census.__file__, *SAMPLE, *kinds]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wanted = []
    for name in SAMPLE:
        text, odd, images = table[name]
        wanted.append(f"{name} {text}")
        wanted += [f"{name} with odd sizes: {odd}"] if odd else []
        wanted += [f"{name} with images: {images}"] if images else []
    for line, start in zip(printed.splitlines(), wanted, strict=True):
        assert line.startswith(start), line


FAULTS = """
import warnings
warnings.simplefilter("ignore")
import census, os, time
def sleep(name, writer, has_images):
    time.sleep(3600)
def crash(name, writer, has_images):
    os._exit(3)
census.examine = sleep
print(census.run("LlamaForCausalLM", seconds=0.1)[0])
census.examine = crash
print(census.run("LlamaForCausalLM", seconds=600)[0])
"""


def test_classes_that_are_examined_again_tell_their_date(page, data):
    """The others keep that of the whole, and the page names those that do not."""
    name, row = next(iter(data["classes"].items()))
    again = page.with_rows(data, {"classes": {name: row}, "sounds": {}}, "2100-01-01")
    assert again["classes"][name] == row | {"date": "2100-01-01"}
    assert f"Examined again later, each with its date in the data: {name}." in page.page(again)
    assert page.with_rows(data, {"classes": {name: row}, "sounds": {}}, data["date"]) == data


@pytest.mark.parametrize("missing", ["torchvision", "timm"])
def test_nothing_is_written_without_the_libraries_of_images(missing, census, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", sys)
    monkeypatch.setitem(sys.modules, "timm", sys)
    census.check_libraries()
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=f"cannot import {missing}, .* so it writes nothing"):
        census.check_libraries()


@pytest.mark.full
def test_a_hang_and_a_crash_are_outcomes(census, run_program):
    done = run_program(FAULTS, cwd=Path(census.__file__).parent)
    assert done.stdout.split() == ["hang", "died"], done.stderr


def test_other_tokens_are_noticed(census):
    wanted = [([1, 2], [-0.5, -0.25])]
    assert census.is_same(wanted, wanted)
    assert not census.is_same([([1, 3], [-0.5, -0.25])], wanted)
    assert not census.is_same([([1, 2], [-0.5, -0.26])], wanted)
