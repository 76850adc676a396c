"""The census as data and as a page: docs/census.json has every class, docs/census.md sums it up.

python tests/plugins/transformers_any/census/page.py    writes the page anew from the data
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[4] / "docs"
DATA, PAGE = DOCS / "census.json", DOCS / "census.md"
EQUAL, BY_SEQUENCE, BY_PLUGIN = "equal", "equal, by sequence", "equal, by its plugin"
REFUSED, NOT_MADE = "refused", "not made"
EXPECTED = (EQUAL, BY_SEQUENCE, BY_PLUGIN, REFUSED, NOT_MADE)  # anything else is a fault
OWN_PLUGIN = "a plugin of its own"
OTHER = "others, each with a reason of its own"
NEEDS_TORCHVISION = "images need torchvision"
SAID = {  # kind of prompts -> what a printed line says of it
    "text": "",
    "odd": " with odd sizes:",
    "images": " with images:",
    "sounds": " with sounds:",
}
KINDS = {  # what stops a class -> what its reason says; the first that matches
    "text alone: each prompt must have an image, with which it is served": "must have an image",
    "its decoder attends to an encoder": "cross attention",
    "its encoder reads boxes of words": "boxes on the page",
    "its forward needs more than tokens and positions": "takes ",
    "image tokens attend to each other as its own code masks them": "masks of its own",
    "its layers keep or share keys in a way of their own": "shares the keys|is of the type",
    "transformers' own forward or `generate` fails": "generate fails|its own code|cannot run with",
    "no attention that goes through transformers' interface": "no attention that goes",
    "its logits differ, or the checkpoint lacks a parameter": "logits differ|holds no values",
    "transformers has no processor, or it does not say how it writes an image": "[pP]rocessor",
}


class Result(NamedTuple):
    """Says what came of a class with one kind of prompts. served: the mechanisms that ran."""

    outcome: str = ""
    reason: str = ""
    served: tuple = ()


def rows_of(results, plugins):
    """Returns the rows of the data: table -> class -> row. results: class -> kind of prompts ->
    Result; kinds that a class does not have are "". plugins: class -> its own plugin."""
    rows = {"classes": {}, "sounds": {}}
    for name, found in sorted(results.items()):
        text, odd, images, sounds = (found.get(kind, Result()) for kind in SAID)
        if sounds.outcome:
            reason = shorten(sounds.reason)
            rows["sounds"][name] = {"sounds": sounds.outcome, "reason": reason}
        if text.outcome or images.outcome or odd.outcome:
            rows["classes"][name] = {
                "text": text.outcome,
                "odd": odd.outcome,
                "images": images.outcome,
                "plugin": plugins.get(name, ""),
                "served": list(dict.fromkeys((*text.served, *images.served))),
                "reason": shorten(text.reason or images.reason or odd.reason),
            }
    return rows


def data_of(rows, version, date, minutes):
    """Returns the census as it is stored. minutes: how long it took."""
    return {"transformers": version, "date": date, "minutes": minutes, **rows}


def with_rows(data, rows, date):
    """Returns the census with these rows in place of its own; each tells its date if it is of
    another day than the whole."""
    later = {} if date == data["date"] else {"date": date}
    tables = {
        table: dict(sorted((data[table] | {n: row | later for n, row in new.items()}).items()))
        for table, new in rows.items()
    }
    return {**data, **tables}


def shorten(reason):
    """Returns the reason in one line, without what is the same in all."""
    text = " ".join(reason.split("; use a plugin")[0].split())
    text = re.sub(r" \(model '\.\.\.'\)$", "", text.removeprefix("transformers_any cannot "))
    return re.sub(r"^run \w+: ", "", text)[:160]


def dumps(data):
    """Returns the data as JSON with one class on each line."""
    head = "".join(f"{json.dumps(key)}: {json.dumps(data[key])},\n" for key in list(data)[:3])
    tables = []
    for table in ("classes", "sounds"):
        rows = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in data[table].items())
        tables.append(f'"{table}": {{\n' + ",\n".join(rows) + "\n}")
    return f"{{{head}" + ",\n".join(tables) + "}\n"


def counts(classes, kind):
    """Returns a row of the table: how many of the classes came to which outcome."""
    found = [row[kind] for row in classes if row[kind]]
    cells = [len(found), *(found.count(outcome) for outcome in EXPECTED)]
    cells.append(sum(outcome not in EXPECTED for outcome in found))
    return " | ".join(map(str, cells))


def stopped(classes):
    """Returns the rows of the table of what stops classes, most frequent first."""
    groups = {}
    for name, row in classes.items():
        if {row["text"], row["odd"], row["images"]} & {REFUSED, NOT_MADE}:
            kinds = (kind for kind, text in KINDS.items() if re.search(text, row["reason"]))
            groups.setdefault(next(kinds, OTHER), []).append(name)
    ordered = sorted(groups.items(), key=lambda item: (item[0] == OTHER, -len(item[1]), item[0]))
    return "\n".join(f"| {kind} | {len(names)} | {some(names)} |" for kind, names in ordered)


def served(classes):
    """Returns the rows of the table of mechanisms, most frequent first."""
    groups = {OWN_PLUGIN: [name for name, row in classes.items() if row.get("plugin")]}
    for name, row in classes.items():
        for mechanism in row.get("served", ()):
            groups.setdefault(mechanism, []).append(name)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return "\n".join(f"| {kind} | {len(names)} | {some(names)} |" for kind, names in ordered)


def some(names):
    """Returns four names at most, without what classes' names end in."""
    short = [re.sub(r"(For\w+|LMHeadModel|Model\w*)$", "", name) for name in names]
    return ", ".join(dict.fromkeys(short[:4])) + (", ..." if len(names) > 4 else "")


