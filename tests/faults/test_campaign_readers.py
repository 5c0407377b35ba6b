"""The quick part of the campaign of readers that skip a check, and proof that it takes out what it says and nothing else."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack

import pytest
from faults.campaign import readers
from faults.campaign.careless import checks_of, hint_guards, reader_guards, skipped
from faults.campaign.forgeries import Forgery
from faults.campaign.readers import EQUIVALENT, Bench, Found, equivalent


@pytest.fixture(scope="module")
def found() -> Found:
    return readers.find(full=False, seed=1)


def test_whatever_check_a_reader_skips_is_missed(found: Found) -> None:
    outcome = readers.outcome_of(found, seed=1, secs=0.0)
    assert outcome.bad == ()
    assert outcome.facts["checks"] >= 54
    assert outcome.facts["checks whose lack is found"] >= 47
    assert outcome.facts["checks that others stand behind"] == 7
    assert outcome.points == sum(count for name, count in outcome.facts.items() if not name.startswith("checks"))
    assert outcome.facts["forgeries"] > 1000


def test_a_check_that_nothing_needs_and_a_reason_that_does_not_hold_are_told() -> None:
    past = {
        "envelope.check_body: found != record.sha256": "",
        "envelope.parse_record: len(data) != RECORD_BYTES": "bit 7: load says nothing",
    }
    bad = Found(past, ("a reader that skips nothing: bit 3: load says nothing",), Counter(bits=4)).bad()
    assert [text[:30] for text in bad] == [
        "a reader that skips nothing: b",
        "nothing gets past a reader wit",
        "nothing was said to get past a",
    ]


# -- what gets past whom --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("envelope.parse_marker: found != check", "of COMPLETE of the (plain|secret) checkpoint: verify (says nothing|names MANIFEST)"),
        ("publish._read_manifest: found != marker.manifest_sha256", "MANIFEST that COMPLETE does not name: verify says nothing"),
        ("envelope.check_body: found != record.sha256", "MANIFEST whose record has another digest: verify says nothing"),
        ("access.manifest_of: manifest.nonce != opened.marker.nonce", "COMPLETE of another attempt: verify says nothing"),
        ("envelope.check_header: return if found == header_bytes", "a shard file with a header of no shard file: verify says nothing"),
        ("shard_files.check_shard_file: footer.sha256", "a shard file with another footer, which vouches for itself: verify says nothing"),
        ("shard_files.check_shard_file: check_body()", r"bit \d+ of \S+\.shard of the \w+ checkpoint: verify says nothing"),
        ("read_pipeline.SpanReader._check: job.found_digest is not None", r"bit \d+ of \S+\.shard of the \w+ checkpoint: load "),
        ("verify._Walk._check_block: found != expected", r"bit \d+ of \S+\.shard of the \w+ checkpoint: verify "),
        ("read_pipeline.SpanReader._check: any(job.padding)", r"bit \d+ of \S+\.shard of the \w+ checkpoint: load says nothing"),
        ("verify._Walk._check_block: bytes(extent", r"bit \d+ of \S+\.shard of the \w+ checkpoint: verify says nothing"),
        ("access.manifest_of: opened.marker.signature", "a signature over weak digests: verify says nothing"),
        (
            "signing.check_signature: not hmac.compare_digest(marker.signature",
            "another MANIFEST under the old signature: verify says nothing",
        ),
        ("access.manifest_of: check_signature()", "another MANIFEST under the old signature: verify says nothing"),
        ("access.cipher_of: wanted != cipher.key_id", "a key for blocks in the clear: verify says nothing"),
        (
            "encryption.FileCipher.open: except InvalidTag",
            "a block of optimizer.noise that was not encrypted with the key: verify says nothing",
        ),
    ],
)
def test_what_gets_past_a_reader_is_what_its_check_is_for(found: Found, check: str, words: str) -> None:
    (text,) = (text for name, text in found.past.items() if name.startswith(check))
    assert re.search(words, text)


def test_subjects_are_as_they_were_after_each_kind_of_fault() -> None:
    with ExitStack() as stack:
        bench = Bench(stack, seed=3, full=False)
        assert {fault.kind for fault in bench.faults} == {"plain", "secret", "signed", "encrypted"}
        forged = [fault for fault in bench.faults if isinstance(fault, Forgery)]
        for fault in (*forged, *bench.faults[len(forged) : len(forged) + 40]):
            assert list(bench.complaints(fault)) == []
        for subject in bench._subjects.values():
            assert {entry.name: entry.read_bytes() for entry in subject.path.iterdir()} == subject.contents
            assert subject.loads_what_was_saved()


def test_each_reason_for_having_no_effect_is_that_of_a_check() -> None:
    names = [check.name for check in checks_of([*reader_guards(), *hint_guards()])]
    assert len(names) == len(set(names))
    assert all(any(re.match(pattern, name) for name in names) for pattern, _ in EQUIVALENT)
    assert len([name for name in names if equivalent(name)]) == 7


# -- what is taken out ----------------------------------------------------------------------------------------------------------------


def check_sign(value: int) -> None:
    if value < 0:
        raise ValueError("negative")


def guard(value: int, seen: list[str]) -> None:
    check_sign(value)
    seen.append("sign")
    if value > 9:
        raise ValueError("large")
    if value == 7:
        message = "seven"
    elif value == 5:
        return
    else:
        seen.append("small")
        return
    raise ValueError(message)


def refusals() -> dict[int, str]:
    found = {}
    for value in (-1, 1, 5, 7, 10):
        try:
            guard(value, [])
        except ValueError as error:
            found[value] = str(error)
        except UnboundLocalError:
            found[value] = "unbound"
    return found


def test_one_check_is_taken_out_at_a_time_and_put_back() -> None:
    right = {-1: "negative", 7: "seven", 10: "large"}
    assert refusals() == right
    found = {}
    for check in checks_of([guard]):  # type: ignore[list-item]
        with skipped(check):
            found[check.name.rpartition("guard: ")[2]] = refusals()
    assert found == {
        "check_sign()": {7: "seven", 10: "large"},
        "value > 9": {-1: "negative", 7: "seven"},
        "value == 7": {-1: "negative", 10: "large"},
        "return if value == 5": right,
    }
    assert refusals() == right
