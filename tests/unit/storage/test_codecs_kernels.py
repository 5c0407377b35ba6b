"""The compiled loops of the paired layout against those of numpy, bit by bit, and which of them a process runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.storage import dtypes
from dcp_engine.storage.codecs import PLANES, Scratch, decode_block, encode_block, floats, kernels, paired
from dcp_engine.storage.codecs.pairing import NumpyLoops, PairLoops, Pairs

FP32 = 18


def loops() -> PairLoops:
    """The compiled ones, wherever they are: then every test here holds them against numpy's."""
    return kernels.CompiledLoops() if kernels.compiled is not None else NumpyLoops()


def raw_floats(num: int, itemsize: int, seed: int, spread: int, *, signs: bool) -> bytes:
    """Floats with exponents from 100 on, some of them beyond the sixteen codes, and noise in all other bits."""
    generator = np.random.default_rng(seed)
    tops = generator.integers(0, 0x10000, num).astype(np.uint16) & (0x807F if signs else 0x007F)
    exponents = 100 + generator.integers(0, 16, num)
    far = generator.random(num) < spread / 1000
    exponents[far] = generator.integers(0, 256, int(far.sum()))
    tops |= exponents.astype(np.uint16) << 7
    if itemsize == 2:
        return tops.tobytes()
    return np.stack((generator.integers(0, 0x10000, num).astype(np.uint16), tops), axis=1).tobytes()


