"""Installed packages with broken plugins: each affects only its own requests. The packages are put
on sys.path as pip would leave them, next to the in-tree ones, and run through a real LLM on tiny
checkpoints."""

import logging
import re
import sys

import pytest
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import (
    ConfigError,
    MediaError,
    ModelNotSupportedError,
    PluginConflictError,
    PluginError,
)
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.isolation import Workers

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEXT, VL = "qwen2", "qwen2_5_vl"
POISON = "Z"  # the broken plugin fails on the prompt with this text
PROMPTS = ["How many are there?", f"{POISON} is for zebra", "The quick brown fox"]
SIZE = (60, 40)  # of good images; the poisoned one is 64 x 64

NEVER_LOADS = {
    "no-import": ("import no_such_module", "ModuleNotFoundError: No module named"),
    "ends-it-all": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "misspelt": ("@hookimpl\ndef provide_model():\n    return []", "no hook 'provide_model'"),
    "no-hooks": ("def provide_models():\n    return []", "mark provide_models with @hookimpl"),
    "raises": ("@hookimpl\ndef provide_models():\n    return 1 / 0", "ZeroDivisionError"),
    "half-raises": (
        "@hookimpl\ndef provide_models():\n    yield None\n    raise SystemExit",
        "SystemExit",
    ),
    "wrong-spec": (
        "@hookimpl\ndef provide_models():\n"
        "    return [ModelSpec(name='x', architectures='Qwen2ForCausalLM', factory='a:b')]",
        "architectures must be a tuple",
    ),
}

OBSERVERS = """
@hookimpl
def on_engine_start(info):
    raise SystemExit

@hookimpl
def on_step(stats):
    raise ValueError("step")

@hookimpl
def on_request_finished(record):
    record.request_id = "mine"

@hookimpl
def fetch_media(ref, limits):
    if "poison" in ref.uri:
        raise SystemExit("fetch")
"""

PARSER = """
class Parser(ReasoningParser):
    markers = ("</think>",)

    def start(self, prompt):
        self.is_poisoned = "Z" in prompt

    def feed(self, text):
        if self.is_poisoned:
            {fault}
        return [Segment(kind="content", text=text)]

    def finish(self):
        return []

from mmdeploy_llm.hooks import Segment

@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name="stumbles", factory=__name__ + ":Parser")]
"""
PARSER_FAULTS = {
    "raises": "raise KeyError(text)",
    "ends the process": "raise SystemExit",
    "wrong type": "return text",
    "wrong kind": "return [Segment(kind='thoughts', text=text)]",
}

PROCESSOR = """
from dataclasses import replace
import torch
from mmdeploy_llm_plugins.qwen.image import QwenImageProcessor

class Processor(QwenImageProcessor):
    def process(self, item, options):
        made = super().process(item, options)
        if item.size != (64, 64):
            return made
        {fault}

@hookimpl
def provide_media_processors():
    return [MediaProcessorSpec(name="stumbles", kind="image", models=("qwen2_5_vl",), priority=9,
                               factory=__name__ + ":Processor")]
"""
PROCESSOR_FAULTS = {
    "raises": ("raise RuntimeError('no such colour')", "Processor .plugin .* no such colour"),
    "ends the process": ("raise SystemExit(3)", "Processor .plugin .* SystemExit: 3"),
    "wrong type": ("return None", "returned no usable MediaInput"),
    "no tokens": ("return replace(made, num_tokens=0)", "returned no usable MediaInput"),
    "too many tokens": (
        "return replace(made, num_tokens=made.num_tokens + 3)",
        "could not be encoded",
    ),
    "too few tokens": ("return replace(made, num_tokens=1)", "could not be encoded"),
    "wrong tensor shape": (
        "return replace(made, tensors={'pixels': made.tensors['pixels'][:, :-1]})",
        "could not be encoded",
    ),
    "missing tensor": ("return replace(made, tensors={})", "could not be encoded: KeyError"),
    "no tensor": ("return replace(made, tensors={'pixels': [1, 2]})", "no usable MediaInput"),
    "wrong prompt text": (
        "return replace(made, prompt_text='<|image_pad|>')",
        "prompt_text|placeholder",
    ),
}

