import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gptq_reader import field

from qinfer.formats.packing import num_words, pack, to_int32, unpack

BITS = st.sampled_from([2, 3, 4, 8])


@given(bits=BITS, size=st.integers(1, 100), other=st.integers(1, 3), dim=st.sampled_from([0, 1]),
       seed=st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_round_trip_and_literal_bit_stream(bits, size, other, dim, seed) -> None:
    rng = np.random.default_rng(seed)
    shape = (size, other) if dim == 0 else (other, size)
    codes = torch.from_numpy(rng.integers(0, 1 << bits, shape))
    words = pack(codes, bits, dim)
    assert words.dtype == torch.int32
    assert words.is_contiguous()
    assert words.shape[dim] == num_words(size, bits)
    assert torch.equal(unpack(words, bits, dim, size).long(), codes)
    first = words.movedim(dim, 0)[:, 0].numpy()
    expected = codes.movedim(dim, 0)[:, 0].tolist()
    assert [field(first, index, bits) for index in range(size)] == expected


def test_three_bit_codes_that_cross_words() -> None:
    codes = torch.zeros(32, dtype=torch.uint8)
    codes[10] = codes[21] = 7
    words = [int(word) & 0xFFFFFFFF for word in pack(codes, 3, 0)]
    assert words == [0b11 << 30, 0b1 | 0b1 << 31, 0b11]
    assert torch.equal(unpack(pack(codes, 3, 0), 3, 0, 32), codes)


@pytest.mark.parametrize("bad", [-1, 16])
def test_codes_that_do_not_fit_are_refused(bad: int) -> None:
    codes = torch.zeros(8, 8, dtype=torch.int64)
    codes[3, 3] = bad
    with pytest.raises(ValueError, match=r"codes must lie in 0\.\.15"):
        pack(codes, 4, 0)


def test_wrong_number_of_words_is_refused() -> None:
    with pytest.raises(ValueError, match="need 4 words, found 5"):
        unpack(torch.zeros(5, 2, dtype=torch.int32), 4, 0, 32)


def test_to_int32_wraps() -> None:
    values = torch.tensor([0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x1_0000_0001])
    assert to_int32(values).tolist() == [0, 2**31 - 1, -(2**31), -1, 1]
