"""Rules about imports that hold for every module of the package: lazy, no pickle, private names of torch in one place."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcp_engine

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for folder in ("dcp_engine", "planners", "storage") for path in (ROOT / folder).rglob("*.py"))
UNPICKLERS = {"pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
BARE = {"Exception", "BaseException", "RuntimeError", "AssertionError", "NotImplementedError"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each thing imported, by statement or by import_module of a literal."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"import_module", "__import__", "find_spec"}:
            yield from ((node.lineno, arg.value) for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a chain of attributes, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def private(dotted_name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted_name.split("."))


def loaded_modules(program: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the program."""
    code = f"import json, sys\n{program}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("program", ["import dcp_engine", "import dcp_engine.errors", "import dcp_engine.cli"])
def test_importing_the_engine_loads_neither_torch_nor_numpy(program: str) -> None:
    assert not {"torch", "numpy", "fsspec", "matplotlib"} & loaded_modules(program)


def test_help_on_the_command_line_does_not_load_torch() -> None:
    program = """
sys.argv = ["dcp-engine", "--help"]
from dcp_engine.cli import main
try:
    status = main()
except SystemExit as leave:
    status = leave.code
assert not status, status
"""
    assert not {"torch", "numpy", "fsspec", "matplotlib"} & loaded_modules(program)


@pytest.mark.parametrize("public", dcp_engine.__all__)
def test_every_public_name_can_be_had(public: str) -> None:
    assert getattr(dcp_engine, public) is not None
    assert public in dir(dcp_engine)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dcp_engine' has no attribute 'ShardWritter'"):
        dcp_engine.ShardWritter  # noqa: B018


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_module_imports_an_unpickler(path: Path) -> None:
    assert [(line, what) for line, what in imports(tree(path)) if what.lstrip(".").split(".")[0] in UNPICKLERS] == []


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_torch_load_is_told_to_load_weights_only(path: Path) -> None:
    loads = [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and dotted(node.func) in {"torch.load", "torch.serialization.load"}
    ]
    unsafe = [
        node.lineno
        for node in loads
        if not any(k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords)
    ]
    assert unsafe == []
    assert [line for line, what in imports(tree(path)) if what in {"torch.load", "torch.serialization.load"}] == []


@pytest.mark.parametrize("path", [path for path in MODULES if name(path) != "dcp_engine/compat.py"], ids=name)
def test_private_names_of_torch_are_imported_in_compat_alone(path: Path) -> None:
    module = tree(path)
    found = [(line, what) for line, what in imports(module) if what.split(".")[0] == "torch" and private(what)]
    found += [
        (node.lineno, dotted(node))
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and dotted(node).split(".")[0] in {"torch", "dist", "dcp"} and private(dotted(node))
    ]
    assert found == []


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_says_in_one_line_why_it_exists(path: Path) -> None:
    text = ast.get_docstring(tree(path)) or ""
    assert text.split("\n", 1)[0].strip().endswith((".", ":"))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_errors_are_raised_by_a_name_that_says_something(path: Path) -> None:
    raised = [
        (n.lineno, dotted(n.exc.func if isinstance(n.exc, ast.Call) else n.exc))
        for n in ast.walk(tree(path))
        if isinstance(n, ast.Raise) and n.exc
    ]
    assert [(line, what) for line, what in raised if what in BARE] == []


def test_one_file_of_storage_knows_the_records_of_dcp_and_of_the_format() -> None:
    knows_dcp, knows_format, knows_chunks = set(), set(), set()
    for path in (ROOT / "storage").rglob("*.py"):
        names = [what for _, what in imports(tree(path))]
        if any(what.startswith("torch.distributed") for what in names):
            knows_dcp.add(name(path))
        if any(what.startswith(("dcp_engine.storage.shard_table", "dcp_engine.storage.table")) for what in names):
            knows_format.add(name(path))
        if any(what.startswith(("dcp_engine.storage.manifest", "dcp_engine.storage.records")) for what in names):
            knows_chunks.add(name(path))
    both = {"storage/dcp_records.py", "storage/dcp_metadata.py"}
    callers = {"storage/planner_values.py", "storage/reader.py", "storage/writer.py", "storage/manifest_of_save.py", "storage/tickets.py"}
    agree = {"storage/rank_group.py", "storage/root.py", "storage/root_decision.py"}
    assert knows_dcp <= both | callers | agree
    assert not agree & (knows_format | knows_chunks)
    assert knows_dcp & knows_format <= {"storage/dcp_records.py"}
    assert "storage/planner_values.py" not in knows_format | knows_chunks
    assert {"storage/writer.py", "storage/reader.py"} <= knows_dcp
    assert "storage/manifest.py" in knows_format


def test_the_rules_see_what_they_forbid() -> None:
    module = ast.parse("import pickle\nfrom torch._C import x\nfrom torch.a import _b\nimport_module('dill')\ntorch._C.f()\n")
    assert [what for _, what in imports(module)] == ["pickle", "torch._C.x", "torch.a._b", "dill"]
    assert [private(what) for what in ("torch._C.x", "torch.a._b", "torch.a.b", "torch.__version__")] == [True, True, False, False]


SYSTEM_CALLS = {
    "os.open",
    "os.close",
    "os.read",
    "os.write",
    "os.pread",
    "os.pwrite",
    "os.preadv",
    "os.pwritev",
    "os.readv",
    "os.writev",
    "os.sendfile",
    "os.fsync",
    "os.fdatasync",
    "os.sync",
    "os.truncate",
    "os.ftruncate",
    "os.stat",
    "os.lstat",
    "os.fstat",
    "os.access",
    "os.listdir",
    "os.scandir",
    "os.walk",
    "os.mkdir",
    "os.makedirs",
    "os.rmdir",
    "os.removedirs",
    "os.unlink",
    "os.remove",
    "os.rename",
    "os.renames",
    "os.replace",
    "os.link",
    "os.symlink",
    "os.readlink",
    "os.utime",
    "os.chmod",
    "os.chown",
    "os.path.exists",
    "os.path.lexists",
    "os.path.isdir",
    "os.path.isfile",
    "os.path.islink",
    "os.path.getsize",
    "os.path.getmtime",
    "fcntl.flock",
    "fcntl.lockf",
}
"""What touches files. ``path.realpath`` and ``path.ismount`` resolve names that the user gave, before anything is saved."""

OWN_FILES = {"storage/backends/calls.py", "storage/backends/linux.py", "storage/backends/spool.py"}
"""The layer itself, and the spool of objects on their way to a remote storage, which has no name and is no part of a checkpoint."""


def test_storage_calls_the_system_in_one_place() -> None:
    found = [
        f"{name(path)}:{node.lineno}: {dotted(node.func)}"
        for path in MODULES
        if name(path).startswith("storage/") and name(path) not in OWN_FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and (dotted(node.func) in SYSTEM_CALLS or dotted(node.func).startswith(("shutil.", "tempfile.")))
    ]
    assert found == []