MODEL = """
import mmdeploy_llm_plugins.qwen

@hookimpl
def provide_models():
    return [ModelSpec(name="{name}", architectures=("{architecture}",), priority=9,
                      media={media}, factory=__name__ + ":make")]

def make(config):
    import importlib
    import torch
    specs = mmdeploy_llm_plugins.qwen.provide_models()
    (spec,) = [spec for spec in specs if "{architecture}" in spec.architectures]
    module, _, name = spec.factory.partition(":")
    base = getattr(importlib.import_module(module), name)

    class Model(base):
        def forward(self, inputs):
            hidden = super().forward(inputs)
            if not (inputs.token_ids == {poison}).any():
                return hidden
            {fault}

        def logits(self, hidden):
            logits = super().logits(hidden)
            {logits}

        def encode_media(self, items):
            embeds = super().encode_media(items)
            if {is_encoder_good}:
                return embeds
            return [embed if item.num_tokens != 4 else embed[1:]
                    for item, embed in zip(items, embeds)]

        def positions(self, num_tokens, media):
            positions = super().positions(num_tokens, media)
            if media and media[0].item.num_tokens == 4:
                {positions}
            return positions

    return Model(config)
"""
MODEL_FAULTS = {
    "raises": ("raise RuntimeError('no such token')", "no such token"),
    "ends the process": ("raise SystemExit('enough')", "enough"),
    "too few rows": ("return hidden[:-1]", "must be"),
    "too many rows": ("return torch.cat([hidden, hidden])", "must be"),
    "one axis too many": ("return hidden[None]", "must be"),
    "wrong width": ("return hidden[:, :-1]", "must be"),
    "no tensor": ("return None", "must be"),
}


