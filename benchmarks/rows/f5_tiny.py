"""F5: tens of thousands of scalars and short vectors."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.engines import Engine, dcp_engine, dcp_stock, peers
from benchmarks.files import places
from benchmarks.harness import Case
from benchmarks.moves import load_case, save_case
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim
from benchmarks.state import tiny_state

__all__ = ["Tiny"]

_NUM_TENSORS = (50_000, 100_000)
_QUICK_NUM_TENSORS = (500, 1_000)


class Tiny:
    """The row."""

    NAME = "F5"
    TITLE = "50,000 and 100,000 tiny tensors"

    def cases(self, options: Options) -> Iterator[Case]:
        """Saves and loads on the first place: bytes are few, and the disk would show its fsync alone."""
        place = places(options)[0]
        sizes = _QUICK_NUM_TENSORS if options.quick else _NUM_TENSORS
        for num in sizes:
            state = tiny_state(options, num)
            target = state.empty_like()
            # A save or load takes these some ten seconds with the first size, where one round tells a factor of 20; then minutes.
            slow = {engine.name: 1 for engine in _engines(options) if engine.role == "dcp" or engine.name.startswith("torch-check")}
            engines = [engine for engine in _engines(options) if num == sizes[0] or engine.name not in slow]
            rounds = 2 if options.quick else 5
            writers = [engine for engine in engines if "mmap" not in engine.name]  # it saves as torch.save does
            save, memory, compared = f"save {num:,} tensors", num == sizes[0], frozenset({"safetensors"})
            yield save_case(
                save,
                writers,
                place,
                state,
                target,
                rounds=rounds,
                measure_memory=memory,
                compared=compared,
                keep=True,
                count_bytes=False,
                max_rounds=slow,
            )
            yield load_case(
                f"load {num:,} tensors",
                engines,
                place,
                state,
                target,
                rounds=rounds,
                measure_memory=memory,
                compared=compared,
                saved_in=save,
                count_bytes=False,
                max_rounds=slow,
            )

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """Against DCP and safetensors."""
        claims = []
        for case in results:
            if any(system.role == "dcp" for system in case.systems):
                claims.append(Claim.of_ratio(f"{case.name}: times DCP", 20.0, case.times_faster(case.best("dcp"))))
            claims.append(Claim.of_ratio(f"{case.name}: times safetensors", 3.0, case.times_faster(case.named("safetensors"))))
        return claims

    def notes(self, options: Options) -> list[str]:
        """What a reader has to know."""
        return [
            "torchsnapshot writes a file a tensor and is left out.",
            "DCP and torch-checkpointing run one round with 50,000 tensors, and none with 100,000, which would take them minutes: "
            "their time a tensor does not fall with the number of tensors.",
        ]


def _engines(options: Options) -> list[Engine]:
    others = [engine for engine in peers(sync=False) if engine.name != "torchsnapshot"]
    return [dcp_engine(codec="auto", threads=options.threads), dcp_stock(threads=options.threads, durable=False), *others]
