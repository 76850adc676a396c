"""Layers of a PDF that are off: their texts are taken out of a page before PDFium, which would read
what it does not draw, reads them. Works on what pypdf has read; see structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 40  # of forms in forms, and of expressions
SHOWN = {b"Tj", b"TJ", b"Do"}
SHOWN_ON_A_NEW_LINE = {b"'", b'"'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of a document. on: whether each is, by the number of its object."""

    on: Mapping[int, bool]

    @classmethod
    def of(cls, root: Any) -> Layers | None:
        """Reads the layers that a catalog names as PDFium does, None for a document without any: a
        layer's own state for viewing counts before the list of those that are off."""
        if "/OCProperties" not in root:
            return None
        named = root["/OCProperties"].get_object()
        config = named.get("/D", {}).get_object() if "/D" in named else {}
        groups: dict[int, Any] = {own.idnum: own for own in named.get("/OCGs", ())}
        is_on: bool = config.get("/BaseState") != "/OFF"
        found = dict.fromkeys(groups, is_on)
        for name, state in (("/ON", True), ("/OFF", False)):
            found |= {own.idnum: state for own in config.get(name, ())}
        for number, own in groups.items():
            usage: Any = own.get_object().get("/Usage")
            view: Any = None if usage is None else usage.get_object().get("/View")
            shown = None if view is None else view.get_object().get("/ViewState")
            if shown is not None:
                found[number] = shown != "/OFF"
        return cls(on=found)

    def shows(self, given: Any, depth: int = 0) -> bool:
        """Returns whether what belongs to a layer, or to a rule about several, is drawn."""
        own: Any = given.get_object()
        if not isinstance(own, dict) or depth > MAX_DEPTH:
            return True
        rule: Any = own
        if rule.get("/Type") != "/OCMD":
            return self.on.get(getattr(given, "idnum", None) or _number(own), True)
        if "/VE" in rule:
            return self._holds(rule["/VE"].get_object(), depth + 1)
        groups = rule.raw_get("/OCGs") if "/OCGs" in rule else None
        inner = [] if groups is None else groups.get_object()
        if not isinstance(inner, list):  # to PDFium a rule about one layer is the layer
            return self.shows(groups, depth + 1)
        states = [self.shows(each, depth + 1) for each in inner]
        if not states:
            return True
        return {
            "/AllOn": all(states),
            "/AnyOff": not all(states),
            "/AllOff": not any(states),
        }.get(str(rule.get("/P")), any(states))

    def _holds(self, expression: Any, depth: int) -> bool:
        """Returns what an expression of layers says."""
        if not isinstance(expression, list) or not expression or depth > MAX_DEPTH:
            return True
        states = [
            self._holds(own.get_object(), depth + 1)
            if isinstance(own.get_object(), list)
            else self.shows(own, depth + 1)
            for own in expression[1:]
        ]
        rule = str(expression[0])
        if rule == "/Not":
            return not all(states[:1])
        return any(states) if rule == "/Or" else all(states)


def _number(own: Any) -> int:
    """Returns the number of an object, 0 for one that stands in another."""
    return int(getattr(getattr(own, "indirect_reference", None), "idnum", 0))


@dataclass(frozen=True, slots=True)
class Hiding:
    """Takes what is off out of content streams. pypdf: the package. seen: forms that were read."""

    layers: Layers
    pypdf: Any
    reader: Any
    seen: set[int]

    def hidden(self, content: Any, resources: Any, depth: int) -> Any:
        """Returns a content stream without what is off, and changes the forms that it draws."""
        found = self.pypdf.generic.ContentStream(content, self.reader)
        properties, objects = (_inner(resources, name) for name in ("/Properties", "/XObject"))
        kept, states = [], list[bool]()
        for operands, operator in found.operations:
            if operator in (b"BDC", b"BMC"):
                states.append(self._shows_mark(operands, operator, properties))
            elif operator == b"EMC":
                del states[-1:]
            is_shown = all(states)
            if operator == b"Do" and is_shown and operands and operands[0] in objects:
                is_shown = self._shows_object(objects, operands[0], resources, depth)
            if is_shown or operator not in SHOWN | SHOWN_ON_A_NEW_LINE:
                kept.append((operands, operator))
            elif operator in SHOWN_ON_A_NEW_LINE:
                kept.append(([], b"T*"))
        found.operations = kept
        return found

    def _shows_mark(self, operands: Any, operator: bytes, properties: Any) -> bool:
        if operator != b"BDC" or len(operands) < 2 or operands[0] != "/OC":
            return True
        given = operands[1]
        if isinstance(given, str):
            if given not in properties:
                return True
            given = properties.raw_get(given)
        return self.layers.shows(given)

    def _shows_object(self, objects: Any, name: str, resources: Any, depth: int) -> bool:
        own = objects[name].get_object()
        if not isinstance(own, self.pypdf.generic.StreamObject):
            return True
        if "/OC" in own and not self.layers.shows(own.raw_get("/OC")):
            return False
        if own.get("/Subtype") == "/Form" and id(own) not in self.seen and depth < MAX_DEPTH:
            self.seen.add(id(own))
            inner = own["/Resources"].get_object() if "/Resources" in own else resources
            self._replace(objects, name, own, self.hidden(own, inner, depth + 1))
        return True

    def _replace(self, objects: Any, name: str, form: Any, content: Any) -> None:
        """Puts a form with other content in the place of one."""
        made = self.pypdf.generic.DecodedStreamObject()
        made.set_data(content.get_data())
        packed = ("/Filter", "/DecodeParms", "/Length")
        made.update({key: form.raw_get(key) for key in form if key not in packed})
        self.seen.add(id(made))
        objects[self.pypdf.generic.NameObject(name)] = made


def _inner(resources: Any, name: str) -> Any:
    found = (
        resources[name].get_object() if isinstance(resources, dict) and name in resources else {}
    )
    return found if isinstance(found, dict) else {}
