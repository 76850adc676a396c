"""The bundled model does its job: held-out scenes, on files, through LLM; transformers agrees."""

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

NUM_SCENES = 100
# What the bundled weights reach, minus a margin for chance; the example's README has the figures.
LEAST = {"caption": 0.9, "question": 0.9, "thinking": 0.9}
NUM_CLIPS = 60
EXAMPLE = Path(__file__).parents[2] / "examples" / "shapes_vl"


@pytest.fixture(scope="module")
def evaluate():
    """Loads examples/shapes_vl/evaluate.py, which imports its siblings as top-level modules."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield importlib.import_module("evaluate")
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in {"evaluate", "scenes", "questions", "clips"} - before:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def cases(evaluate, tmp_path_factory):
    """Returns a caption, a question and an answer with thinking for each scene."""
    found = {}
    for case in evaluate.draw_cases(tmp_path_factory.mktemp("scenes"), NUM_SCENES, seed=1):
        sort = "thinking" if case.think else case.question.kind
        sort = sort if sort in ("thinking", "caption") else "question"
        # The scene's number picks its question, so that every kind of question comes up.
        number = int(case.path.stem.removeprefix("scene-"))
        found.setdefault((case.path, sort), []).append(case)
        found[case.path, sort] = found[case.path, sort][: 1 + number % 7]
    return {key: chosen[-1] for key, chosen in found.items()}


@pytest.mark.full
def test_reduced_evaluation(evaluate, cases):
    replies = evaluate.with_llm("shapes-vl")(list(cases.values()))
    right, counts = Counter(), Counter()
    for (_, sort), case, (answer, _) in zip(cases, cases.values(), replies, strict=True):
        counts[sort] += 1
        right[sort] += answer == case.question.answer
    assert counts["caption"] == NUM_SCENES
    shares = {sort: right[sort] / counts[sort] for sort in counts}
    assert all(shares[sort] >= LEAST[sort] for sort in LEAST), shares


@pytest.mark.full
def test_clips_from_mp4_files(evaluate, tmp_path):
    cases = list(evaluate.draw_clip_cases(tmp_path, NUM_CLIPS, seed=1))
    replies = evaluate.with_llm("shapes-vl")(cases)
    right = sum(
        answer == case.question.answer for case, (answer, _) in zip(cases, replies, strict=True)
    )
    assert right >= 0.9 * NUM_CLIPS, right


@pytest.mark.full
def test_transformers_gives_the_same_answers(evaluate, cases):
    """Runs the same folder in transformers' own class; in bf16 a rare near-tie may be decided
    differently."""
    some = list(cases.values())[:24]
    ours = evaluate.with_llm("shapes-vl")(some)
    theirs = evaluate.with_transformers(str(folder()))(some)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    assert same >= len(some) - 1


@pytest.mark.full
def test_it_fits_its_size():
    assert (folder() / "model.safetensors").stat().st_size <= 8_800_000  # with its draft layer


def folder():
    from mmdeploy_llm.weights.folder import resolve_model

    return resolve_model("shapes-vl")
