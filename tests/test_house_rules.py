"""The rules of the house (docs/architecture.md), held by parsing every module and by looking at fresh processes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "mlc_nb"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 400

# Room -> rooms that it may import; what those may import it may import as well. A room is a folder or a file of
# mlc_nb/; two parts are rooms of their own: compiler/kernels, below the models, and models/registry.py, which is a list
# of names that the engine may read.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "protocol": {"errors"},
    "child": set(),
    "progress": set(),
    "table": set(),
    "quantization": set(),
    "weights": set(),
    "kernels": {"quantization"},
    "architectures": set(),
    "cuda_wheels": set(),
    "models": {"kernels", "weights"},
    "compiler": {"architectures", "models", "library"},
    "library": {"weights", "cuda_wheels"},
    "runtime": {"library", "quantization"},
    "engine": {"runtime", "architectures"},
    "lifecycle": {"engine"},
    "presence": {"weights"},
    "admission": {"engine"},
    "accounts": {"admission"},
    "registry": {"lifecycle", "engine", "presence", "accounts"},
    "inventory": {"library"},
    "doctor": {"inventory", "engine"},
    "batch": {"registry"},
    "notebook": {"batch", "doctor", "registry"},
    "cli": {"doctor", "registry"},
}
PARTS_THAT_ARE_ROOMS: dict[tuple[str, ...], str] = {
    ("compiler", "kernels"): "kernels",
    ("models", "registry"): "architectures",
}
FOR_EVERYONE = {"errors", "protocol", "child", "progress", "table"}
MAY_IMPORT_THE_PACKAGE_ITSELF = {"batch", "notebook", "cli"}

# Foreign package -> the only rooms that may import it.
FOREIGN: dict[str, set[str]] = {
    "IPython": {"notebook"},
    "ipykernel": {"notebook"},
    "ipywidgets": {"notebook"},
    "anywidget": {"notebook"},
    "tvm": {"compiler", "kernels", "models"},
    "tvm_ffi": {"runtime"},
    "tvm_ffi_orcjit": {"runtime"},
    "gguf": {"weights"},
    "cuda": {"compiler", "runtime"},
}
# Never in sys.modules after `import mlc_nb`.
HEAVY = ["tvm", "tvm_ffi", "IPython", "numpy", "pydantic", "tokenizers", "huggingface_hub"]


class Import(NamedTuple):
    line: int
    target: str
    for_types_only: bool


def room_of(path: Path) -> str:
    return room_named(path.relative_to(PACKAGE).with_suffix("").parts)


def room_named(parts: Sequence[str]) -> str:
    return PARTS_THAT_ARE_ROOMS.get(tuple(parts[:2]), parts[0])


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> list[Import]:
    """Every import of a module, those inside functions and by ``import_module("...")`` included."""
    found: list[Import] = []

    def visit(node: ast.AST, for_types_only: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.body:
                visit(statement, True)
            for statement in node.orelse:
                visit(statement, for_types_only)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(node.lineno, alias.name, for_types_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports inside the package are absolute"
            assert node.module is not None
            if node.module == "mlc_nb":
                found.extend(Import(node.lineno, f"mlc_nb.{alias.name}", for_types_only) for alias in node.names)
            else:
                found.append(Import(node.lineno, node.module, for_types_only))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found.extend(
                Import(node.lineno, argument.value, for_types_only)
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )
        for child in ast.iter_child_nodes(node):
            visit(child, for_types_only)

    visit(parse(path), False)
    return found


@cache
def reachable(room: str) -> frozenset[str]:
    direct = ARROWS[room] | (FOR_EVERYONE if room not in FOR_EVERYONE else set())
    return frozenset(direct.union(*(reachable(next_room) for next_room in direct)))


def target_room(target: str) -> str | None:
    """The room that ``mlc_nb.<...>`` names; None for a public name of the package itself."""
    parts = target.split(".")
    if len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()):
        return room_named(parts[1:])
    return None


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_arrows_have_no_cycle() -> None:
    assert not [room for room in ARROWS if room in reachable(room)]


def test_every_room_is_on_the_map() -> None:
    assert {room_of(path) for path in MODULES} - {"__init__", "__main__"} <= set(ARROWS)


@pytest.mark.parametrize(
    "path", [path for path in MODULES if room_of(path) not in ("__init__", "__main__")], ids=relative
)
def test_imports_follow_the_arrows(path: Path) -> None:
    room = room_of(path)
    wrong = []
    for line, target, _ in imports_of(path):
        if target.split(".")[0] != "mlc_nb":
            continue
        wanted = target_room(target)
        if wanted is None:
            allowed = room in MAY_IMPORT_THE_PACKAGE_ITSELF
        else:
            allowed = wanted == room or wanted in reachable(room)
        if not allowed:
            wrong.append(f"{relative(path)}:{line} imports {target}")
    assert not wrong, f"{room} may import only {sorted(reachable(room))}: {wrong}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_foreign_packages_stay_in_their_rooms(path: Path) -> None:
    wrong = [
        f"{relative(path)}:{line} imports {target}"
        for line, target, for_types_only in imports_of(path)
        if not for_types_only and room_of(path) not in FOREIGN.get(target.split(".")[0], {room_of(path)})
    ]
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_are_short_and_say_what_they_are(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{relative(path)} has {lines} lines; a file is one idea, at most {MOST_LINES}"
    tree = parse(path)
    assert ast.get_docstring(tree), f"{relative(path)} has no docstring"
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, definitions) and not node.name.startswith("_")]
    undocumented = [node.name for node in public if not ast.get_docstring(node)]
    assert not undocumented, f"{relative(path)}: no docstring on {undocumented}"
    if public and path.name not in ("__init__.py", "__main__.py"):
        names = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        assert names, f"{relative(path)} defines {[node.name for node in public]} but no __all__"
        exported = ast.literal_eval(names[0])
        defined = {name.id for node in ast.walk(tree) for name in ast.walk(node) if isinstance(name, ast.Name)} | {
            node.name for node in ast.walk(tree) if isinstance(node, definitions)
        }
        assert set(exported) <= defined, f"{relative(path)}: __all__ names what is not there"


def in_fresh_process(code: str, timeout: float) -> dict[str, object]:
    """Run code in a new interpreter; its last line of output is a JSON object."""
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert finished.returncode == 0, finished.stderr
    answer: dict[str, object] = json.loads(finished.stdout.splitlines()[-1])
    return answer


def test_importing_the_package_is_light() -> None:
    code = f"""
import json, sys, time
before = time.perf_counter()
import mlc_nb
seconds = time.perf_counter() - before
print(json.dumps({{"seconds": seconds, "heavy": [name for name in {HEAVY} if name in sys.modules]}}))
"""
    answer = in_fresh_process(code, timeout=60)
    print(f"import mlc_nb: {answer['seconds']:.3f} s")
    assert answer["heavy"] == []


def test_the_kernel_process_never_imports_the_compiler() -> None:
    code = """
import json, sys
from mlc_nb import MLCEngine
with MLCEngine("smollm2") as engine:
    answer = engine.chat.completions.create(
        messages=[{"role": "user", "content": "Tell me the capital of France."}], max_tokens=8, temperature=0
    )
modules = sorted(name for name in sys.modules if name == "tvm" or name.startswith(("tvm.", "IPython", "torch")))
print(json.dumps({"text": answer.choices[0].message.content, "modules": modules}))
"""
    answer = in_fresh_process(code, timeout=240)
    assert "Paris" in str(answer["text"])
    assert answer["modules"] == []
