"""Packed exports: training's own codes, decoded by the public package to our values, to the bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model import HybridModel, ModelConfig
from model.hf import linear_rows
from pipeline.config import Config, ConfigError, PhaseConfig, PrecisionConfig
from pipeline.data.shards import Dataset, open_corpus
from pipeline.data.stream import validation_rows
from pipeline.export.calibration import calibration_rows
from pipeline.export.packing import (
    COMPRESSED_TENSORS,
    MODELOPT,
    pack_linears,
    packed_tensors,
    readable_divisor,
)
from pipeline.export.stage import export
from pipeline.hf_folder import read_tensors
from pipeline.runs import RunFolder
from pipeline.stages import dataset_folder
from pipeline.train import build
from pipeline.trained import find_checkpoint, load_model
from quant import (
    NVFP4,
    NVFP4_2D,
    Precision,
    QuantizedTensor,
    apply_recipe,
    named_recipe,
    quantize,
)
from quant.formats import Format
from tests.pipeline.exported import trained_run, with_export

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LAYERS = "model.layers"
Exports = dict[str, tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunFolder]:
    """Pattern M-*, recipe nvfp4_paper, no block in BF16."""
    return trained_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def packed(trained: tuple[Config, RunFolder]) -> Exports:
    """The run's export in each layout: its folder and its record."""
    config, run = trained
    return {
        layout: export(with_export(config, layout), run, quiet)
        for layout in (COMPRESSED_TENSORS, MODELOPT)
    }


def quiet(line: str) -> None:
    pass


def loaded(config: Config, run: RunFolder) -> tuple[HybridModel, Precision]:
    return load_model(config, find_checkpoint(config, run), CPU)


def training_weights(config: Config, run: RunFolder) -> dict[str, QuantizedTensor]:
    """What training's Fprop multiplies, caught where it quantizes, by our linear's name."""
    model, precision = loaded(config, run)
    rows = validation_rows(Dataset.open(dataset_folder(config, run)), "code", 16, 32)
    model.hidden(rows.tokens_BT, rows.seq_idx_BT)
    found = {}
    for name, layer in precision.layers.items():
        format = layer.recipe.weight.spec
        if isinstance(format, Format):
            found[name], made = layer.cache.get(layer.weight, format, along_n=False, step=None)
            assert not made, "the forward pass has quantized it"
    return found


