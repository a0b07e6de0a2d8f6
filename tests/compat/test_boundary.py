"""Versions and private names of the libraries stand in ``compat/`` alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import torchrl_trl_bridge

PACKAGE = Path(torchrl_trl_bridge.__file__).parent
LIBRARIES = {"accelerate", "datasets", "peft", "tensordict", "torch", "torchrl", "transformers", "trl"}
OUTSIDE = sorted(path for path in PACKAGE.rglob("*.py") if "compat" not in path.relative_to(PACKAGE).parts)

PYTHONS_OWN = {"_fields"}  # of named tuples: documented


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def names_defined_in(tree: ast.AST) -> set[str]:
    """The functions, classes, methods and fields that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Tuple):
                names |= {part.attr for part in target.elts if isinstance(part, ast.Attribute)}
            elif isinstance(target, ast.Attribute):
                names.add(target.attr)
            elif isinstance(target, ast.Name):
                names.add(target.id)
    return names


class Boundary(ast.NodeVisitor):
    """Collects what belongs into ``compat/``, as ``line: what``."""

    def __init__(self, source: str, package: frozenset[str] = frozenset()) -> None:
        self.found: list[str] = []
        tree = ast.parse(source)
        self.own = names_defined_in(tree) | PYTHONS_OWN
        self.package = package
        self.visit(tree)

    def add(self, node: ast.AST, what: str) -> None:
        self.found.append(f"{getattr(node, 'lineno', '?')}: {what}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        base = node.value
        # A class may have its fields from another module of the package. A hook that a library calls may hand on.
        mine = isinstance(base, ast.Name) and base.id in {"self", "cls"} and node.attr in self.package
        mine = mine or (isinstance(base, ast.Call) and getattr(base.func, "id", "") == "super")
        if is_private(node.attr) and not mine and node.attr not in self.own:
            self.add(node, f".{node.attr}")
        if node.attr == "__version__" and ast.unparse(base) != "torchrl_trl_bridge":
            self.add(node, f"{ast.unparse(base)}.__version__")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called in {"getattr", "hasattr", "setattr", "delattr"} and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in self.own:
                self.add(node, f"{called}(..., {name.value!r})")
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.module(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self.module(node, module)
        if module.partition(".")[0] in LIBRARIES:
            for alias in node.names:
                if is_private(alias.name) or alias.name == "__version__":
                    self.add(node, f"from {module} import {alias.name}")

    def module(self, node: ast.AST, module: str) -> None:
        parts = module.split(".")
        if parts[0] in LIBRARIES and any(map(is_private, parts)):
            self.add(node, f"import {module}")
        if module in {"packaging.version", "importlib.metadata", "packaging", "pkg_resources"}:
            self.add(node, f"import {module}")


PACKAGE_NAMES = frozenset().union(*(names_defined_in(ast.parse(path.read_text())) for path in OUTSIDE))


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_versions_and_private_names_stand_in_compat_alone(path: Path) -> None:
    assert Boundary(path.read_text(), PACKAGE_NAMES).found == []


@pytest.mark.parametrize(
    "source",
    [
        "import trl\nif trl.__version__ > '1': pass",
        "from torch import __version__",
        "from packaging.version import Version",
        "import importlib.metadata",
        "import torchrl._extension",
        "from datasets.iterable_dataset import _BaseExamplesIterable",
        "def f(buffer): return buffer._storage",
        "def f(buffer): return getattr(buffer, '_storage', None)",
        "def f(self): return self.replay_buffer._sampler",
        "class A(datasets.IterableDataset):\n    def f(self): return self._info",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert len(Boundary(source).found) == 1


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self): self._x = 1\n    def f(self, other): return other._x",
        "class A(B):\n    def _call(self, x): return super()._call(x)",
        "def _f(): pass",
        "import torchrl_trl_bridge\nprint(torchrl_trl_bridge.__version__)",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert Boundary(source).found == []
