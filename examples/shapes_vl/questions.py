"""Make questions about a scene in varied words, each with its one right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scenes import COLOURS, KINDS, ROWS, Scene, Shape, caption, inventory, pick

CAPTION_PROMPTS = (
    "Describe the image.",
    "Describe this image.",
    "Describe the picture.",
    "Describe this picture.",
    "What do you see?",
    "What is in the image?",
    "What is in this picture?",
    "Caption this image.",
    "Write a caption for this image.",
)
NO_PICTURE_PROMPTS = (*CAPTION_PROMPTS, "Hello.", "Hi.", "Who are you?", "How are you?", "Hello!")
NO_PICTURE_ANSWER = "Please show me a picture of shapes."
NO_PICTURE_THOUGHT = "I see no picture."
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that looks at pictures.",
    "Answer briefly.",
)
PLURALS = {kind: f"{kind}es" if kind.endswith("s") else f"{kind}s" for kind in KINDS}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt about a picture, the thought that leads to the answer, and the answer."""

    kind: str
    prompt: str
    thought: str
    answer: str


def ask_caption(rng: np.random.Generator, scene: Scene) -> Question:
    """Make the caption task."""
    return _question("caption", pick(rng, CAPTION_PROMPTS), caption(scene), scene)


def ask_no_picture(rng: np.random.Generator) -> Question:
    """Make a prompt without a picture, to which the model answers by asking for one."""
    return Question(
        kind="no_picture",
        prompt=pick(rng, NO_PICTURE_PROMPTS),
        thought=NO_PICTURE_THOUGHT,
        answer=NO_PICTURE_ANSWER,
    )


def ask(rng: np.random.Generator, scene: Scene, kind: str | None = None) -> Question:
    """Make a question of the given kind or of a random one, always with a clear answer.

    Raises ValueError if the scene allows no question of the given kind.
    """
    kinds = [kind] if kind else rng.permutation(LOTS).tolist()
    for name in kinds:
        made = MAKERS[name](rng, scene)
        if made is not None:
            return _question(name, made[0], made[1], scene)
    raise ValueError(f"this scene has no question of kind {kind!r}")


def ask_about_picture(rng: np.random.Generator, scene: Scene, number: int) -> Question:
    """Make a question about picture `number` of several."""
    place = f"picture {number}"
    draw = rng.random()
    if draw < 0.4:
        prompt, answer = f"Describe {place}.", caption(scene)
        return _question("caption", prompt, answer, scene)
    if draw < 0.7:
        return _question("count", f"How many shapes are in {place}?", str(len(scene.shapes)), scene)
    shape, present = _maybe_present(rng, scene)
    prompt = f"Is there {article(shape)} {shape} in {place}?"
    return _question("exists", prompt, yes_no(present), scene)


def article(words: str) -> str:
    """Return the indefinite article of a word."""
    return "an" if words[0] in "aeiou" else "a"


def yes_no(value: bool) -> str:
    """Return the answer to a yes/no question."""
    return "yes" if value else "no"


def _question(kind: str, prompt: str, answer: str, scene: Scene) -> Question:
    return Question(kind=kind, prompt=prompt, thought=inventory(scene), answer=answer)


def _only(shapes: tuple[Shape, ...], **wanted: str) -> bool:
    """Return whether exactly one shape has these attributes."""
    matches = [
        shape
        for shape in shapes
        if all(getattr(shape, name) == value for name, value in wanted.items())
    ]
    return len(matches) == 1


def _references(scene: Scene, shape: Shape) -> list[str]:
    """Return the descriptions, without "the", that match `shape` and no other shape."""
    fits = []
    if _only(scene.shapes, colour=shape.colour, kind=shape.kind):
        fits += [f"{shape.colour} {shape.kind}"] * 2
    if _only(scene.shapes, kind=shape.kind):
        fits.append(shape.kind)
    if _only(scene.shapes, size=shape.size, colour=shape.colour, kind=shape.kind):
        fits.append(shape.name)
    return fits


# Each maker returns (prompt, answer), or None if the scene has no such question.
Made = tuple[str, str] | None


def _count(rng: np.random.Generator, scene: Scene) -> Made:
    prompts = (
        "How many shapes are there?",
        "How many shapes are in the image?",
        "How many shapes do you see?",
        "Count the shapes.",
    )
    return pick(rng, prompts), str(len(scene.shapes))


def _some_colour(rng: np.random.Generator, scene: Scene) -> str:
    seen = rng.random() < 0.75
    return pick(rng, scene.shapes).colour if seen else pick(rng, tuple(COLOURS))


def _some_kind(rng: np.random.Generator, scene: Scene) -> str:
    return pick(rng, scene.shapes).kind if rng.random() < 0.75 else pick(rng, KINDS)


def _count_colour(rng: np.random.Generator, scene: Scene) -> Made:
    colour = _some_colour(rng, scene)
    prompts = (
        f"How many {colour} shapes are there?",
        f"How many shapes are {colour}?",
        f"Count the {colour} shapes.",
    )
    number = sum(shape.colour == colour for shape in scene.shapes)
    return pick(rng, prompts), str(number)


def _count_kind(rng: np.random.Generator, scene: Scene) -> Made:
    kind = _some_kind(rng, scene)
    plural = PLURALS[kind]
    prompts = (
        f"How many {plural} are there?",
        f"How many {plural} do you see?",
        f"Count the {plural}.",
    )
    return pick(rng, prompts), str(sum(shape.kind == kind for shape in scene.shapes))


