"""Checks the shape annotations of tcore's functions while the tests run.

jaxtyping's own import hook checks every call of every function, which took half of the suite's time. Whether
the shapes of a call are right depends on the shapes alone: here every combination is checked once.
"""

import ast
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

# An int is accepted where a float is due.
check = jaxtyped(typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))


def look(kind: type) -> Callable[[Any], object]:
    """How values of a type are looked at."""
    if issubclass(kind, torch.Tensor | np.ndarray):
        return lambda value: (kind, value.dtype, value.shape)
    if issubclass(kind, Mapping):
        return lambda value: (kind, tuple((key, shape_of(item)) for key, item in value.items()))
    if issubclass(kind, list | tuple):
        return lambda value: (kind, tuple(map(shape_of, value)))
    return lambda value: kind


# By type: to ask every value what it is takes longer than all the rest.
LOOKS: dict[type, Callable[[Any], object]] = {}


def shape_of(value: Any) -> object:
    """What a check of shapes depends on."""
    kind = type(value)
    if kind not in LOOKS:
        LOOKS[kind] = look(kind)
    return LOOKS[kind](value)


# What was checked, by the code of a function: one that is defined inside another is made anew all the time.
SEEN: dict[CodeType, set[object]] = {}


def once(
    plain: Callable[..., Any], checking: Callable[[], Callable[..., Any]], seen: set[object]
) -> Callable[..., Any]:
    """A function that checks every combination of shapes once."""

    @functools.wraps(plain)
    def call(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*args, **named)
        shapes = (shape_of(args), shape_of(named))
        if shapes in seen:
            return plain(*args, **named)
        seen.add(shapes)
        return checking()(*args, **named)

    return call


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, or one that checks its shapes, if it announces any."""
    if not any("jaxtyping." in str(hint) for hint in function.__annotations__.values()):
        return function
    checking = functools.cache(lambda: check(function))  # made once, if at all
    return once(function, checking, SEEN.setdefault(function.__code__, set()))


def checked_class(kind: type) -> type:
    """A dataclass whose fields are checked, if one announces a shape."""
    hints = getattr(kind, "__annotations__", {}).values()
    if "__dataclass_fields__" in vars(kind) and any("jaxtyping." in str(hint) for hint in hints):
        plain = vars(kind)["__init__"]
        check(kind)
        checking = vars(kind)["__init__"]
        kind.__init__ = once(plain, lambda: checking, set())  # type: ignore[misc]
    return kind


class Decorate(ast.NodeTransformer):
    """Puts the checks above every function and class."""

    def visit(self, node: ast.AST) -> Any:
        """Statements alone: no expression holds a definition."""
        return node if isinstance(node, ast.expr) else super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Innermost, below `staticmethod` and the like."""
        self.generic_visit(node)
        node.decorator_list.append(ast.Name("__checked__", ast.Load()))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Outermost, above `dataclass`."""
        self.generic_visit(node)
        node.decorator_list.insert(0, ast.Name("__checked_class__", ast.Load()))
        return node


class CheckingLoader(SourceFileLoader):
    """Loads a module with checks."""

    def get_code(self, fullname: str) -> CodeType:
        """The code with checks, compiled anew: what Python caches has none."""
        tree = ast.parse(self.get_data(self.path), self.path)
        code: CodeType = compile(ast.fix_missing_locations(Decorate().visit(tree)), self.path, "exec")
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, where the decorators are known."""
        vars(module).update(__checked__=checked, __checked_class__=checked_class)
        super().exec_module(module)


class CheckingFinder:
    """Finds the modules that are checked: all of tcore, but for Triton's kernels, which are read as text."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual place of a module, with the loader that checks."""
        if not name.startswith("tcore.") or name.endswith("_triton"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = CheckingLoader(name, spec.loader.path)
        return spec


def install() -> None:
    """Check the shapes of whatever part of tcore is imported from now on."""
    sys.meta_path.insert(0, CheckingFinder)
