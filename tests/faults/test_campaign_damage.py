"""The quick part of the damage campaign, and proof that it sees what a reader misses."""

from __future__ import annotations

from typing import Any

import pytest
from faults.campaign import damage
from faults.campaign.damage import HAS_ROOTS, Tally, cut_lengths, flip_bits, misplace_files, subject_of

from dcp_engine.storage import read_pipeline, shard_files, verify


def test_all_damage_is_found_and_named() -> None:
    outcome = damage.run(full=False, seed=5)
    assert outcome.bad == ()
    assert outcome.points >= 15_000
    assert outcome.facts["strangers"] == 2 * 5 * 12  # two checkpoints of five files
    assert outcome.points == sum(outcome.facts.values())
    assert outcome.facts.get("LATEST", 0) >= (1000 if HAS_ROOTS else 0)


def test_every_bit_of_64_kib_would_be_flipped() -> None:
    with subject_of("plain", 0) as subject:
        assert len(damage._all_bits(subject)) >= 524_288
        assert len(damage._all_lengths(subject)) >= 65_536
        kinds = {region.kind for region in subject.regions}
    assert kinds == {"marker", "record", "body", "header", "block", "padding", "footer", "trailer"}


def test_a_loader_that_skips_digests_is_caught(monkeypatch: Any) -> None:
    monkeypatch.setattr(read_pipeline.SpanReader, "_check", lambda self, job, span: None)
    with subject_of("plain", 0) as subject:
        noise = next(region for region in subject.regions if region.kind == "block" and region.file.startswith("optimizer"))
        tally = Tally("plain", 0)
        flip_bits(subject, tally, [(noise.file, 8 * noise.begin)])
    assert [text.rpartition(": ")[2] for text in tally.bad] == ["load says nothing"]


def test_a_verifier_that_skips_footers_is_caught(monkeypatch: Any) -> None:
    monkeypatch.setattr(verify, "check_shard_file", lambda *args, **kwargs: None)
    with subject_of("plain", 0) as subject:
        footer = next(region for region in subject.regions if region.kind == "footer")
        tally = Tally("plain", 0)
        flip_bits(subject, tally, [(footer.file, 8 * footer.begin)])
        cut_lengths(subject, tally, [(footer.file, len(subject.contents[footer.file]) - 1)])
    assert [text.rpartition(": ")[2] for text in tally.bad] == ["verify says nothing"] * 2


def test_a_reader_that_mixes_attempts_is_caught(monkeypatch: Any) -> None:
    for module in (verify, shard_files):
        monkeypatch.setattr(module, "check_shard_file", lambda *args, **kwargs: None)
    with subject_of("plain", 0) as subject:
        tally = Tally("plain", 0)
        misplace_files(subject, tally)
    assert any("of another attempt" in text and text.endswith("says nothing") for text in tally.bad)


def test_an_error_that_names_another_file_is_caught(monkeypatch: Any) -> None:
    honest = verify._Walk.report

    def report(self: Any, block: int, error: Any) -> None:
        honest(self, block, error)
        error.file = "MANIFEST"

    monkeypatch.setattr(verify._Walk, "report", report)
    with subject_of("plain", 0) as subject:
        block = next(region for region in subject.regions if region.kind == "block")
        tally = Tally("plain", 0)
        flip_bits(subject, tally, [(block.file, 8 * block.begin)])
    assert len(tally.bad) == 1
    assert "names MANIFEST" in tally.bad[0]


@pytest.mark.parametrize("kind", ["plain", "secret"])
def test_damage_is_undone(kind: str) -> None:
    with subject_of(kind, 3) as subject:
        tally = Tally(kind, 3)
        flip_bits(subject, tally, [(file, 17) for file in subject.contents])
        cut_lengths(subject, tally, [(file, len(content) + step) for file, content in subject.contents.items() for step in (-1, 1)])
        misplace_files(subject, tally)
        assert {entry.name: entry.read_bytes() for entry in subject.path.iterdir()} == subject.contents
        assert subject.loads_what_was_saved()
    assert tally.bad == []
