"""Rows of one pass: what is kept in memory, what in files, and what is left of them."""

from contextlib import closing
from pathlib import Path

import torch

from qinfer.quant.activations import FileRows, MemoryRows
from qinfer.quant.rows_store import RowsStore, row_bytes

LENGTHS = (3, 5)


def test_memory_is_used_up_to_the_room_and_files_hold_the_rest(tmp_path: Path) -> None:
    room = row_bytes(LENGTHS, 4) + row_bytes(LENGTHS, 2)
    assert room == 4 * 8 * 6
    with closing(RowsStore(tmp_path, LENGTHS, room=room)) as store:
        made = [store.make(f"rows-{index}", width) for index, width in enumerate((4, 4, 2, 1))]
        kinds = [MemoryRows, FileRows, MemoryRows, FileRows]
        assert [type(rows) for rows in made] == kinds
        assert list(tmp_path.iterdir()) == []  # the files have no names
        for number, rows in enumerate(made):
            width = (4, 4, 2, 1)[number]
            for sample, length in enumerate(LENGTHS):
                values = torch.randn(length, width)
                rows.write(sample, values)
                assert torch.equal(rows.read(sample), values)
