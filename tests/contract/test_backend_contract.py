"""What every back end must do, checked through raw hooks that share no code with it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.s3 import boto_client, make_bucket, storage_options

from dcp_engine.errors import LimitExceededError, MalformedCheckpointError, MissingFileError, StorageError, TruncatedFileError
from dcp_engine.storage.backends import Directory, ReadFile, WriteFile, resolve

CONTENT = bytes(range(256)) * 40


class BackendContract:
    """Inherit, and supply ``directory`` and the raw hooks."""

    @pytest.fixture
    def directory(self) -> Iterator[Directory]:
        raise NotImplementedError

    def raw_put(self, directory: Directory, name: str, content: bytes) -> None:
        raise NotImplementedError

    def raw_get(self, directory: Directory, name: str) -> bytes | None:
        raise NotImplementedError

    def test_satisfies_the_protocols(self, directory: Directory) -> None:
        self.raw_put(directory, "there", b"1")
        file = directory.create("new")
        reader = directory.open("there")

        assert isinstance(directory, Directory)
        assert isinstance(file, WriteFile)
        assert isinstance(reader, ReadFile)
        file.abort()
        reader.close()

    def test_parts_are_appended_in_order(self, directory: Directory) -> None:
        file = directory.create("a-00000.shard")
        file.write([b"one", bytearray(b"two"), memoryview(b"-three-")[1:6]])
        file.write([])
        file.write([b"", b"!"])
        assert file.position == 12
        file.commit()

        assert self.raw_get(directory, "a-00000.shard") == b"onetwothree!"

    def test_parts_are_written_where_they_belong_in_any_order(self, directory: Directory) -> None:
        file = directory.create("placed")
        file.write([b"head"])
        file.write_at(10, [b"three", b"", b"!"])
        file.write_at(4, [b"two", memoryview(b"...")])
        assert file.position == 16
        file.write([b"end"])
        file.commit()

        assert self.raw_get(directory, "placed") == b"headtwo...three!end"

    def test_a_part_is_shown_piece_by_piece_as_it_is_written(self, directory: Directory) -> None:
        part = bytes(range(256)) * 5000
        seen: list[bytes] = []
        file = directory.create("pieces")
        file.write([b"head"])
        file.write_pieces(4, memoryview(part).cast("Q"), lambda piece: seen.append(bytes(piece)))
        file.write_pieces(4 + len(part), b"", lambda piece: seen.append(bytes(piece)))
        assert file.position == 4 + len(part)
        file.commit()

        assert b"".join(seen) == part
        assert self.raw_get(directory, "pieces") == b"head" + part

    def test_an_error_of_whoever_is_shown_a_piece_reaches_the_caller(self, directory: Directory) -> None:
        def refuse(piece: memoryview) -> None:
            raise ValueError("seen enough")

        file = directory.create("refused")
        with pytest.raises(ValueError, match="seen enough"):
            file.write_pieces(0, b"abc", refuse)
        file.abort()

        assert self.raw_get(directory, "refused") is None

    def test_a_closed_file_does_not_settle(self, directory: Directory) -> None:
        file = directory.create("closed")
        file.write([b"abc"])
        file.commit()

        assert not file.settle(0, 3)

    def test_threads_may_write_one_file(self, directory: Directory) -> None:
        piece = 1 << 20
        file = directory.create("shared")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: file.write_at(number * piece, [bytes([number]) * piece]), reversed(range(12))))
        assert file.position == 12 * piece
        file.commit()

        assert self.raw_get(directory, "shared") == b"".join(bytes([number]) * piece for number in range(12))

    def test_items_of_a_part_are_counted_in_bytes(self, directory: Directory) -> None:
        file = directory.create("words")
        file.write([memoryview(bytes(16)).cast("Q")])
        file.commit()

        assert self.raw_get(directory, "words") == bytes(16)

    def test_an_empty_file_can_be_written_and_read(self, directory: Directory) -> None:
        directory.create("empty").commit()

        assert self.raw_get(directory, "empty") == b""
        assert directory.file_size("empty") == 0
        assert directory.read_small("empty", 0) == b""

    def test_large_files_arrive_whole(self, directory: Directory) -> None:
        piece = bytes(range(256)) * 4096
        file = directory.create("large")
        for _ in range(12):
            file.write([piece, b"x"])
        file.commit()

        assert self.raw_get(directory, "large") == (piece + b"x") * 12

    def test_thousands_of_parts_go_in_one_write(self, directory: Directory) -> None:
        file = directory.create("many")
        file.write([b"%04d" % number for number in range(5000)])
        file.commit()

        assert self.raw_get(directory, "many") == b"".join(b"%04d" % number for number in range(5000))

    def test_parts_may_be_reused_after_a_write(self, directory: Directory) -> None:
        part = bytearray(b"first")
        file = directory.create("reused")
        file.write([part])
        part[:] = b"later"
        file.commit()

        assert self.raw_get(directory, "reused") == b"first"

    def test_an_aborted_file_is_not_there(self, directory: Directory) -> None:
        file = directory.create("gone")
        file.write([b"1"])
        file.abort()
        file.abort()

        assert self.raw_get(directory, "gone") is None
        with pytest.raises(MissingFileError):
            directory.open("gone")

    def test_abort_does_not_undo_a_commit(self, directory: Directory) -> None:
        file = directory.create("kept")
        file.write([b"1"])
        file.commit()
        file.abort()

        assert self.raw_get(directory, "kept") == b"1"

    def test_a_closed_file_takes_nothing_more(self, directory: Directory) -> None:
        file = directory.create("closed")
        file.commit()

        with pytest.raises(StorageError, match="closed"):
            file.write([b"1"])
        with pytest.raises(StorageError, match="closed"):
            file.write_at(0, [b"1"])
        with pytest.raises(StorageError, match="closed"):
            file.commit()
        assert self.raw_get(directory, "closed") == b""

    def test_nothing_is_overwritten(self, directory: Directory) -> None:
        self.raw_put(directory, "old", b"old")

        with pytest.raises(StorageError) as caught:
            directory.create("old")
        assert caught.value.file == "old"
        assert caught.value.path == directory.path
        assert self.raw_get(directory, "old") == b"old"

    def test_ranges_fill_their_parts(self, directory: Directory) -> None:
        self.raw_put(directory, "file", CONTENT)
        file = directory.open("file")
        parts = [bytearray(3), bytearray(0), bytearray(1000), bytearray(1)]
        file.read_into(1234, [memoryview(part) for part in parts])
        file.read_into(len(CONTENT), [])
        file.close()
        file.close()

        assert file.size_bytes == len(CONTENT)
        assert b"".join(parts) == CONTENT[1234:2238]

    def test_a_range_fills_memory_of_any_item_type(self, directory: Directory) -> None:
        self.raw_put(directory, "file", CONTENT)
        target = bytearray(64)
        file = directory.open("file")
        file.read_into(0, [memoryview(target).cast("d")])
        file.close()

        assert target == CONTENT[:64]

    def test_threads_may_read_one_file(self, directory: Directory) -> None:
        self.raw_put(directory, "file", CONTENT)
        file = directory.open("file")

        def read(position: int) -> bytes:
            target = bytearray(100)
            file.read_into(position, [memoryview(target)])
            return bytes(target)

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(read, range(0, 10_000, 100)))
        file.close()
        assert found == [CONTENT[position : position + 100] for position in range(0, 10_000, 100)]

    def test_a_range_beyond_the_end_is_a_truncated_file(self, directory: Directory) -> None:
        self.raw_put(directory, "short", b"12345")
        file = directory.open("short")

        with pytest.raises(TruncatedFileError) as caught:
            file.read_into(3, [memoryview(bytearray(3))])
        assert caught.value.file == "short"
        assert caught.value.found == "5 bytes"
        file.close()

    def test_a_missing_file_is_named(self, directory: Directory) -> None:
        for call in (directory.open, directory.file_size, lambda name: directory.read_small(name, 9)):
            with pytest.raises(MissingFileError) as caught:
                call("absent")
            assert caught.value.file == "absent"
            assert caught.value.path == directory.path

    def test_a_small_file_is_read_up_to_its_limit(self, directory: Directory) -> None:
        self.raw_put(directory, "small", b"12345")

        assert directory.read_small("small", 5) == b"12345"
        with pytest.raises(LimitExceededError) as caught:
            directory.read_small("small", 4)
        assert caught.value.found == "5 bytes"

    def test_sizes_and_names_are_those_of_now(self, directory: Directory) -> None:
        assert directory.names() == []
        self.raw_put(directory, "b", b"1")
        assert directory.names() == ["b"]
        self.raw_put(directory, "a", b"22")
        assert directory.names() == ["a", "b"]
        assert directory.file_size("a") == 2
        self.raw_put(directory, "a", b"333")
        assert directory.file_size("a") == 3

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\\b", "a\0b", "a\nb", "x" * 256])
    def test_a_name_cannot_leave_the_directory(self, directory: Directory, name: str) -> None:
        for call in (directory.create, directory.open, directory.file_size, lambda name: directory.read_small(name, 9)):
            with pytest.raises(MalformedCheckpointError):
                call(name)


class TestLocal(BackendContract):
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Directory:
        (tmp_path / "odd name 'ü").mkdir()
        return resolve(tmp_path / "odd name 'ü")

    def raw_put(self, directory: Directory, name: str, content: bytes) -> None:
        (Path(directory.path) / name).write_bytes(content)

    def raw_get(self, directory: Directory, name: str) -> bytes | None:
        place = Path(directory.path) / name
        return place.read_bytes() if place.exists() else None


class TestMemory(BackendContract):
    @pytest.fixture
    def directory(self) -> Iterator[Directory]:
        root = f"contract-{uuid.uuid4().hex}"
        yield resolve(f"memory://{root}/run")
        for key in [key for key in MemoryFileSystem.store if key.startswith(f"/{root}/")]:
            del MemoryFileSystem.store[key]

    def raw_put(self, directory: Directory, name: str, content: bytes) -> None:
        MemoryFileSystem().pipe_file(directory.path.removeprefix("memory:/") + "/" + name, content)

    def raw_get(self, directory: Directory, name: str) -> bytes | None:
        file = MemoryFileSystem.store.get(directory.path.removeprefix("memory:/") + "/" + name)
        return None if file is None else file.getvalue()


class TestS3(BackendContract):
    @pytest.fixture
    def directory(self) -> Directory:
        return resolve(f"s3://{make_bucket()}/runs/7", storage_options())

    @staticmethod
    def _place(directory: Directory) -> tuple[str, str]:
        bucket, _, key = directory.path.removeprefix("s3://").partition("/")
        return bucket, key

    def raw_put(self, directory: Directory, name: str, content: bytes) -> None:
        bucket, key = self._place(directory)
        boto_client().put_object(Bucket=bucket, Key=f"{key}/{name}", Body=content)

    def raw_get(self, directory: Directory, name: str) -> bytes | None:
        bucket, key = self._place(directory)
        found = boto_client().list_objects_v2(Bucket=bucket, Prefix=f"{key}/{name}").get("Contents", [])
        if f"{key}/{name}" not in [entry["Key"] for entry in found]:
            return None
        body = boto_client().get_object(Bucket=bucket, Key=f"{key}/{name}")["Body"]
        try:
            return bytes(body.read())
        finally:
            body.close()
