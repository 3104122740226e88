"""What holds of the repository as a whole: versions, the map of the tree, imports, and words that must not occur."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import blend

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted([*(ROOT / "blend").rglob("*.py"), *(ROOT / "server" / "blend_server").rglob("*.py")])
OUTER = ("blend.rag", "blend.connector", "blend.eval")
FORBIDDEN = {
    "store": ("torch", "transformers", "blend.model", "blend.recompute", "blend.chunks", "blend.engine"),
    "model": ("blend.store", "blend.chunks", "blend.engine", *OUTER),
    "recompute": ("blend.store", "blend.chunks", "blend.engine", *OUTER),
    "rag": ("blend.store", "blend.recompute", "blend.engine", "blend.eval"),
    "page": ("torch", "transformers", "blend.model", "blend.store", "blend.recompute", "blend.engine", *OUTER),
    "": ("blend_server",),
}
ONLY_IN = {
    "vllm": "connector/vllm/",
    "mooncake": "store/mooncake.py",
    "triton": "recompute/kernels/",
    "numba": "recompute/kernels/cpu.py",
    "pickle": "",
    "dill": "",
    "cloudpickle": "",
}


def _text_files() -> Iterator[tuple[str, str]]:
    """Name and text of every file of the repository that is no binary: what git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (path := ROOT / name).is_file():
            data = path.read_bytes()
            if b"\0" not in data:
                yield name, data.decode("utf-8", "replace")


@cache
def _imports(path: Path) -> set[str]:
    """Modules that a file imports when it runs; what is imported for annotations alone is left out."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update({node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def _within(imports: set[str], package: str) -> set[str]:
    return {name for name in imports if name == package or name.startswith(f"{package}.")}


def test_the_version_stands_once_in_code_and_once_in_the_metadata() -> None:
    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert stated is not None
    assert stated[1] == blend.__version__


def _map() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"## Map of the tree\n.*?```\n(.*?)```", text, re.DOTALL)
    return [line.split()[0] for line in tree.splitlines() if line]


def test_every_path_of_the_map_exists() -> None:
    assert [path for path in _map() if not (ROOT / path).exists()] == []


def test_every_module_is_on_the_map_or_in_a_directory_on_it() -> None:
    places = {ROOT / path for path in _map()}
    modules = [path for path in MODULES if path.name != "__init__.py"]
    assert [str(path.relative_to(ROOT)) for path in modules if places.isdisjoint([path, *path.parents])] == []


def test_nothing_names_a_package_registry_or_a_path_of_one_machine() -> None:
    words = ["py" + "pi.org", "python" + "hosted.org", "download." + "pytorch.org"]
    pattern = re.compile("|".join([*map(re.escape, words), "/" + r"(home|Users)/\w+", "/" + "root/"]))
    wrong = [f"{name}: {found[0]}" for name, text in _text_files() for found in pattern.finditer(text)]
    assert wrong == []


@pytest.mark.parametrize("layer", sorted(FORBIDDEN))
def test_imports_point_one_way(layer: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "blend" / layer).rglob("*.py"))
        for package in FORBIDDEN[layer]
        for name in sorted(_within(_imports(path), package))
    ]
    assert wrong == []


def test_only_their_own_modules_import_optional_engines_and_nothing_unpickles() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {package}"
        for path in MODULES
        for package, place in ONLY_IN.items()
        if _within(_imports(path), package) and not (place and place in path.as_posix())
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module", ["blend", "blend.connector.client", "blend_server.client", "blend_server.client.explain"]
)
def test_a_client_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")])}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "[]", "")
