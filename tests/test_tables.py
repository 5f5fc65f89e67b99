"""Tables: marks, notes and alignment; the final table of a sweep and its conclusion."""

import io
import math
from types import ModuleType
from typing import Any

import pytest

from llmbench.bench.slo import Goodput
from llmbench.reports.conclusion import conclude
from llmbench.reports.format import MILLISECONDS, NULL
from llmbench.reports.serve_table import serve_table
from llmbench.reports.tables import Column, Table, markdown, number_column, render, text_column


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def two_columns(**options: Any) -> Table:
    return Table(
        columns=(
            text_column("policy", ["chunked", "mixed"]),
            number_column("ITL p99", [0.0412, 0.7], MILLISECONDS, better="lower", **options),
        ),
        notes=("a | note",),
    )


def column(table: Table, name: str) -> Column:
    return next(column for column in table.columns if column.name == name)


def test_the_best_value_is_marked_in_the_direction_that_is_better() -> None:
    assert number_column("x", [1, 3, 2], better="higher").best == {1}
    assert number_column("x", [1, 3, 2], better="lower").best == {0}
    assert number_column("x", [1, 3, 2]).best == frozenset()


def test_values_that_read_alike_are_marked_alike() -> None:
    assert number_column("x", [41.21, 41.24, 50.0], better="lower").best == {0, 1}


@pytest.mark.parametrize("values", [[3.0, None], [3.0, 3.0], [None, None], [], [3.0, math.nan]])
def test_nothing_is_best_without_a_rival(values: list[float | None]) -> None:
    assert number_column("x", values, better="higher").best == frozenset()


def test_rows_that_may_not_compete_are_never_best() -> None:
    assert number_column("x", [9, 1, 2], better="higher", eligible=[False, True, True]).best == {2}


def test_a_table_of_more_than_eight_columns_is_refused() -> None:
    with pytest.raises(AssertionError):
        Table(columns=tuple(text_column(str(index), ["a"]) for index in range(9)))


def test_markdown_is_aligned_and_marks_in_bold() -> None:
    assert markdown(two_columns()).splitlines() == [
        "| policy  | ITL p99 (ms) |",
        "|---------|-------------:|",
        "| chunked |     **41.2** |",
        "| mixed   |          700 |",
        "",
        "- **bold**: best of its column",
        "- a \\| note",
    ]


def test_wide_characters_take_two_places_in_markdown() -> None:
    table = Table(columns=(text_column("모델", ["가나", "abcd"]), number_column("n", [1, 2])))
    lines = markdown(table).splitlines()
    assert lines[0] == "| 모델 |   n |"
    assert lines[2] == "| 가나 |   1 |"
    assert lines[3] == "| abcd |   2 |"


def test_off_a_terminal_a_table_is_markdown() -> None:
    assert render(two_columns(), io.StringIO()) == markdown(two_columns())


def test_on_a_terminal_the_best_is_starred_and_nothing_is_cut() -> None:
    text = render(two_columns(), Terminal(), width=80)
    assert "41.2*" in text
    assert "* best of its column" in text
    assert "a | note" in text
    assert "…" not in text


def test_a_terminal_too_narrow_gets_markdown() -> None:
    assert render(two_columns(), Terminal(), width=12) == markdown(two_columns())


def test_the_final_table_fits_eighty_columns(simulated_sweep: ModuleType) -> None:
    records = [
        simulated_sweep.simulated_record(rate, cap) for rate in (1, math.inf) for cap in (8,)
    ]
    text = render(serve_table(records), Terminal(), width=80)
    assert "E2EL p50" in text
    assert "…" not in text


def test_rows_stand_in_order_of_load(simulated_sweep: ModuleType) -> None:
    loads = [(math.inf, None), (4, None), (4, 2), (1, None)]
    table = serve_table([simulated_sweep.failed_record(*load) for load in loads])
    rates = [cell.split()[0] for cell in column(table, "rate").cells]
    assert list(zip(rates, column(table, "conc.").cells, strict=True)) == [
        ("1", "none"),
        ("4", "2"),
        ("4", "none"),
        ("inf", "none"),
    ]


def test_the_tail_is_the_farthest_that_samples_carry(simulated_sweep: ModuleType) -> None:
    table = serve_table([simulated_sweep.simulated_record(4, num_requests=80)])
    assert [c.name for c in table.columns][3:5] == ["TTFT p50", "TTFT p95"]
    assert column(table, "ITL p99").cells != (NULL,)
    assert "p99 is withheld: it needs 368 requests a cell, here are 80" in table.notes


def test_a_withheld_percentile_is_a_dash_with_its_reason(simulated_sweep: ModuleType) -> None:
    table = serve_table([simulated_sweep.simulated_record(4, num_requests=5)])
    assert column(table, "TTFT p99").cells == (NULL,)
    assert "–: no tail; p90 needs 36 requests a cell and p99 368, here are 5" in table.notes  # noqa: RUF001


