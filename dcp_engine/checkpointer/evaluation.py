"""What evaluations said of checkpoints: records beside the steps, added after the commit, one small file each, never changed."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from dcp_engine.errors import CorruptCheckpointError, InvalidOptionError, MalformedCheckpointError, UnsupportedVersionError
from dcp_engine.storage.backends import Location, locate
from dcp_engine.storage.envelope import is_nonce
from dcp_engine.storage.notes import add_note, note_names, read_note
from dcp_engine.storage.publish import open_checkpoint
from dcp_engine.storage.steps import parse_step_name, step_name
from dcp_engine.storage.texts import MAX_TEXT_FILE_BYTES, encode_text, parse_text

__all__ = ["EVALUATIONS_NAME", "EvaluationLog", "EvaluationRecord", "Evaluations", "best_first"]

logger = logging.getLogger(__name__)

EVALUATIONS_NAME: Final = "evaluations"
"""Directory of the records, beside the steps."""

_KIND: Final = "evaluation"
_FIELDS: Final = ("step", "nonce", "manifest", "at", "metrics", "code", "data", "config")
_NAME = re.compile(r"(step-[0-9]+)-[0-9a-f]{32}-[0-9a-f]{32}\.eval", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_AT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
_ODD: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One evaluation of one checkpoint. Step, nonce and digest together name the checkpoint: another one may get its step.

    Attributes:
        step: of the checkpoint.
        nonce: of the attempt that wrote it, in hex.
        manifest_sha256: of its MANIFEST, in hex.
        metrics: name -> value; at least one. Values may be infinite or no numbers.
        code: what evaluated: a version or a commit; None where it was not said.
        data: what it was evaluated on; None likewise.
        config: of the evaluation: JSON's types.
        at: when it was recorded, by the clock of whoever did: UTC, RFC 3339 with microseconds.
    """

    step: int
    nonce: str
    manifest_sha256: str
    metrics: Mapping[str, float]
    code: str | None
    data: str | None
    config: Mapping[str, Any]
    at: str

    def encode(self) -> bytes:
        """The content of its file: lines of ASCII that check themselves.

        Raises:
            InvalidOptionError: a value cannot be recorded, or all together are too long.
        """
        fields = [
            ("step", str(self.step)),
            ("nonce", self.nonce),
            ("manifest", self.manifest_sha256),
            ("at", self.at),
            ("metrics", _json({name: _plain(value) for name, value in self.metrics.items()}, "metrics")),
            ("code", _json(self.code, "code")),
            ("data", _json(self.data, "data")),
            ("config", _json(dict(self.config), "config")),
        ]
        content = encode_text(_KIND, fields)
        if len(content) > MAX_TEXT_FILE_BYTES:
            longest = max(fields, key=lambda field: len(field[1]))[0]
            raise InvalidOptionError(
                "the record of an evaluation is too long",
                step=self.step,
                expected=f"at most {MAX_TEXT_FILE_BYTES} bytes",
                found=f"{len(content)} bytes, most of them {longest}",
                remedy="keep large results in a file of their own, and name it in config",
            )
        return content

    @classmethod
    def decode(cls, content: bytes, *, path: str, file: str) -> EvaluationRecord:
        """Parses the content of a file.

        Raises:
            CorruptCheckpointError kinds: it is damaged, or no record. UnsupportedVersionError: a newer release wrote it.
        """
        fields = parse_text(content, _KIND, file=file, path=path)
        if tuple(name for name, _ in fields) == _FIELDS:
            values = dict(fields)
            try:
                metrics, config = json.loads(values["metrics"]), json.loads(values["config"])
                code, data = json.loads(values["code"]), json.loads(values["data"])
                record = cls(
                    step=int(values["step"]),
                    nonce=values["nonce"],
                    manifest_sha256=values["manifest"],
                    metrics={name: _ODD[value] if isinstance(value, str) else float(value) for name, value in metrics.items()},
                    code=code,
                    data=data,
                    config=config,
                    at=values["at"],
                )
                if record._is_valid() and record.encode() == content:
                    return record
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                pass  # said below
        raise MalformedCheckpointError(
            "not the record of an evaluation", file=file, path=path, expected=f"the fields {list(_FIELDS)}", found=fields[:3]
        )

    def _is_valid(self) -> bool:
        texts = all(text is None or isinstance(text, str) for text in (self.code, self.data))
        names = is_nonce(self.nonce) and _SHA256.fullmatch(self.manifest_sha256) and _AT.fullmatch(self.at)
        return bool(texts and names and self.metrics and isinstance(self.config, Mapping) and self.step >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """What was read of the records.

    Attributes:
        records: by step, and within it by time.
        damaged: what is wrong with files that are no whole records, in words; they are left out.
    """

    records: tuple[EvaluationRecord, ...]
    damaged: tuple[str, ...] = ()


class EvaluationLog:
    """The records of evaluations of a root's checkpoints, in its directory ``evaluations``.

    Args:
        root: directory or URL that holds the steps.
        storage_options: keyword arguments of the fsspec file system of a URL, and ``request_timeout_secs``.

    Raises:
        InvalidOptionError: the path cannot be one.

    Thread-safety: callable from any thread, and from any number of processes and hosts: nobody writes to a file of another's.
    """

    def __init__(self, root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self._root: Location = locate(root)
        self._storage_options = dict(storage_options or {})

    def record(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        code: str | None = None,
        data: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> EvaluationRecord:
        """Adds a record; durable when this returns. One process calls it for each evaluation.

        Args:
            step: of a committed checkpoint.
            metrics: name -> number, or a tensor of one element.
            code: what evaluated: a version or a commit.
            data: what it was evaluated on.
            config: of the evaluation, of JSON's types. Stored as it is: no secrets.

        Raises:
            InvalidOptionError: a value that cannot be recorded; names it.
            CheckpointNotFoundError kinds, CorruptCheckpointError: there is no such checkpoint.
            StorageError kinds: it could not be written.
        """
        name = step_name(step)
        values, texts = _metrics(metrics), _texts(code=code, data=data)
        if config is not None and not isinstance(config, Mapping):
            raise InvalidOptionError("config is no mapping", expected="None or a dict", found=repr(config)[:300])
        opened = open_checkpoint(self._root.child(name).path, storage_options=self._storage_options)
        opened.hold.release()
        record = EvaluationRecord(
            step=int(step),
            nonce=opened.marker.nonce,
            manifest_sha256=opened.marker.manifest_sha256,
            metrics=values,
            code=texts["code"],
            data=texts["data"],
            config=json.loads(_json(dict(config or {}), "config")),
            at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        )
        file = f"{name}-{record.nonce}-{uuid.uuid4().hex}.eval"
        add_note(self._root, EVALUATIONS_NAME, file, record.encode(), self._storage_options)
        return record

    def read(self, step: int | None = None) -> Evaluations:
        """The records that there are. Damaged ones are a warning in the log each, and in :attr:`Evaluations.damaged`.

        Args:
            step: only those of this step. None: all.

        Raises:
            InvalidOptionError: ``step`` cannot be the number of one.
            StorageError kinds: the directory or a file cannot be read.
        """
        wanted = None if step is None else step_name(step)
        records, damaged = [], []
        for file in note_names(self._root, EVALUATIONS_NAME, self._storage_options):
            match = _NAME.fullmatch(file)
            if match is None or parse_step_name(match[1]) is None or (wanted is not None and match[1] != wanted):
                continue  # somebody else's, or of another step
            try:
                records.append(self._read_one(file))
            except (CorruptCheckpointError, UnsupportedVersionError) as error:
                logger.warning("the record of an evaluation is left out: %s", error)
                damaged.append(str(error))
        return Evaluations(records=tuple(sorted(records, key=lambda one: (one.step, one.at))), damaged=tuple(damaged))

    def _read_one(self, file: str) -> EvaluationRecord:
        path = self._root.child(EVALUATIONS_NAME).path
        record = EvaluationRecord.decode(read_note(self._root, EVALUATIONS_NAME, file, self._storage_options), path=path, file=file)
        if not file.startswith(f"{step_name(record.step)}-{record.nonce}-"):
            raise MalformedCheckpointError(
                "the record of an evaluation is of another checkpoint than its name says", path=path, file=file, found=f"step {record.step}"
            )
        return record


def best_first(records: Iterable[EvaluationRecord], metric: str, mode: Literal["min", "max"]) -> tuple[EvaluationRecord, ...]:
    """For each checkpoint its newest record that has the metric, the best first; of equally good ones the newest step first. Pure.

    A value that is no number is none. Whether a checkpoint is still there is for the caller to see.

    Args:
        records: of any steps.
        metric: name of it.
        mode: ``"min"``: the least value is the best. ``"max"``: the greatest.

    Raises:
        InvalidOptionError: another mode.
    """
    if mode not in ("min", "max"):
        raise InvalidOptionError("mode says what is better", expected="'min' or 'max'", found=repr(mode)[:300])
    newest: dict[tuple[int, str], EvaluationRecord] = {}
    for record in sorted(records, key=lambda one: one.at):
        if metric in record.metrics:
            newest[record.step, record.nonce] = record
    sign = 1 if mode == "min" else -1
    found = [record for record in newest.values() if not math.isnan(record.metrics[metric])]
    return tuple(sorted(found, key=lambda one: (sign * one.metrics[metric], -one.step)))


def _metrics(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping) or not metrics:
        raise InvalidOptionError("metrics are no metrics", expected="name -> number, at least one", found=repr(metrics)[:300])
    values = {}
    for name, value in metrics.items():
        number = _number(value)
        if not isinstance(name, str) or not name or number is None:
            raise InvalidOptionError(f"the metric {name!r} is no number", expected="a name, and an int or a float", found=repr(value)[:300])
        values[name] = number
    return values


def _number(value: Any) -> float | None:
    """Also of tensors and numpy arrays of one element."""
    try:
        number = value.item() if callable(getattr(value, "item", None)) else value
        return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None
    except (RuntimeError, ValueError, OverflowError):
        return None


def _texts(**texts: object) -> dict[str, str | None]:
    checked: dict[str, str | None] = {}
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise InvalidOptionError(f"{name} is no text", expected="None or a str", found=repr(text)[:300])
        checked[name] = text
    return checked


def _plain(value: float) -> float | str:
    """JSON has no words for what is no finite number."""
    return value if math.isfinite(value) else repr(value)


def _json(value: object, name: str) -> str:
    try:
        text = json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":"))
        if json.loads(text) == _lists(value):
            return text
    except (TypeError, ValueError, RecursionError):
        pass  # said below
    raise InvalidOptionError(
        f"{name} cannot be recorded", expected="JSON's types: dicts with text keys, lists, texts, finite numbers", found=repr(value)[:300]
    )


def _lists(value: object) -> object:
    """Tuples are lists to JSON, which is no loss; integer keys would be texts."""
    if isinstance(value, Mapping):
        return {key: _lists(part) for key, part in value.items()}
    return [_lists(part) for part in value] if isinstance(value, list | tuple) else value
