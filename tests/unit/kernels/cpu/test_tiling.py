"""Repacking in pieces: the same tiles, whatever the pieces and whoever repacks them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qinfer.errors import ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native, tiled, tiling
from qinfer.schemes import WeightScheme

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C++ library was not built")


def random_weight(scheme: WeightScheme, *, scattered: bool = False) -> QuantizedWeight:
    """Return `[100, 72]` codes of 4 bits."""
    generator = torch.Generator().manual_seed(0)
    groups = scheme.num_groups(72)
    index = torch.randperm(72, generator=generator).int() // (scheme.group_size or 72)
    return QuantizedWeight(
        torch.randint(-8, 8, (100, 72), dtype=torch.int8, generator=generator),
        torch.rand(100, groups, generator=generator).half(),
        scheme,
        None
        if scheme.symmetric
        else torch.randint(-8, 9, (100, groups), generator=generator).short(),
        index if scattered else None,
    )


WEIGHTS: dict[str, torch.Tensor | QuantizedWeight] = {
    "float32": torch.arange(7200.0).view(100, 72),
    "bfloat16": torch.arange(7200.0).view(100, 72).bfloat16(),
    "float16": torch.arange(7200.0).view(100, 72).half(),
    "symmetric": random_weight(WeightScheme(4, 32)),
    "asymmetric": random_weight(WeightScheme(4, 32, symmetric=False)),
    "channel": random_weight(WeightScheme(4, None)),
    "scattered": random_weight(WeightScheme(4, 32, symmetric=False), scattered=True),
}


def same(one: tiled.TiledWeight, other: tiled.TiledWeight) -> bool:
    """Tell whether two weights have the same tiles."""
    pairs = [(getattr(one, part), getattr(other, part)) for part in ("scales", "zeros", "offsets")]
    pairs += [(one.data, other.data), (one.permutation, other.permutation)]
    return one.kind == other.kind and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs
    )


@pytest.mark.parametrize("workers", [None, 1, 3])
@pytest.mark.parametrize("name", WEIGHTS)
def test_pieces_make_the_tiles_of_the_whole(
    name: str, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = WEIGHTS[name]
    whole = tiling.tile(weight)
    read = weight.rows if isinstance(weight, QuantizedWeight) else lambda a, b: weight[a:b]
    for elements in (1, 72 * 16, 72 * 40, 72 * 99):
        monkeypatch.setattr(tiling, "_PIECE_ELEMENTS", elements)
        if workers is None:
            assert same(tiling.tile_rows((100, 72), read), whole)
            continue
        with ThreadPoolExecutor(workers) as team:
            assert same(tiling.tile_rows((100, 72), read, team=team), whole)


@pytest.mark.parametrize("workers", [None, 2])
def test_what_a_piece_raises_is_raised(
    workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "_PIECE_ELEMENTS", 1)
    weight = random_weight(WeightScheme(4, 32))
    broken = QuantizedWeight(weight.codes, weight.scales.float(), weight.scheme)
    broken.scales[70] = 0.1  # no float16
    with ThreadPoolExecutor(2) as pool:
        team = pool if workers else None
        with pytest.raises(ConfigError, match="float16"):
            tiling.tile_rows((100, 72), broken.rows, team=team)
    with pytest.raises(ConfigError, match="some rows of a dense weight are quantized"):
        tiling.tile_rows(
            (32, 72), lambda begin, end: weight.rows(begin, end) if begin else torch.zeros(16, 72)
        )
