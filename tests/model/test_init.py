"""Initial values: the table, its depth scaling, and independence of order and device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import model.init as initial
from model import HybridModel, ModelConfig, materialize
from model.init import RESIDUAL_WRITERS, initial_rows

Build = Callable[..., ModelConfig]


def residual_writer_std(config: ModelConfig) -> float:
    model = HybridModel(config)
    writers = [p.flatten() for n, p in model.named_parameters() if n.endswith(RESIDUAL_WRITERS)]
    assert len(writers) == config.num_blocks
    return torch.cat(writers).std().item()


@pytest.mark.parametrize("kind", "M-*")
def test_residual_writers_shrink_with_depth(small_config: Build, kind: str) -> None:
    shallow, deep = (residual_writer_std(small_config(pattern=kind * n)) for n in (4, 40))
    assert shallow / deep == pytest.approx(math.sqrt(10), rel=0.03)


def test_other_matrices_keep_the_standard_deviation(small_config: Build) -> None:
    model = HybridModel(small_config(pattern="M-*" * 5, init_std=0.03))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not name.endswith((*RESIDUAL_WRITERS, "conv.weight")):
            spread = 3.5 / math.sqrt(2 * parameter.numel())
            assert parameter.std().item() == pytest.approx(0.03, rel=spread), name


def test_scan_parameters_lie_in_their_ranges(small_config: Build) -> None:
    model = HybridModel(small_config(pattern="M" * 20, dt_init_min=0.01, dt_init_max=0.2))
    mixers = [block.mamba for block in model.blocks]
    dt = torch.cat([torch.nn.functional.softplus(mixer.dt_bias) for mixer in mixers])
    a = torch.cat([mixer.A_log.exp() for mixer in mixers])
    assert 0.0099 < dt.min() < 0.02 < 0.1 < dt.max() < 0.201
    assert 1 <= a.min() < 3 < 14 < a.max() <= 16.001
    assert all((mixer.D == 1).all() and (mixer.norm.weight == 1).all() for mixer in mixers)
    assert all((mixer.conv.bias == 0).all() for mixer in mixers)
    assert all(mixer.conv.weight.abs().max() <= 0.5 for mixer in mixers)


def test_values_depend_on_seed_and_name_alone(small_config: Build) -> None:
    first = HybridModel(small_config(), seed=1)
    torch.manual_seed(99)
    later = on_meta(small_config())
    materialize(later, 1, "cpu")
    other = HybridModel(small_config(), seed=2)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, later.get_parameter(name)), name
        if parameter.std() > 0:
            assert not torch.equal(parameter, other.get_parameter(name)), name


def on_meta(config: ModelConfig) -> HybridModel:
    with torch.device("meta"):
        return HybridModel(config)


def test_tied_weights_are_one_after_materializing(small_config: Build) -> None:
    tied = on_meta(small_config(tie_embeddings=True))
    materialize(tied, 1, "cpu")
    assert tied.head.weight is tied.embedding.weight
    assert torch.equal(tied.head.weight, HybridModel(tied.config, seed=1).head.weight)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parameters of several pieces, as a large model's; the elements of each piece drawn."""
    monkeypatch.setattr(initial, "DRAWN_ELEMENTS", 500)
    drawn: list[int] = []
    draw = initial._draw

    def noted(name: str, value: torch.Tensor, *arguments: object) -> None:
        drawn.append(value.numel())
        draw(name, value, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(initial, "_draw", noted)
    return drawn


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_rows_drawn_by_each_rank_join_to_the_whole(
    small_config: Build, small_pieces: list[int], ranks: int
) -> None:
    model = HybridModel(small_config(), seed=3)
    small_pieces.clear()
    for name, parameter in model.named_parameters():
        cuts = [len(parameter) * rank // ranks for rank in range(ranks + 1)]
        parts = [
            initial_rows(name, parameter.shape, model.config, 3, start, stop)
            for start, stop in itertools.pairwise(cuts)
            if stop > start
        ]
        assert torch.equal(torch.cat(parts), parameter), name
    assert max(small_pieces) <= 500


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
    ],
)
def test_a_sharded_model_is_the_whole_one_cut_and_draws_no_more_than_a_piece(
    small_config: Build, small_pieces: list[int], mesh_shape: tuple[int, ...], placements: list
) -> None:
    config = small_config(vocab_size=103)
    whole = HybridModel(config, seed=3)
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        # DTensor caches by mesh: named apart, the ranks do not meet in this one process.
        names = tuple(f"axis{axis}_of_rank{rank}" for axis in range(len(mesh_shape)))
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        model = on_meta(config)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                # Sharding along columns leaves vectors whole.
                of_it = [
                    Replicate() if place.is_shard(parameter.ndim) else place for place in placements
                ]
                empty = distribute_tensor(parameter, mesh, of_it, src_data_rank=None)
                setattr(module, name, torch.nn.Parameter(empty))
        small_pieces.clear()
        try:
            materialize(model, 3, "cpu")
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                expected = whole.get_parameter(name).detach()
                for axis, place in enumerate(parameter.placements):
                    if place.is_shard():
                        parts = expected.chunk(mesh_shape[axis], dim=place.dim)
                        expected = parts[mesh.get_local_rank(axis)]
                assert torch.equal(parameter.to_local(), expected), (name, rank)
        finally:
            dist.destroy_process_group()
        assert max(small_pieces) <= 500


def test_deeper_model_keeps_the_shared_blocks_values(small_config: Build) -> None:
    short = HybridModel(small_config(pattern="M-"))
    long = HybridModel(small_config(pattern="M-M*"))
    name = "blocks.0.mamba.in_zxbc.weight"
    assert torch.equal(short.get_parameter(name), long.get_parameter(name))


def test_building_draws_nothing_from_the_global_generator(small_config: Build) -> None:
    before = torch.get_rng_state()
    HybridModel(small_config())
    assert torch.equal(before, torch.get_rng_state())
