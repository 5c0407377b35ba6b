"""Who counts as lost: dead and hung ranks do, slow and waiting ones do not."""

from __future__ import annotations

import pytest

from dcp_engine.background.pulse import ARRIVING, LEFT, Beat, Limits, Pulses

LIMITS = Limits(stall_secs=10, patience_secs=100)


def lost_after(beats: dict[float, Beat], now: float) -> str | None:
    """What is found of rank 1 at ``now``, when it was looked at at these times in save 5."""
    pulses = Pulses(5, [0, 1], LIMITS, 0.0)
    for second in range(int(now) + 1):
        pulses.saw(0, Beat(second, 5, "planning"), second)
        if second in beats:
            pulses.saw(1, beats[second], second)
    found = pulses.lost(now)
    assert found is None or found.rank == 1
    return None if found is None else f"{found.phase}: {found.found}"


def living(phase: str, *, is_work: bool = True, progress: int | None = None, save: int = 5, grows: bool = False) -> dict[float, Beat]:
    return {s: Beat(s, save, phase, is_work, None if progress is None else progress + s * grows) for s in range(200)}


def test_a_rank_that_never_showed_itself_is_lost() -> None:
    assert lost_after({}, 10) is None
    assert lost_after({}, 11) == f"{ARRIVING}: no sign of life for 11 s: its process is dead or stopped"


def test_a_rank_whose_beat_stands_still_is_lost_in_the_phase_that_it_showed() -> None:
    beats = {second: Beat(min(second, 3), 5, "writing", True, second) for second in range(40)}
    assert lost_after(beats, 13) is None
    assert lost_after(beats, 14) == "writing: no sign of life for 11 s: its process is dead or stopped"


def test_a_rank_that_writes_slowly_is_not_lost_and_one_whose_write_hangs_is() -> None:
    assert lost_after(living("writing", progress=7, grows=True), 199) is None
    assert lost_after(living("writing", progress=7), 10) is None
    assert lost_after(living("writing", progress=7), 11) == "writing: it lives, but its work hangs: no progress for 11 s"


def test_work_that_shows_no_progress_has_more_time() -> None:
    assert lost_after(living("planning"), 100) is None
    assert lost_after(living("planning"), 101) == "planning: it lives, but its work has not ended for 101 s"


def test_a_rank_that_waits_for_others_is_never_lost() -> None:
    assert lost_after(living("waiting for plans", is_work=False), 199) is None


def test_a_rank_that_does_not_come_has_more_time_and_one_that_left_has_none() -> None:
    assert lost_after(living("", save=4), 100) is None
    assert lost_after(living("", save=4), 101) == f"{ARRIVING}: it lives, but has not come for 101 s"
    assert lost_after(living(LEFT, save=4), 1) == f"{ARRIVING}: it has left: its saver was closed, or its process ends"


def test_a_rank_that_is_in_the_next_save_already_is_not_lost() -> None:
    assert lost_after(living(ARRIVING, save=6), 199) is None


def test_a_watcher_that_did_not_run_itself_forgives() -> None:
    pulses = Pulses(5, [1], LIMITS, 0.0)
    pulses.saw(1, Beat(1, 5, "writing", True, 1), 1.0)
    pulses.forgive(50.0)
    assert pulses.lost(55.0) is None
    assert pulses.lost(61.0) is not None


@pytest.mark.parametrize("beat", [Beat(1, 2, "writing", True, 3), Beat(0, 0, "")])
def test_a_beat_travels(beat: Beat) -> None:
    assert Beat.decode(beat.encode().encode()) == beat
