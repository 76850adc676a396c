"""Finds out which templates are simple: built of operations whose cost is linear in the size of
what they work on. Only these are rendered in this process, see metered.py.

The check is an allow-list over the syntax tree, so that whatever is not known here is not simple.
Arguments that could multiply a text (separators, replacements, indents) must be short constants.
Only macros of the template and a few functions are called by name, and only listed methods by
attribute: a bound method kept in a variable cannot be called. Almost all published chat templates
are simple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jinja2 import nodes

MAX_SIMPLE = 2**15  # characters of a simple template
MAX_NODES = 3000  # of its syntax tree
MAX_DEPTH = 60  # of its syntax tree
MAX_CONSTANT = 64  # characters of a constant argument that can multiply a text
MAX_INDENT = 16

PLAIN = (
    nodes.And,
    nodes.Assign,
    nodes.AssignBlock,
    nodes.BinExpr,
    nodes.Break,
    nodes.CallBlock,
    nodes.Concat,
    nodes.CondExpr,
    nodes.Const,
    nodes.Continue,
    nodes.Dict,
    nodes.ExprStmt,
    nodes.FilterBlock,
    nodes.Getattr,
    nodes.Getitem,
    nodes.If,
    nodes.Keyword,
    nodes.List,
    nodes.Macro,
    nodes.NSRef,
    nodes.Name,
    nodes.Neg,
    nodes.Not,
    nodes.Operand,
    nodes.Or,
    nodes.Output,
    nodes.Pair,
    nodes.Pos,
    nodes.Scope,
    nodes.Slice,
    nodes.Template,
    nodes.TemplateData,
    nodes.Tuple,
    nodes.With,
)
FUNCTIONS = frozenset({"caller", "namespace", "raise_exception", "range", "strftime_now"})
# fmt: off
TESTS = frozenset({
    "!=", "<", "<=", "==", ">", ">=", "boolean", "defined", "divisibleby", "eq", "equalto",
    "even", "false", "float", "ge", "greaterthan", "gt", "in", "integer", "iterable", "le",
    "lessthan", "lower", "lt", "mapping", "ne", "none", "number", "odd", "sameas", "sequence",
    "string", "true", "undefined", "upper",
})
# fmt: on

Check = Callable[[Sequence[nodes.Expr], Sequence[nodes.Keyword]], bool]


def is_simple(tree: nodes.Template) -> bool:
    """Returns whether every construct of the template is of a cost that is bounded."""
    functions = FUNCTIONS | {macro.name for macro in tree.find_all(nodes.Macro)}
    for count, (node, depth) in enumerate(_walk(tree)):
        if count >= MAX_NODES or depth > MAX_DEPTH or not _is_allowed(node, functions):
            return False
    return True


def _walk(tree: nodes.Node) -> Iterator[tuple[nodes.Node, int]]:
    """Yields all nodes with their depth, without recursion: the tree may be deep."""
    stack = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        if depth <= MAX_DEPTH:
            stack.extend((child, depth + 1) for child in node.iter_child_nodes())


def _is_allowed(node: nodes.Node, functions: frozenset[str]) -> bool:
    match node:
        case nodes.Name():  # a variable must not take the place of a function
            return node.ctx == "load" or node.name not in functions
        case nodes.For():
            return not node.recursive
        case nodes.Compare():
            return len(node.ops) <= 2
        case nodes.Test():
            return node.name in TESTS and _has_plain_arguments(node)
        case nodes.Filter():
            check = FILTERS.get(node.name)
            return check is not None and _has_plain_arguments(node) and _passes(check, node)
        case nodes.Call():
            return _has_plain_arguments(node) and _is_allowed_call(node, functions)
    return isinstance(node, PLAIN)


def _is_allowed_call(node: nodes.Call, functions: frozenset[str]) -> bool:
    match node.node:
        case nodes.Name(name="strftime_now"):
            return _constants(node.args, node.kwargs)
        case nodes.Name(name="namespace"):
            return not node.args
        case nodes.Name(name=name):
            return name in functions
        case nodes.Getattr(node=nodes.Const(value=str(text)), attr="join"):
            return len(text) <= MAX_CONSTANT
        case nodes.Getattr(attr=attribute) if attribute in METHODS:
            return _passes(METHODS[attribute], node)
    return False


def _has_plain_arguments(node: Any) -> bool:
    return node.dyn_args is None and node.dyn_kwargs is None


def _passes(check: Check, node: Any) -> bool:
    return check(node.args, node.kwargs)


def _anything(args: Sequence[nodes.Expr], kwargs: Sequence[nodes.Keyword]) -> bool:
    return True


def _nothing(args: Sequence[nodes.Expr], kwargs: Sequence[nodes.Keyword]) -> bool:
    return not args and not kwargs


def _constants(args: Sequence[nodes.Expr], kwargs: Sequence[nodes.Keyword]) -> bool:
    """Allows short constants only."""
    return all(_is_short(value) for value in (*args, *(item.value for item in kwargs)))


def _is_short(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.Tuple):
        return len(node.items) <= 4 and all(map(_is_short, node.items))
    if isinstance(node, nodes.Neg):
        return _is_short(node.node)
    if not isinstance(node, nodes.Const):
        return False
    value = node.value
    if isinstance(value, str):
        return len(value) <= MAX_CONSTANT
    return value is None or isinstance(value, (bool, float)) or abs(value) <= MAX_CONSTANT


def _json(args: Sequence[nodes.Expr], kwargs: Sequence[nodes.Keyword]) -> bool:
    """Allows tojson's keywords with short constants, no wide indent and no text as indent."""
    for item in kwargs:
        if not _is_short(item.value):
            return False
        value = getattr(item.value, "value", None)
        if item.key == "indent" and not (value is None or _is_small(value)):
            return False
    return not args


