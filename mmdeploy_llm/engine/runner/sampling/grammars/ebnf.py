"""Translates an EBNF grammar in the syntax of xgrammar and llama.cpp into Lark for llguidance.

    name ::= alternatives     "text"   [a-z]   [^"\\n]   .   (group)   x* x+ x? x{2,5}   # comment

llguidance reads text as lexemes, each as long as possible. Parts of a grammar that do not recurse
therefore become one lexeme each, within which every split is tried: a grammar without recursion
means exactly what it says. In a recursive rule the lexeme before a recursion is read greedily.
(`llguidance.gbnf_to_lark` makes a lexeme of every literal: ("a" | "ab") ("b" | "ba") then matches
"abb" but not "ab".)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

MAX_DEPTH = 100  # nested groups
MAX_COUNT = 100_000
MAX_MARKS = 8  # repetitions of one expression, such as x+?
ROOT = "root"
TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
      | (?P<define>::=)
      | (?P<name>[A-Za-z_][\w.-]*)
      | (?P<text>"(?:[^"\\\n]|\\.)*")
      | (?P<set>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
      | (?P<mark>[()|*+?.])""",
    re.VERBOSE | re.ASCII,
)
ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|u\{([0-9A-Fa-f]{1,6})\}|(.))"
)
SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
CLASSES = frozenset("dDwWsS")
COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class EbnfError(ValueError):
    """The grammar cannot be read or matches no text; the message says why."""


@dataclass(frozen=True, slots=True)
class Node:
    """One expression. lark: its Lark text where it is a single lexeme without a rule's name.

    kind: "lexeme", "name" (of a rule, in `lark`), "sequence", "choice", "repeat" (of one part).
    """

    kind: str
    parts: tuple[Node, ...] = ()
    lark: str = ""
    bounds: tuple[int, int | None] = (1, 1)


def to_lark(text: str) -> str:
    """Returns the Lark grammar. Raises EbnfError."""
    rules = _Parser(text).rules()
    if ROOT not in rules:
        raise EbnfError(f"it has no rule named {ROOT}")
    for name, rule in rules.items():
        for used in _names(rule):
            if used not in rules:
                raise EbnfError(f"rule {name} uses {used}, which is not defined")
    rules = _reached(rules)
    if ROOT not in _fixpoint(rules, can_end=True):
        raise EbnfError("it matches no text, because root can never end")
    return _Writer(rules).text()