def _colour_of(rng: np.random.Generator, scene: Scene) -> Made:
    shape = pick(rng, scene.shapes)
    if _only(scene.shapes, kind=shape.kind):
        name = shape.kind
    elif _only(scene.shapes, kind=shape.kind, size=shape.size):
        name = f"{shape.size} {shape.kind}"
    else:
        return None
    word = pick(rng, ("color", "colour"))
    prompts = (f"What {word} is the {name}?", f"Which {word} is the {name}?")
    return pick(rng, prompts), shape.colour


def _kind_of(rng: np.random.Generator, scene: Scene) -> Made:
    shape = pick(rng, scene.shapes)
    if not _only(scene.shapes, colour=shape.colour):
        return None
    prompts = (
        f"What shape is the {shape.colour} one?",
        f"What is the {shape.colour} shape?",
        f"Which shape is {shape.colour}?",
    )
    return pick(rng, prompts), shape.kind


def _size_of(rng: np.random.Generator, scene: Scene) -> Made:
    shape = pick(rng, scene.shapes)
    if not _only(scene.shapes, colour=shape.colour, kind=shape.kind):
        return None
    name = f"{shape.colour} {shape.kind}"
    prompts = (f"Is the {name} small or large?", f"What size is the {name}?")
    return pick(rng, prompts), shape.size


def _where(rng: np.random.Generator, scene: Scene) -> Made:
    shape = pick(rng, scene.shapes)
    names = _references(scene, shape)
    if not names:
        return None
    name = pick(rng, names)
    prompts = (f"Where is the {name}?", f"Is the {name} at the top, middle or bottom?")
    return pick(rng, prompts), shape.row


def _end(rng: np.random.Generator, scene: Scene) -> Made:
    if len(scene.shapes) < 2:
        return None
    side = pick(rng, ("left", "right"))
    shape = scene.shapes[0 if side == "left" else -1]
    prompts = (f"What is the {side}most shape?", f"Which shape is furthest to the {side}?")
    return pick(rng, prompts), f"a {shape.name}"


def holds(one: Shape, relation: str, other: Shape) -> bool | None:
    """Return whether `one` is left of / right of / above / below `other`; None if unclear."""
    if relation in ("left of", "right of"):
        return (one.x < other.x) == (relation == "left of")
    if one.row == other.row:
        return None
    return (ROWS.index(one.row) < ROWS.index(other.row)) == (relation == "above")


def _relation(rng: np.random.Generator, scene: Scene) -> Made:
    if len(scene.shapes) < 2:
        return None
    first, second = rng.permutation(len(scene.shapes))[:2].tolist()
    one, other = scene.shapes[first], scene.shapes[second]
    names, others = _references(scene, one), _references(scene, other)
    if not names or not others:
        return None
    relation = pick(rng, ("left of", "above") if one.row != other.row else ("left of",))
    # Choose the word by the wanted answer, so that yes and no are equally frequent.
    wanted = bool(rng.random() < 0.5)
    if holds(one, relation, other) is not wanted:
        relation = OPPOSITE[relation]
    words = relation
    if relation in ("left of", "right of") and rng.random() < 0.3:
        words = f"to the {relation}"
    prompt = f"Is the {pick(rng, names)} {words} the {pick(rng, others)}?"
    return prompt, yes_no(wanted)


def _maybe_present(rng: np.random.Generator, scene: Scene) -> tuple[str, bool]:
    """Describe a shape of the scene or, equally often, a similar one that is missing."""
    shape = pick(rng, scene.shapes)
    if rng.random() < 0.5:
        return pick(rng, (f"{shape.colour} {shape.kind}", shape.kind, shape.name)), True
    for _ in range(8):
        colour, kind = shape.colour, shape.kind
        draw = rng.random()
        if draw < 0.45:
            colour = pick(rng, tuple(COLOURS))
        elif draw < 0.9:
            kind = pick(rng, KINDS)
        else:
            colour, kind = pick(rng, tuple(COLOURS)), pick(rng, KINDS)
        if not any(s.colour == colour and s.kind == kind for s in scene.shapes):
            absent_kind = not any(s.kind == kind for s in scene.shapes)
            return (kind if absent_kind and rng.random() < 0.4 else f"{colour} {kind}"), False
    return f"{shape.colour} {shape.kind}", True


def _exists(rng: np.random.Generator, scene: Scene) -> Made:
    words, present = _maybe_present(rng, scene)
    prompts = (f"Is there {article(words)} {words}?", f"Do you see {article(words)} {words}?")
    return pick(rng, prompts), yes_no(present)


MAKERS: dict[str, Callable[[np.random.Generator, Scene], Made]] = {
    "count": _count,
    "count_colour": _count_colour,
    "count_kind": _count_kind,
    "colour": _colour_of,
    "shape": _kind_of,
    "size": _size_of,
    "where": _where,
    "end": _end,
    "relation": _relation,
    "exists": _exists,
}

# A random question is drawn from this list. Questions that require finding a shape by its kind take
# longest to learn, so each of them is listed more than once.
EXTRA_LOTS = {"colour": 1, "count_kind": 1, "where": 1, "exists": 1, "relation": 2}
LOTS = tuple(name for name in MAKERS for _ in range(1 + EXTRA_LOTS.get(name, 0)))
