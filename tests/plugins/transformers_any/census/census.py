"""The census: every class of transformers that generates text, alone or from images, gives the same
greedy tokens here as in transformers, on small random weights, or says why it cannot run.

    python tests/plugins/transformers_any/census/census.py             all; writes docs/census.json
    python tests/plugins/transformers_any/census/census.py CLASS ...   prints these
    python .../census.py [CLASS ...] --only odd sounds                 some kinds of prompts; prints
    python .../census.py --write CLASS ...                             writes these into the data

A class has up to four kinds of prompts: text, text to a model of odd sizes, images, and sounds.
Each runs in a process of its own with bounded time and memory, as many at a time as there are
cores. Some classes need torchvision or timm for their images, so what is written asks for both.
CENSUS_LOUD=1 shows what these processes print.
"""

import argparse
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # no pool of threads before the fork

import mmdeploy_llm_plugins.transformers_any.model  # noqa: F401 - imported once for all
import torch
import transformers
from mmdeploy_llm_plugins import (
    blip,
    decoders,
    ernie,
    florence,
    formulanet,
    gemma,
    git,
    glm,
    gptoss,
    granite,
    internvl,
    kosmos,
    lfm,
    llama,
    minicpm,
    mllama,
    nemotron,
    olmo,
    paddleocr,
    phi,
    pix2struct,
    qwen,
    t5gemma,
    vision_encoder_decoder,
)
from mmdeploy_llm_plugins.transformers_any import BY_PROMPT, masks, mechanisms, structure
from mmdeploy_llm_plugins.transformers_any.mechanisms import ONE_AFTER_THE_OTHER, TOGETHER
from mmdeploy_llm_plugins.transformers_media import processor
from transformers import modeling_outputs
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.caches import layer_caches
from mmdeploy_llm.errors import MMDeployLLMError, RequestError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
import encoders
import frames
import images
import page
import shrink
import sounds
from page import BY_PLUGIN, BY_SEQUENCE, EQUAL, NOT_MADE, REFUSED, Result

# The plugins of single families, and of standard decoders.
NATIVE = (
    *(ernie, gemma, glm, gptoss, granite, internvl, lfm, llama, minicpm, nemotron),
    *(
        olmo,
        paddleocr,
        phi,
        qwen,
        blip,
        decoders,
        florence,
        formulanet,
        git,
        kosmos,
        mllama,
        pix2struct,
        t5gemma,
        vision_encoder_decoder,
    ),
)
WHOLE = (
    "CpmAntForCausalLM",
    "ProphetNetForCausalLM",
    "XLMWithLMHeadModel",
    "XLNetLMHeadModel",
)  # their `generate` is repeated
TOKENIZERS = {  # others have that of qwen2
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
}
# A field that Llama 4's forward asks for, and transformers 5.24 forgot in its output.
modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
SECONDS = 120
BYTES = 6 * 2**30
MAX_TOKENS = 8
MAX_DIFFERENCE = 5e-3  # of log-probabilities
# Without special tokens, which plugins take for placeholders of media.
PROMPTS = [[45, 59, 33, 47, 71], [301, 52, 105, 77] * 5 + [48, 60, 61], list(range(40, 71))]
SETTINGS = {  # prompts come in chunks, in batches, and the second time from the prefix cache
    "num_threads": 1,
    "use_warmup": False,
    "block_size": 4,
    "max_num_batched_tokens": 32,
    "limit_mm_per_prompt": {"image": 2},
    "max_num_seqs": 4,
    "kv_cache_memory": 2**26,
    "max_model_len": 128,
    "enable_logprob": True,
}
LONGER = {**SETTINGS, "max_model_len": 900, "max_num_batched_tokens": 64}  # for images
HEARD = {**LONGER, "max_num_batched_tokens": 600}  # a sound of some comes in one step


def classes(mapping):
    """Returns name of a class -> model type."""
    found = {}
    for kind, names in mapping.items():
        for name in names if isinstance(names, (tuple, list)) else (names,):
            found.setdefault(name, kind)
    return found


