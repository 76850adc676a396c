"""Parts of messages of every kind, in the chat templates of every family."""

import importlib

import pytest

from mmdeploy_llm.engine.intake.parts import TemplateParts
from mmdeploy_llm.engine.intake.prompts import PromptReader
from mmdeploy_llm.engine.intake.template import render
from mmdeploy_llm.hooks import MediaProcessor
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.testing.tiny.common import CHATML

LLAMA = (  # Llama 3 and many models of text: the content is a text
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
)
REPR = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
STRICT = (  # refuses what it does not know
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif p.type == 'image' %}<|image_pad|>{% else %}{{ raise_exception('unknown part') }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
KEYS = (  # tests keys, as Qwen2-Audio's
    "{% for m in messages %}{% for p in m.content %}{% if 'audio' in p or 'audio_url' in p %}"
    "<|audio|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
OPENAI = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'input_audio' %}<|audio|>"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
FAMILIES = (
    ("ernie.tiny", "TEMPLATE"),
    ("gemma.tiny", "TEMPLATE"),
    ("gemma.tiny3", "TEMPLATE"),
    ("gemma.tiny4", "TEMPLATE"),
    ("gemma.tiny4", "TEXT_TEMPLATE"),
    ("glm.tiny", "TEMPLATE"),
    ("glm.tiny_vl", "TEMPLATE"),
    ("internvl.tiny", "TEMPLATE"),
    ("lfm.tiny", "VL_TEMPLATE"),
    ("llama.tiny", "TEMPLATE"),
    ("paddleocr.tiny", "TEMPLATE"),
    ("phi.tiny", "TEMPLATE"),
)


def processor(kind, *texts):
    class Reader(MediaProcessor):
        def decode(self, source, limits):
            raise NotImplementedError

        process = count_tokens = decode

    Reader.kind, Reader.token, Reader.markers = kind, texts[0], texts
    return Reader()


MEDIA = ModelMedia(
    processors={
        "image": processor("image", "<|image_pad|>"),
        "audio": processor("audio", "<|audio|>", "<audio/>"),
        "scan": processor("scan", "<scan>"),
    },
    part_types={"input_audio": "audio"},
    part_texts={"scan": "Scan: <scan>\n"},
)


@pytest.fixture
def rendered(raw_tokenizer, renderer):
    """Returns (template, contents of the user) -> the text, and the number of probes."""

    def make(template, *contents):
        calls = []

        def write(template, messages):
            calls.append(messages)
            return render(raw_tokenizer, template, messages, {}, renderer=renderer)

        parts = TemplateParts(MEDIA, write)
        given = [{"role": "user", "content": list(content)} for content in contents]
        messages = PromptReader.of_model(MEDIA).read(given).messages
        kinds = [part["type"] for content in contents for part in content]
        groups = [
            [MediaItem(kind=kind, source=b"", options={})] for kind in kinds if kind != "text"
        ]
        made = parts.messages(messages, groups, template)
        num_probes = len(calls)
        assert parts.messages(messages, groups, template) == made
        assert len(calls) == num_probes, "what a template does is found once"
        return write(template, made)

    return make


def text(value):
    return {"type": "text", "text": value}


@pytest.mark.parametrize("template", [CHATML, STRICT, LLAMA, REPR])
def test_a_kind_that_the_template_does_not_know_is_its_first_marker(rendered, template):
    found = rendered(template, [text("a"), {"type": "audio"}, text("b")])
    assert found.count("<|audio|>") == 1
    assert found.index("a") < found.index("<|audio|>") < found.rindex("b")
    assert "{" not in found


@pytest.mark.parametrize("template", [KEYS, OPENAI])
def test_a_template_that_knows_the_kind_writes_it_itself(rendered, template):
    assert rendered(template, [{"type": "audio"}, text("b")]) == "<|audio|>b"


def test_the_text_of_the_spec_stands_for_an_item(rendered):
    assert rendered(STRICT, [{"type": "scan"}, text("b")]) == "Scan: <scan>\nb"


def test_a_template_of_text_gets_texts(rendered):
    assert rendered(LLAMA, [text("a"), text("b")]) == "<|start|>user\na\nb<|end|>"
    assert rendered(LLAMA, [{"type": "image"}, text("b")]) == (
        "<|start|>user\n<|image_pad|>\nb<|end|>"
    )


@pytest.mark.parametrize(("module", "name"), FAMILIES, ids=str)
def test_the_templates_of_families_render_every_kind(rendered, module, name):
    template = getattr(importlib.import_module(f"mmdeploy_llm_plugins.{module}"), name)
    found = rendered(template, [text("Listen."), {"type": "audio"}, {"type": "scan"}, text("?")])
    assert found.count("<|audio|>") == found.count("Scan: <scan>") == 1
    assert found.index("Listen.") < found.index("<|audio|>") < found.index("<scan>")
    assert "'type'" not in found


def test_a_template_that_refuses_the_probe_is_read(rendered):
    fussy = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}" + KEYS
    assert rendered(fussy, [text("a")], [{"type": "audio"}, {"type": "scan"}]) == (
        "a<|audio|>Scan: <scan>\n"
    )
