"""What a path means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_engine.errors import InvalidOptionError
from dcp_engine.storage.backends import Location, is_remote, is_supported_path, locate, resolve


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b"),
        ("/a//b/./c/", "/a/b/c"),
        ("//a", "/a"),
        ("/", "/"),
        (Path("/a/b"), "/a/b"),
        (b"/a/\xff", "/a/\udcff"),
        ("file:///a/b", "/a/b"),
        ("local:///a/b/", "/a/b"),
        ("/a/s3:/b", "/a/s3:/b"),
        ("/a b/ü'", "/a b/ü'"),
        ("/a/~", "/a/~"),
    ],
)
def test_local_paths_are_absolute_and_tidy(given: str | Path, path: str) -> None:
    assert locate(given) == Location(path, remote=False)
    assert not is_remote(given)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("s3://bucket/run/step-00000001", "s3://bucket/run/step-00000001"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("memory://x", "memory://x"),
        ("memory:///x", "memory:///x"),
        ("simplecache::s3://bucket/run", "simplecache::s3://bucket/run"),
        ("abfs+x.y-z://a@b/c", "abfs+x.y-z://a@b/c"),
    ],
)
def test_urls_are_kept(given: str, path: str) -> None:
    assert locate(given) == Location(path, remote=True)
    assert locate(locate(given).path) == locate(given)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "\0",
        "/a\0b",
        "/a\ud800",
        7,
        None,
        "s3:/bucket/x",
        Path("s3://bucket/x"),
        "s3://",
        "s3:///",
        "s3://b/../c",
        "file://host/x",
        "file://",
    ],
)
def test_what_cannot_be_a_path_is_refused(given: object) -> None:
    with pytest.raises(InvalidOptionError):
        locate(given)  # type: ignore[arg-type]
    assert not is_supported_path(given)  # type: ignore[arg-type]


def test_a_relative_path_outlives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path)
    directory = resolve("one")
    monkeypatch.chdir("/")

    file = directory.create("x")
    file.commit()
    assert os.listdir(tmp_path / "one") == ["x"]


def test_a_parent_is_taken_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")

    assert locate(f"{tmp_path}/link/../x").path == f"{tmp_path}/far/x"
    assert locate(f"{tmp_path}/link/..").path == f"{tmp_path}/far"
    assert locate(f"{tmp_path}/link").path == f"{tmp_path}/link"


@pytest.mark.parametrize(
    ("given", "supported"),
    [
        ("relative", True),
        ("/a", True),
        ("s3://b/x", True),
        ("memory://x", True),
        ("simplecache::gs://b/x", True),
        ("nonsense://b/x", False),
    ],
)
def test_support_is_told_without_asking_a_storage(given: str, supported: bool) -> None:
    assert is_supported_path(given) is supported


def test_children_of_roots_have_one_separator() -> None:
    assert Location("/", remote=False).child("a").path == "/a"
    assert Location("/a", remote=False).child("b").path == "/a/b"
    assert Location("s3://b/c", remote=True).child("d") == Location("s3://b/c/d", remote=True)


def test_local_paths_do_not_pay_for_fsspec() -> None:
    code = "import sys; from dcp_engine.storage.backends import resolve; resolve('/tmp'); print('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_relative_path_in_a_directory_that_is_gone_is_an_error_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidOptionError, match="the working directory is gone"):
        locate("checkpoint")
    assert locate(str(tmp_path / "checkpoint")).path == str(tmp_path / "checkpoint")
