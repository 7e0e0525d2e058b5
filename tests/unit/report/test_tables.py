"""The figures as text."""

from dataclasses import replace

from support.records import make_record, make_row, make_run

from qinfer.report.tables import (
    context_table,
    evaluation_table,
    method_lines,
    row_label,
    stage_line,
)


def test_quality_memory_and_speed_stand_side_by_side() -> None:
    table = evaluation_table(make_record())
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert cells[0]["drift %"] == "baseline"
    assert cells[1] == {
        "weights": "int4 g64 sym",
        "KV": "int8",
        "PPL": "23.50",
        "drift %": "+4.25",
        "KLD mean": "0.041",
        "KLD p99": "0.4",
        "top-1 %": "91.5",
        "weights MB": "120.0",
        "disk MB": "118.0",
        "KV B/token": "11,880",
        "peak MB": "560.0",
        "TTFT ms @1": "200",
        "TPOT ms @1": "200.0",
        "tok/s @1": "18.0",
    }
    assert table.columns[: table.left] == ["weights", "KV"]


def test_models_of_equal_weights_are_told_apart_by_name() -> None:
    record = make_record(make_row("one"), make_row("two"))
    table = evaluation_table(record)
    assert table.columns[:2] == ["model", "weights"]
    assert [row[0] for row in table.rows] == ["base-model", "one", "two"]
    assert row_label(record, record.rows[1]) == "one, int4 g64 sym, int8 KV"


def test_what_was_not_measured_is_a_dash() -> None:
    row = make_row(speed=())
    row = replace(row, memory=replace(row.memory, process_peak_bytes=None))
    table = evaluation_table(make_record(row))
    cells = dict(zip(table.columns, table.rows[1], strict=True))
    assert cells["peak MB"] == cells["TTFT ms @1"] == cells["tok/s @1"] == "-"
    untimed = evaluation_table(replace(make_record(), rows=(row,)))
    assert not any("TTFT" in name for name in untimed.columns)


def test_the_method_is_told() -> None:
    text = "\n".join(method_lines(make_record()))
    for part in ("8 windows of 512", "stride 512", "no BOS", "4088 tokens", "abababababab"):
        assert part in text
    for part in ("KL(baseline || model)", "base-model", "bfloat16", "fp16", "A processor"):
        assert part in text
    assert "warm-up excluded" in text
    assert "300.0 MB" in text


def test_a_shared_process_has_no_peak_and_says_so() -> None:
    record = make_record()
    rows = [
        replace(row, memory=replace(row.memory, process_start_bytes=None)) for row in record.rows
    ]
    text = "\n".join(method_lines(replace(record, rows=tuple(rows))))
    assert "shared one process" in text


def test_k18_the_context_table_has_a_column_per_range() -> None:
    """K18: drift per context length stands in the report."""
    table = context_table(make_record())
    assert table.columns[table.left :] == ["1-31", "32-127"]
    assert table.rows[1][table.left :] == ["0.05", "0.04"]
    assert table.rows[0][table.left :] == ["-", "-"]


def test_small_figures_keep_their_digits() -> None:
    row = make_row()
    tiny = replace(row, divergence=replace(row.divergence, mean=0.0000321, p99=0.0))
    table = evaluation_table(make_record(tiny))
    cells = dict(zip(table.columns, table.rows[1], strict=True))
    assert (cells["KLD mean"], cells["KLD p99"]) == ("3.2e-05", "0")


def test_stages_add_up() -> None:
    assert stage_line(make_run()) == "Time: quantize 60 s, evaluate 90 s; 150 s in all."
