"""Measure a shapes-vl folder on held-out scenes, drawn to real files on disk.

    python evaluate.py                                     the bundled model, through LLM
    python evaluate.py --model my-shapes-vl --scenes 500   a folder
    python evaluate.py --quantization int8                 with 8-bit linear layers
    python evaluate.py --engine transformers               the same files, transformers' generate()

An answer is right if it equals the truth character for character. For each scene the model writes
a caption, one answer to each possible kind of question, and two answers with thinking; for each
clip a caption.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import clips
import numpy as np
import questions as asking
from PIL import Image
from scenes import Scene, draw_scene

# Training never uses these seeds: train.py draws from seeds below a million and from 1_000_003.
FIRST_SEED = 7_000_000
SUFFIXES = ("png", "jpg", "webp")
MAX_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt about one file, and the expected answer."""

    path: Path
    question: asking.Question
    think: bool
    text_first: bool = False
    media: str = "image"

    @property
    def row(self) -> str:
        """The row of the result table to which this case belongs."""
        if self.media == "video":
            return self.question.kind
        if self.think:
            return "thinking: answer"
        return self.question.kind if self.question.kind == "caption" else f"q: {self.question.kind}"

    def messages(self) -> list[dict[str, object]]:
        """Return the conversation to send."""
        parts: list[dict[str, str]] = [
            {"type": self.media, self.media: str(self.path)},
            {"type": "text", "text": self.question.prompt},
        ]
        return [{"role": "user", "content": parts[::-1] if self.text_first else parts}]


# (case) -> (answer, reasoning)
Reply = tuple[str, str]
Engine = Callable[[list[Case]], list[Reply]]


def draw_cases(folder: Path, num_scenes: int, seed: int) -> Iterator[Case]:
    """Draw scenes into `folder` and ask about them."""
    rng = np.random.default_rng(FIRST_SEED + seed)
    for index in range(num_scenes):
        image, scene = draw_scene(rng)
        path = folder / f"scene-{index:05d}.{asking.pick(rng, SUFFIXES)}"
        image.save(path, quality=90)
        yield from _cases(rng, path, scene)


def draw_clip_cases(folder: Path, num_clips: int, seed: int) -> Iterator[Case]:
    """Draw clips into MP4 files and ask for a caption of each."""
    rng = np.random.default_rng(FIRST_SEED + seed)
    for index in range(num_clips):
        clip = clips.plan_clip(rng)
        path = folder / f"clip-{index:05d}.mp4"
        clips.write_clip(clips.ClipPainter(rng, clip), path)
        yield Case(
            path=path, question=clips.ask_caption(rng, clip), think=index % 4 == 3, media="video"
        )


def _cases(rng: np.random.Generator, path: Path, scene: Scene) -> Iterator[Case]:
    first = bool(rng.random() < 0.2)
    caption = asking.ask_caption(rng, scene)
    yield Case(path=path, question=caption, think=False, text_first=first)
    possible = []
    for kind in asking.MAKERS:
        try:
            possible.append(asking.ask(rng, scene, kind))
        except ValueError:
            continue
    for question in possible:
        yield Case(path=path, question=question, think=False, text_first=first)
    for question in (caption, asking.pick(rng, possible)):
        yield Case(path=path, question=question, think=True, text_first=first)


def with_llm(model: str, **options: object) -> Engine:
    """Answer with this toolkit through its public API. options: further options of LLM."""
    from mmdeploy_llm import LLM, SamplingParams

    llm = LLM(model=model, reasoning_parser="ernie-45-vl", **options)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def run(cases: list[Case]) -> list[Reply]:
        replies: dict[int, Reply] = {}
        for think in (False, True):
            chosen = [index for index, case in enumerate(cases) if case.think is think]
            outputs = llm.chat(
                [cases[index].messages() for index in chosen],
                params,
                chat_template_kwargs={"enable_thinking": think},
            )
            for index, output in zip(chosen, outputs, strict=True):
                reply = output.outputs
                replies[index] = (reply.text, reply.reasoning_content or "")
        return [replies[index] for index in range(len(cases))]

    return run


