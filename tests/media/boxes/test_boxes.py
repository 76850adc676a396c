"""Boxes are read by one rule for each family, in pixels of the picture, whatever models write."""

import json
import time

import pytest
from mmdeploy_llm_plugins.ernie import BOXES as ERNIE
from mmdeploy_llm_plugins.gemma import BOXES as GEMMA
from mmdeploy_llm_plugins.glm import BOXES as GLM
from mmdeploy_llm_plugins.internvl import BOXES as INTERNVL
from mmdeploy_llm_plugins.kosmos import BOXES as KOSMOS
from mmdeploy_llm_plugins.paddleocr import BOXES as PADDLE
from mmdeploy_llm_plugins.qwen import QWEN2_5_VL_BOXES as QWEN2_5_VL
from mmdeploy_llm_plugins.qwen import QWEN2_VL_BOXES as QWEN2_VL
from mmdeploy_llm_plugins.qwen import QWEN3_VL_BOXES as QWEN3_VL

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.media.boxes.reading import Box, read_boxes
from mmdeploy_llm.media.boxes.writing import MAX_SHOWN, Labelled, coco, labels_of, svg, yolo_lines

SIZE, SHOWN = (2000, 1000), (1008, 504)
CAT = Box(label="cat", x0=200, y0=100, x1=600, y1=500)
JSON = '```json\n[{"bbox_2d": [100, 100, 300, 500], "label": "cat"}]\n```'


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (QWEN2_VL, "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(100,100),(300,500)"),
        (QWEN2_VL, "cat(100,100),(300,500)"),
        (QWEN2_VL, JSON),
        (QWEN2_5_VL, '[{"bbox_2d": [100.8, 50.4, 302.4, 252], "label": "cat"}]'),
        (QWEN3_VL, JSON),
        (ERNIE, JSON),
        (GEMMA, '[{"box_2d": [100, 100, 500, 300], "label": "cat"}]'),
        (INTERNVL, "<ref>cat</ref><box>[[100, 100, 300, 500]]</box>"),
        (INTERNVL, "cat[[100, 100, 300, 500]]"),
        (GLM, "cat<|begin_of_box|>[[100,100,300,500]]<|end_of_box|>"),
        (GLM, JSON),
        (PADDLE, "cat" + "".join(f"<|LOC_{n}|>" for n in (100, 100, 300, 100, 300, 500, 100, 500))),
    ],
)
def test_one_rule_for_each_family(rule, text):
    """Each family's way to write a box is read as the same box of the file."""
    assert read_boxes(text, rule, SIZE, SHOWN if rule is QWEN2_5_VL else None) == [CAT]


def test_a_label_after_its_box():
    """Kosmos-2.5 writes the place of a line before its text, which may have numbers."""
    first, second = (f"<bbox><x_{x}><y_50><x_{x + 202}><y_252></bbox>" for x in (100, 302))
    found = read_boxes(f"{first}45,455 yen\n{second}\n{first}", KOSMOS, SIZE, SHOWN)
    assert [box.label for box in found] == ["45,455 yen", "", ""]
    assert found[1] == Box(label="", x0=599.21, y0=99.21, x1=1000, y1=500)