@pytest.fixture
def install(tmp_path, monkeypatch, load_file):
    """install(name, source): a package with one plugin, found beside the installed ones."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = load_file("hooks/conftest.py").Site(folder)
    yield site.install
    for module in site.modules:
        sys.modules.pop(module, None)


@pytest.fixture
def image_prompt(reference_of):
    text = f"{reference_of(VL).image_text()} what is it?"
    return lambda image: {"prompt": text, "multimodal_data": {"image": [image]}}


@pytest.fixture(scope="module")
def answers():
    """Returns the answers of the in-tree plugins alone, computed once."""
    return {}


def alone(answers, make_llm, folder, prompts, name):
    """Returns the outputs of `prompts`, called `name`, before anything is installed."""
    if name not in answers:
        answers[name] = make_llm(folder)[0].generate(prompts, GREEDY, use_tqdm=False)
    return answers[name]


def texts(outputs):
    return [list(output.outputs.token_ids) for output in outputs if output.is_ok]


@pytest.mark.full
def test_plugins_that_do_not_load(answers, install, make_llm, tiny_folder, caplog):
    """With all of them at once the host starts, says what is wrong with each, and generates as
    before."""
    folder = tiny_folder(TEXT)
    want = texts(alone(answers, make_llm, folder, PROMPTS, "text"))
    for name, (source, _) in NEVER_LOADS.items():
        install(name, source)
    with caplog.at_level(logging.WARNING):
        llm, _ = make_llm(folder)
    assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == want
    failures = {failure.plugin: failure for failure in llm.plugins.failures}
    for name, (_, message) in NEVER_LOADS.items():
        assert failures[name].distribution == f"{name}-llm"
        assert message in failures[name].error
        assert f"plugin {name!r} ({name}-llm)" in caplog.text
    with pytest.raises(ConfigError, match=r"ends-it-all.*SystemExit: no licence") as error:
        make_llm(folder, reasoning_parser="acme")
    assert "there is no reasoning parser 'acme'" in str(error.value)


def test_a_plugin_that_was_named_must_load(install, tiny_folder):
    install("ends-it-all", "raise SystemExit('no licence')")
    with pytest.raises(PluginError, match=r"ends-it-all.*SystemExit: no licence"):
        LLM(model=str(tiny_folder(TEXT)), plugins=("qwen", "ends-it-all"))


@pytest.mark.full
def test_observers_and_fetchers(install, make_llm, tiny_folder, image_prompt, tmp_path):
    """Observers are muted; a fetcher that raises fails its own item."""
    picture = tmp_path / "good.png"
    Image.new("RGB", SIZE, "red").save(picture)
    want = texts(make_llm(tiny_folder(VL))[0].generate(image_prompt(str(picture)), GREEDY))
    install("observes", OBSERVERS)
    llm, _ = make_llm(tiny_folder(VL))
    prompts = [image_prompt(name) for name in (str(picture), "poison.png", str(picture))]
    good, bad, again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert texts([good, again]) == want * 2
    assert (bad.error_code, bad.outputs.finish_reason) == (400, "error")
    assert "'observes' (observes-llm 1.0) failed to fetch 'poison.png': SystemExit" in bad.error_msg
    observed = [failure.error for failure in llm.plugins.failures if failure.phase == "observe"]
    assert len(observed) == 3  # each hook once


@pytest.mark.full
@pytest.mark.parametrize("fault", PARSER_FAULTS)
def test_a_parser(answers, install, make_llm, tiny_folder, fault):
    """The request it fails on keeps its unparsed text; all others are parsed."""
    folder = tiny_folder(TEXT)
    want = alone(answers, make_llm, folder, PROMPTS, "text")
    install("stumbles", PARSER.format(fault=PARSER_FAULTS[fault]))
    llm, _ = make_llm(folder, reasoning_parser="stumbles")
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.is_ok for output in found] == [True, False, True]
    assert [output.outputs.text for output in found] == [output.outputs.text for output in want]
    assert "'stumbles' of plugin 'stumbles'" in found[1].error_msg
    other, _ = make_llm(folder, reasoning_parser="qwen3")
    assert all(output.is_ok for output in other.generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.mark.full
@pytest.mark.parametrize("fault", PROCESSOR_FAULTS)
def test_a_processor(answers, install, make_llm, tiny_folder, image_prompt, fault):
    """The item on which it fails becomes an error of its request; the other images are answered as
    before."""
    source, message = PROCESSOR_FAULTS[fault]
    good = [image_prompt(Image.new("RGB", SIZE, colour)) for colour in ("red", "green")]
    bad = image_prompt(Image.new("RGB", (64, 64), "blue"))
    want = texts(alone(answers, make_llm, tiny_folder(VL), good, "small images"))
    install("stumbles", PROCESSOR.format(fault=source))
    llm, _ = make_llm(tiny_folder(VL))
    check_batch(llm, [good[0], bad, good[1]], want, message)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_a_model(answers, install, make_llm, tiny_folder, reference_of, fault):
    """The request on which forward fails ends with an error; the others of the same step do not."""
    (poison,) = reference_of(TEXT).tokenizer(POISON).input_ids
    source, message = MODEL_FAULTS[fault]
    want = texts(alone(answers, make_llm, tiny_folder(TEXT), PROMPTS, "text"))[::2]
    install("stumbles", model_source(fault=source, poison=poison))
    llm, _ = make_llm(tiny_folder(TEXT))
    check_batch(llm, PROMPTS, want, message)


@pytest.mark.full
def test_a_model_that_encodes_too_few_rows(answers, install, make_llm, tiny_folder, image_prompt):
    good = [image_prompt(Image.new("RGB", (90, 60), colour)) for colour in ("red", "green")]
    bad = image_prompt(Image.new("RGB", (56, 56), "blue"))  # 4 tokens
    want = texts(alone(answers, make_llm, tiny_folder(VL), good, "larger images"))
    install("stumbles", model_source("Qwen2_5_VLForConditionalGeneration", is_encoder_good=False))
    llm, _ = make_llm(tiny_folder(VL))
    check_batch(
        llm,
        [good[0], bad, good[1]],
        want,
        r"encode_media of Model .plugin 'stumbles'. returned \(3, ",
    )


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "return positions[0]",
            "positions of Model .plugin 'stumbles'. returned .*, must be .3, ",
        ),
        (
            "return positions[:, 1:]",
            "positions of Model .plugin 'stumbles'. returned .*, must be .3, ",
        ),
        ("raise SystemExit('nowhere')", "could not start: SystemExit: nowhere"),
    ],
)
def test_a_model_with_wrong_positions(
    answers, install, make_llm, tiny_folder, image_prompt, fault, message
):
    """Even more failing requests than there are slots take none from the others."""
    good = [image_prompt(Image.new("RGB", (90, 60), colour)) for colour in ("red", "green")]
    bad = image_prompt(Image.new("RGB", (56, 56), "blue"))
    want = texts(alone(answers, make_llm, tiny_folder(VL), good, "larger images"))
    install("stumbles", model_source("Qwen2_5_VLForConditionalGeneration", positions=fault))
    llm, _ = make_llm(tiny_folder(VL), max_num_seqs=2)
    failed = llm.generate([bad] * 3, GREEDY, use_tqdm=False)
    assert all(re.search(message, output.error_msg) for output in failed)
    check_batch(llm, [good[0], bad, good[1]], want, message)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "fault", ["return logits[:, :-1]", "return logits[None]", "return logits[:0]", "return None"]
)
def test_a_model_with_wrong_logits(install, make_llm, tiny_folder, fault):
    install("stumbles", model_source(logits=fault))
    llm, _ = make_llm(tiny_folder(TEXT))
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        assert output.error_code == 500
        assert re.search(
            r"logits of Model .plugin 'stumbles'. returned .*must be .1, ", output.error_msg
        )


@pytest.mark.full
@pytest.mark.parametrize("fault", ["raise SystemExit('no licence')", "return {}[config]"])
def test_a_model_that_cannot_be_built(install, make_llm, tiny_folder, fault):
    """The error names it, and no other model replaces it silently; other architectures run, and so
    does this one with the plugin blocked."""
    source = model_source().replace("    import importlib\n", f"    {fault}\n", 1)
    install("stumbles", source)
    kind = PluginError if "SystemExit" in fault else ModelNotSupportedError
    with pytest.raises(kind, match=r"'stumbles' .stumbles-llm 1.0"):
        make_llm(tiny_folder(TEXT))
    for folder, blocked in (("ernie4_5", ()), (TEXT, ("stumbles",))):
        llm, _ = make_llm(tiny_folder(folder), blocked_plugins=blocked)
        assert len(texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))) == 3


def test_two_plugins_that_want_the_same(install, make_llm, tiny_folder):
    source = model_source()
    install("first", source)
    install("second", source)
    with pytest.raises(PluginConflictError, match=r"first-llm.*second-llm.*blocked_plugins"):
        make_llm(tiny_folder(TEXT))
    llm, _ = make_llm(tiny_folder("ernie4_5"))
    assert len(texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))) == 3


WORKER = """
import sys
import numpy as np

