"""What the code promises about itself: sizes, imports, names."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from size import excesses, measured

import forerun
from forerun.core import errors

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "lab" / "src").rglob("*.py")])
FILES = [
    ROOT / "conftest.py",
    *SOURCES,
    *sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "lab" / "tests").rglob("*.py")]),
]
EXTRAS = {
    "fastapi": "serve", "starlette": "serve", "uvicorn": "serve", "ray": "scale", "matplotlib": "lab",
    "llama_cpp": "lab", "vllm": "lab", "torchao": "models",
}  # fmt: skip


def name(path):
    return str(path.relative_to(ROOT))


class Facts(NamedTuple):
    """Top-level packages that a file imports anywhere, the lines of its functions, whether it has a docstring."""

    imports: set[str]
    functions: dict[str, int]
    said: bool


def statements(node):
    """All below a node; expressions, most of a tree, hold none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child
            yield from statements(child)


@cache
def facts(path):
    tree = ast.parse(path.read_text())
    imports, functions = set(), {}
    for node in statements(tree):
        if isinstance(node, ast.Import):
            imports |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports.add(node.module.split(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]])
            functions[f"{node.name} of line {first}"] = node.end_lineno - first + 1
    return Facts(imports, functions, not tree.body or bool(ast.get_docstring(tree)))


def test_files_and_functions_are_short():
    assert len(SOURCES) > 50
    lengths = {name(path): path.read_text().count("\n") for path in FILES}
    assert {path: lines for path, lines in lengths.items() if lines > 700} == {}
    functions = {f"{name(path)}: {each}": lines for path in FILES for each, lines in facts(path).functions.items()}
    assert {function: lines for function, lines in functions.items() if lines > 80} == {}


def test_the_code_keeps_its_budgets():
    assert excesses() == []
    assert measured("src/forerun")[0].total() == sum(
        len(path.read_text().splitlines()) for path in SOURCES if "lab" not in path.relative_to(ROOT).parts
    )


def test_layers_import_downwards_only():
    # In a process of its own: it switches off every logger of this one.
    command = [str(Path(sys.executable).with_name("lint-imports")), "--config", str(ROOT / "pyproject.toml")]
    result = subprocess.run([*command, "--no-cache"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("package", EXTRAS)
def test_an_optional_package_is_imported_in_one_folder(package):
    parts = [path.relative_to(ROOT).parts for path in SOURCES if package in facts(path).imports]
    folders = {index[2] if index[0] == "src" else index[0] for index in parts}
    assert folders <= {EXTRAS[package]}


def test_public_names():
    public = forerun.__all__
    assert public == sorted(public, key=lambda word: (not word.isupper(), not word[0].isupper(), word))
    assert len(set(public)) == len(public)
    for word in public:
        assert getattr(forerun, word) is not None
        assert word == "__version__" or not word.startswith("_")
    modules = {word for word, value in vars(forerun).items() if isinstance(value, ModuleType)}
    assert {word for word in vars(forerun) if not word.startswith("_")} - modules == set(public) - {"__version__"}


def test_everything_public_says_what_it_is():
    classes = [word for word in forerun.__all__ if isinstance(getattr(forerun, word), type)]
    assert [word for word in classes if not getattr(forerun, word).__doc__] == []
    assert [name(path) for path in SOURCES if not facts(path).said] == []


def test_errors_are_value_errors_of_one_family():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 5
    assert all(issubclass(kind, forerun.ForerunError) for kind in kinds)
    assert issubclass(forerun.ForerunError, ValueError)


def test_nothing_is_left_for_later():
    marks = re.compile(
        r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|raise NotImplemented" + r"Error)\b"
        r"|mark\.(sk" + r"ip|xf" + r"ail)|pytest\.(sk" + r"ip|xf" + r"ail)\("
    )
    assert [f"{name(path)}: {match.group()}" for path in FILES for match in marks.finditer(path.read_text())] == []
