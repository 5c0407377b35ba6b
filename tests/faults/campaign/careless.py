"""Readers that skip a check, made from the right ones: each check is taken out of the code that runs, one at a time.

Nothing is listed by hand but the functions: every refusal in them is a check, also one that is added tomorrow.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, cast

from dcp_engine.storage import access, envelope, publish, root, shard_files, signing, texts, verify
from dcp_engine.storage.encryption import FileCipher
from dcp_engine.storage.read_pipeline import SpanReader

__all__ = ["Check", "checks_of", "hint_guards", "reader_guards", "skipped"]

_CHECKING_CALL = re.compile(r"_?check\w*|_?require\w*")


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: module, function, and what is checked as it is written there.
        function: that checks.
        careless: its code without the check.
    """

    name: str
    function: FunctionType
    careless: CodeType


def reader_guards() -> tuple[FunctionType, ...]:
    """The functions that stand between the bytes of a checkpoint and whoever believes them, from COMPLETE down to a block."""
    found: tuple[Any, ...] = (
        envelope.parse_marker,
        envelope.check_header,
        envelope.parse_record,
        envelope.check_body,
        envelope.open_body,
        envelope._check_version,
        envelope._check_sizes,
        publish._data_directory,
        publish._read_manifest,
        signing.check_signature,
        access.manifest_of,
        access.cipher_of,
        shard_files.check_shard_file,
        shard_files.ShardFiles.use,
        SpanReader.read,
        SpanReader._check,
        verify._verify_file,
        verify._Walk.check_span,
        verify._Walk._check_block,
        FileCipher.open,
    )
    return found


def hint_guards() -> tuple[FunctionType, ...]:
    """Likewise for LATEST; epochs and tombstones are texts of the same kind."""
    found: tuple[Any, ...] = (texts.parse_text, root.RunRoot.hint)
    return found


def checks_of(guards: Sequence[FunctionType]) -> list[Check]:
    """Every check in some functions, in the order of their text."""
    found = []
    for function in guards:
        for index in range(len(_removals(_tree_of(function)))):
            tree = _tree_of(function)
            what, remove = _removals(tree)[index]
            remove()
            name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}: {what}"
            found.append(Check(name, function, _compiled(tree, function)))
    return found


@contextlib.contextmanager
def skipped(check: Check) -> Iterator[None]:
    """Has the whole process do without a check: whoever has imported the function already does without it as well."""
    function = check.function
    before = function.__code__
    function.__code__ = check.careless
    try:
        yield
    finally:
        function.__code__ = before


def _tree_of(function: FunctionType) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (found,) = tree.body
    found = cast(ast.FunctionDef, found)
    found.decorator_list = []
    return found


def _removals(tree: ast.FunctionDef) -> list[tuple[str, Callable[[], None]]]:
    """Each check in words, and what takes it out of the tree."""
    found: list[tuple[int, str, Callable[[], None]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            if _refuses(node.body):
                found.append((node.lineno, ast.unparse(node.test), lambda node=node: setattr(node, "test", ast.Constant(False))))
            elif isinstance(node.body[-1], ast.Return) and node.body[-1].value is None:
                text = f"return if {ast.unparse(node.test)}"
                found.append((node.lineno, text, lambda node=node: setattr(node, "test", ast.Constant(True))))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _CHECKING_CALL.fullmatch(_name_of(node.value)):
            found.append((node.lineno, f"{_name_of(node.value)}()", lambda node=node: setattr(node, "value", ast.Constant(None))))
        elif isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is not None:
            text = "except" if node.type is None else f"except {ast.unparse(node.type)}"
            if "OSError" not in text:  # of the storage, not of what is stored: part ``errors`` puts those
                found.append((node.lineno, text, lambda node=node: setattr(node, "body", [ast.Pass()])))
    return [(text, remove) for _, text, remove in sorted(found, key=lambda item: item[0])]


def _refuses(body: Sequence[ast.stmt]) -> bool:
    """Whether statements end in an error, or note the message of one that is raised further down."""
    last = body[-1]
    if isinstance(last, ast.Assign):
        return "message" in {node.id for node in ast.walk(last.targets[0]) if isinstance(node, ast.Name)}
    return isinstance(last, ast.Raise)


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _compiled(tree: ast.FunctionDef, function: FunctionType) -> CodeType:
    module = ast.fix_missing_locations(ast.Module([tree], []))
    flags = __future__.annotations.compiler_flag
    whole = compile(module, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    code = next(value for value in whole.co_consts if isinstance(value, CodeType) and value.co_name == function.__name__)
    assert code.co_freevars == function.__code__.co_freevars, "a function within another one is no guard"
    return code