def with_transformers(model: str) -> Engine:
    """Answer with transformers' own generate(), one prompt at a time, as a cross-check."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    from mmdeploy_llm.weights.folder import resolve_model

    model = str(resolve_model(model))
    tokenizer = AutoTokenizer.from_pretrained(model)
    processor = AutoImageProcessor.from_pretrained(model)
    network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.bfloat16).eval()
    markers = (tokenizer.image_start_token_id, tokenizer.image_end_token_id)

    @torch.no_grad()
    def run_one(case: Case) -> Reply:
        with Image.open(case.path) as image:
            vision = processor([image.convert("RGB")], return_tensors="pt")
        prompt = tokenizer.apply_chat_template(
            case.messages(), tokenize=False, add_generation_prompt=True, enable_thinking=case.think
        )
        count = int(vision["image_grid_thw"].prod()) // 4
        prompt = prompt.replace("<|image@placeholder|>", tokenizer.image_token * count)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        types = (ids == tokenizer.image_token_id).int()
        output = network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=types,
            moe_mm_token_type_ids=types | torch.isin(ids, torch.tensor(markers)).int(),
            max_new_tokens=MAX_TOKENS,
            **vision,
        )
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        thought, mark, answer = text.partition("</think>")
        return (answer, thought) if mark else (text, "")

    return lambda cases: [run_one(case) for case in cases]


def table(cases: list[Case], replies: list[Reply]) -> str:
    """Format the right and all answers of each kind of question, then the three main figures."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for case, (answer, reasoning) in zip(cases, replies, strict=True):
        hits = {case.row: answer == case.question.answer}
        if case.media == "video":
            pass
        elif case.think:
            hits["thinking: inventory"] = reasoning == case.question.thought
        elif case.question.kind != "caption":
            hits["questions, all"] = hits[case.row]
        for row, hit in hits.items():
            right[row] += hit
            asked[row] += 1
    lines = [f"{'':24}{'right':>8}{'asked':>8}{'percent':>10}"]
    for row in sorted(asked, key=lambda name: (not name.startswith("q:"), name)):
        share = 100 * right[row] / asked[row]
        lines.append(f"{row:24}{right[row]:8}{asked[row]:8}{share:10.2f}")
    return "\n".join(lines)


def main() -> None:
    """Run the evaluation from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shapes-vl", help="folder or bundled name (shapes-vl)")
    parser.add_argument("--engine", choices=("llm", "transformers"), default="llm")
    parser.add_argument("--scenes", type=int, default=500, help="held-out scenes to draw (500)")
    parser.add_argument("--clips", type=int, default=200, help="held-out clips to draw (200)")
    parser.add_argument("--seed", type=int, default=0, help="selects the scenes (0)")
    parser.add_argument("--errors", type=int, default=0, help="print this many wrong answers")
    parser.add_argument("--dtype", default="auto", help="option of LLM: auto, bfloat16, float32")
    parser.add_argument("--quantization", help="option of LLM: int8, int4, int8wo, ...")
    parser.add_argument("--kv-cache-dtype", default="auto", help="option of LLM: auto, int8, ...")
    parser.add_argument("--image-tokens", type=int, help="option of LLM: the most of a picture")
    options = parser.parse_args()
    if options.engine == "transformers":
        engine = with_transformers(options.model)
    else:
        engine = with_llm(
            options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            image_tokens=options.image_tokens or "full",
        )
    with tempfile.TemporaryDirectory() as folder:
        cases = list(draw_cases(Path(folder), options.scenes, options.seed))
        if options.engine == "llm":  # transformers reads no videos without torchvision
            cases += draw_clip_cases(Path(folder), options.clips, options.seed)
        replies = engine(cases)
    print(table(cases, replies))
    wrong = [
        (case, reply)
        for case, reply in zip(cases, replies, strict=True)
        if reply[0] != case.question.answer
    ]
    for case, (answer, reasoning) in wrong[: options.errors]:
        print(f"\n{case.path.name}  {case.question.prompt}\n  wanted {case.question.answer!r}")
        print(f"  got    {answer!r}")
        if case.think:
            print(f"  saw    {reasoning!r}\n  truth  {case.question.thought!r}")


if __name__ == "__main__":
    main()