def test_every_rule_that_a_plugin_names_is_one():
    """Each family whose models find things says how; the names lead to rules."""
    from mmdeploy_llm.hooks import BoxRule
    from mmdeploy_llm.hooks.factories import imported

    named = {spec.name: spec.boxes for spec in PluginManager.load().models if spec.boxes}
    assert {"qwen2_5_vl", "qwen3_vl", "gemma4", "internvl", "glm4v", "paddleocr_vl"} <= set(named)
    assert all(isinstance(imported(name), BoxRule) for name in named.values())


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("", []),
        ("There is no cat.", []),
        (JSON[:-20], [Box(label="", x0=200, y0=100, x1=600, y1=500)]),
        ('[{"bbox_2d": [100, 100, 300', []),
        ('{"bbox_2d": [300, 500, 100, 100], "label": "cat"}', [CAT]),
        (
            '{"bbox_2d": [-50, 900, 9999, 1500], "label": "cat"}',
            [Box(label="cat", x0=0, y0=900, x1=2000, y1=1000)],
        ),
        ('{"bbox_2d": [2000, 2000, 3000, 3000]}', []),
        ('{"bbox_2d": [5, 5, 5, 5]}', []),
        ('{"bbox_2d": [NaN, 1e999, "a", null]}', []),
        ('{"bbox_2d": [[100,100,300,500],[100,100,300,500]], "label": "cat"}', [CAT, CAT]),
        ('{"a": {"b": {"bbox_2d": [100, 100, 300, 500], "label": "cat"}}}', [CAT]),
        (
            '{"bbox_2d": [100, 100, 300, 500], "label": "a \\"b\\" \\u00e9"}',
            [Box(label='a "b" é', x0=200, y0=100, x1=600, y1=500)],
        ),
        (
            '{"bbox_2d": [100, 100, 300, 500], "label": "' + "x" * 10_000,
            [Box(label="", x0=200, y0=100, x1=600, y1=500)],
        ),
        ("{" * 100_000 + '"bbox_2d": [', []),
        ("[" * 100_000, []),
        ('{"bbox_2d": [' + "9" * 100_000, []),
    ],
)
def test_hostile_answers(text, boxes):
    """Half-written, out of range, swapped, nested and endless answers are no surprise."""
    assert read_boxes(text, QWEN3_VL, SIZE) == boxes


def seconds(text, rule):
    """Returns the least CPU time of three readings, in this thread, and no less than a clock tells
    apart on any system."""
    taken = []
    for _ in range(3):
        begin = time.thread_time()
        read_boxes(text, rule, SIZE)
        taken.append(time.thread_time() - begin)
    return max(0.01, min(taken))


@pytest.mark.few_in_ci(10)
@pytest.mark.full
@pytest.mark.parametrize("rule", [QWEN2_VL, QWEN3_VL, GEMMA, INTERNVL, GLM, PADDLE])
@pytest.mark.parametrize(
    "text",
    [
        "(1,2),(3,4)" * 5_000,
        '{"bbox_2d": [1,2,3,4], "box_2d": [1,2,3,4]}' * 5_000,
        "[[1, 2, 3, 4]]" * 5_000,
        "<|LOC_1|><|LOC_9|>" * 5_000,
        "a" * 50_000,
        "<ref>" * 10_000,
        " " * 50_000,
        '"label": "' * 5_000,
        "[[1" * 15_000,
    ],
)
def test_many_boxes_take_linear_time(rule, text):
    """Nothing that a model writes holds the program: four times the text takes about four times as
    long, where a square would take sixteen."""
    assert seconds(4 * text, rule) < 12 * seconds(text, rule)


def test_coco_and_yolo():
    """Both formats have the same boxes; a label's number is the same in all pictures."""
    dog = Box(label="", x0=0, y0=0, x1=1000, y1=1000)
    pictures = [
        Labelled(name="a.png", size=SIZE, boxes=[CAT, dog]),
        Labelled(name="b.png", size=(10, 10), boxes=[]),
    ]
    found = coco(pictures)
    assert json.loads(json.dumps(found)) == found
    assert [one["name"] for one in found["categories"]] == labels_of(pictures) == ["cat", "object"]
    first, second = found["annotations"]
    assert first["bbox"] == [200, 100, 400, 400]
    assert first["area"] == 160_000
    assert (second["category_id"], second["image_id"], second["id"]) == (2, 1, 2)
    assert len(found["images"]) == 2
    classes = {label: number for number, label in enumerate(labels_of(pictures))}
    assert yolo_lines(pictures[0], classes)[0] == "0 0.200000 0.300000 0.200000 0.400000"


def test_svg_escapes_what_a_model_wrote():
    """A label is text in the overlay, whatever it holds, and there are not too many boxes."""
    box = Box(label='<script>"&', x0=1, y0=1, x1=5, y1=5)
    found = svg([box] * 1000, SIZE)
    assert "<script>" not in found
    assert found.count("<rect") == MAX_SHOWN


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("a" * 40, "a" * 40),
        ("a" * 41, "a" * 40 + "…"),
        ("红" * 20, "红" * 20),
        ("红" * 21, "红" * 20 + "…"),
    ],
)
def test_a_label_over_a_picture_is_cut_by_its_width(label, shown):
    drawn = svg([Box(label=label, x0=1, y0=1, x1=9, y1=9)], SIZE)
    assert f">{shown}</text>" in drawn
    assert f"<title>{label}</title>" in drawn
