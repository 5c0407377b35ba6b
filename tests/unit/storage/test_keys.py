"""Secret keys: where they come from, what is refused, and that nothing shows or stores them."""

from __future__ import annotations

import copy
import hashlib
import hmac
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_engine import ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.errors import DcpEngineError, InvalidOptionError, UnsupportedModeError
from dcp_engine.storage.keys import SecretKey, key_id, secret_key

KEY = b"a key of 32 bytes, as they go..!"


def test_a_key_is_bytes_a_whole_file_or_what_a_callable_returns(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    sources: list[tuple[Any, bytes]] = [
        (KEY, KEY),
        (bytearray(KEY), KEY),
        (tmp_path / "key", KEY + b"\n"),
        (str(tmp_path / "key"), KEY + b"\n"),
        (lambda: KEY, KEY),
    ]
    for source, material in sources:
        key = secret_key(source, "signing_key")
        assert key is not None
        assert key.material() == material
    assert secret_key(None, "signing_key") is None


def test_a_file_is_read_anew_every_time(tmp_path: Path) -> None:
    key = secret_key(tmp_path / "key", "signing_key")
    assert key is not None
    for material in (KEY, KEY[::-1]):
        (tmp_path / "key").write_bytes(material)
        assert key.material() == material


def broken() -> bytes:
    raise ConnectionError(f"the vault said {KEY!r}")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (KEY[:15], "15 bytes"),
        (b"", "0 bytes"),
        (KEY * 200, "more than 4096 bytes"),
        (7, "int"),
        (lambda: KEY[:15], "15 bytes"),
        (lambda: "text", "str"),
        (broken, "ConnectionError"),
        ("/nowhere/key", "No such file or directory"),
        ("/", "Is a directory"),
    ],
)
@pytest.mark.parametrize("option", ["signing_key", "encryption_key"])
def test_what_is_no_key_is_refused_by_name_and_not_shown(source: Any, found: str, option: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        key = secret_key(source, option)
        assert key is not None
        key.material()
    assert caught.value.found == found
    assert option in str(caught.value)
    assert KEY[:8].decode() not in str(caught.value)


def test_an_endless_file_is_not_read_to_its_end() -> None:
    key = secret_key("/dev/zero", "signing_key")
    assert key is not None
    with pytest.raises(InvalidOptionError, match="more than 4096 bytes"):
        key.material()


def test_a_key_shows_nowhere_and_is_pickled_by_multiprocessing_alone(tmp_path: Path) -> None:
    holders: list[Any] = [SecretKey(KEY, "signing_key")]
    holders += [kind(tmp_path / "a", signing_key=KEY, encryption_key=KEY) for kind in (ShardWriter, ShardReader)]
    for holder in holders:
        assert KEY.decode() not in repr(holder) + str(vars(holder) if hasattr(holder, "__dict__") else "")
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(UnsupportedModeError, match="not pickled"):
                pickle.dumps(holder, protocol)
        assert KEY not in bytes(pickled_to_disk(holder))
        sent = ForkingPickler.loads(ForkingPickler.dumps(holder))
        assert type(sent) is type(holder)
        copy.copy(holder)
    key = copy.deepcopy(holders[0])
    assert key.material() == ForkingPickler.loads(ForkingPickler.dumps(key)).material() == KEY


def pickled_to_disk(value: object) -> bytes:
    file = io.BytesIO()
    with pytest.raises(UnsupportedModeError):
        pickle.Pickler(file).dump(value)
    return file.getvalue()


@pytest.mark.parametrize("make", [ShardWriter, ShardReader, verify_checkpoint])
def test_a_missing_library_is_said_with_the_command_that_installs_it(make: Callable[..., Any], monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(DcpEngineError) as caught:
        make(tmp_path / "a", encryption_key=KEY)
    assert isinstance(caught.value, InvalidOptionError)
    assert "pip install 'dcp-engine[crypto]'" in str(caught.value)
    make_signed = make is not verify_checkpoint
    if make_signed:
        make(tmp_path / "a", signing_key=KEY)


def test_ids_are_the_documented_ones() -> None:
    for purpose in ("signing", "encryption"):
        assert key_id(KEY, purpose) == hmac.new(KEY, f"dcp-engine {purpose} key id".encode(), hashlib.sha256).digest()[:8]


def test_a_relative_path_in_a_directory_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidOptionError, match="signing_key is a relative path, and the working directory is gone"):
        secret_key("key", "signing_key")


def test_a_signing_key_that_cannot_be_had_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException, match="signing_key cannot be read"):
        dcp.save({"w": torch.ones(3)}, storage_writer=ShardWriter(tmp_path / "step-00000001", signing_key=tmp_path / "no-key"))
    assert list(tmp_path.iterdir()) == []


def test_a_signing_key_is_asked_once_a_save(tmp_path: Path) -> None:
    asked = []

    def key() -> bytes:
        asked.append(1)
        return KEY

    writer = ShardWriter(signing_key=key)
    for num_saves in (1, 2):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / str(num_saves), storage_writer=writer)
        assert len(asked) == num_saves
        verify_checkpoint(tmp_path / str(num_saves), signing_key=KEY).raise_if_bad()
