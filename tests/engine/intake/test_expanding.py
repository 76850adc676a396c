"""Parts of plugins' types are expanded; what a plugin does wrong is the error of one item."""

import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from mmdeploy_llm.errors import (
    MediaError,
    MediaTimeoutError,
    PluginError,
    RequestError,
    RequestTimeoutError,
)
from mmdeploy_llm.hooks import ChatPartSpec, MediaLimits, PluginManager, hookimpl
from mmdeploy_llm.media.loading import expanding
from mmdeploy_llm.media.loading.expanding import PartExpander, Placed
from mmdeploy_llm.values.deadline import Deadline


@pytest.fixture
def expander(monkeypatch):
    """Builds an expander of parts of type "x" that a function writes."""

    def make(function, *, engine=None, **fields):
        module = ModuleType("written_for_a_test")
        module.write = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        given = {"types": ("x",), "optional": {"*": object}, **fields}
        spec = ChatPartSpec(name="x", factory="written_for_a_test:write", **given)
        manager = PluginManager()
        manager.register(SimpleNamespace(provide_chat_parts=hookimpl(lambda: [spec])), "acme")
        return PartExpander(manager.kinds, **{"model": "any", **(engine or {})})

    return make


def expand(expander, *parts, **kwargs):
    placed = [Placed(part=part, path=f"messages[2].content[{n}]") for n, part in enumerate(parts)]
    return [own.part for own in expander.expanded(placed, **kwargs)]


def test_parts_become_parts_in_their_place(expander):
    made = expander(lambda part, about: ["a", {"type": "image", "image": part["n"]}])
    found = expand(made, {"type": "text", "text": "t"}, {"type": "x", "n": b"1"}, "odd", None)
    assert found == [
        {"type": "text", "text": "t"},
        {"type": "text", "text": "a"},
        {"type": "image", "image": b"1"},
        "odd",
        None,
    ]
    placed = [
        Placed(part=part, path=f"c[{n}]") for n, part in enumerate([1, {"type": "x", "n": 2}, 3])
    ]
    paths = [own.path for own in made.expanded(placed)]
    assert paths == ["c[0]", "c[1]", "c[1]", "c[2]"]


def test_nothing_and_generators_are_parts(expander):
    assert expand(expander(lambda part, about: ()), {"type": "x"}) == []
    many = expander(lambda part, about: (str(number) for number in range(3)))
    assert [own["text"] for own in expand(many, {"type": "x"})] == ["0", "1", "2"]


def test_parts_of_parts_are_expanded_in_order(expander):
    def write(part, about):
        depth = part["depth"]
        inner = [{"type": "x", "depth": depth - 1}] * 2 if depth else []
        return [f"({depth}", *inner, f"{depth})"]

    found = expand(expander(write), {"type": "x", "depth": 2})
    assert "".join(own["text"] for own in found) == "(2(1(00)(00)1)(1(00)(00)1)2)"


def test_chains_without_an_end_and_too_many_parts_are_refused(expander, monkeypatch):
    monkeypatch.setattr(expanding, "MAX_PARTS", 100)
    endless = expander(lambda part, about: [dict(part)])
    with pytest.raises(RequestError, match=r"messages\[2\].content\[0\]: parts become .* x > x"):
        expand(endless, {"type": "x"})
    doubling = expander(lambda part, about: [dict(part)] * 50)
    with pytest.raises(RequestError, match="more than 100 parts"):
        expand(doubling, {"type": "x"})

    def forever(part, about):
        while True:
            yield "a"

    with pytest.raises(RequestError, match="more than 100 parts"):
        expand(expander(forever), {"type": "x"})


def raises(error):
    def write(part, about):
        raise error

    return write


