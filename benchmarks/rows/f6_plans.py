"""F6: the coordinator's work for a large cluster, simulated on one core, encoding and decoding of what travels included."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from benchmarks.cluster import Cluster, simulate
from benchmarks.files import places, remove
from benchmarks.harness import Case, Facts, System, in_fresh_process
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim
from benchmarks.stats import growth_exponent, spread

__all__ = ["Plans"]

_RANKS = (16, 64, 256, 1024)
_QUICK_RANKS = (4, 16)
_MAX_DCP_CHUNKS = 50_000
_MAX_GATHERED_BYTES = 164 / 8
"""An eighth of what DCP's plans alone took when the figure was set."""


class Plans:
    """The row."""

    NAME = "F6"
    TITLE = "plans of many ranks, simulated on one core"

    def cases(self, options: Options) -> Iterator[Case]:
        """One size after the other. DCP takes part in the large ones only where they were asked for by name."""
        largest = options.ranks or (_QUICK_RANKS if options.quick else _RANKS)[-1]
        sizes = [ranks for ranks in (_QUICK_RANKS if options.quick else _RANKS) if ranks < largest]
        for ranks in [*sizes, largest]:
            yield _case(ranks, options, asked_for=ranks == options.ranks <= 1024)

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """Ratios where DCP took part, at the largest such size; bytes and growth at the largest of all."""
        shared = [case for case in results if case.best("ours") and case.named("DCP, gc on")]
        claims = []
        if shared:
            case = shared[-1]
            for name, reach in (("DCP, gc on", 50.0), ("DCP, gc off", 15.0)):
                claims.append(Claim.of_ratio(f"{case.name}: coordinator, times {name}", reach, case.times_faster(case.named(name))))
                claims.append(Claim(f"{case.name}: planning alone, times {name}", reach, _fact_ratio(case, "plan_secs", name)))
            gathered = _fact_ratio(case, "sent_bytes", "DCP, gc on")
            name = f"{case.name}: bytes gathered, plans and results, share of DCP's"
            claims.append(Claim(name, 1 / 8, 1 / gathered if gathered else None, at_most=True))
        known = [(case, ours) for case in results if (ours := case.best("ours")) is not None]
        if known:
            case, ours = known[-1]
            claims.append(Claim(f"{case.name}: bytes gathered a chunk", _MAX_GATHERED_BYTES, ours.fact("sent_bytes_a_chunk"), at_most=True))
            claims.append(Claim(f"{case.name}: seconds of one rank's load plan", 1.0, ours.fact("load_plan_secs"), at_most=True))
            claims.append(Claim(f"{case.name}: manifest bytes a block", 12.0, ours.fact("manifest_bytes_a_block"), at_most=True))
        if len(known) > 1:
            chunks = [ours.fact("chunks") or 0.0 for _, ours in known]
            times = [spread(ours.secs.values()).median for _, ours in known]
            claims.append(Claim("coordinator's growth: exponent over the chunks", 1.1, growth_exponent(chunks, times), at_most=True))
        return claims

    def notes(self, options: Options) -> list[str]:
        """What a reader has to know."""
        return [
            "Seconds are the coordinator's: decode, plan, encode; then decode results, finish, encode the metadata. Nothing is sent.",
            f"DCP takes some 70 to 170 us a chunk: it takes part up to {_MAX_DCP_CHUNKS:,} chunks, or where --ranks names the size.",
            "Each run has a process of its own; memory is that process's, with the bytes of all messages in it.",
        ]


def _fact_ratio(case: CaseResult, fact: str, name: str) -> float | None:
    ours, theirs = case.best("ours"), case.named(name)
    of, to = (theirs.fact(fact) if theirs else None), (ours.fact(fact) if ours else None)
    return of / to if of and to else None


def _case(ranks: int, options: Options, *, asked_for: bool) -> Case:
    name = f"{ranks:,} ranks x {options.tensors:,} tensors"
    place = places(options)[0]
    num_chunks = ranks * options.tensors
    large = num_chunks > _MAX_DCP_CHUNKS

    def system(label: str, engine: str, *, collect: bool) -> System:
        path = place.path(name, label)

        def run() -> Facts:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            facts: dict[str, float] = in_fresh_process(
                _on_one_core, Cluster(engine=engine, collect=collect, ranks=ranks, tensors=options.tensors, path=path)
            )
            facts["chunks"] = num_chunks
            facts["sent_bytes"] = facts["gathered_bytes"] + facts["result_bytes"]
            facts["sent_bytes_a_chunk"] = facts["sent_bytes"] / num_chunks
            facts["manifest_bytes_a_block"] = facts["manifest_bytes"] / num_chunks
            facts["us_a_chunk"] = facts["secs"] / num_chunks * 1e6
            return facts

        left_out = "" if engine == "ours" or not large or asked_for else f"left out: minutes; name the size with --ranks {ranks}"
        return System(
            name=label,
            role="ours" if engine == "ours" else "dcp",
            run=run,
            unavailable=left_out,
            max_rounds=1 if engine == "dcp" else 1000,  # ten seconds even at the smallest size
        )

    return Case(
        name=name,
        systems=[
            system("dcp-engine", "ours", collect=True),
            system("DCP, gc on", "dcp", collect=True),
            system("DCP, gc off", "dcp", collect=False),
        ],
        rounds=1 if options.quick or large else 3,
        measure_memory=False,
        close=lambda: remove(place.path(name)),
    )


def _on_one_core(cluster: Cluster) -> dict[str, float]:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return simulate(cluster)
