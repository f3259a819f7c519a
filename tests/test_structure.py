"""The architecture, as a test: imports run one way, rooms keep their borders, files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "labkit"
MAX_LINES = 300

LEAVES = ("perf.timer", "perf.trace", "perf.busy", "perf.workers")
"""Files that anyone may import: one small room of their own inside ``perf``."""

LAYERS: list[set[str]] = [
    {"registry", "resources", *LEAVES},
    {"kernels", "tokenizer", "prompts"},
    {"kvcache", "quant"},
    {"model"},
    {"backends"},
    {"decoding", "checkpoint", "perf"},
    {"pipeline"},
    {"diagnose"},
    {"serving"},
    {"ui", "cli"},
]
"""docs/design.md, "Who may import whom", bottom first. A room imports only from layers below its own (and itself)."""

ROOM_OF_FILE = {
    **dict.fromkeys(("cli_diagnose", "terminal", "launch", "visitors", "doctor", "doctor_kernels", "serve"), "cli"),
    **dict.fromkeys(("run", "sequence", "engine"), "pipeline"),
}
"""A room at the top of the package is several files: the command line, and the pipeline with what it is made of."""

UI_ONLY = {"ipywidgets", "plotly", "anywidget", "IPython", "traitlets"}
TESTS_ONLY = {"transformers", "tokenizers", "tiktoken", "sentencepiece", "hypothesis", "pytest", "playwright"}

SOURCES = sorted(PACKAGE.rglob("*.py"))
RANK = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """``labkit/kvcache/__init__.py`` -> ``labkit.kvcache``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room that a module of labkit belongs to; "face" for ``labkit`` itself."""
    inside = module.removeprefix("labkit").lstrip(".")
    if not inside:
        return "face"
    if any(inside == leaf or inside.startswith(f"{leaf}.") for leaf in LEAVES):
        return "perf.timer"
    first = inside.split(".")[0]
    return ROOM_OF_FILE.get(first, first)


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) for each import anywhere in the file; ``from labkit import x`` counts as ``labkit.x``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "labkit":
                yield from ((f"labkit.{alias.name}", node.lineno) for alias in node.names)
            elif node.module:
                yield node.module, node.lineno


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def known_rooms() -> set[str]:
    children = (path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
    return {ROOM_OF_FILE.get(path.stem, path.stem) for path in children} - {"__init__"}


def test_every_room_has_a_layer():
    assert known_rooms() <= set(RANK), "give the new room a layer here and in docs/design.md"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_run_one_way(path):
    room = room_of(module_name(path))
    wrong = []
    for module, line in imports_of(parse(path)):
        if module.split(".")[0] != "labkit":
            continue
        target = room_of(module)
        if target == "face" or (target not in RANK and module.count(".") == 1):
            target = "face"  # `import labkit` or `from labkit import load`
        if room == "face" or target == room:
            continue
        allowed = room in ("ui", "cli") if target == "face" else RANK[target] < RANK[room]
        if not allowed:
            wrong.append(f"{relative(path)}:{line} imports {module}: {room} may not import {target}")
    assert not wrong, "\n".join(wrong)


def top_level_imports(path: Path) -> set[str]:
    """Modules of labkit that importing this file brings in at once (not those inside functions or TYPE_CHECKING)."""
    names = {module_name(source) for source in SOURCES}
    found: set[str] = set()
    for node in parse(path).body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & names
            continue
        for alias in node.names:  # `from package import name`: the module of that name, or else the package
            full = f"{node.module}.{alias.name}"
            found.add(full if full in names else str(node.module))
    return (found & names) - {module_name(path)}


def test_no_import_cycles():
    graph = {module_name(path): top_level_imports(path) for path in SOURCES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for target in graph.get(module, ()):
            visit(target, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_borders_with_other_packages(path):
    room = room_of(module_name(path))
    for module, line in imports_of(parse(path)):
        package = module.split(".")[0]
        assert package not in TESTS_ONLY, f"line {line}: {package} is an oracle of the tests, never a dependency"
        assert room == "ui" or package not in UI_ONLY, f"line {line}: only labkit/ui may import {package}"


@pytest.mark.parametrize("folder", ["labkit", "benchmarks", "tests"])
def test_files_stay_small(folder):
    sizes = {relative(p): len(p.read_text(encoding="utf-8").splitlines()) for p in (ROOT / folder).rglob("*.py")}
    large = {name: n for name, n in sizes.items() if n > MAX_LINES}
    assert not large, f"over {MAX_LINES} lines, so two ideas in one file: {large}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_each_module_says_what_it_is(path):
    tree = parse(path)
    if tree.body:
        assert ast.get_docstring(tree), "begin the module with one sentence that says what it is"


FORBIDDEN_CALLS = {
    "eval": "no evaluation of text",
    "exec": "no evaluation of text",
    "pickle.load": "pickles run code: safetensors instead",
    "pickle.loads": "pickles run code: safetensors instead",
    "torch.load": "pickles run code: safetensors instead",
    "os.system": "a list of arguments to subprocess instead",
    "breakpoint": "left from debugging",
}

OWN_TEXT = {("labkit/kernels/cpu/simd.py", "exec")}
"""numba reads an intrinsic's arity off its signature, so one is written out there: from numbers, never from input."""


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_runs_untrusted_input(path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            is_own = (relative(path), name) in OWN_TEXT
            assert is_own or name not in FORBIDDEN_CALLS, f"line {node.lineno}: {name}: {FORBIDDEN_CALLS[name]}"
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            assert "trust_remote_code" not in options, f"line {node.lineno}: labkit runs no code of a model's"
            shell = options.get("shell")
            assert not (isinstance(shell, ast.Constant) and shell.value), f"line {node.lineno}: shell=True"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"


def test_names_say_what_they_are():
    vague = re.compile(r"^(utils?|helpers?|misc|common|stuff|tools?)$")
    wrong = [relative(path) for path in PACKAGE.rglob("*") if vague.match(path.stem)]
    assert not wrong, f"a name that says nothing: {wrong}"


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git clone: there is no list of tracked files")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_path_of_one_machine_is_committed():
    """Home folders and other places that exist on one machine only."""
    pattern = re.compile(rb"/(home|Users)/[a-z][\w.-]*/|/root/\w|[A-Z]:\\\\Users\\\\\w")
    wrong = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content and (found := pattern.search(content)):
            wrong.append(f"{relative(path)}: {found.group().decode()}")
    assert not wrong, wrong


def imported_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_face_is_lean():
    """`import labkit` reads no torch; using it reads no widgets, no plots and no oracle."""
    assert not {"torch", "numpy", "pandas"} & imported_after(
        "import labkit, labkit.cli, labkit.doctor, labkit.launch, labkit.checkpoint.fetch"
    )
    loaded = imported_after("import labkit; labkit.Pipeline, labkit.load, labkit.components('kv_cache')")
    assert not (UI_ONLY | TESTS_ONLY) & loaded


def test_the_face_has_the_promised_names():
    import labkit

    promised = {"models", "load", "Pipeline", "Sampling", "components", "Run", "Completion", "Trace", "Model", "Remote"}
    assert promised <= set(labkit.__all__)
    assert all(getattr(labkit, name) is not None for name in labkit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        labkit.no_such_name  # noqa: B018
