"""Boxes are drawn over the picture of their item, and what a model wrote stays text."""

from html.parser import HTMLParser

from mmdeploy_llm.batch.report.cards import CardMaker
from mmdeploy_llm.batch.report.pictures import Picture
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.media.boxes.writing import MAX_SHOWN

PICTURE = Picture(source="data:image/jpeg;base64,AA==", name="a.png")


def found(*labels, size=(400, 200)):
    boxes = tuple({"label": label, "box": [40.0, 20.0, 200.0, 100.0]} for label in labels)
    return Record(
        id="a", text="t", num_prompt_tokens=5, item_digest="d", boxes=boxes, picture_size=size
    )


def html_of(record, *pictures):
    return CardMaker().make(record, pictures).html


def test_boxes_are_drawn_in_the_frame_of_the_picture():
    html = html_of(found("cat"), PICTURE)
    assert '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 200"' in html
    assert '<rect x="40.0" y="20.0" width="160.00" height="80.00"' in html
    assert ">1 box<" in html
    assert ">cat</text>" in html


def test_labels_stay_text():
    """Nothing of a label becomes an element, an attribute or a control of the direction."""
    label = '</title></svg><script>alert(1)</script><img src=x onerror="x">&amp;\u202e\ud800"\''
    html = html_of(found(label), PICTURE)
    tags = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.extend((tag, *(name for name, _ in attrs if name.startswith("on"))))

    Tags().feed(html)
    assert "script" not in tags
    assert "onerror" not in tags
    assert tags.count("img") == 1
    assert "\u202e" not in html
    html.encode()


def test_what_cannot_be_drawn_is_told():
    """There are at most MAX_SHOWN boxes over a picture; a strip of frames, and no preview, has
    none."""
    many = html_of(found(*["x"] * (MAX_SHOWN + 1)), PICTURE)
    assert many.count("<rect") == MAX_SHOWN
    assert f"{MAX_SHOWN + 1} boxes, {MAX_SHOWN} of them drawn" in many
    assert "<svg" not in html_of(found("x"), PICTURE, PICTURE)
    assert "<svg" not in html_of(found("x"))
    assert "<svg" not in html_of(found(), PICTURE)


def test_another_box_is_another_card():
    """A page does not use the card of an earlier one whose boxes differ."""
    maker = CardMaker()
    assert maker.key(found("a")) != maker.key(found("b"))
