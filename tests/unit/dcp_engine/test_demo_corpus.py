"""A batch depends on the cursor and on the generator, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_engine.demo.corpus import Corpus, draw_batch, read_standard_library
from dcp_engine.errors import MissingFileError


def corpus_of(*sizes: int) -> Corpus:
    """Document ``i`` is the byte ``i`` over and over."""
    return Corpus(tuple(map(str, range(len(sizes)))), tuple(torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(sizes)))


def test_standard_library_is_read_in_one_order_up_to_the_limit() -> None:
    first = read_standard_library(limit_bytes=200_000, min_document_bytes=129)
    second = read_standard_library(limit_bytes=200_000, min_document_bytes=129)
    assert first.names == second.names
    assert all(torch.equal(a, b) for a, b in zip(first.documents, second.documents, strict=True))
    assert first.size_bytes >= 200_000
    assert first.size_bytes - first.documents[-1].numel() < 200_000
    assert all(name.endswith(".py") for name in first.names)
    assert all(document.numel() >= 129 for document in first.documents)


def test_only_sources_of_the_library_itself_are_read(tmp_path: Path) -> None:
    for name, text in {
        "a.py": "x = 1\n" * 9,
        "short.py": "x",
        "notes.txt": "y" * 99,
        "package/b.py": "y = 2\n" * 9,
        "site-packages/c.py": "z = 3\n" * 9,
        "test/d.py": "z = 3\n" * 9,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    corpus = read_standard_library(limit_bytes=1 << 20, min_document_bytes=10, folder=str(tmp_path))
    assert sorted(corpus.names) == ["a.py", "package/b.py"]
    assert bytes(corpus.documents[corpus.names.index("package/b.py")].numpy()) == b"y = 2\n" * 9


def test_machine_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"\*\.py files of 10 bytes"):
        read_standard_library(limit_bytes=100, min_document_bytes=10, folder=str(tmp_path))


def test_cursor_chooses_the_documents_and_wraps_round() -> None:
    batch = draw_batch(corpus_of(9, 9, 9), 1, num_windows=4, window_bytes=4)
    assert batch.tokens.tolist() == [[1] * 5, [2] * 5, [0] * 5, [1] * 5]
    assert batch.tokens.dtype == torch.int64


def test_generator_chooses_the_place_within_a_document() -> None:
    corpus = Corpus(("a",), (torch.arange(200, dtype=torch.uint8),))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = draw_batch(corpus, 0, num_windows=2, window_bytes=4)
    second = draw_batch(corpus, 0, num_windows=2, window_bytes=4)
    torch.set_rng_state(state)
    again = draw_batch(corpus, 0, num_windows=2, window_bytes=4)
    assert torch.equal(first.tokens, again.tokens)
    assert (first.documents, first.draws_digest) == (again.documents, again.draws_digest)
    assert second.documents == first.documents
    assert second.draws_digest != first.draws_digest
    assert not torch.equal(second.tokens, first.tokens)
    assert torch.equal(first.tokens[:, 1:] - first.tokens[:, :-1], torch.ones(2, 4, dtype=torch.int64))


def test_document_of_exactly_one_window_is_read_whole() -> None:
    corpus = Corpus(("a",), (torch.arange(5, dtype=torch.uint8),))
    assert draw_batch(corpus, 0, num_windows=1, window_bytes=4).tokens.tolist() == [[0, 1, 2, 3, 4]]


def test_cursor_is_seen_in_the_documents_alone() -> None:
    corpus = corpus_of(*[50] * 8)
    torch.manual_seed(1)
    here = draw_batch(corpus, 0, num_windows=2, window_bytes=4)
    torch.manual_seed(1)
    there = draw_batch(corpus, 2, num_windows=2, window_bytes=4)
    assert here.draws_digest == there.draws_digest
    assert here.documents != there.documents
