"""The sandbox of simple templates (see simple.py): it counts what a template makes.

Every value that a simple template sees is a tree of at most BUDGET characters and items: the inputs
are at most MAX_INPUT, and each new value is charged to the budget. Each operation is linear in such
values, and the clock is checked after it. So no single operation holds the interpreter for long,
and memory is bounded. What needs more than this is not refused: it is rendered in the process that
can be killed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, Undefined
from jinja2.visitor import NodeTransformer

from .sandbox import Sandbox
from .simple import FILTERS, MAX_INDENT, MAX_SIMPLE, is_simple

MAX_INPUT = 2**17  # characters and items of messages and variables
BUDGET = 2**20  # characters and items of everything that the template makes
STREAMS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})  # yield items


class BudgetError(TemplateRuntimeError):
    """The template needs more than a simple one may use."""


class Metered(Sandbox):
    """The sandbox of simple templates. Raises BudgetError where one uses too much."""

    def __init__(self) -> None:
        super().__init__()
        self.optimized = False  # or constants would be computed, uncounted, when it is compiled
        self.finalize = _finalize
        self.filters = {name: self._charged(name, self.filters[name]) for name in FILTERS}
        self.filters["metered"] = self.metered
        self._left = threading.local()

    def render(self, ready: Template, variables: dict[str, Any], seconds: float) -> str:
        """Renders a template of this sandbox with a new budget."""
        measure(variables, MAX_INPUT)
        self._left.budget = BUDGET
        with self.limited(seconds):
            return ready.render(variables)

    def charge(self, count: int) -> None:
        """Takes `count` characters or items from the budget of this thread."""
        self._left.budget -= count
        if self._left.budget < 0:
            raise BudgetError("it makes more than a simple template may")

    def metered(self, value: Any) -> Any:
        """Returns the value of an expression; charges it and checks the clock."""
        self.check_time()
        self.charge(len(value) if type(value) is str else measure(value, self._left.budget))
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        value = super().call(__context, __obj, *args, **kwargs)
        if isinstance(getattr(__obj, "__self__", None), str):
            __self.metered(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charges a result that is a text or list before it is made."""
        sizes = [
            measure(value, self._left.budget)
            for value in (left, right)
            if isinstance(value, (str, list, tuple))
        ]
        if sizes:
            if operator not in ("+", "*"):
                raise BudgetError(f"{operator} of a text may be any size")
            counts = [value for value in (left, right) if isinstance(value, int)]
            self.charge(sum(sizes) * (max(0, *counts, 0) if operator == "*" else 1))
        return super().call_binop(context, operator, left, right)

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what is output, by a template, macro or block."""
        texts = []
        for piece in pieces:
            self.charge(len(piece) + 1)
            texts.append(piece)
        return "".join(texts)

    def _charged(self, name: str, call: Any) -> Callable[..., Any]:
        """Wraps an allowed filter so that what it makes is charged."""
        if name == "tojson":
            return functools.partial(self._json, call)

        @functools.wraps(call)  # keeps jinja_pass_arg
        def charged(*args: Any, **kwargs: Any) -> Any:
            value = call(*args, **kwargs)
            if name in STREAMS:
                return self.each(value)
            return self.metered(value) if isinstance(value, str) or name == "list" else value

        return charged

    def _json(self, call: Any, value: Any, **options: Any) -> Any:
        """Charges JSON before it is written; each item may stand on a line with an indent."""
        depth = _depth(value, self._left.budget) if options.get("indent") else 0
        self.charge(measure(value, self._left.budget) * (1 + depth * MAX_INDENT))
        return self.metered(call(value, **options))

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Generates the code of a template with `metered` around what makes or compares values."""
        return super()._generate(_Meter().visit(source), name, filename, defer_init)


class _Meter(NodeTransformer):
    """Puts `metered` around operations that the sandbox does not intercept. A concatenation's
    operands are charged before they are joined."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_metered(child) for child in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        return _metered(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _metered(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in node.items) else _metered(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx != "load":
            return node
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in node.items) else _metered(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _metered(node)


def _metered(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    metered = nodes.Filter(node, "metered", [], [], None, None)
    metered.set_lineno(node.lineno)
    return metered


@pass_context  # so that jinja2 does not compute outputs when it compiles
def _finalize(context: Context, value: Any) -> Any:
    """Charges a value that is output. A text is charged where outputs are joined."""
    sandbox = context.environment
    assert isinstance(sandbox, Metered)
    sandbox.check_time()
    return value if type(value) is str else sandbox.metered(value)


def measure(value: Any, limit: int) -> int:
    """Returns the characters and items of a value as a tree. Raises BudgetError above `limit`, and
    for anything but texts, numbers, lists and dicts."""
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind is str:
            size += len(item)
        elif kind in (int, float, bool) or item is None:
            size += 8 if kind is not int else 8 + item.bit_length() // 3
        elif kind is dict:
            size += 2 * len(item)
            stack += item.keys()
            stack += item.values()
        elif kind is list or kind is tuple:
            size += len(item)
            stack += item
        elif isinstance(item, str):  # marked as safe
            size += len(item)
        elif not isinstance(item, Undefined):
            raise BudgetError(f"it makes a {kind.__name__}")
        if size > limit:
            raise BudgetError("it makes more than a simple template may")
    return size


def _depth(value: Any, limit: int) -> int:
    """Returns how deep lists and dicts are nested. Raises BudgetError for more than 20."""
    measure(value, limit)
    level, depth = [value], 0
    while level := [
        item
        for parent in level
        if isinstance(parent, (list, tuple, dict))
        for item in (parent.values() if isinstance(parent, dict) else parent)
    ]:
        depth += 1
        if depth > 20:
            raise BudgetError("it writes JSON that is nested deeply")
    return depth


@functools.lru_cache(maxsize=32)
def simple_template(template: str) -> Template | None:
    """Returns the template ready for `Metered.render`; None for a wrong one or one not simple."""
    if len(template) > MAX_SIMPLE:
        return None
    sandbox = Metered()
    try:
        return sandbox.from_string(template) if is_simple(sandbox.parse(template)) else None
    except Exception:  # the process that renders the others says what is wrong
        return None
