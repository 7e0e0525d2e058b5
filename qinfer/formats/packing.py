"""Unsigned codes of 2, 3, 4 or 8 bits to int32 words and back.

One layout serves every width: a dense little-endian bit stream along one dimension, code `i` at
bits `b*i … b*i + b - 1`, so that 32 codes fill exactly `b` words. For 3 bits, codes 10 and 21
cross a word border. GPTQ packs `qweight` along its input and `qzeros` along its output this way.
"""

import torch

_CODES = 32  # codes that fill a whole number of words, whatever the width
_WORD_MASK = 0xFFFFFFFF
_BYTE_BITS = (4, 8)  # the widths of which bytes hold whole codes, in order


def num_words(size: int, bits: int) -> int:
    """Return the int32 words that `size` codes occupy; the last one may be padded with zeros."""
    return -(-size * bits // 32)


def pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack codes along `dim`.

    Args:
        codes: integers in `0 … 2**bits - 1`, any shape.
        bits: width of a code, 1 to 8.
        dim: the dimension to pack.

    Returns:
        int32, the shape of `codes` with `dim` replaced by `num_words`.

    Raises:
        ValueError: a code does not fit its field; packed, it would change its neighbours.
    """
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= 1 << bits):
        raise ValueError(
            f"codes must lie in 0..{(1 << bits) - 1}, found {int(codes.min())}..{int(codes.max())}"
        )
    moved = codes.movedim(dim, 0)  # [size, ...]
    size = moved.shape[0]
    blocks = -(-size // _CODES)
    padded = torch.zeros(
        (blocks * _CODES, *moved.shape[1:]), dtype=torch.int64, device=codes.device
    )
    padded[:size] = moved
    lanes = padded.unflatten(0, (blocks, _CODES))  # [blocks, 32, ...]
    words = torch.zeros((blocks, bits, *moved.shape[1:]), dtype=torch.int64, device=codes.device)
    for lane in range(_CODES):
        word, shift = divmod(lane * bits, 32)
        words[:, word] |= lanes[:, lane] << shift
        if shift + bits > 32:
            words[:, word + 1] |= lanes[:, lane] >> (32 - shift)
    flat = words.flatten(0, 1)[: num_words(size, bits)]
    return to_int32(flat).movedim(0, dim).contiguous()


def unpack(words: torch.Tensor, bits: int, dim: int, size: int) -> torch.Tensor:
    """Undo `pack`.

    Args:
        words: int32 words packed along `dim`.
        bits: width of a code, 1 to 8.
        dim: the packed dimension.
        size: number of codes along `dim`.

    Returns:
        uint8 in memory of its own, the shape of `words` with `dim` replaced by `size`; with 4 and 8
        bits, codes that are neighbours along `dim` are so in memory.

    Raises:
        ValueError: `words` holds another number of words than `size` codes need.
    """
    found, needed = words.shape[dim], num_words(size, bits)
    if found != needed:
        raise ValueError(f"{size} codes of {bits} bits need {needed} words, found {found}")
    if bits in _BYTE_BITS:
        return _unpack_bytes(words, bits, dim, size)
    moved = words.movedim(dim, 0)  # [words, ...]
    blocks = -(-size // _CODES)
    padded = torch.zeros((blocks * bits, *moved.shape[1:]), dtype=torch.int64, device=words.device)
    padded[: moved.shape[0]] = moved.to(torch.int64) & _WORD_MASK
    stream = padded.unflatten(0, (blocks, bits))  # [blocks, bits, ...]
    codes = torch.empty((blocks, _CODES, *moved.shape[1:]), dtype=torch.uint8, device=words.device)
    for lane in range(_CODES):
        word, shift = divmod(lane * bits, 32)
        value = stream[:, word] >> shift
        if shift + bits > 32:
            value = value | (stream[:, word + 1] << (32 - shift))
        codes[:, lane] = (value & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(0, 1)[:size].movedim(0, dim)


def to_int32(words: torch.Tensor) -> torch.Tensor:
    """Return unsigned 32-bit values held in int64 as the int32 of the same bits."""
    words = words & _WORD_MASK
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _unpack_bytes(words: torch.Tensor, bits: int, dim: int, size: int) -> torch.Tensor:
    """Unpack through the words' bytes: a few passes over little memory, for large weights."""
    moved = words.movedim(dim, -1).clone(memory_format=torch.contiguous_format)
    codes = moved.view(torch.uint8)  # [..., bytes]
    if bits == 4:
        pairs = codes.new_empty(*codes.shape, 2)
        torch.bitwise_and(codes, 15, out=pairs[..., 0])
        torch.bitwise_right_shift(codes, 4, out=pairs[..., 1])
        codes = pairs.flatten(-2)
    return codes[..., :size].movedim(-1, dim)