def _is_small(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= MAX_INDENT


def _attribute(args: Sequence[nodes.Expr], kwargs: Sequence[nodes.Keyword]) -> bool:
    """Allows `map(attribute="name")`, with or without a default."""
    keys = {item.key for item in kwargs}
    return not args and "attribute" in keys <= {"attribute", "default"} and _constants(args, kwargs)


def _select(args: Sequence[nodes.Expr], kwargs: Sequence[nodes.Keyword]) -> bool:
    """Allows `select` and `reject` by a test that is allowed."""
    return not kwargs and (not args or _is_test(args[0]))


def _select_attribute(args: Sequence[nodes.Expr], kwargs: Sequence[nodes.Keyword]) -> bool:
    """Allows `selectattr` and `rejectattr` by a constant name and a test that is allowed."""
    return bool(args) and _is_short(args[0]) and _select(args[1:], kwargs)


def _is_test(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and node.value in TESTS


FILTERS: dict[str, Check] = {
    "abs": _nothing,
    "capitalize": _nothing,
    "count": _nothing,
    "d": _anything,
    "default": _anything,
    "first": _nothing,
    "float": _nothing,
    "items": _nothing,
    "join": _constants,
    "last": _nothing,
    "length": _nothing,
    "list": _nothing,
    "lower": _nothing,
    "map": _attribute,
    "reject": _select,
    "rejectattr": _select_attribute,
    "replace": _constants,
    "reverse": _nothing,
    "safe": _nothing,
    "select": _select,
    "selectattr": _select_attribute,
    "string": _nothing,
    "tojson": _json,
    "trim": _constants,
    "upper": _nothing,
}
METHODS: dict[str, Check] = {
    "capitalize": _nothing,
    "endswith": _anything,
    "find": _constants,
    "get": _anything,
    "items": _nothing,
    "keys": _nothing,
    "lower": _nothing,
    "lstrip": _constants,
    "replace": _constants,
    "rfind": _constants,
    "rsplit": _constants,
    "rstrip": _constants,
    "split": _constants,
    "splitlines": _nothing,
    "startswith": _anything,
    "strip": _constants,
    "title": _nothing,
    "upper": _nothing,
    "values": _nothing,
}
