"""Models whose picture stands before a prompt are equal to transformers, and read prompts as their
processors write them, with the tokenizer's own token after the picture."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_any.before import FOLDER, KosmosPrompts, QueryPrompts
from tokenizers import processors

from mmdeploy_llm.errors import CheckpointError, MediaError, RequestError
from mmdeploy_llm.hooks import Checkpoint, MediaInput
from mmdeploy_llm.testing.tiny import make_tokenizer

MARKER = QueryPrompts.token
COUNT = 3  # embeddings of the picture
CLASSES = (
    "Blip2ForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "InstructBlipVideoForConditionalGeneration",
    "Kosmos2ForConditionalGeneration",
)


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSES)
def test_answers_equal_those_of_transformers(name, run_program, load_file):
    """Two prompts in one batch, in chunks, and again with their prefixes from the cache."""
    census = load_file("plugins/transformers_any/census/census.py")
    code = f"""
import sys, tempfile, warnings
from pathlib import Path
warnings.simplefilter("ignore")
sys.path.insert(0, {str(census.Path(census.__file__).parent)!r})
import census
with tempfile.TemporaryDirectory() as folder:
    print("outcome:", census.image_outcome({name!r}, Path(folder))[0])
"""
    assert "outcome: equal" in run_program(code).stdout


def tokenizer_with_start():
    """Returns a tokenizer that begins a text with a token of its own, as OPT's and Llama's do."""
    found = make_tokenizer()
    found.add_special_tokens({"additional_special_tokens": [MARKER]})
    start = found.convert_tokens_to_ids("<s>")
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    return found


def rule(folder):
    return QueryPrompts(Checkpoint(folder=folder, config=SimpleNamespace()))


def item(key="own"):
    tensors = {"pixel_values": torch.zeros(1, 3, 2, 2)}
    return MediaInput(kind="image", tensors=tensors, num_tokens=COUNT, key=key)


def encoder(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def divide(rule, tokenizer, text, media):
    return rule.divide(text, tokenizer(text)["input_ids"], media, encoder(tokenizer))


def test_the_picture_stands_before_the_first_token(tmp_path):
    """The ids are those that Blip2Processor writes."""
    tokenizer = tokenizer_with_start()
    found = divide(rule(tmp_path), tokenizer, f"{MARKER}What is it?", [item()])
    theirs = transformers.Blip2Processor(
        transformers.BlipImageProcessorPil(), tokenizer_with_start(), num_query_tokens=COUNT
    )
    image = torch.zeros(3, 8, 8, dtype=torch.uint8).numpy()
    assert list(found.ids) == theirs(images=[image], text="What is it?")["input_ids"][0]
    assert found.places == ((0, 1, 2),)
    assert found.items[0].key == "own", "no Q-Former reads the text"


def test_ids_of_the_caller(tmp_path):
    tokenizer, own = tokenizer_with_start(), rule(tmp_path)
    encode = encoder(tokenizer)
    (image_id,) = encode(MARKER)
    found = own.divide(None, [image_id] * COUNT + [5, 6], [item()], encode)
    assert (found.ids, found.places) == ((*[image_id] * COUNT, 5, 6), ((0, 1, 2),))
    with pytest.raises(MediaError, match="has 2 tokens for the image, which needs 3"):
        own.divide(None, [image_id, image_id, 5], [item()], encode)
    assert own.divide(None, [5, 6], [], encode).items == ()


def test_a_prompt_of_kosmos_2():
    """The ids are those of its processor, without the end that a tokenizer may add."""
    tokenizer = make_tokenizer()
    special = ["<image>", "</image>", "</line>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    start, *ids = (tokenizer.convert_tokens_to_ids(text) for text in ("<s>", *special))
    own = KosmosPrompts(
        Checkpoint(
            folder=None, config=SimpleNamespace(text_config=SimpleNamespace(bos_token_id=start))
        )
    )
    picture = replace(item(), prompt_text="<image></line></line></line></image>")
    encode = encoder(tokenizer)
    found = own.divide("<image> An image", [ids[0], *encode(" An image"), 9], [picture], encode)
    assert found.ids == (start, ids[0], *ids[2:] * COUNT, ids[1], *encode(" An image"))
    assert found.places == ((2, 3, 4),)


@pytest.mark.parametrize(
    ("text", "count", "match"),
    [
        (f"What is {MARKER}?", 1, "begin with <image>"),
        ("What is it?", 1, "begin with <image>"),
        (f"{MARKER}a{MARKER}", 1, "begin with <image>"),
        (f"{MARKER}What?", 2, "one image in each prompt, found 2"),
    ],
)
def test_what_is_refused(tmp_path, text, count, match):
    tokenizer = tokenizer_with_start()
    with pytest.raises(MediaError, match=match):
        divide(rule(tmp_path), tokenizer, text, [item()] * count)


def test_the_q_former_reads_the_text(tmp_path):
    tokenizer, questions = tokenizer_with_start(), make_tokenizer()
    questions.save_pretrained(tmp_path / FOLDER)
    own = rule(tmp_path)
    found = [
        divide(own, tokenizer, f"{MARKER}{text}", [item()]).items[0] for text in ("What?", "Where?")
    ]
    read = found[0].tensors["qformer_input_ids"]
    assert read.tolist() == [questions("What?")["input_ids"]]
    assert found[0].tensors["qformer_attention_mask"].tolist() == [[1] * read.shape[1]]
    assert len({one.key for one in (*found, item())}) == 3
    assert divide(own, tokenizer, f"{MARKER}What?", [item("")]).items[0].key == ""
    encode = encoder(tokenizer)
    with pytest.raises(RequestError, match="give the prompt as text"):
        own.divide(None, encode(MARKER) * COUNT, [item()], encode)


def test_a_tokenizer_that_cannot_be_used(tmp_path):
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(CheckpointError, match="the tokenizer in qformer_tokenizer cannot be used"):
        rule(tmp_path)