class _Parser:
    """Reads the rules of a grammar."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._peek()[0] != "end":
            kind, name = self._take()
            if kind != "name" or self._take()[0] != "define":
                raise EbnfError(f"expected 'name ::=', found {name[:40]!r}")
            if name in rules:
                raise EbnfError(f"rule {name} is defined twice")
            rules[name] = self._choice()
        return rules

    def _choice(self) -> Node:
        parts = [self._sequence()]
        while self._peek() == ("mark", "|"):
            self._take()
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Node("choice", tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (part := self._atom()) is not None:
            marks = 0
            while self._peek()[0] == "count" or self._peek()[1] in COUNTS:
                part = Node("repeat", (part,), bounds=_bounds(self._take()[1]))
                marks += 1
                if marks > MAX_MARKS:
                    raise EbnfError(f"more than {MAX_MARKS} repetitions follow one expression")
            parts.append(part)
        return parts[0] if len(parts) == 1 else Node("sequence", tuple(parts))

    def _atom(self) -> Node | None:
        kind, text = self._peek()
        is_rule = kind == "name" and self._peek(1)[0] == "define"
        if is_rule or kind == "end" or text in ("|", ")"):
            if text == ")" and not self._depth:
                raise EbnfError("a ')' has no '('")
            return None
        self._take()
        match kind, text:
            case "text", _:
                return Node("lexeme", lark=_literal(text[1:-1]))
            case "set", _:
                return Node("lexeme", lark=_set(text[1:-1]))
            case "mark", ".":
                return Node("lexeme", lark=r"/[^\n]/")
            case "mark", "(":
                return self._group()
            case "name", _:
                return Node("name", lark=text)
        raise EbnfError(f"found {text[:40]!r} where an expression is expected")

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise EbnfError(f"groups are nested more than {MAX_DEPTH} levels deep")
        inner = self._choice()
        if self._take() != ("mark", ")"):
            raise EbnfError("a '(' has no ')'")
        self._depth -= 1
        return inner

    def _peek(self, ahead: int = 0) -> tuple[str, str]:
        index = self._next + ahead
        return self._tokens[index] if index < len(self._tokens) else ("end", "the end")

    def _take(self) -> tuple[str, str]:
        token = self._peek()
        self._next += 1
        return token


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        found = TOKEN.match(text, position)
        if found is None:
            line = text.count("\n", 0, position) + 1
            raise EbnfError(f"cannot read line {line} from {text[position : position + 40]!r}")
        position = found.end()
        if found.lastgroup != "space":
            assert found.lastgroup is not None
            yield found.lastgroup, found.group()


def _bounds(text: str) -> tuple[int, int | None]:
    if text in COUNTS:
        return COUNTS[text]
    low, comma, high = text.strip("{}").replace(" ", "").partition(",")
    first, last = int(low[:9]), int((high or low)[:9])  # nine digits suffice to be too many
    if not first <= last <= MAX_COUNT:
        raise EbnfError(f"the count {text[:40]} is not a range up to {MAX_COUNT}")
    return first, None if comma and not high else last


def _literal(inner: str) -> str:
    pieces, position = [], 0
    for found in ESCAPE.finditer(inner):
        pieces += [inner[position : found.start()], _character(found)]
        position = found.end()
    return lark_text("".join([*pieces, inner[position:]]))


def _set(inner: str) -> str:
    """Returns a character class as a Lark regular expression."""
    negated, inner = inner.startswith("^"), inner.removeprefix("^")
    pieces, position = [], 0
    while position < len(inner):
        found = ESCAPE.match(inner, position)
        if found is not None and found[5] in CLASSES:
            pieces.append({"d": "[0-9]", "D": "[^0-9]"}.get(found[5], found.group()))
        elif found is not None:
            pieces.append(_escaped(_character(found)))
        elif inner[position] == "-" and 0 < position < len(inner) - 1:
            pieces.append("-")
        else:
            pieces.append(_escaped(inner[position]))
        position = found.end() if found is not None else position + 1
    if not pieces:
        return r"/[\s\S]/" if negated else r"/[^\s\S]/"
    return f"/[{'^' * negated}{''.join(pieces)}]/"


def _character(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3] or found[4]
    if code is not None:
        number = int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise EbnfError(f"{found.group()} is not a character")
        return chr(number)
    if found[5].isalnum() and found[5] not in SIMPLE:
        raise EbnfError(f"the escape {found.group()} is not known")
    return SIMPLE.get(found[5], found[5])


def _escaped(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{{{ord(character):x}}}"


def lark_text(text: str) -> str:
    """Returns the Lark expression of exactly this text."""
    return f"/{''.join(map(_escaped, text))}/" if text else '""'


def _names(rule: Node) -> list[str]:
    """Returns the rules that a rule uses."""
    found, stack = [], [rule]
    while stack:
        node = stack.pop()
        if node.kind == "name":
            found.append(node.lark)
        stack.extend(node.parts)
    return found


def _reached(rules: dict[str, Node]) -> dict[str, Node]:
    """Returns the rules that root uses, directly or not."""
    seen, stack = {ROOT}, [ROOT]
    while stack:
        fresh = set(_names(rules[stack.pop()])) - seen
        seen |= fresh
        stack.extend(fresh)
    return {name: rule for name, rule in rules.items() if name in seen}


def _fixpoint(rules: dict[str, Node], *, can_end: bool) -> set[str]:
    """Returns the rules that can produce a finite text (can_end), or those that never reach a
    recursion: all rules that they use hold too."""
    users = defaultdict(set)
    for name, rule in rules.items():
        for used in _names(rule):
            users[used].add(name)
    holding: set[str] = set()
    queue = list(rules)
    while queue:
        name = queue.pop()
        if name not in holding and _holds(rules[name], holding, can_end):
            holding.add(name)
            queue.extend(users[name] - holding)
    return holding


def _holds(node: Node, holding: set[str], can_end: bool) -> bool:
    if node.kind == "name":
        return node.lark in holding
    if can_end and node.kind == "repeat" and node.bounds[0] == 0:
        return True
    results = (_holds(part, holding, can_end) for part in node.parts)
    return any(results) if can_end and node.kind == "choice" else all(results)


class _Writer:
    """Writes rules as Lark. Names are numbers, so that no name has a meaning of its own."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._regular = _fixpoint(rules, can_end=False)
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._lines: list[str] = []
        self._num_lexemes = 0

    def text(self) -> str:
        self._lines.append(f"start: {self._name(ROOT)}")
        for name, rule in self._rules.items():
            body = self._write(rule) if name in self._regular else self._rule(rule)
            self._lines.append(f"{self._name(name)}: {body}")
        return "\n".join(self._lines)

    def _name(self, name: str) -> str:
        return f"{'R' if name in self._regular else 'r'}{self._numbers[name]}"

    def _write(self, node: Node) -> str:
        """Returns an expression as it stands."""
        match node.kind:
            case "lexeme":
                return node.lark
            case "name":
                return self._name(node.lark)
            case "repeat":
                return self._repeat(node, self._write(node.parts[0]))
        separator = " | " if node.kind == "choice" else " "
        return f"({separator.join(map(self._write, node.parts))})" if node.parts else '""'

    def _rule(self, node: Node) -> str:
        """Returns an expression of a recursive rule, with its parts that do not recurse as
        lexemes."""
        if _holds(node, self._regular, can_end=False):
            return self._lexeme((node,))
        match node.kind:
            case "name":
                return self._name(node.lark)
            case "repeat":
                return self._repeat(node, self._rule(node.parts[0]))
            case "choice":
                return f"({' | '.join(map(self._rule, node.parts))})"
        pieces: list[str] = []
        run: list[Node] = []
        for part in node.parts:
            if _holds(part, self._regular, can_end=False):
                run.append(part)
                continue
            pieces += [self._lexeme(tuple(run))] * bool(run) + [self._rule(part)]
            run = []
        return f"({' '.join([*pieces, *[self._lexeme(tuple(run))] * bool(run)])})"

    def _lexeme(self, parts: tuple[Node, ...]) -> str:
        self._num_lexemes += 1
        self._lines.append(f"T{self._num_lexemes}: {self._write(Node('sequence', parts))}")
        return f"T{self._num_lexemes}"

    def _repeat(self, node: Node, inner: str) -> str:
        low, high = node.bounds
        marks = {bounds: mark for mark, bounds in COUNTS.items()}
        upper = "" if high is None else high
        return f"({inner}){marks.get(node.bounds, f'{{{low},{upper}}}')}"
