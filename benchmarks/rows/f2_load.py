"""F2: load fp32 parameters and Adam's moments into tensors that exist: from warm page cache, and cold from disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks import limits
from benchmarks.engines import Engine, dcp_engine, dcp_stock, peers, physical_limit
from benchmarks.files import places
from benchmarks.harness import Case
from benchmarks.moves import load_case
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim
from benchmarks.state import State, mixed_state

__all__ = ["LoadRaw"]

_WARM = "warm load"
_COLD = "cold load"
_MAPPED = ("safetensors", "torch.load mmap")
_UNCHECKED = "dcp-engine raw, unchecked"


class LoadRaw:
    """The row."""

    NAME = "F2"
    TITLE = "load fp32 parameters + Adam into allocated tensors, verified"

    def cases(self, options: Options) -> Iterator[Case]:
        """tmpfs, disk with its files cached, disk with its files dropped from the cache."""
        state = mixed_state(options)
        target = state.empty_like()
        where = places(options)
        for place in where:
            for cold in (False, True) if place.durable else (False,):
                yield load_case(
                    f"{_COLD if cold else _WARM} from {place.name}",
                    _engines(options, state),
                    place,
                    state,
                    target,
                    rounds=2 if options.quick else 5,
                    budget_secs=30 if cold else 25,
                    measure_memory=place is where[0] and not cold,
                    compared=frozenset((*_MAPPED, _UNCHECKED)),
                    cold=cold,
                )

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """Against DCP, against those who map the file, and against plain pread."""
        claims = []
        for case in results:
            cold = case.name.startswith(_COLD)
            claims.append(Claim.of_ratio(f"{case.name}: times DCP", 1.7 if cold else 3.5, case.times_faster(case.best("dcp"))))
            if not cold:
                unchecked = case.named(_UNCHECKED)
                for name in _MAPPED:
                    claims.append(Claim.of_ratio(f"{case.name}: times {name}", 1.0, case.times_faster(case.named(name))))
                    if unchecked is not None:
                        ratio = case.times_faster(case.named(name), unchecked)
                        claims.append(Claim.of_ratio(f"{case.name}, nothing checked by either: times {name}", 1.0, ratio))
                pread = next((system for system in case.systems if system.name.startswith("plain pread") and system.secs), None)
                claims.append(Claim.of_ratio(f"{case.name}: share of plain pread", 0.85, case.times_faster(pread)))
        return claims

    def notes(self, options: Options) -> list[str]:
        """What a reader has to know."""
        return [
            "Every engine has saved its own files. DCP's reader has one thread whatever the writer had.",
            "Who maps a file checks nothing of it, so the engine is there a second time without its digests: like against like.",
            "Peak memory of engines that map their file holds its pages, which the kernel may take back.",
        ]


def _engines(options: Options, state: State) -> list[Engine]:
    pread = physical_limit(threads=options.threads, sync=False)
    memcpy = Engine(
        name=f"memcpy, {options.threads} threads",
        role="limit",
        save=lambda path, saved: None,
        load=lambda path, target: limits.memcpy(state, target, threads=options.threads),
        comparable=False,
        note="from memory to memory",
    )
    plain = Engine(
        name=f"plain pread, {options.threads} threads",
        role="limit",
        save=pread.save,
        load=pread.load,
        note="a file a thread, nothing checked",
    )
    return [
        dcp_engine(codec="raw", threads=options.threads),
        dcp_engine(codec="raw", threads=options.threads, name=_UNCHECKED, verify=False),
        replace(dcp_stock(threads=options.threads, durable=False), name="DCP"),
        *peers(sync=False),
        plain,
        memcpy,
    ]