def decoded_publicly(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """One linear's BF16 weight as the public package reads it."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    parts = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    stored = {part: tensors[f"{name}.{part}"] for part in parts}
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    return compressors.NVFP4PackedCompressor.decompress(stored, scheme)["weight"]


def test_the_public_package_decodes_to_what_training_multiplied(
    trained: tuple[Config, RunFolder],
    packed: Exports,
) -> None:
    config, run = trained
    folder, record = packed[COMPRESSED_TENSORS]
    tensors, training = read_tensors(folder), training_weights(config, run)
    compared = 0
    for theirs, parts in linear_rows(loaded(config, run)[0].config).items():
        if parts[0].linear not in training:
            continue
        rows = parts[0]
        ours = training[rows.linear].dequantize(torch.bfloat16)[rows.start : rows.end]
        public = decoded_publicly(tensors, theirs)[: len(ours)]
        assert public.dtype == torch.bfloat16
        assert torch.equal(public.view(torch.int16), ours.view(torch.int16)), theirs
        compared += 1
    assert compared == record["packed_linears"] == 8
    assert record["check"]["values_that_differ"] == 0


def test_codes_of_a_run_in_bf16_are_of_weights_rounded_as_its_forward_pass_rounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(build, "compute_dtype", lambda device: torch.bfloat16)  # as on a GPU
        config, run = trained_run(tmp_path)
    model, precision = loaded(config, run)
    inputs = dict.fromkeys(precision.layers, torch.tensor(1.0))
    packed = pack_linears(model.config, precision, inputs).packed
    differing = dt_rows = 0
    for theirs, parts in linear_rows(model.config).items():
        layer = precision.layers[parts[0].linear]
        of_rounded, of_whole = (
            quantize(weight, NVFP4_2D).codes[parts[0].start : parts[0].end]
            for weight in (layer.weight.detach().bfloat16(), layer.weight.detach())
        )
        if theirs in packed:
            assert torch.equal(packed[theirs].weight.codes[: len(of_rounded)], of_rounded), theirs
            differing += int((of_rounded != of_whole).sum())
        if theirs in packed and len(parts) > 1:  # decoded by the scale that is stored for all rows
            dt = precision.layers[parts[1].linear].weight.detach()
            amax = layer.weight.detach().bfloat16().abs().max().float()
            expected = quantize(dt, NVFP4, amax=amax)
            stored = packed[theirs].weight
            assert torch.equal(stored.dequantize()[len(of_rounded) :], expected.dequantize())
            dt_rows += 1
    assert differing  # else nothing would show
    assert dt_rows


@pytest.mark.parametrize("layout", [COMPRESSED_TENSORS, MODELOPT])
def test_codes_and_block_scales_are_training_s(
    trained: tuple[Config, RunFolder], packed: Exports, layout: str
) -> None:
    config, run = trained
    folder, _ = packed[layout]
    tensors, training = read_tensors(folder), training_weights(config, run)
    codes = "weight_packed" if layout == COMPRESSED_TENSORS else "weight"
    for theirs, parts in linear_rows(loaded(config, run)[0].config).items():
        if parts[0].linear in training:
            rows = slice(parts[0].start, parts[0].end)
            q, count = training[parts[0].linear], parts[0].end - parts[0].start
            assert torch.equal(tensors[f"{theirs}.{codes}"][:count], q.codes[rows])
            stored = tensors[f"{theirs}.weight_scale"]
            assert stored.dtype == torch.float8_e4m3fn
            assert torch.equal(stored[:count].view(torch.uint8), q.scales[rows].view(torch.uint8))


def test_the_divisor_of_one_layout_is_the_multiplier_of_the_other(
    trained: tuple[Config, RunFolder],
    packed: Exports,
) -> None:
    config, run = trained
    divided = read_tensors(packed[COMPRESSED_TENSORS][0])
    multiplied = read_tensors(packed[MODELOPT][0])
    model, _ = loaded(config, run)
    amax = model.blocks[1].ffn.up.weight.abs().max()  # type: ignore[union-attr]
    assert amax < 1, "far from 2688, where both conventions would look alike"
    name = f"{LAYERS}.1.mixer.up_proj"
    divisor, multiplier = (
        divided[f"{name}.weight_global_scale"],
        multiplied[f"{name}.weight_scale_2"],
    )
    assert (divisor.shape, multiplier.shape) == ((1,), ())
    torch.testing.assert_close(divisor, (2688 / amax).reshape(1), rtol=3e-7, atol=0)
    torch.testing.assert_close(multiplier, amax / 2688, rtol=3e-7, atol=0)
    for name in ("up_proj", "down_proj"):
        inputs = divided[f"{LAYERS}.1.mixer.{name}.input_global_scale"]
        scale = multiplied[f"{LAYERS}.1.mixer.{name}.input_scale"]
        torch.testing.assert_close(inputs * scale, torch.ones(1), rtol=1e-6, atol=0)


def test_the_public_converter_turns_one_layout_into_the_other(
    packed: Exports,
) -> None:
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    ours = read_tensors(packed[COMPRESSED_TENSORS][0])
    folder, record = packed[MODELOPT]
    converter = converters.ModelOptNvfp4Converter(
        ignore=list(record["ignored"]), targets=["re:.*_proj$"]
    )
    converted = converter.validate(read_tensors(folder))
    assert converted.keys() == ours.keys()
    for name, tensor in converted.items():
        if tensor.is_floating_point() and tensor.element_size() > 1:
            torch.testing.assert_close(
                tensor.reshape(-1), ours[name].reshape(-1), rtol=3e-7, atol=0
            )
        else:
            assert torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8)), name


def test_linears_that_a_reader_fuses_share_their_global_scales(
    packed: Exports,
) -> None:
    tensors = read_tensors(packed[COMPRESSED_TENSORS][0])
    for scale in ("weight_global_scale", "input_global_scale"):
        q, k, v = (tensors[f"{LAYERS}.2.mixer.{name}_proj.{scale}"] for name in "qkv")
        assert torch.equal(q, k)
        assert torch.equal(q, v)


def test_dt_rows_are_quantized_under_the_shared_scale_and_reported(
    trained: tuple[Config, RunFolder],
    packed: Exports,
) -> None:
    config, run = trained
    folder, record = packed[COMPRESSED_TENSORS]
    model, _ = loaded(config, run)
    mamba = model.blocks[0].mamba  # type: ignore[union-attr]
    zxbc, dt = mamba.in_zxbc.weight.shape[0], mamba.in_dt.weight.detach()
    public = decoded_publicly(read_tensors(folder), f"{LAYERS}.0.mixer.in_proj").float()
    assert public.shape == (zxbc + len(dt), 32)
    (report,) = record["dt_rows"]
    assert report["linear"] == f"{LAYERS}.0.mixer.in_proj"
    assert report["rows"] == (zxbc, zxbc + len(dt))
    error = ((public[zxbc:] - dt).norm() / dt.norm()).item()
    assert report["relative_error"] == pytest.approx(error, rel=0.01)
    assert 0.02 < error < 0.3


def test_dt_rows_beyond_the_shared_scale_are_clipped_and_counted() -> None:
    model, precision = quantized_model("nvfp4_paper")
    mamba = model.blocks[0].mamba  # type: ignore[union-attr]
    with torch.no_grad():
        mamba.in_dt.weight[0, :3] = 5 * mamba.in_zxbc.weight.abs().max()
    packing = pack_linears(model.config, precision, unit_inputs(precision))
    assert packing.dt_rows[0].clipped == 3
    q = packing.packed[f"{LAYERS}.0.mixer.in_proj"].weight
    zxbc = mamba.in_zxbc.weight.shape[0]
    amax = mamba.in_zxbc.weight.abs().max()
    assert torch.allclose(q.dequantize()[zxbc, :3], amax.expand(3), rtol=1e-5)


def test_what_stayed_in_bf16_is_ignored_and_stored_whole(
    trained: tuple[Config, RunFolder], tmp_path: Path
) -> None:
    config, run = trained
    ends = dataclasses.replace(config, precision=PrecisionConfig("nvfp4_paper", first=1, last=1))
    target = str(tmp_path / "out")
    folder, record = export(with_export(ends, COMPRESSED_TENSORS, folder=target), run, quiet)
    ignore = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignore) == {
        *(f"{LAYERS}.0.mixer.{name}" for name in ("in_proj", "out_proj")),
        *(f"{LAYERS}.2.mixer.{name}_proj" for name in "qkvo"),
        "lm_head",
    }
    tensors, (model, _) = read_tensors(folder), loaded(config, run)
    for name in ignore:
        assert tensors[f"{name}.weight"].dtype == torch.bfloat16
    out = model.blocks[0].mamba.out.weight  # type: ignore[union-attr]
    assert torch.equal(tensors[f"{LAYERS}.0.mixer.out_proj.weight"], out.bfloat16())
    assert record["dt_rows"] == []


def test_linears_of_another_format_stay_in_bf16_and_are_said_to(tmp_path: Path) -> None:
    model, precision = quantized_model("nvfp4")
    packing = pack_linears(model.config, precision, unit_inputs(precision))
    assert (
        packing.ignored[f"{LAYERS}.0.mixer.out_proj"]
        == "trained in mxfp8, which is not stored here"
    )
    assert packing.ignored[f"{LAYERS}.2.mixer.q_proj"] == "trained in bf16"
    assert packing.packed.keys() == {
        f"{LAYERS}.0.mixer.in_proj",
        f"{LAYERS}.1.mixer.up_proj",
        f"{LAYERS}.1.mixer.down_proj",
    }


def test_a_recipe_of_one_dimensional_blocks_is_stored_as_it_trained() -> None:
    model, precision = quantized_model("no_2d")
    packing = pack_linears(model.config, precision, unit_inputs(precision))
    up = packing.packed[f"{LAYERS}.1.mixer.up_proj"].weight
    layer = precision.layers["blocks.1.ffn.up"]
    trained, _ = layer.cache.get(layer.weight, NVFP4, along_n=False, step=None)
    assert torch.equal(up.codes, trained.codes)
    assert not torch.equal(up.scales[0].view(torch.uint8), up.scales[1].view(torch.uint8))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4", "fp8"])
def test_a_recipe_without_nvfp4_is_refused(recipe: str) -> None:
    model, precision = quantized_model(recipe)
    with pytest.raises(ConfigError, match="trained no linear in NVFP4"):
        pack_linears(model.config, precision, unit_inputs(precision))


def test_input_scales_are_the_largest_inputs_met_on_the_held_out_text(
    trained: tuple[Config, RunFolder],
    packed: Exports,
) -> None:
    config, run = trained
    tensors = read_tensors(packed[MODELOPT][0])
    model, precision = loaded(config, run)
    seen: dict[str, list[Tensor]] = {}
    for name, layer in precision.layers.items():
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.setdefault(name, []).append(inputs[0].abs().max())
        )
    dataset = Dataset.open(dataset_folder(config, run))
    for source in dataset.sources:
        rows = validation_rows(dataset, source, 16, 10_000)
        for start in range(0, len(rows.tokens_BT), 2):
            part = slice(start, start + 2)
            model.hidden(rows.tokens_BT[part], rows.seq_idx_BT[part])
    for theirs, parts in linear_rows(model.config).items():
        if f"{theirs}.input_scale" in tensors:
            largest = torch.stack(seen[parts[0].linear]).max()
            torch.testing.assert_close(tensors[f"{theirs}.input_scale"], largest / 2688)


def test_a_given_text_decides_the_input_scales(
    trained: tuple[Config, RunFolder], packed: Exports, tmp_path: Path
) -> None:
    config, run = trained
    text = tmp_path / "text.txt"
    text.write_text("words that repeat " * 40)
    given = with_export(config, MODELOPT, calibration=str(text), folder=str(tmp_path / "out"))
    name = f"{LAYERS}.1.mixer.down_proj.input_scale"
    one = read_tensors(export(given, run, quiet)[0])[name]
    other = read_tensors(packed[MODELOPT][0])[name]
    assert one != other
    absent = with_export(config, MODELOPT, calibration=str(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match=r"none\.txt cannot be read"):
        export(absent, run, quiet)


def test_a_given_text_begins_as_documents_do(
    trained: tuple[Config, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = trained
    (tmp_path / "text.txt").write_text("words that repeat")
    given = with_export(config, MODELOPT, calibration=str(tmp_path / "text.txt"))
    dataset = open_corpus(config.data, dataset_folder(config, run))
    (plain,) = calibration_rows(given, dataset)
    monkeypatch.setattr(Dataset, "bos_id", 7)
    (begun,) = calibration_rows(given, open_corpus(config.data, dataset.folder))
    assert begun.tokens_BT[0, 0] == 7
    assert begun.tokens_BT[0, 1:].equal(plain.tokens_BT[0, :-1])


def test_a_late_switch_to_bf16_is_said(trained: tuple[Config, RunFolder], tmp_path: Path) -> None:
    config, run = trained
    phases = (PhaseConfig(blend={"code": 1.0}, precision="bf16_forward"),)
    switched = dataclasses.replace(config, train=dataclasses.replace(config.train, phases=phases))
    settings = with_export(switched, MODELOPT, folder=str(tmp_path / "out"))
    _, record = export(settings, run, quiet)
    assert "bf16_forward" in record["notes"][0]


def test_compressed_tensors_reads_the_configuration(packed: Exports) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    folder, _ = packed[COMPRESSED_TENSORS]
    values = json.loads((folder / "config.json").read_text())["quantization_config"]
    read = quantization.QuantizationConfig.model_validate(values)
    preset = preset_name_to_scheme("NVFP4", ["Linear"])
    scheme = read.config_groups["group_0"]
    assert scheme.weights == preset.weights
    ours, theirs = scheme.input_activations.model_dump(), preset.input_activations.model_dump()
    assert {**ours, "observer": None} == {**theirs, "observer": None}
    assert read.ignore == ["lm_head"]


def test_modelopt_s_two_configurations_agree(packed: Exports) -> None:
    folder, _ = packed[MODELOPT]
    inner = json.loads((folder / "config.json").read_text())["quantization_config"]
    outer = json.loads((folder / "hf_quant_config.json").read_text())
    assert outer["producer"]["name"] == inner["producer"]["name"] == inner["quant_method"]
    assert outer["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": inner["ignore"],
    }


def test_transformers_loads_the_packed_folder(
    trained: tuple[Config, RunFolder], packed: Exports
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    config, run = trained
    folder, _ = packed[COMPRESSED_TENSORS]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    up = training_weights(config, run)["blocks.1.ffn.up"].dequantize(torch.bfloat16)
    assert torch.equal(theirs.model.layers[1].mixer.up_proj.weight, up)


def test_the_reader_s_order_of_rounding_never_changes_a_value() -> None:
    """Over many amax values, all 882 products of a code and a block scale."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    codes = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])
    generator = torch.Generator().manual_seed(0)
    candidates = torch.rand(400_000, generator=generator) * 3 + 1e-3
    encode = torch.full_like(candidates, 2688) / candidates
    decode = torch.ones_like(encode) / encode
    small = (1 + torch.arange(8) / 8)[:, None] * torch.tensor([1.0, 1.5])
    plain = torch.tensor([1.0, 1.5]) * ((1 + torch.arange(8) / 8)[:, None] / encode[:, None, None])
    differs = ((small * decode[:, None, None]).bfloat16() != plain.bfloat16()).flatten(1).any(1)
    hard = differs.nonzero().flatten()[:8].tolist()
    assert hard, "cases in which the plain inverse rounds otherwise"
    for i in [*hard, *range(200)]:
        divisor = readable_divisor(encode[i], decode[i])
        ours = ((codes * scales) * decode[i]).bfloat16()
        assert torch.equal((codes * (scales / divisor)).bfloat16(), ours)
        torch.testing.assert_close(divisor, encode[i], rtol=3e-7, atol=0)


def quantized_model(recipe: str) -> tuple[HybridModel, Precision]:
    shape = ModelConfig("M-*", 64, 32, 64, 2, 1, 16, 2, 16, 16, 1, mamba_chunk_size=16)
    model = HybridModel(shape, seed=1)
    chosen = named_recipe(recipe).with_blocks(0, 0)
    if recipe == "fp8":
        chosen = dataclasses.replace(chosen, name="fp8")
    return model, apply_recipe(model, chosen, num_blocks=3, seed=0)


def unit_inputs(precision: Precision) -> dict[str, Tensor]:
    return {name: torch.tensor(1.0) for name in precision.layers}


def test_layouts_hold_nothing_but_what_they_define() -> None:
    model, precision = quantized_model("nvfp4_paper")
    packed = pack_linears(model.config, precision, unit_inputs(precision)).packed
    for layout, parts in (
        (
            COMPRESSED_TENSORS,
            {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"},
        ),
        (MODELOPT, {"weight", "weight_scale", "weight_scale_2", "input_scale"}),
    ):
        names = packed_tensors(packed, layout)
        assert {name.rpartition(".")[2] for name in names} == parts
        assert len(names) == 4 * len(packed)
