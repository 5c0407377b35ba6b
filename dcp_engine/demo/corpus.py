"""Real text that every machine with Python has: the sources of its own standard library, and the windows that training reads from them."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass

import torch

from dcp_engine.errors import MissingFileError

__all__ = ["Batch", "Corpus", "draw_batch", "read_standard_library"]

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in a fixed order.

    Attributes:
        names: path of each document relative to the library's folder, with ``/``.
        documents: the bytes of each document, uint8, one dimension.
    """

    names: tuple[str, ...]
    documents: tuple[torch.Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all documents together."""
        return sum(document.numel() for document in self.documents)


@dataclass(frozen=True, slots=True)
class Batch:
    """One global batch, the same on every rank.

    Attributes:
        tokens: int64 [num_windows, window_bytes + 1]; inputs are all but the last column, targets all but the first.
        documents: indices of the documents, one for each window: what the cursor decided.
        draws_digest: hex digest of the random numbers, before they were turned into positions: what the generator decided.
        tokens_digest: hex digest of the bytes themselves.
    """

    tokens: torch.Tensor
    documents: tuple[int, ...]
    draws_digest: str
    tokens_digest: str


def read_standard_library(*, limit_bytes: int, min_document_bytes: int, folder: str | None = None) -> Corpus:
    """Reads Python sources of the standard library until the limit is reached, in an order that depends on their relative paths alone.

    The order is that of the paths' digests: sorted by name, a batch would be sixteen of one package's tables and the next one prose.

    Args:
        limit_bytes: no further document is taken once this many bytes are there.
        min_document_bytes: shorter documents are left out.
        folder: where to read; by default the running interpreter's standard library.

    Returns:
        The corpus: at least one document.

    Raises:
        MissingFileError: no document of that length lies there.
    """
    root = folder if folder is not None else sysconfig.get_paths()["stdlib"]
    names: list[str] = []
    documents: list[torch.Tensor] = []
    size_bytes = 0
    for name in sorted(_python_files(root), key=lambda name: _digest(name.encode())):
        if size_bytes >= limit_bytes:
            break
        with open(os.path.join(root, name), "rb") as file:
            data = bytearray(file.read())
        if len(data) < max(min_document_bytes, 1):
            continue
        names.append(name)
        documents.append(torch.frombuffer(data, dtype=torch.uint8))
        size_bytes += len(data)
    if not documents:
        raise MissingFileError(
            "no Python source long enough to train on",
            path=root,
            expected=f"*.py files of {min_document_bytes} bytes or more",
            remedy="run the demo with a Python whose standard library is installed as source files",
        )
    return Corpus(tuple(names), tuple(documents))


def _python_files(root: str) -> list[str]:
    found: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found.extend(os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/") for name in files if name.endswith(".py"))
    return found


def draw_batch(corpus: Corpus, cursor: int, *, num_windows: int, window_bytes: int) -> Batch:
    """Draws the batch at ``cursor``: one window from each of the next documents, at a place that the torch CPU generator decides.

    Both the cursor and the generator matter, and neither depends on the ranks: every rank draws the whole batch and takes its part.

    Args:
        corpus: documents of at least ``window_bytes + 1`` bytes.
        cursor: number of documents consumed before this batch; the documents repeat when they are all consumed.
        num_windows: windows in the batch.
        window_bytes: tokens of one window that are read as input.
    """
    length = window_bytes + 1
    draws = torch.rand(num_windows, dtype=torch.float64)
    indices = [(cursor + i) % len(corpus.documents) for i in range(num_windows)]
    windows = []
    for index, draw in zip(indices, draws.tolist(), strict=True):
        document = corpus.documents[index]
        start = int(draw * (document.numel() - length + 1))
        windows.append(document[start : start + length])
    tokens = torch.stack(windows)
    return Batch(
        tokens=tokens.to(torch.int64),
        documents=tuple(indices),
        draws_digest=_digest(draws.numpy().tobytes()),
        tokens_digest=_digest(tokens.numpy().tobytes()),
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
