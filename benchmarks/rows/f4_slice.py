"""F4: load 1/64 of the leading dimension of one large compressed tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from benchmarks.engines import dcp_engine, dcp_zstandard, peers
from benchmarks.files import Place, bytes_read, evict, fsync_tree, places, remove, size_of
from benchmarks.harness import Case, Facts, MismatchError, System
from benchmarks.options import Options
from benchmarks.parts import Part
from benchmarks.results import CaseResult, Claim, Role
from benchmarks.state import State, large_tensor
from dcp_engine import ReshardLoadPlanner, ShardReader
from dcp_engine.storage.limits import BLOCK_BYTES

__all__ = ["Slice"]

_PARTS = 64
_KEY = "model.weight"
_RAW = "not compressed"


class Slice:
    """The row."""

    NAME = "F4"
    TITLE = "1/64 of the leading dimension of a 1 GiB compressed tensor"

    def cases(self, options: Options) -> Iterator[Case]:
        """Warm from the first place, cold from disk."""
        tensor = large_tensor(options, (64 << 20) if options.quick else 1 << 30)
        state = State({"model": {"weight": tensor}}, {_KEY: tensor})
        for place in places(options):
            yield _case(place, state, options, cold=place.durable)

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """Time against DCP + ZStandard; bytes against the slice's share of the file."""
        claims = []
        for case in results:
            claims.append(Claim.of_ratio(f"{case.name}: times DCP + ZStandard", 60.0, case.times_faster(case.best("dcp"))))
            ours = case.best("ours")
            read, stored = (ours.fact("bytes_by_calls"), ours.fact("stored_bytes")) if ours else (None, None)
            measured = (read - BLOCK_BYTES) / (stored / _PARTS) if read and stored else None
            claims.append(Claim(f"{case.name}: (bytes read - 1 block) / share of the stored bytes", 1.25, measured, at_most=True))
        return claims

    def notes(self, options: Options) -> list[str]:
        """What a reader has to know."""
        return [
            "The slice is asked for by DCP's protocol for parts of tensors, as a rank of 64 would ask for its shard.",
            "Bytes read are those of read calls, manifest included; mapped files (safetensors) do not show in them.",
        ]


def _case(place: Place, state: State, options: Options, *, cold: bool) -> Case:
    name = f"{'cold' if cold else 'warm'} slice from {place.name}"
    whole = state.flat[_KEY]
    rows = whole.shape[0] // _PARTS
    begin = rows * (_PARTS // 2 + 1)
    expected = whole[begin : begin + rows]
    target = torch.zeros_like(expected)
    part = Part.of(target, whole=whole.shape, offsets=torch.Size([begin, 0]))
    read = [0, 0]

    def system(
        engine_name: str, role: Role, save: Callable[[str, State], None], load: Callable[[str], None], note: str = "", unavailable: str = ""
    ) -> System:
        path = place.path(name, engine_name)

        def prepare() -> None:
            remove(path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            save(path, state)
            fsync_tree(path)

        def before() -> None:
            target.zero_()
            if cold:
                evict(path)
            read[:] = bytes_read()

        def check() -> Facts:
            called, delivered = (now - then for now, then in zip(bytes_read(), read, strict=True))
            if not torch.equal(target.view(torch.int32), expected.view(torch.int32)):
                raise MismatchError("the slice is not what was saved")
            return {"bytes_by_calls": called, "bytes_from_device": delivered, "stored_bytes": size_of(path)}

        return System(
            name=engine_name,
            role=role,
            prepare=prepare,
            before=before,
            run=lambda: load(path),
            check=check,
            comparable=note != _RAW,
            note=note,
            unavailable=unavailable,
        )

    def from_ours(path: str) -> None:
        dcp.load({"model": {"weight": part}}, storage_reader=ShardReader(path, threads=options.threads), planner=ReshardLoadPlanner())

    def from_dcp(path: str) -> None:
        dcp.load({"model": {"weight": part}}, storage_reader=FileSystemReader(path))

    def from_safetensors(path: str) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            target.copy_(file.get_slice(_KEY)[begin : begin + rows])

    ours = dcp_engine(codec="planes", threads=options.threads)
    stock = dcp_zstandard(threads=options.threads)
    safetensors = peers(sync=False)[0]
    return Case(
        name=name,
        systems=[
            system(ours.name, "ours", ours.save, from_ours),
            system(stock.name, "dcp", stock.save, from_dcp),
            system(safetensors.name, "peer", safetensors.save, from_safetensors, _RAW, safetensors.unavailable),
        ],
        rounds=2 if options.quick else 5,
        nbytes=expected.nbytes,
        budget_secs=15,
        measure_memory=not cold or not options.memory,
        close=lambda: remove(place.path(name)),
    )
