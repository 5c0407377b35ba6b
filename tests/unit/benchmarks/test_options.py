"""The benchmarks' command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.options import ROW_NAMES, parse


def test_without_arguments_every_row_runs_with_the_states_of_the_design(tmp_path: Path) -> None:
    options = parse(["--memory", str(tmp_path)])
    assert options.rows == ("F1", "F2", "F3", "F4", "F5", "F6", "F7", "F8", "F9")
    assert (options.state_bytes, options.tensors, options.threads) == (1_200_000_000, 2000, 2)
    assert (options.rounds, options.ranks) == (0, 0)
    assert (options.quick, options.record, options.measure_memory) == (False, False, True)


def test_rows_are_taken_in_their_own_order_once_each_and_in_any_case() -> None:
    assert parse(["--rows", "f4,F3, f3"]).rows == ("F3", "F4")


def test_the_largest_cluster_is_an_option() -> None:
    options = parse(["--rows", "F6", "--ranks", "1024", "--tensors", "2000"])
    assert (options.rows, options.ranks, options.tensors) == (("F6",), 1024, 2000)


def test_quick_is_small() -> None:
    options = parse(["--quick"])
    assert (options.state_bytes, options.tensors) == (24_000_000, 50)


def test_no_tmpfs_is_a_choice() -> None:
    assert parse(["--memory", ""]).memory == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "F10"], ["'F10'", *ROW_NAMES]),
        (["--rows", "F1,speed"], ["'SPEED'", "F1, F2, F3, F4, F5, F6, F7, F8, F9"]),
        (["--rows", ""], ["the rows are F1"]),
        (["--rounds", "0"], ["--rounds must be at least 1", "0"]),
        (["--ranks", "-3"], ["--ranks must be at least 1", "-3"]),
        (["--tensors", "0"], ["--tensors must be at least 1"]),
        (["--threads", "0"], ["--threads must be at least 1"]),
        (["--state-mb", "0"], ["--state-mb must be at least 1"]),
        (["--state-mb", "much"], ["--state-mb", "much"]),
        (["--memory", "/no/such/folder"], ["/no/such/folder", "no such folder"]),
        (["--quick", "--readme"], ["--readme", "--quick"]),
        (["--state-mb", "5", "--rounds", "9", "--readme"], ["--readme", "leave --state-mb and --rounds out"]),
        (["--rounds", "-2"], ["--rounds must be at least 1", "-2"]),
    ],
)
def test_what_cannot_be_measured_is_refused_naming_what_is_valid(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert [text for text in said if text not in message] == []