CAUSAL = classes(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = classes(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
ALL = {**IMAGE_TEXT, **CAUSAL}
SOUNDS = sounds.classes(
    classes(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES), set(IMAGE_TEXT)
)
PLUGINS = {  # class -> its own plugin, which serves it where none is blocked
    name: spec.name
    for plugin in NATIVE
    for spec in plugin.provide_models()
    for name in spec.architectures
}


def config_of(name):
    config_class = getattr(transformers, name).config_class or CONFIG_MAPPING[ALL[name]]
    config = shrink.shrunk(config_class)
    config.architectures = [name]
    if name in CAUSAL and name not in IMAGE_TEXT:
        config.is_decoder, config.is_encoder_decoder = True, False
    return config


def reference(folder, name, prompts):
    """Returns (tokens, log-probabilities) of each prompt by transformers' generate. prompts:
    arguments of the model's forward."""
    architecture = getattr(transformers, name)
    model = architecture.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ends = {} if name in encoders.OWN_ENDS else {"eos_token_id": None, "pad_token_id": 0}
    found = []
    for inputs in prompts:
        with torch.inference_mode():
            out = model.generate(
                **inputs,
                **ends,
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = out.sequences[0, -MAX_TOKENS:].tolist()
        rows = [logits[0].float().log_softmax(-1) for logits in out.logits]
        found.append((tokens, [row[t].item() for row, t in zip(rows, tokens, strict=True)]))
    return found


def ours(llm, prompts):
    """Returns (tokens, log-probabilities) of each prompt. Raises the error of a request that
    failed."""
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, min_tokens=0, ignore_eos=True, logprobs=1
    )
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        if output.error_msg:
            says_why = "use a plugin made for this model" in output.error_msg
            is_wrong = 400 <= output.error_code < 500 or says_why
            kind = RequestError if is_wrong else RuntimeError
            raise kind(output.error_msg)
        tokens, rows = list(output.outputs.token_ids), output.outputs.logprobs
        found.append((tokens, [row[t].logprob for row, t in zip(rows, tokens, strict=True)]))
    return found


def is_same(found, wanted):
    return all(
        tokens == others
        and max(abs(a - b) for a, b in zip(logprobs, theirs, strict=True)) < MAX_DIFFERENCE
        for (tokens, logprobs), (others, theirs) in zip(found, wanted, strict=True)
    )


def text_outcome(name, folder):
    """Returns (outcome, reason) for prompts of text."""
    if name in encoders.NEED_AN_IMAGE:
        return REFUSED, encoders.REASON
    if name in encoders.TEXTS:
        prompts, inputs = encoders.write_texts(name, folder)
        return compared(name, folder, SETTINGS, prompts, inputs)
    processor.load_processor = no_images  # the folder has no files of an image processor
    try:
        tokenizer = make_tokenizer(TOKENIZERS.get(name, "qwen2"))
        write_checkpoint(config_of(name), folder, tokenizer=tokenizer)
    except Exception as error:
        return NOT_MADE, f"no small config: {describe(error)}"
    inputs = [{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS]
    first = first_position(name)
    if first:  # transformers' generate counts from 0, its forward and the training from there
        for own in inputs:
            own["position_ids"] = torch.arange(first, first + own["input_ids"].shape[1])[None]
    return compared(name, folder, SETTINGS, PROMPTS, inputs)


def first_position(name):
    """Returns the position of the first token; see structure.positions_of."""
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config_of(name))
    return structure.positions_of(structure.decoder_of(model))[0]


def odd_outcome(name, folder):
    """Returns (outcome, reason) for prompts of text to a model of odd sizes."""
    shrink.odd_sizes(getattr(transformers, name).config_class or CONFIG_MAPPING[ALL[name]])
    return text_outcome(name, folder)


def image_outcome(name, folder):
    """Returns (outcome, reason) for prompts with images."""
    if name in encoders.FAMILIES:
        prompts, inputs = encoders.write(name, folder)
        return compared(name, folder, {**SETTINGS, "max_model_len": 100}, prompts, inputs)
    if name == frames.NAME:
        prompts, inputs = frames.write(config_of(name), folder)
        return compared(name, folder, LONGER, prompts, inputs)
    try:
        base, _ = images.processor_class(ALL[name])
        tokenizer, config = images.make_tokenizer(base), config_of(name)
        tokenizer.save_pretrained(folder)
        images.write_processor(folder, ALL[name], config)
        checkpoint = Checkpoint(folder=folder, config=config)
        found = images.theirs(checkpoint)
        images.set_tokens(config, found)
        write_checkpoint(config, folder, tokenizer=tokenizer)
        images.set_number(name, folder, found)
        found = images.theirs(checkpoint)
        prompts = images.prompts(found)
        inputs = [images.inputs(found, prompt) for prompt in prompts]
        prompts = [images.ours(found, prompt) for prompt in prompts]
    except MMDeployLLMError as error:
        return REFUSED, str(error)
    except Exception as error:
        traceback.print_exc()
        return NOT_MADE, describe(error)
    return compared(name, folder, LONGER, prompts, inputs)


def sound_outcome(name, folder):
    """Returns (outcome, reason) for prompts with a sound, and without."""
    try:
        sounds.write(name, SOUNDS[name], folder)
        prompts, inputs = sounds.prompts(folder)
    except MMDeployLLMError as error:
        return REFUSED, str(error)
    except Exception as error:
        traceback.print_exc()
        return NOT_MADE, describe(error)
    return compared(name, folder, HEARD, prompts, inputs)


def compared(name, folder, settings, prompts, inputs):
    """Returns (outcome, reason, mechanisms). prompts: ours; inputs: the same for transformers'
    forward."""
    settings = {**settings, "model": str(folder)}
    if name in (*BY_PROMPT, *masks.KNOWN, *WHOLE):  # its prompts come whole
        settings["max_num_batched_tokens"] = settings["max_model_len"]
    blocked = [plugin.__name__.rpartition(".")[2] for plugin in NATIVE]
    try:
        try:
            way, served, found = answers(blocked, prompts, settings)
        except MMDeployLLMError:
            if name not in PLUGINS:
                raise
            traceback.print_exc()
            (_, served, found), way = answers([], prompts, settings), BY_PLUGIN
    except MMDeployLLMError as error:
        traceback.print_exc()
        return REFUSED, str(error).replace(str(folder), "...")
    except Exception as error:
        traceback.print_exc()
        return "fault", describe(error)
    try:
        wanted = reference(folder, name, inputs)
    except Exception as error:
        traceback.print_exc()
        return NOT_MADE, f"transformers' generate fails: {describe(error)}"
    print(found, wanted, sep="\n")
    outcome = way if all(is_same(tokens, wanted) for tokens in found) else "wrong"
    return outcome, "", served


def answers(blocked, prompts, settings):
    """Returns (outcome if they are right, what serves the model, the answers of two runs)."""
    with LLM(blocked_plugins=blocked, **settings) as llm:
        way = BY_SEQUENCE if getattr(llm.model, "attends_itself", False) else EQUAL
        return way, served_by(llm.model), (ours(llm, prompts), ours(llm, prompts))


def served_by(model):
    """Returns the mechanisms that serve a model, as it runs."""
    own = getattr(model, "mechanisms", None)
    if own is not None:
        return list(own)
    way = ONE_AFTER_THE_OTHER if getattr(model, "attends_itself", False) else TOGETHER
    return [way, *mechanisms.of_caches(model, layer_caches(model))]


def describe(error):
    return f"{type(error).__name__}: {error}"


def no_images(*_):
    raise UnsupportedMediaError("the census has prompts of text")


OUTCOMES = {
    "text": text_outcome,
    "odd": odd_outcome,
    "images": image_outcome,
    "sounds": sound_outcome,
}


def examine(name, writer, kind):
    """Runs in a process of its own; writes its result to a pipe."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    if not os.environ.get("CENSUS_LOUD"):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    with tempfile.TemporaryDirectory() as folder:
        result = OUTCOMES[kind](name, Path(folder))
    os.write(writer, json.dumps(result).encode()[:60_000])


def run(name, kind="text", seconds=SECONDS):
    """Returns the Result of a class: "hang" after `seconds`, "died" when its process did."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            examine(name, writer, kind)
        finally:
            os._exit(0)
    os.close(writer)
    data, end = b"", time.monotonic() + seconds
    while select.select([reader], [], [], max(0, end - time.monotonic()))[0]:
        part = os.read(reader, 65536)
        if not part:
            break
        data += part
    else:
        os.killpg(pid, signal.SIGKILL)
        data = b'["hang", ""]'
    os.close(reader)
    os.waitpid(pid, 0)
    return Result(*json.loads(data)) if data else Result("died")


def outcomes_of(name, kinds):
    """Returns the class and kind of prompts -> Result, for those of the kinds that it takes."""
    found = {}
    if "text" in kinds and name in ALL:
        found["text"] = run(name)
    is_refused = found.get("text", Result()).outcome == REFUSED
    if "odd" in kinds and name in ALL and name not in encoders.TEXTS and not is_refused:
        found["odd"] = run(name, "odd")
    if "images" in kinds and name in IMAGE_TEXT:
        is_final = is_refused and name not in encoders.FAMILIES
        found["images"] = found["text"] if is_final else run(name, "images")
        is_right = found["images"].outcome in (EQUAL, BY_SEQUENCE)
        if is_right and images.needs_torchvision(ALL[name]):
            found["images"] = found["images"]._replace(reason=page.NEEDS_TORCHVISION)
    if "sounds" in kinds and name in SOUNDS:
        found["sounds"] = run(name, "sounds")
    return name, found


def take(names, kinds):
    """Yields (class, its Results), in the order of the names, and prints them."""
    work = functools.partial(outcomes_of, kinds=kinds)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as workers:
        for name, found in workers.imap(work, names):
            for kind, result in found.items():
                print(name + page.SAID[kind], *result, flush=True)
            yield name, found


def check_libraries():
    """Ends a census that would be written without a library of images, before it begins: it would
    count what needs the library as refused, and the page would say so of every machine."""
    for name in ("torchvision", "timm"):
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
            raise SystemExit(
                f"The census cannot import {name}, with which some classes process images, so it "
                f"writes nothing ({error}). Install the build of {name} that fits your torch."
            ) from error


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="all where none is named")
    kinds, said = list(page.SAID), "kinds of prompts; classes are named before this option"
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help=said)
    parser.add_argument("--write", action="store_true", help="write the named classes, too")
    args = parser.parse_args()
    if args.write and len(args.only) < len(kinds):
        parser.error("--write examines all kinds of prompts of a class: leave --only out")
    is_whole = not args.classes and args.only == kinds
    if is_whole or args.write:
        check_libraries()
    begun, today = time.monotonic(), datetime.date.today().isoformat()
    results = dict(take(args.classes or sorted({*ALL, *SOUNDS}), args.only))
    rows = page.rows_of(results, PLUGINS)
    if is_whole:
        minutes = round((time.monotonic() - begun) / 60)
        page.write(page.data_of(rows, transformers.__version__, today, minutes))
    elif args.write:
        page.write(page.with_rows(page.read(), rows, today))


if __name__ == "__main__":
    main()