def decode(blob, limits):
    if blob == b"exits":
        raise SystemExit(3)
    if blob == b"dies":
        import os
        os._exit(7)
    if blob == b"raises":
        raise KeyError("secret")
    names = [name for name in sys.modules if name == "torch" or name.startswith("site_")]
    yield {"names": names}, np.zeros(3, np.uint8)
"""


@pytest.mark.full
def test_worker_processes(install, tmp_path, monkeypatch, cold_children):
    """Workers load no plugins, so none can break them: a worker imports only the module of its
    function. A failure of that module fails the item."""
    for name, (source, _) in NEVER_LOADS.items():
        install(name, source)
    install("decodes", WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    workers, limits = Workers(), MediaLimits()
    faults = {b"exits": "SystemExit", b"dies": "exit status 7", b"raises": "KeyError"}
    try:
        for blob in (b"good", *faults, b"good"):
            answers = workers.decode("site_decodes_llm:decode", blob, limits)
            if blob in faults:
                with pytest.raises(MediaError, match=faults[blob]) as error:
                    list(answers)
                assert "secret" not in str(error.value)
            else:
                ((fields, array),) = answers
                assert (fields["names"], array.tolist()) == (["site_decodes_llm"], [0, 0, 0])
    finally:
        workers.close()


def model_source(
    architecture="Qwen2ForCausalLM",
    *,
    fault="return hidden",
    poison=-1,
    is_encoder_good=True,
    positions="pass",
    logits="return logits",
):
    is_vl = "VL" in architecture
    return MODEL.format(
        name=VL if is_vl else "stumbles",  # a processor names the family it is for
        architecture=architecture,
        media=("image",) if is_vl else (),
        fault=fault,
        poison=poison,
        is_encoder_good=is_encoder_good,
        positions=positions,
        logits=logits,
    )


def check_batch(llm, prompts, want, message):
    """Checks that the second prompt fails with `message` and the others give `want`, twice."""
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.is_ok for output in outputs] == [True, False, True]
        assert outputs[1].outputs.finish_reason == "error"
        assert re.search(message, outputs[1].error_msg), outputs[1].error_msg
        assert texts(outputs) == want