def page(data):
    """Returns the page of the guide, from the data alone."""
    classes = data["classes"]
    causal = [row for row in classes.values() if not row["images"]]
    pictured = [row for row in classes.values() if row["images"]]
    return HEAD.format(
        date=data["date"],
        version=data["transformers"],
        total=len(classes),
        minutes=data["minutes"],
        later=later(data),
        odd=counts(classes.values(), "odd"),
        causal=counts(causal, "text"),
        texts=counts(pictured, "text"),
        images=counts(pictured, "images"),
        sounds=counts(list(data["sounds"].values()), "sounds"),
        heard=heard(data["sounds"]),
        stopped=stopped(classes),
        served=served(classes),
        torchvision=sum(row["reason"] == NEEDS_TORCHVISION for row in pictured),
    )


def later(data):
    """Says which classes were examined again after the whole, if any."""
    names = [
        name for kind in ("classes", "sounds") for name, row in data[kind].items() if "date" in row
    ]
    return (
        f" Examined again later, each with its date in the data: {', '.join(names)}."
        if names
        else ""
    )


def heard(classes):
    """Returns the models that answer about sounds, and those that do not, in words."""
    ways = {EQUAL: [], REFUSED: [], NOT_MADE: []}
    for name, row in classes.items():
        way = row["sounds"] if row["sounds"] in (REFUSED, NOT_MADE) else EQUAL
        ways[way].append(re.sub(r"(Thinker)?For\w+$", "", name))
    said = (
        (EQUAL, "Equal"),
        (REFUSED, "Refused, with the reason"),
        (NOT_MADE, "Not made by the census"),
    )
    return " ".join(f"{text}: {', '.join(ways[way]) or 'none'}." for way, text in said)


