"""The table of the census in the guide is complete and has no faults, and a sample of it holds."""

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
)
ROW = re.compile(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| .*\|$", re.MULTILINE)


@pytest.fixture(scope="module")
def census(load_file):
    return load_file("plugins/transformers_any/census/census.py")


@pytest.fixture(scope="module")
def table(census):
    """Returns class -> (outcome of text, outcome of images)."""
    rows = ROW.findall(census.PAGE.read_text(encoding="utf-8"))
    return {name: (text, images) for name, text, images in rows}


def test_the_table_has_every_class(census, table):
    version = re.search(r"transformers\s+(\S+) names", census.PAGE.read_text(encoding="utf-8"))[1]
    known = {name for name in table if name in census.ALL}
    assert len(known) > 0.9 * len(table)
    if version == transformers.__version__:
        assert set(table) == set(census.ALL)


def test_the_table_has_no_faults(census, table):
    for name, (text, images) in table.items():
        assert text in census.EXPECTED, name
        assert images in (census.EXPECTED if name in census.IMAGE_TEXT else ("",)), name


@pytest.mark.long
def test_a_sample_of_the_table(census, table):
    """In a process of its own, which may fork: this one has threads."""
    command = [sys.executable, "-W", "ignore", census.__file__, *SAMPLE]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wanted = []
    for name in SAMPLE:
        text, images = table[name]
        wanted.append(f"{name} {text}")
        wanted += [f"{name} with images: {images}"] if images else []
    for line, start in zip(printed.splitlines(), wanted, strict=True):
        assert line.startswith(start), line


FAULTS = """
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


@pytest.mark.full
def test_a_hang_and_a_crash_are_outcomes(census):
    command = [sys.executable, "-W", "ignore", "-c", FAULTS]
    folder = Path(census.__file__).parent
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["hang", "died"]


def test_other_tokens_are_noticed(census):
    wanted = [([1, 2], [-0.5, -0.25])]
    assert census.is_same(wanted, wanted)
    assert not census.is_same([([1, 3], [-0.5, -0.25])], wanted)
    assert not census.is_same([([1, 2], [-0.5, -0.26])], wanted)