def taken_apart(which: PairLoops, raw: memoryview, itemsize: int, num_pairs: int, max_outside: int) -> tuple[object, ...] | None:
    low = np.full(2 * num_pairs if itemsize == 4 else 0, 0xA5A5, np.uint16)
    rest, codes = np.full(num_pairs, 0xA5A5, np.uint16), np.full(num_pairs, 0xA5, np.uint8)
    found = which.pair(raw, Pairs(itemsize, 100, codes, low, rest), max_outside, Scratch())
    if found is None:
        return None
    return low.tobytes(), rest.tobytes(), codes.tobytes(), found.positions.tolist(), found.exponents.tolist(), found.has_signs


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 300),
    st.sampled_from([2, 4]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 20, 300]),
    st.booleans(),
    st.integers(0, 7),
)
def test_both_loops_take_floats_apart_and_together_alike(words: int, itemsize: int, seed: int, spread: int, signs: bool, skew: int) -> None:
    num_pairs = 8 * words
    raw = raw_floats(2 * num_pairs, itemsize, seed, spread, signs=signs)
    view = memoryview(bytes(skew) + raw)[skew:]  # blocks begin at any byte
    mine, numpys = (taken_apart(which, view, itemsize, num_pairs, num_pairs // 4) for which in (loops(), NumpyLoops()))
    assert mine == numpys
    if numpys is None:
        return
    low, rest, codes, positions, exponents, _ = numpys
    out = bytearray(skew + len(raw))
    pairs = Pairs(itemsize, 100, np.frombuffer(codes, np.uint8), np.frombuffer(low, np.uint16), np.frombuffer(rest, np.uint16))
    loops().unpair(pairs, memoryview(out)[skew:], Scratch())
    tops = np.frombuffer(bytes(out[skew:]), np.uint16).reshape(-1, itemsize // 2).copy()
    tops[positions, -1] = tops[positions, -1] & 0x807F | np.array(exponents, np.uint16) << 7
    assert tops.tobytes() == raw


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 20, 300]), st.integers(0, 7))
def test_both_loops_code_exponents_as_they_code_floats(words: int, seed: int, spread: int, skew: int) -> None:
    num_pairs = 8 * words
    raw = memoryview(raw_floats(2 * num_pairs, 2, seed, spread, signs=True))
    expected = taken_apart(NumpyLoops(), raw, 2, num_pairs, num_pairs // 4)
    exponents = np.zeros(skew + 2 * num_pairs, np.uint8)[skew:]
    exponents[:] = np.frombuffer(raw, np.uint16) >> 7 & 0xFF
    for which in (loops(), NumpyLoops()):
        codes = np.full(num_pairs, 0xA5, np.uint8)
        found = which.code(exponents, 100, codes, num_pairs // 4, Scratch())
        if found is None:
            assert expected is None
        else:
            assert expected is not None
            assert (codes.tobytes(), found[0].tolist(), found[1].tolist()) == expected[2:5]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_both_loops_fold_and_unfold_alike(words: int, seed: int) -> None:
    rest = np.random.default_rng(seed).integers(0, 0x10000, 8 * words).astype(np.uint16) & 0x7F7F
    folded = [np.array(which.fold(rest.copy(), Scratch())) for which in (loops(), NumpyLoops())]
    assert folded[0].tolist() == folded[1].tolist()
    assert len(folded[0]) == 7 * words
    for which in (loops(), NumpyLoops()):
        assert which.unfold(folded[0], 8 * words, Scratch()).tolist() == rest.tolist()


@pytest.mark.parametrize("itemsize", [2, 4])
def test_more_floats_outside_than_are_worth_listing_are_refused_by_both(itemsize: int) -> None:
    raw = memoryview(raw_floats(64, itemsize, 0, 1000, signs=True))
    for which in (loops(), NumpyLoops()):
        assert taken_apart(which, raw, itemsize, 32, 5) is None


def test_a_block_is_the_same_bytes_with_either_and_each_reads_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = memoryview((np.random.default_rng(1).standard_normal(1 << 18) * 0.02).astype(np.float32).tobytes())
    stored = []
    for which in (loops(), NumpyLoops()):
        for module in (paired, floats):
            monkeypatch.setattr(module, "pair_loops", which)
        stored.append(b"".join(encode_block(raw, dtypes.of_code(FP32), "planes", 1, Scratch()).parts))
    assert stored[0] == stored[1]
    for which in (loops(), NumpyLoops()):
        monkeypatch.setattr(paired, "pair_loops", which)
        out = bytearray(len(raw))
        decode_block(PLANES, memoryview(stored[0]), memoryview(out), dtypes.of_code(FP32), Scratch())
        assert out == raw


def test_where_there_is_a_compiler_the_loops_are_compiled() -> None:
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is not None and sys.byteorder == "little":
        assert kernels.compiled is not None


def test_a_variable_switches_them_off() -> None:
    code = "from dcp_engine.storage.codecs import kernels; print(type(kernels.pair_loops).__name__)"
    command = [sys.executable, "-P", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, kernels.VARIABLE: "0"})
    assert result.stdout.strip() == "NumpyLoops"


def test_compiled_loops_refuse_memory_that_is_too_short() -> None:
    if kernels.compiled is None:
        return  # numpy's own checks hold there
    codes, rest = bytearray(16), bytearray(32)
    with pytest.raises(ValueError, match="raw has 127 bytes and must have 128"):
        kernels.compiled.pair(bytes(127), 4, 16, 0, bytearray(64), rest, codes, bytearray(0), bytearray(0))
    with pytest.raises(ValueError, match="low has 63 bytes and must have 64"):
        kernels.compiled.pair(bytes(128), 4, 16, 0, bytearray(63), rest, codes, bytearray(0), bytearray(0))
    with pytest.raises(ValueError, match="out has 63 bytes and must have 64"):
        kernels.compiled.unpair(bytearray(63), 2, 16, 0, b"", rest, codes)
    with pytest.raises(ValueError, match="rest has 31 bytes and must have 32"):
        kernels.compiled.unpair(bytearray(64), 2, 16, 0, b"", bytes(31), codes)
    with pytest.raises(ValueError, match="floats of 3 bytes"):
        kernels.compiled.unpair(bytearray(64), 3, 16, 0, b"", rest, codes)
    with pytest.raises(ValueError, match="exponents has 31 bytes and must have 32"):
        kernels.compiled.code(bytes(31), 16, 0, codes, bytearray(0), bytearray(0))
    with pytest.raises(ValueError, match="codes has 15 bytes and must have 16"):
        kernels.compiled.code(bytes(32), 16, 0, bytearray(15), bytearray(0), bytearray(0))
    with pytest.raises(ValueError, match="outside has 3 bytes and must have 4"):
        kernels.compiled.code(bytes(32), 16, 0, codes, bytearray(32), bytearray(3))
    with pytest.raises(ValueError, match="folded has 13 bytes and must have 14"):
        kernels.compiled.unfold(bytes(13), bytearray(16))
