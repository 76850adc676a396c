"""The imports are light: `import mmdeploy_llm`, its names and the commands that need no model load
neither torch nor transformers, so that they answer at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmdeploy_llm.data.records.record import Record

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "numpy", "PIL"}
HEAVY |= {"av", "httpcore2", "jinja2", "asyncio", "mmdeploy_llm.engine.startup.start"}
OF_REPORTS = {"numpy", "PIL", "jinja2", "asyncio"}  # small pictures in a template; tqdm.auto
OF_BATCHES = {"jinja2"}
# Modules of ours that are loaded at most; each costs about a millisecond.
MAX_MODULES = {"mmdeploy_llm.client.llm": 200, "mmdeploy_llm.cli.program": 200}

NAMES = "from mmdeploy_llm import LLM, SamplingParams"
ALL = """
import mmdeploy_llm
names = {}
exec("from mmdeploy_llm import *", names)
missing = set(mmdeploy_llm.__all__) - names.keys()
assert not missing, missing
assert set(mmdeploy_llm.__all__) <= set(dir(mmdeploy_llm))
"""
RUN = """
from mmdeploy_llm.cli import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, {code}), end.code
"""
MISTAKES = """
import sys
from mmdeploy_llm.cli import main
for line in sys.argv[1:]:
    sys.argv = ["mmdeploy-llm", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, line
"""
TELL = """
import json, sys
print("\\n" + json.dumps(list(sys.modules)))
"""


def loaded(code, *words, cwd=None):
    """Modules of a fresh interpreter that has run the code."""
    done = subprocess.run(
        [sys.executable, "-c", code + TELL, *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("code", "words", "name"),
    [
        (NAMES, (), "mmdeploy_llm.client.llm"),
        (RUN.format(code=0), ("--help",), "mmdeploy_llm.cli.program"),
        (RUN.format(code=0), ("caption", "--help"), "mmdeploy_llm.cli.program"),
        (RUN.format(code=0), ("batch", "--help-all"), "mmdeploy_llm.cli.program"),
    ],
    ids=["LLM", "help", "help of a command", "all of its help"],
)
def test_what_is_imported_first_is_little(code, words, name):
    modules = loaded(code, *words)
    assert not HEAVY & modules
    assert name in modules
    assert len([each for each in modules if each.startswith("mmdeploy_llm")]) <= MAX_MODULES[name]


@pytest.mark.full
def test_every_name_of_the_package_loads_nothing_heavy():
    modules = loaded(ALL)
    assert not (HEAVY - {"asyncio"}) & modules  # which AsyncLLM needs
    assert "mmdeploy_llm.client.llm" in modules


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("words", "allowed", "code"),
    [
        ("plugins list", (), 0),
        ("export captions.jsonl -o captions.csv", (), 0),
        ("report captions.jsonl --output captions.html", OF_REPORTS, 0),
        ("caption nowhere", OF_BATCHES, 2),
    ],
)
def test_commands_without_a_model_load_nothing_heavy(words, allowed, code, tmp_path):
    picture = ROOT / "examples/images/picture-2.jpg"
    record = Record(id="2", path=str(picture), text="A circle.")
    (tmp_path / "captions.jsonl").write_text(record.to_json() + "\n")
    modules = loaded(RUN.format(code=code), *words.split(), cwd=tmp_path)
    assert not (HEAVY - set(allowed)) & modules
    assert "mmdeploy_llm.cli.program" in modules


@pytest.mark.full
def test_plain_mistakes_are_told_before_anything_is_read(tmp_path):
    lines = (
        "caption",
        "caption nowhere",
        "batch -o out.jsonl",
        "batch nowhere.jsonl -o out.jsonl",
        "embed nowhere",
        "read nowhere.pdf",
        "transcribe nowhere.wav",
        "count nowhere.png",
        "search nowhere text",
        "dedupe nowhere",
        "report nowhere.jsonl",
        "export nowhere.jsonl -o out.csv",
        "generate hi --model nowhere",
        "generate hi --image nowhere.png",
        "chat --model ./nowhere",
        "bench --model nowhere",
        "quantize nowhere out",
        "merge nowhere adapter out",
    )
    modules = loaded(MISTAKES, *lines, cwd=tmp_path)
    assert not (HEAVY | {"mmdeploy_llm.values.options.config", "mmdeploy_llm.hooks"}) & modules
    assert "mmdeploy_llm.cli.program" in modules


@pytest.mark.full
def test_folders_that_cannot_be_used_are_told_before_torch_is_imported(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    commands = ("generate hi", "batch rows.jsonl -o out.jsonl", "count rows.jsonl", "bench")
    lines = [f"{command} --model empty" for command in commands]
    lines += ["quantize empty out", "quantize shapes-vl empty", "merge empty . out"]
    lines += ["merge shapes-vl . empty", "merge shapes-vl nowhere out"]
    modules = loaded(MISTAKES, *lines, cwd=tmp_path)
    assert not {"torch", "transformers"} & modules
    assert "mmdeploy_llm.weights.folder" in modules


@pytest.mark.full
def test_names_that_mean_nothing_are_told_before_torch_is_imported(tmp_path):
    for name in ("a.jpg", "a.pdf"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    engine = (
        "--engine reasoning_parser=nothing",
        "--engine tool_call_parser=nothing",
        "--engine logits_processors=nothing",
        "--engine attention_backend=nothing",
        "--engine plugins=nothing",
        "--engine chat_template=nowhere.jinja",
        "--use Nothing=ernie",
        "--use think=nothing",
        "--adapter a=./nowhere",
        "--device nothing",
    )
    lines = [f"generate hi {option}" for option in engine]
    commands = ("caption a.jpg", "batch rows.jsonl -o out.jsonl", "embed a.jpg", "chat", "bench")
    lines += [f"{command} --engine logits_processors=nothing" for command in commands]
    reading = ("pages x", "pages 0", "preset nothing", "task nothing", "task page --prompt hi")
    lines += [f"read a.pdf --{option}" for option in reading]
    written = ("caption a.jpg", "caption .", "batch rows.jsonl", "read a.pdf", "embed a.jpg")
    lines += [f"{command} -o x.wrong" for command in written]
    rounding = ("group-size 7", "calibrate nowhere", "calibrate a.jpg")
    lines += [f"quantize shapes-vl out --{option}" for option in rounding]
    lines += ["merge shapes-vl . out", "generate hi --adapter a=."]
    lines += [f"plugins check {name}" for name in ("nothing", "nowhere.py")]
    lines += ["transcribe a.jpg --transcripts nothing --model shapes-vl"]
    modules = loaded(MISTAKES, *lines, cwd=tmp_path)
    assert not {"torch", "transformers"} & modules
    assert "mmdeploy_llm.hooks.objects.attention_names" in modules


@pytest.mark.full
def test_wrong_engine_options_are_told_before_the_engine_is_imported(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    commands = (
        "caption rows.jsonl",
        "batch rows.jsonl -o out.jsonl",
        "embed rows.jsonl",
        "read rows.jsonl",
        "transcribe rows.jsonl",
        "count rows.jsonl",
        "search rows.jsonl text",
        "report rows.jsonl",
        "generate hi",
        "chat",
        "bench",
        "check-determinism",
    )
    lines = [f"{command} --engine nothing=1" for command in commands]
    modules = loaded(MISTAKES, *lines, cwd=tmp_path)
    assert not (HEAVY | {"mmdeploy_llm.hooks", "mmdeploy_llm.batch.job"}) & modules
    assert "mmdeploy_llm.values.options.config" in modules


@pytest.mark.full
def test_a_wrong_id_of_the_hub_is_told_at_once_where_nothing_may_be_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    commands = (
        f"caption {ROOT / 'examples/images'} --model nobody/nothing",
        "generate hi --model nobody/nothing",
        "bench --model nobody/nothing",
        "quantize nobody/nothing out",
        "merge nobody/nothing adapter out",
    )
    modules = loaded(MISTAKES, *commands, cwd=tmp_path)
    light = {"huggingface_hub"}
    assert (
        not (HEAVY - light | {"mmdeploy_llm.values.options.config", "mmdeploy_llm.hooks"}) & modules
    )
    assert light <= modules


@pytest.mark.full
def test_a_wrong_id_of_the_hub_is_told_before_torch_is_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    commands = (
        f"caption {ROOT / 'examples/images'}",
        "batch rows.jsonl -o out.jsonl",
        "embed rows.jsonl",
        "count rows.jsonl",
        "generate hi",
        "chat",
        "bench",
        "check-determinism",
        "read rows.jsonl",
        "transcribe rows.jsonl",
    )
    lines = [f"{command} --model nobody/nothing" for command in commands]
    lines += ["quantize nobody/nothing out", "merge nobody/nothing . out"]
    lines.append("generate hi --engine tokenizer=nobody/nothing")
    modules = loaded(MISTAKES, *lines, cwd=tmp_path)
    assert not {"torch", "transformers"} & modules
    assert "huggingface_hub.hf_api" in modules
