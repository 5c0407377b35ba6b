"""Records of evaluations: what they hold, which is the best, and what damage does to the others."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import fsspec
import numpy as np
import pytest
import torch
from support.roots import RootPlace

from dcp_engine.checkpointer.evaluation import EvaluationLog, EvaluationRecord, best_first
from dcp_engine.errors import CheckpointNotFoundError, InvalidOptionError
from dcp_engine.storage import RunRoot
from dcp_engine.storage.publish import open_checkpoint
from dcp_engine.storage.texts import encode_text


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RootPlace]:
    if request.param == "local":
        yield RootPlace(str(tmp_path / "run"))
        return
    name = f"/evaluations-{uuid4().hex}"
    yield RootPlace(f"memory:/{name}/run")
    fsspec.filesystem("memory").rm(name, recursive=True)


def files(place: RootPlace) -> dict[str, bytes]:
    if place.path.startswith("memory:"):
        file_system = fsspec.filesystem("memory")
        return {name.rpartition("/")[2]: file_system.cat_file(name) for name in file_system.ls(f"{place.path}/evaluations", detail=False)}
    return {path.name: path.read_bytes() for path in Path(place.path, "evaluations").iterdir()}


def put(place: RootPlace, name: str, content: bytes) -> None:
    with fsspec.open(f"{place.path}/evaluations/{name}", "wb") as file:
        file.write(content)


def test_record_names_its_checkpoint_and_what_evaluated_it(place: RootPlace) -> None:
    place.save(3)
    marker = open_checkpoint(place.root().path_of(3)).marker
    log = EvaluationLog(place.path)
    record = log.record(3, {"loss": 0.5, "accuracy": 1}, code="v1.2 (abc)", data="süd-2024", config={"beams": 4, "betas": (0.9, 0.95)})
    assert (record.step, record.nonce, record.manifest_sha256) == (3, marker.nonce, marker.manifest_sha256)
    assert record.metrics == {"loss": 0.5, "accuracy": 1.0}
    assert (record.code, record.data, record.config) == ("v1.2 (abc)", "süd-2024", {"beams": 4, "betas": [0.9, 0.95]})
    read = EvaluationLog(place.path).read()
    assert (read.records, read.damaged) == ((record,), ())


def test_records_are_added_and_none_is_changed(place: RootPlace) -> None:
    place.save(1)
    place.save(2)
    log = EvaluationLog(place.path)
    log.record(2, {"loss": 0.5})
    before = files(place)
    log.record(1, {"loss": 0.25})
    log.record(2, {"loss": 0.125})
    assert {name: content for name, content in files(place).items() if name in before} == before
    assert [(one.step, one.metrics["loss"]) for one in log.read().records] == [(1, 0.25), (2, 0.5), (2, 0.125)]
    assert [one.metrics["loss"] for one in log.read(2).records] == [0.5, 0.125]
    assert log.read(7).records == ()


def test_root_with_records_is_still_a_root(place: RootPlace) -> None:
    root = RunRoot(place.path)
    claim = root.claim("run")
    place.save(1, claim)
    place.save(2, claim)
    EvaluationLog(place.path).record(1, {"loss": 1.0})
    assert root.steps() == [1, 2]
    root.retire(1, claim)
    root.clean(claim, older_than_secs=0)
    assert [one.step for one in EvaluationLog(place.path).read().records] == [1]
    root.claim("run")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1 + 0.2])
def test_any_number_comes_back(place: RootPlace, value: float) -> None:
    place.save(1)
    EvaluationLog(place.path).record(1, {"x": value})
    (record,) = EvaluationLog(place.path).read().records
    assert repr(record.metrics["x"]) == repr(value)


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.tensor([[0.5]]), np.float32(0.5), np.array([0.5])])
def test_tensors_of_one_element_are_numbers(tmp_path: Path, value: Any) -> None:
    place = RootPlace(str(tmp_path))
    place.save(1)
    assert EvaluationLog(tmp_path).record(1, {"x": value}).metrics == {"x": 0.5}


def test_damaged_records_are_reported_and_harm_no_other(place: RootPlace, caplog: pytest.LogCaptureFixture) -> None:
    place.save(1)
    log = EvaluationLog(place.path)
    log.record(1, {"loss": 0.5})
    ((name, content),) = files(place).items()
    start = name.rpartition("-")[0]
    damage = {
        f"{start}-{'0' * 32}.eval": b"",
        f"{start}-{'1' * 32}.eval": content[:-20],
        f"{start}-{'2' * 32}.eval": content.replace(b"0.5", b"0.4"),
        f"{start}-{'3' * 32}.eval": b"x" * 70_000,
        f"{start}-{'4' * 32}.eval": encode_text("evaluation", [("step", "1")]),
        f"step-00000009-{'5' * 32}-{'6' * 32}.eval": content,
        f"{start}-{'7' * 32}.eval": content.replace(b"dcp-engine evaluation 1", b"dcp-engine evaluation 2"),
    }
    for other, damaged in damage.items():
        put(place, other, damaged)
    put(place, "notes.txt", b"of somebody")
    with caplog.at_level(logging.WARNING):
        read = log.read()
    assert [one.metrics for one in read.records] == [{"loss": 0.5}]
    assert len(read.damaged) == len(damage)
    for other, text in zip(sorted(damage), read.damaged, strict=True):
        assert other in text
    assert len([record for record in caplog.records if "is left out" in record.getMessage()]) == len(damage)
    log.record(1, {"loss": 0.25})
    assert len(log.read().records) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"step": "-1"},
        {"nonce": "xyz"},
        {"manifest": "0" * 63},
        {"at": "yesterday"},
        {"metrics": "[]"},
        {"metrics": "{}"},
        {"metrics": '{"a":"many"}'},
        {"metrics": '{"a": 1.0}'},
        {"code": "3"},
        {"config": "[]"},
        {"config": "[" * 5000},
    ],
)
def test_whole_file_of_wrong_values_is_no_record(tmp_path: Path, values: dict[str, str]) -> None:
    good = {
        "step": "1",
        "nonce": "0" * 32,
        "manifest": "0" * 64,
        "at": "2026-01-01T00:00:00.000000Z",
        "metrics": '{"a":1.0}',
        "code": "null",
        "data": "null",
        "config": "{}",
    }
    name = f"step-00000001-{'0' * 32}-{'0' * 32}.eval"
    (tmp_path / "evaluations").mkdir()
    file = tmp_path / "evaluations" / name
    file.write_bytes(encode_text("evaluation", list(good.items())))
    assert len(EvaluationLog(tmp_path).read().records) == 1
    file.write_bytes(encode_text("evaluation", list({**good, **values}.items())))
    read = EvaluationLog(tmp_path).read()
    assert (read.records, len(read.damaged)) == ((), 1)


def test_writers_do_not_meet(place: RootPlace) -> None:
    place.save(1)

    def write(writer: int) -> None:
        for number in range(3):
            EvaluationLog(place.path).record(1, {f"{writer}": float(number)})

    threads = [Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = EvaluationLog(place.path).read()
    assert not read.damaged
    assert sorted((name, value) for one in read.records for name, value in one.metrics.items()) == [
        (str(writer), float(number)) for writer in range(4) for number in range(3)
    ]


def test_checkpoint_that_is_not_committed_gets_no_record(place: RootPlace) -> None:
    place.save(1)
    with pytest.raises(CheckpointNotFoundError):
        EvaluationLog(place.path).record(2, {"loss": 0.5})
    assert EvaluationLog(place.path).read().records == ()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"metrics": {}}, "at least one"),
        ({"metrics": 3}, "at least one"),
        ({"metrics": {"loss": "low"}}, "the metric 'loss' is no number"),
        ({"metrics": {"loss": True}}, "the metric 'loss' is no number"),
        ({"metrics": {"loss": torch.ones(2)}}, "the metric 'loss' is no number"),
        ({"metrics": {3: 1.0}}, "the metric 3 is no number"),
        ({"code": 3}, "code is no text"),
        ({"data": b"x"}, "data is no text"),
        ({"config": [1]}, "config is no mapping"),
        ({"config": {"a": {1: 2}}}, "config cannot be recorded"),
        ({"config": {"a": object()}}, "config cannot be recorded"),
        ({"config": {"a": math.nan}}, "config cannot be recorded"),
        ({"config": {"a": "x" * 70_000}}, "most of them config"),
        ({"step": 1.5}, "number of a step"),
        ({"step": -1}, "number of a step"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    RootPlace(str(tmp_path)).save(1)
    with pytest.raises(InvalidOptionError, match=text):
        EvaluationLog(tmp_path).record(**{"step": 1, "metrics": {"loss": 1.0}, **arguments})
    assert not (tmp_path / "evaluations").exists()


# -- the best -------------------------------------------------------------------------------------------------------------


def record(step: int, at: int, nonce: str = "0", **metrics: float) -> EvaluationRecord:
    return EvaluationRecord(
        step=step, nonce=nonce * 32, manifest_sha256="0" * 64, metrics=metrics, code=None, data=None, config={}, at=f"2026-01-{at:02d}"
    )


def test_best_is_the_least_or_the_greatest() -> None:
    records = [record(1, 1, loss=0.5), record(2, 2, loss=0.25), record(3, 3, loss=0.75), record(4, 4, other=0.0)]
    assert [one.step for one in best_first(records, "loss", "min")] == [2, 1, 3]
    assert [one.step for one in best_first(records, "loss", "max")] == [3, 1, 2]
    assert best_first(records, "accuracy", "max") == ()


def test_newest_record_of_a_checkpoint_counts_and_of_equals_the_newest_step() -> None:
    records = [record(1, 5, loss=0.9), record(1, 2, loss=0.1), record(2, 1, loss=0.5), record(3, 1, loss=0.5), record(1, 9, other=0.0)]
    assert [(one.step, one.metrics["loss"]) for one in best_first(records, "loss", "min")] == [(3, 0.5), (2, 0.5), (1, 0.9)]


def test_checkpoints_of_one_step_are_two() -> None:
    assert [one.nonce[0] for one in best_first([record(1, 1, "a", x=1.0), record(1, 2, "b", x=2.0)], "x", "max")] == ["b", "a"]


def test_no_number_is_never_the_best() -> None:
    records = [record(1, 1, loss=math.nan), record(2, 1, loss=math.inf), record(3, 1, loss=1.0)]
    assert [one.step for one in best_first(records, "loss", "min")] == [3, 2]
    assert best_first([record(1, 1, loss=0.5), record(1, 2, loss=math.nan)], "loss", "min") == ()


def test_mode_is_checked() -> None:
    with pytest.raises(InvalidOptionError, match="mode"):
        best_first([], "loss", "least")  # type: ignore[arg-type]
