"""F1: save fp32 parameters and Adam's moments as they are, to tmpfs and durably to disk."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.engines import Engine, dcp_engine, dcp_process, dcp_stock, peers, physical_limit
from benchmarks.files import Place, places
from benchmarks.harness import Case
from benchmarks.moves import save_case
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim
from benchmarks.state import mixed_state

__all__ = ["SaveRaw"]


class SaveRaw:
    """The row."""

    NAME = "F1"
    TITLE = "save fp32 parameters + Adam, raw, every block digested"

    def cases(self, options: Options) -> Iterator[Case]:
        """tmpfs, then disk with fsync."""
        state = mixed_state(options)
        target = state.empty_like()
        for place in places(options):
            yield save_case(
                f"save to {place.name}",
                _engines(place, options),
                place,
                state,
                target,
                rounds=2 if options.quick else 5,
                budget_secs=40 if place.durable else 25,
                measure_memory=place.durable,  # where all configurations are
            )

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """Against DCP's best configuration, and against plain pwrite."""
        claims = []
        for case in results:
            on_disk = case.name.endswith("disk")
            if on_disk:
                best = case.best("dcp")
                detail = best.name if best else ""
                claims.append(Claim.of_ratio(f"{case.name}: times DCP's best", 1.25, case.times_faster(best), detail=detail))
            text = f"{case.name}: share of plain pwrite{' + fsync' if on_disk else ''}"
            claims.append(Claim.of_ratio(text, 0.9 if on_disk else 0.95, case.times_faster(case.best("limit"))))
        return claims

    def notes(self, options: Options) -> list[str]:
        """What a reader has to know."""
        return ["torch.load mmap saves as torch.save does, and is not listed here."]


def _engines(place: Place, options: Options) -> list[Engine]:
    sync = place.durable
    stock = [dcp_stock(threads=threads, durable=sync) for threads in sorted({1, options.threads})]
    stock.append(dcp_stock(threads=options.threads, durable=sync, checksums=False))
    if sync:
        stock += [dcp_stock(threads=threads, sync=False) for threads in sorted({1, options.threads})]
        stock.append(dcp_process(threads=options.threads))
    others = [engine for engine in peers(sync=sync) if "mmap" not in engine.name]
    return [dcp_engine(codec="raw", threads=options.threads), *stock, *others, physical_limit(threads=options.threads, sync=sync)]