class Own(MediaError):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (raises(ValueError("no such place")), RequestError, r"content\[0\]: no such place$"),
        (raises(MediaError("no file")), MediaError, r"content\[0\]: no file$"),
        (raises(Own(1, 2)), MediaError, r"content\[0\]: 1 2$"),
        (raises(KeyError("lat")), RequestError, "plugin 'acme' .* failed .* 'x': KeyError: 'lat'"),
        (raises(SystemExit(3)), RequestError, "plugin 'acme' .*SystemExit: 3"),
        (lambda part, about: None, RequestError, "must return parts .* got NoneType"),
        (lambda part, about: "text", RequestError, "got str"),
        (lambda part, about: {"type": "text"}, RequestError, "got dict"),
        (lambda part, about: ["a", 5], RequestError, "got 5 at 1"),
        (lambda part, about: [{"text": "x"}], RequestError, "at 0"),
        (lambda part: ["a"], RequestError, "TypeError"),
    ],
)
def test_faults_of_a_plugin_are_errors_of_the_part(expander, function, kind, words):
    with pytest.raises(kind, match=words) as caught:
        expand(expander(function), {"type": "x"})
    assert caught.type is kind


def test_a_plugin_has_a_limited_time(expander, monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.system.guarding.calls.GRACE", 0.0)
    ended = threading.Event()
    slow = expander(
        lambda part, about: ended.wait(120) and [],
        engine={"limits": MediaLimits(decode_timeout=0.1)},
    )
    with pytest.raises(MediaTimeoutError, match=r"content\[0\]: plugin 'acme' .* within 0.1 s"):
        expand(slow, {"type": "x"})
    ended.set()
    late = Deadline(seconds=0.01, end=time.monotonic() - 0.01)
    with pytest.raises(RequestTimeoutError):
        expand(slow, {"type": "x"}, deadline=late)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"n": 1}, None),
        ({"n": 1.5, "t": "x", "b": False, "l": (1,), "d": {}, "o": None}, None),
        ({}, r"content\[0\]: a x part needs 'n'"),
        ({"n": "1"}, r"content\[0\].n: must be a number, got '1'"),
        ({"n": True}, "n: must be a number, got True"),
        ({"n": None}, "n: must be a number, got None"),
        ({"n": 1, "i": 1.0}, "i: must be a whole number"),
        ({"n": 1, "b": 1}, "b: must be true or false"),
        ({"n": 1, "l": "ab"}, "l: must be a list"),
        ({"n": 1, "d": []}, "d: must be an object"),
        ({"n": 1, "t": b"x"}, "t: must be a text"),
        ({"n": 1, "tt": "x"}, "unknown key 'tt'; did you mean 't'"),
        ({"n": 1, 5: "x"}, "unknown key 5"),
    ],
)
def test_keys_are_checked(expander, part, words):
    optional = {"t": str, "i": int, "b": bool, "l": list, "d": dict, "o": object}
    made = expander(lambda part, about: [str(part)], keys={"n": float}, optional=optional)
    if words is None:
        assert expand(made, {"type": "x", **part})
        return
    with pytest.raises(RequestError, match=words):
        expand(made, {"type": "x", **part})


def test_a_late_part_waits_for_the_model_and_reads_within_the_limits(expander):
    asked = []

    def fetch(ref, limits):
        asked.append((ref.kind, ref.uri, limits.max_bytes))
        return b"Hi"

    def write(part, about):
        return [about.fetch(part["path"]).decode(), str(about.takes)]

    fields = {"late": True, "keys": {"path": str}, "files": ("path",), "optional": {}}
    early = expander(write, engine={"model": None}, **fields)
    part = {"type": "x", "path": "a.txt"}
    assert expand(early, part) == [part]
    assert [*early.files(part)] == ["path"]
    limits = MediaLimits(max_bytes=7)
    made = expander(write, engine={"fetch": fetch, "limits": limits, "takes": ("image",)}, **fields)
    assert [own["text"] for own in expand(made, part)] == ["Hi", "('image',)"]
    assert asked == [("x", "a.txt", 7)]


def test_a_part_of_one_family_waits_for_the_model(expander):
    write = lambda part, about: ["a"]  # noqa: E731
    part = {"type": "x"}
    assert expand(expander(write, engine={"model": None}, models=("Acme_VL",)), part) == [part]
    assert expand(expander(write, engine={"model": "acme-vl"}, models=("Acme_VL",)), part) != [part]
    assert expand(expander(write, engine={"model": "other"}, models=("Acme_VL",)), part) == [part]


def test_a_function_that_cannot_be_imported_is_told_at_the_start(expander):
    made = expander(5)
    with pytest.raises(PluginError, match=r"plugin 'acme' .*chat part x.* must be .* a function"):
        made.check()