def test_a_percentile_that_only_some_cells_carry_is_explained(simulated_sweep: ModuleType) -> None:
    sizes = {1: 40, 2: 40, 4: 8}
    records = [simulated_sweep.simulated_record(rate, num_requests=n) for rate, n in sizes.items()]
    table = serve_table(records)
    assert column(table, "TTFT p90").cells[2] == NULL
    assert "–: p90 needs 36 requests; the sample has 8 requests" in table.notes  # noqa: RUF001


def test_cells_that_are_not_sound_carry_a_letter_and_never_win(
    simulated_sweep: ModuleType,
) -> None:
    records = [
        simulated_sweep.simulated_record(1),
        simulated_sweep.simulated_record(2),
        simulated_sweep.simulated_record(8, failing=range(5)),
        simulated_sweep.failed_record(),
    ]
    table = serve_table(records)
    assert column(table, "rate").cells == ("1", "2", "8 [a]", "inf [b]")
    assert column(table, "output").best == {1}
    assert column(table, "output").cells[3] == NULL
    assert any(note.startswith("[a] FAILED-REQUESTS: 5 of 64") for note in table.notes)
    assert "[b] failed: the engine ended" in table.notes


def test_a_saturated_cell_does_not_win_on_latency(simulated_sweep: ModuleType) -> None:
    records = [simulated_sweep.simulated_record(rate, 2) for rate in (2, 4, 16)]
    table = serve_table(records)
    assert records[2]["validity"]["verdict"] == "RATE-NOT-ACHIEVED"
    assert 2 not in column(table, "TTFT p90").best
    assert any("the concurrency cap held requests back" in note for note in table.notes)


def test_goodput_takes_a_column_where_objectives_were_set(simulated_sweep: ModuleType) -> None:
    goodput = Goodput(ttft_s=0.2)
    table = serve_table([simulated_sweep.simulated_record(4, goodput=goodput)])
    assert column(table, "goodput").cells != (NULL,)
    assert len(table.columns) == 8


def test_the_conclusion_names_best_load_and_saturation(simulated_sweep: ModuleType) -> None:
    records = [simulated_sweep.simulated_record(rate, 8) for rate in (2, 4, 32)]
    sentence = conclude(records)
    assert sentence.startswith("Output is highest at 32 req/s, concurrency 8: ")
    assert "it keeps up with 4 req/s and falls behind at 32 req/s" in sentence
    assert sentence.endswith(".")


def test_the_conclusion_names_a_lighter_load_that_gives_nearly_as_much(
    simulated_sweep: ModuleType,
) -> None:
    light = simulated_sweep.simulated_record(math.inf, 8)
    heavy = simulated_sweep.simulated_record(math.inf, 16)
    heavy["metrics"]["output_throughput_tok_s"] = 100.0
    light["metrics"]["output_throughput_tok_s"] = 97.0
    sentence = conclude([light, heavy])
    assert sentence.startswith("Output is highest at concurrency 16 (closed loop): 100 tok/s")
    assert "at concurrency 8 (closed loop) it is already 97 % of that" in sentence


def test_the_conclusion_of_one_cell_compares_nothing(simulated_sweep: ModuleType) -> None:
    sentence = conclude([simulated_sweep.simulated_record(4)])
    assert sentence.startswith("At 4 req/s the target gives ")
    assert "highest" not in sentence


def test_a_rate_that_a_short_run_cannot_judge_is_said_to_be_unclear(
    simulated_sweep: ModuleType,
) -> None:
    record = simulated_sweep.simulated_record(4)
    record["metrics"]["completion_rate_req_s"] = 0.5 * record["metrics"]["offered_rate_req_s"]
    assert "at 4 req/s the runs are too short to tell" in conclude([record])


def test_goodput_is_concluded_with_its_attainment(simulated_sweep: ModuleType) -> None:
    met = simulated_sweep.simulated_record(2, goodput=Goodput(ttft_s=1.0))
    missed = simulated_sweep.simulated_record(2, goodput=Goodput(ttft_s=1e-6))
    assert "goodput is highest at 2 req/s: " in conclude([met])
    assert "100 % of requests in time" in conclude([met])
    assert "no request met the objectives" in conclude([missed])


def test_nothing_is_concluded_from_cells_unfit_to_be_read(simulated_sweep: ModuleType) -> None:
    records = [
        simulated_sweep.failed_record(),
        simulated_sweep.simulated_record(4, failing=range(64)),
    ]
    assert conclude(records) == (
        "No cell is fit to be read (1 FAILED-REQUESTS, 1 failed), so nothing can be concluded."
    )
    assert conclude([]) == "There is no cell to conclude from."


def test_unfit_cells_are_left_out_and_counted(simulated_sweep: ModuleType) -> None:
    records = [simulated_sweep.simulated_record(1), simulated_sweep.failed_record()]
    assert conclude(records).endswith("1 cell not fit to be read left out.")