HEAD = """# Which models of transformers run

`transformers_any` runs what no plugin is made for, and much of what has one. The census builds every class that
transformers {version} names for text, and for images and text, with small random weights, and compares it with
transformers itself ({date}). **[census.json](census.json) has the outcome of each of the {total} classes**, with the
reason where one does not run; `grep Falcon docs/census.json` shows two.{later}

| prompts | classes | equal | equal, by sequence | equal, by its plugin | refused | not made | faults |
|---|---|---|---|---|---|---|---|
| text, to models of text | {causal} |
| text, to models of images and text | {texts} |
| text, to small models of odd sizes | {odd} |
| one image and two, to models of images and text | {images} |
| a sound and none, to models that hear | {sounds} |

| outcome | meaning |
|---|---|
| equal | greedy tokens and their log-probabilities are those of transformers' `generate`: batched, in chunks, and with prefixes from the cache |
| equal, by sequence | the same; transformers computes the attention, one sequence after the other, on the paged KV cache: exact, but slower |
| equal, by its plugin | the same; `transformers_any` refuses the class, but a plugin of this package is made for it |
| refused | an error says why, when the model is loaded or at the request |
| not made | the census has no small config or processor of the class, or transformers' own `generate` fails on it |

Odd sizes are those that divide nothing: heads of 12, eight of them in a model of 64 channels, keys and values of
different widths, 509 tokens, 92 channels in a layer. A class that is refused with even sizes is not tried with them.

What serves a class is its field `served`, as the model that ran says it; a class may need several:

| mechanism | classes | such as |
|---|---|---|
{served}

The field `plugin` names the plugin of this package that is made for a class and serves it, unless you block it. The
census blocks these and compares `transformers_any`, but where only the plugin runs the class.

What stops the others:

| reason | classes | such as |
|---|---|---|
{stopped}

**Images.** transformers' own classes process them; where there are two, the one that needs no torchvision. The
images of {torchvision} classes need it, and an error asks for it where it is not installed. FastVLM, Gemma 3n and
PerceptionLM need timm too. Each image is encoded alone. The census gives Emu3 and PerceptionLM two images of one
size: transformers pads others for Emu3, and PerceptionLM takes no others together. BLIP-2, InstructBLIP and Kosmos-2
take one image, before the prompt, and InstructBlipVideo one video. BLIP-2 and InstructBLIP need one in each prompt, and InstructBLIP the prompt as text,
since its Q-Former reads it.

**Sounds.** {heard} Each sound is encoded alone.

**Long prompts.** The census does not reach the lengths at which a model chooses tokens by their scores. Such a
request is refused.

**Again at each step.** Some older models keep nothing of earlier tokens, or something of their own: OpenAI GPT, XLM,
XLNet, Reformer, CPM-Ant, ProphetNet. All tokens of a sequence are computed again for each new one, in one pass where a trial at the
start shows that it gives the same, else by the model's own `generate`; the log says so. The answers are exact and take
long: the time grows with the square of their length, or its cube. Where a prompt sees itself in both directions, it has
no `prompt_logprobs`. Reformer's sequences end where its chunks begin, at 64 tokens by default.

**Positions.** RoBERTa and its kin (XLM-RoBERTa, CamemBERT, Data2Vec, X-MOD) are given the positions of their training,
which begin after that of padding. transformers' forward has them too, its `generate` counts from 0: the census gives it
the positions.

**Partial rotary embedding.** The plugins of this package apply `partial_rotary_factor` in the default rope too, where
some classes of transformers ignore it: a checkpoint that states it was trained with it, and other engines apply it.
The census compares `transformers_any`, which computes as the class does.

## Models that hear

Like those below they have plugins of their own: Whisper, Moonshine (also Streaming), Parakeet (CTC, RNNT, TDT), Nemotron ASR Streaming, Nemotron 3.5 ASR, Granite Speech 5, Canary and Cohere ASR, for `transcribe`; Qwen2.5-Omni, Qwen3-Omni and Gemma 4 answer questions about sounds. Of the classes of the census `transcribe` takes [six more](speech.md#models-that-chat), and Granite Speech Plus, which the census does not run: transformers' feature extractor of it needs torchaudio. Ours does not, and its answers are compared in tests.

## Models that give vectors or scores

The census asks for text, so these have plugins of their own and are not in its table. Each is equal to its class in
transformers on a small random checkpoint, in vectors and in scores of its head, for texts of several lengths in one step.

| kind | classes |
|---|---|
| encoders (`Model`, `ForMaskedLM`; without classes of scores) | EuroBert, Ultrabert, UltraVBert (texts and images) |
| encoders (`Model`, `ForMaskedLM`, `ForSequenceClassification`) | Bert, Camembert, DistilBert, Electra, Gte, JinaEmbeddingsV3, ModernBert, MPNet, NomicBert, Roberta, XLMRoberta |
| one vector of texts, images and sounds | EmbeddingGemma2, EmbeddingGemma2Text (texts alone) |
| two towers, texts and images | CLIP, Siglip (SigLIP 2 of one size too), Siglip2 (of any size), Tipsv2 |
| late interaction, a vector for each token | ColPali, ColQwen2, ColModernVBert, NeoMME (`ForRetrieval`; its `Model` and `ForMaskedLM` give a mean) |

- ColQwen2 has the M-RoPE positions of its training; transformers' class computes them only where it is given them.
- transformers 5.24 has the image processors of UltraVBert, TIPSv2 and NeoMME for torchvision alone; theirs here do the
  same on Pillow, which may round a pixel otherwise.
- The score of a text and an image is the cosine of their vectors, without the scale and bias of SigLIP's loss, which
  keep the order.

| left out | why |
|---|---|
| DeBERTa, DeBERTa v2 and v3 | attention to relative positions, with products of its own |
| ALBERT, BigBird, Longformer, Funnel, XLNet, ConvBERT, MobileBERT, SqueezeBERT, RemBERT | layers of their own; no plugin yet |
| T5 and MT5 encoders (Sentence-T5, GTR) | an encoder with relative biases of another form |
| videos of EmbeddingGemma 2 | one frame a second, without times, by rules of its own; give frames as images |
| Jina v2, Jina v4, NV-Embed | code of the checkpoint, which is never run |
| AltCLIP, ChineseCLIP, MetaCLIP 2, X-CLIP, CLAP, ALIGN | other towers; no plugin yet |
| ColQwen2.5, ColQwen3, ColIdefics3 | transformers has no class of them |

`python tests/plugins/transformers_any/census/census.py` takes the census again and writes both files. On two
cores that took {minutes} minutes; it needs torchvision and timm, and says so where they are missing.
"""  # noqa: E501 - rows of tables


def read():
    """Returns the stored census."""
    return json.loads(DATA.read_text(encoding="utf-8"))


def write(data):
    """Stores the census, and writes its page."""
    DATA.write_text(dumps(data), encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    write(read())
