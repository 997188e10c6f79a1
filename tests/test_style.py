"""The layout is the architecture, and the code reads as one hand wrote it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("molt/**/*.py"), *ROOT.glob("callbacks/*.py")])
LAYERS = [
    {"cli", "configuration", "resume"},
    {"callbacks"},
    {"module", "ppo", "data", "evaluation", "sft", "preflight", "tally", "credit", "batches"},
    {"parallel", "rollout"},
    {"model", "agents"},
    {"tasks", "types", "algo", "metrics", "audit", "recording"},
    {"ledger"},
]
HEAVY = {"ray": "rollout", "vllm": "rollout"}


def layer_of(part: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if part in layer)


def part_of(path: Path) -> str:
    inside = path.relative_to(ROOT)
    return "callbacks" if inside.parts[0] == "callbacks" else inside.with_suffix("").parts[1]


def imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "molt":
            names |= {f"molt.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_dependencies_point_one_way(path: Path):
    if path == ROOT / "molt/__init__.py":
        return
    layer = layer_of(part_of(path))
    for name in imports(ast.parse(path.read_text())):
        if name.startswith("molt."):
            assert layer_of(name.split(".")[1]) >= layer, f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_ray_and_vllm_are_imported_where_they_are_driven(path: Path):
    for name in imports(ast.parse(path.read_text())):
        owner = HEAVY.get(name.split(".")[0])
        assert owner is None or part_of(path) == owner, f"{path} imports {name}"


def code_lines(source: str, node: ast.AST) -> int:
    """Lines of a node that are not blank, comment or docstring."""
    docs = set()
    for child in ast.walk(node):
        body = child.body if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Module) else []
        for item in body:
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                docs |= set(range(item.lineno, item.end_lineno + 1))
    lines = source.splitlines()
    first, last = (
        (1, len(lines)) if isinstance(node, ast.Module) else (node.lineno, node.end_lineno)
    )
    return sum(
        1
        for number in range(first, last + 1)
        if number not in docs and re.match(r"\s*[^#\s]", lines[number - 1])
    )


def functions() -> list[tuple[int, str]]:
    sizes = []
    for path in FILES:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                sizes.append((code_lines(source, node), f"{path.name}:{node.name}"))
    return sizes


def test_a_function_fits_on_one_screen():
    sizes = sorted(functions())
    assert sizes[-1][0] <= 80, sizes[-1]
    assert sizes[int(0.95 * len(sizes))][0] <= 40, sizes[-10:]


def test_a_file_has_one_idea():
    sizes = {path.name: code_lines(s := path.read_text(), ast.parse(s)) for path in FILES}
    assert max(sizes.values()) <= 350, sizes
    assert sum(sizes.values()) <= 7000


def test_every_signature_is_typed():
    untyped = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                bare = [
                    a.arg for a in args if a.annotation is None and a.arg not in ("self", "cls")
                ]
                if bare or node.returns is None:
                    untyped.append(f"{path.name}:{node.name} {bare}")
    assert not untyped


def test_nothing_prints_and_nothing_is_left_to_do():
    for path in FILES:
        assert not re.search(r"(?<![.\w])print\(|TODO|FIXME|XXX", path.read_text()), path
