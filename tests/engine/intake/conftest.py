"""Fixtures of the intake tests: a small tokenizer, a pixel-free processor, an Intake."""

import itertools
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mmdeploy_llm.engine.intake.intake import Intake
from mmdeploy_llm.engine.intake.rules import MediaRules, ParamRules, TextRules
from mmdeploy_llm.engine.intake.templates import Renderer
from mmdeploy_llm.engine.intake.tokenizer import PromptTokenizer
from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput, MediaLimits, MediaProcessor
from mmdeploy_llm.layers.pooling.abilities import GENERATES
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig

SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "<|begin|>",
    "<|start|>",
    "<|end|>",
    "<|image_pad|>",
    "<|image@placeholder|>",
)
TEXT_TOKENS = ("<think>", "</think>")
TEMPLATE = (
    "<|begin|>{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{% if c.type == 'image_url' %}"
    "<|start|><|image@placeholder|><|end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: <think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)
CORPUS = [
    "user: describe the picture please\nassistant: a red circle and a blue square, left of it",
    "hello world, these are plain words. Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich",
] * 20


def make_tokenizer(adds_bos=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, *TEXT_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<|begin|>",
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="session")
def raw_tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer():
    return make_tokenizer(adds_bos=True)


@pytest.fixture(scope="session")
def tokenizer(raw_tokenizer):
    return PromptTokenizer(raw_tokenizer)


class FakeTensor:
    """Has a size in bytes, like a tensor."""

    def __init__(self, nbytes):
        self.nbytes = nbytes


class FakeProcessor(MediaProcessor):
    """Reads bytes such as b"5" as an image of 5 tokens, and records its calls."""

    kind = "image"
    token = "<|image_pad|>"
    markers = ("<|image@placeholder|>", "<|image_pad|>")

    def __init__(self, nbytes=100):
        self.calls = []
        self.nbytes = nbytes

    def decode(self, source, limits):
        self.calls.append(("decode", source))
        if source == b"crash":
            raise KeyError("inside the plugin")
        if source == b"bad":
            raise MediaError("the image is corrupt")
        return int(source)

    def process(self, item, options):
        self.calls.append(("process", item))
        tensors = {"pixels": FakeTensor(self.nbytes)}
        return MediaInput(kind="image", tensors=tensors, num_tokens=item, key=f"key{item}")

    def count_tokens(self, item, options):
        return item


@pytest.fixture
def processor():
    return FakeProcessor()


@pytest.fixture
def config():
    return RuntimeConfig(
        options=EngineConfig(model="m"),
        device="cpu",
        dtype="float32",
        dtype_choice=None,
        kv_cache_dtype="float32",
        max_model_len=256,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=None,
        num_blocks_override=None,
        enable_prefix_caching=True,
        prefix_cache_memory_bytes=None,
        enable_chunked_prefill=True,
        limit_mm_per_prompt={"image": 4, "video": 1},
        encoder_cache_tokens=1000,
        num_intake_threads=1,
        num_threads=1,
        max_logprobs=5,
        seed=0,
        enforce_eager=True,
        attention_backend="auto",
    )


@pytest.fixture(scope="session")
def renderer():
    """Renders templates; one process for all tests that need it."""
    renderer = Renderer()
    yield renderer
    renderer.close()


@pytest.fixture
def make_intake(tokenizer, processor, config):
    """Builds an Intake from the fixtures; keywords replace its collaborators or config fields."""
    made = []

    def make(**changes):
        names = set(RuntimeConfig.__dataclass_fields__) & set(changes)
        own = replace(config, **{name: changes.pop(name) for name in names})
        names = set(ModelMedia.__dataclass_fields__) & set(changes)
        media = {name: changes.pop(name) for name in names}
        numbers = itertools.count()
        new_id = changes.pop("new_request_id", lambda: f"request-{next(numbers)}")
        abilities = changes.pop("abilities", GENERATES)
        arguments = {
            "tokenizer": tokenizer,
            "media": ModelMedia(**{"processors": {"image": processor}, **media}),
            "fetch": lambda ref, limits: ref.uri.encode(),
            "limits": MediaLimits(),
            "vocab_size": len(tokenizer.raw),
            "eos_token_ids": frozenset({2}),
            "chat_template": TEMPLATE,
        }
        arguments |= changes
        groups = [
            kind(**{name: arguments.pop(name) for name in kind.__slots__ if name in arguments})
            for kind in (TextRules, MediaRules, ParamRules)
        ]
        assert not arguments, arguments
        rules = dict(zip(("text", "media", "params"), groups, strict=True))
        made.append(Intake(config=own, **rules, abilities=abilities, new_request_id=new_id))
        return made[-1]

    yield make
    for intake in made:
        intake.close()


@pytest.fixture
def intake(make_intake):
    return make_intake()
