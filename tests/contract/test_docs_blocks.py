"""What the documents tell a reader to type works, as written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.docs import LANGUAGES, MARKS, blocks

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUNNABLE = [path for path in DOCUMENTS if any(block.mark == "run" for block in blocks(path.read_text(encoding="utf-8")))]
START = "import sys; sys.path.insert(0, sys.argv[1]); from support.docs import run_document; run_document(sys.argv[2])"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run(path: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    # -P: as for an installed package, nothing comes from the working directory.
    return subprocess.run(
        [sys.executable, "-P", "-c", START, str(TESTS), str(path)],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_code_block_says_whether_it_runs(path: Path) -> None:
    unmarked = [b.line for b in blocks(path.read_text(encoding="utf-8")) if b.language in LANGUAGES and b.mark not in MARKS]
    assert unmarked == [], f"{name(path)}: say run or no-run after the language"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_only_python_and_sh_are_marked_to_run(path: Path) -> None:
    assert [b.line for b in blocks(path.read_text(encoding="utf-8")) if b.mark == "run" and b.language not in LANGUAGES] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_that_do_not_run_compile(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "python":
            assert compile("\n" * (block.line - 1) + block.text, str(path), "exec")


@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_blocks_run_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    result = run(path, tmp_path)
    assert result.returncode == 0, result.stdout


def test_the_readme_shows_a_use_that_runs() -> None:
    assert ROOT / "README.md" in RUNNABLE


def test_a_block_that_fails_is_found_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python run\nx = 1\n```\n\n```sh no-run\nexit 3\n```\n\n```python run\n\nassert x == 2\n```\n")
    result = run(page, tmp_path)
    assert result.returncode == 1
    assert f'File "{page}", line 13' in result.stdout


@pytest.mark.parametrize("body", ["false | true", "echo $UNSET_NAME", "false\ntrue"])
def test_a_shell_block_fails_at_its_first_failing_command(tmp_path: Path, body: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```sh run\n{body}\n```\n")
    assert run(page, tmp_path).returncode == 1


def test_a_warning_in_a_block_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python run\nimport warnings\nwarnings.warn('careful')\n```\n")
    result = run(page, tmp_path)
    assert (result.returncode, "UserWarning: careful" in result.stdout) == (1, True)


def test_blocks_are_taken_apart_with_their_lines() -> None:
    text = "# t\n```python run\na\n```\n1. list\n   ````sh no-run\n   b\n   ```\n     c\n   ````\n~~~\nd\n~~~\n"
    assert [(b.language, b.mark, b.line, b.text) for b in blocks(text)] == [
        ("python", "run", 3, "a\n"),
        ("sh", "no-run", 7, "b\n```\n  c\n"),
        ("", "", 12, "d\n"),
    ]


def test_a_block_that_is_not_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match="starts at line 2 is not closed"):
        blocks("text\n```python run\nx\n")
