"""F3: save and load compressed, with equal threads: fp32 with Adam, bf16 weights, and the codecs alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.engines import Engine, dcp_engine, dcp_zstandard, version_of
from benchmarks.files import places
from benchmarks.harness import Case, Facts, MismatchError, System
from benchmarks.moves import load_case, save_case
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim
from benchmarks.state import State, large_tensor, mixed_state, weights_state
from benchmarks.stats import ratio
from dcp_engine.storage.codecs import Scratch, decode_block, encode_block
from dcp_engine.storage.dtypes import of_tensor_dtype
from dcp_engine.storage.limits import BLOCK_BYTES

__all__ = ["Compressed"]

_CODEC_BYTES = 128 << 20
_REACH = {"fp32": (2.0, 4.0, 0.84), "bf16": (1.6, 4.0, 0.67)}


class Compressed:
    """The row."""

    NAME = "F3"
    TITLE = "save and load compressed, equal threads"

    def cases(self, options: Options) -> Iterator[Case]:
        """Each dtype saved and loaded, then the codecs on one thread."""
        rounds = 2 if options.quick else 5
        for dtype, state in _states(options):
            target = state.empty_like()
            first, *others = places(options)
            save, load = f"{dtype} save to {first.name}", f"{dtype} warm load from {first.name}"
            engines = _engines(options)
            secs, memory = (18, True) if dtype == "fp32" else (10, False)
            yield save_case(save, engines, first, state, target, rounds=rounds, budget_secs=secs, measure_memory=memory, keep=True)
            yield load_case(load, engines, first, state, target, rounds=rounds, budget_secs=secs, measure_memory=memory, saved_in=save)
            # Elsewhere only what differs: a warm load does not, and bf16 shows what fp32 has shown.
            for place in others if dtype == "fp32" else []:
                yield save_case(f"{dtype} save to {place.name}", engines, place, state, target, rounds=rounds, budget_secs=secs)
        weights = large_tensor(options, 2 * (4 << 20 if options.quick else _CODEC_BYTES)).to(torch.bfloat16)
        yield _codec_case("bf16 codec alone, 1 thread: encode", weights, rounds, decode=False)
        yield _codec_case("bf16 codec alone, 1 thread: decode", weights, rounds, decode=True)

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """Against DCP + ZStandard and, codec alone, ZipNN."""
        claims = []
        for case in results:
            save, load, size = _REACH.get(case.name[:4], (0.0, 0.0, 0.0))
            if "codec" in case.name:
                claims.append(Claim.of_ratio(f"{case.name}: times ZipNN", 1.0, case.times_faster(case.best("peer"))))
                claims += _ratio_claims(case)
                continue
            saves = " save " in case.name
            # "auto" leaves bytes raw where that is faster: only what compresses everything is compared with what does.
            ours, dcp = case.named("dcp-engine planes"), case.best("dcp")
            times = ratio(dcp.secs, ours.secs) if ours is not None and dcp is not None else None
            claims.append(Claim.of_ratio(f"{case.name}: planes, times DCP + ZStandard", save if saves else load, times))
            stored = ours.fact("stored_bytes") if ours else None
            if saves:
                claims.append(Claim(f"{case.name}: stored bytes, share", size, stored / case.nbytes if stored else None, at_most=True))
        return claims

    def notes(self, options: Options) -> list[str]:
        """What a reader has to know."""
        return [
            "DCP's reader decodes on one thread: it has no option for more.",
            "A warm load is from the page cache, wherever the file lies: F2 has both.",
        ]


def _ratio_claims(case: CaseResult) -> list[Claim]:
    if "encode" not in case.name:
        return []
    ours, zipnn = case.best("ours"), case.best("peer")
    bytes_ours = ours.fact("stored_bytes") if ours else None
    bytes_zipnn = zipnn.fact("stored_bytes") if zipnn else None
    known = bytes_ours and bytes_zipnn
    return [Claim(f"{case.name}: bytes, share of ZipNN's", 1.0, bytes_ours / bytes_zipnn if known else None, at_most=True)]  # type: ignore[operator]


def _states(options: Options) -> Iterator[tuple[str, State]]:
    yield "fp32", mixed_state(options)
    yield "bf16", weights_state(options)


def _engines(options: Options) -> list[Engine]:
    return [
        dcp_engine(codec="planes", threads=options.threads),
        dcp_engine(codec="auto", threads=options.threads),
        dcp_zstandard(threads=options.threads),
    ]


def _codec_case(name: str, weights: torch.Tensor, rounds: int, *, decode: bool) -> Case:
    systems = [_our_codec(weights, decode=decode), _zipnn(weights, decode=decode)]
    return Case(
        name=name, systems=systems, rounds=rounds, budget_secs=6, compared=frozenset({"ZipNN"}), nbytes=weights.nbytes, measure_memory=False
    )


def _our_codec(weights: torch.Tensor, *, decode: bool) -> System:
    dtype = of_tensor_dtype(weights.dtype)
    scratch = Scratch()
    raw = memoryview(weights.reshape(-1).view(torch.uint8).numpy())
    blocks = [raw[begin : begin + BLOCK_BYTES] for begin in range(0, len(raw), BLOCK_BYTES)]
    stored: list[tuple[int, memoryview]] = []
    out = memoryview(bytearray(len(raw)))

    def encode(*, keep: bool) -> int:
        num_bytes = 0
        for block in blocks:
            encoded = encode_block(block, dtype, "planes", 1, scratch)
            num_bytes += encoded.stored_bytes
            if keep:
                stored.append((encoded.codec, memoryview(b"".join(encoded.parts))))
        return num_bytes

    def decode_all() -> None:
        for number, (codec, data) in enumerate(stored):
            decode_block(codec, data, out[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES], dtype, scratch)

    def check() -> Facts:
        if not decode:
            if not stored:
                encode(keep=True)
            decode_all()
        if out != raw:
            raise MismatchError("planes: decoded bytes differ")
        return {"stored_bytes": sum(len(data) for _, data in stored)}

    def prepare() -> None:
        encode(keep=True)

    def wipe() -> None:
        out[:] = bytes(len(out))

    def run_encode() -> None:
        encode(keep=False)

    if decode:
        return System(name="dcp-engine planes", role="ours", prepare=prepare, before=wipe, run=decode_all, check=check)
    return System(name="dcp-engine planes", role="ours", run=run_encode, check=check)


def _zipnn(weights: torch.Tensor, *, decode: bool) -> System:
    name = "zipnn"
    if not version_of(name):
        return System(name="ZipNN", role="peer", unavailable="not installed: pip install zipnn")
    codec: Any = importlib.import_module(name).ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    expected = weights.reshape(-1).view(torch.uint8).numpy().tobytes()
    copies: list[bytearray] = []
    stored: list[Any] = []
    out: list[Any] = []

    def copy() -> None:
        copies[:] = [bytearray(expected)]  # it works in place

    def encode() -> None:
        stored[:] = [codec.compress(copies[0])]

    def prepare() -> None:
        copy()
        encode()

    def run_decode() -> None:
        out[:] = [codec.decompress(stored[0])]

    def check() -> Facts:
        if not decode:
            run_decode()
        if bytes(out[0]) != expected:
            raise MismatchError("zipnn: decoded bytes differ")
        return {"stored_bytes": len(stored[0])}

    if decode:
        return System(name="ZipNN", role="peer", prepare=prepare, before=out.clear, run=run_decode, check=check)
    note = "works in place: the copy that keeps its caller's bytes is not on the clock"
    return System(name="ZipNN", role="peer", before=copy, run=encode, check=check, note=note)
