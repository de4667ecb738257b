"""Exports in Hugging Face's layout: whole on disk, and transformers computes what we compute."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from model import HybridModel, ModelConfig
from model.hf import config_to_nemotron_h, from_nemotron_h, to_nemotron_h
from pipeline.config import Config, ConfigError
from pipeline.data.shards import Dataset
from pipeline.export import folder as export_folder
from pipeline.export.folder import write_json, write_tensors
from pipeline.export.stage import export
from pipeline.hf_folder import read_model_config, read_tensors
from pipeline.runs import RunFolder
from pipeline.train import checkpoint
from tests.model.conftest import build_config
from tests.model.peer import assert_same_computation, randomized
from tests.pipeline.exported import STEPS, trained_run, with_export

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

CASES = {
    "2 groups": {},
    "8 groups, odd vocabulary": {"mamba_num_groups": 8, "vocab_size": 77},
    "tied": {"tie_embeddings": True},
    "Mamba alone": {"pattern": "MM"},
    "attention alone": {"pattern": "**", "num_kv_heads": 4},
    "feed-forward alone": {"pattern": "--"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunFolder]:
    return trained_run(tmp_path_factory.mktemp("runs"))


def quiet(line: str) -> None:
    pass


def write_model(folder: Path, model: HybridModel, shard_bytes: int) -> None:
    folder.mkdir()
    write_json(folder / "config.json", config_to_nemotron_h(model.config))
    write_tensors(folder, to_nemotron_h(model.state_dict(), model.config), shard_bytes)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_transformers_computes_what_we_do_from_our_folder(tmp_path: Path, changes: dict) -> None:
    model = randomized(build_config(**changes))
    write_model(tmp_path / "ours", model, shard_bytes=40_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32
    )
    assert type(theirs) is transformers.NemotronHForCausalLM
    assert_same_computation(model, theirs)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_we_compute_what_transformers_does_from_its_folder(tmp_path: Path, changes: dict) -> None:
    source = randomized(build_config(**changes), seed=5)
    values = config_to_nemotron_h(source.config)
    theirs = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**values))
    theirs.load_state_dict(to_nemotron_h(source.state_dict(), source.config))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    model = HybridModel(read_model_config(tmp_path / "theirs"))
    tensors = from_nemotron_h(read_tensors(tmp_path / "theirs"), model.config)
    model.load_state_dict(tensors)
    assert model.config == source.config
    assert_same_computation(model, theirs)


def test_an_exported_run_gives_the_checkpoint_s_logits_in_transformers(
    trained: tuple[Config, RunFolder],
) -> None:
    config, run = trained
    folder, record = export(with_export(config, "hf"), run, quiet)
    assert folder == run.exports / f"step-{STEPS:08d}-hf"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert theirs.dtype == torch.float32
    found = checkpoint.latest(run.checkpoints)
    assert found is not None
    model = HybridModel(ModelConfig.from_dict(dataclasses.asdict(config.model)))
    checkpoint.load_model_tensors(model, found.tensors("model"))
    assert_same_computation(model, theirs)
    assert record["check"]["equal"]
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == 0


def test_the_folder_has_both_patterns_and_a_tokenizer_that_loads(
    trained: tuple[Config, RunFolder],
) -> None:
    config, run = trained
    folder, _ = export(with_export(config, "hf"), run, quiet)
    values = json.loads((folder / "config.json").read_text())
    assert values["hybrid_override_pattern"] == "M-*"
    assert values["layers_block_type"] == ["linear_attention", "mlp", "full_attention"]
    assert values["num_hidden_layers"] == 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == values["eos_token_id"]
    text = "words that repeat"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_begins_a_text_as_documents_began(
    trained: tuple[Config, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = trained
    monkeypatch.setattr(Dataset, "bos_id", 7)
    folder, _ = export(with_export(config, "hf"), run, quiet)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with_bos = tokenizer("words that")["input_ids"]
    assert with_bos == [7, *tokenizer("words that", add_special_tokens=False)["input_ids"]]
    values = json.loads((folder / "config.json").read_text())
    assert values["bos_token_id"] == tokenizer.bos_token_id == 7


def test_bfloat16_rounds_all_but_what_decides_decay(trained: tuple[Config, RunFolder]) -> None:
    config, run = trained
    folder, _ = export(with_export(config, "hf", dtype="bfloat16"), run, quiet)
    for name, tensor in read_tensors(folder).items():
        exempt = name.endswith((".A_log", ".D", ".dt_bias"))
        assert tensor.dtype == (torch.float32 if exempt else torch.bfloat16), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert theirs.lm_head.weight.dtype == torch.bfloat16


def test_the_record_s_sizes_and_checksums_are_the_files(trained: tuple[Config, RunFolder]) -> None:
    config, run = trained
    lines: list[str] = []
    folder, record = export(with_export(config, "hf", shard_bytes=20_000), run, lines.append)
    assert json.loads((folder / "export.json").read_text()) == record
    on_disk = export_folder.describe_files(folder)
    del on_disk["export.json"]
    assert record["files"] == on_disk
    assert record["bytes"] == sum(file["bytes"] for file in on_disk.values())
    assert "model.safetensors.index.json" in on_disk
    printed = "\n".join(lines)
    assert record["checksum"][:16] in printed
    assert "equal to the bit" in printed


def test_an_older_checkpoint_is_exported_by_its_step(trained: tuple[Config, RunFolder]) -> None:
    config, run = trained
    folder, record = export(dataclasses.replace(with_export(config, "hf"), step=2), run, quiet)
    assert (record["step"], folder.name) == (2, "step-00000002-hf")
    found = checkpoint.at_step(run.checkpoints, 2).tensors("model")
    assert torch.equal(read_tensors(folder)["lm_head.weight"], found["head.weight"])
    with pytest.raises(ConfigError, match="no checkpoint of step 3"):
        export(dataclasses.replace(config, step=3), run, quiet)


def test_a_run_that_has_no_checkpoint_yet_is_refused_with_the_way_out(
    trained: tuple[Config, RunFolder], tmp_path: Path
) -> None:
    config, run = trained
    young = RunFolder(tmp_path / "young")
    ignored = shutil.ignore_patterns("state.json", "exports")
    shutil.copytree(run.path, young.path, ignore=ignored)
    with pytest.raises(ConfigError, match=r"no complete checkpoint; .*pipeline run resume=young"):
        export(with_export(config, "hf"), young, quiet)
    assert not young.exports.exists()


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_failure_leaves_the_former_export_and_nothing_half_written(
    trained: tuple[Config, RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    config, run = trained
    target = tmp_path / "out"
    export(with_export(config, "hf", folder=str(target)), run, quiet)
    before = export_folder.describe_files(target)

    def full(*arguments: object) -> None:
        raise kind("No space left on device")

    monkeypatch.setattr(export_folder, "_write_shard", full)
    with pytest.raises(ConfigError, match="No space left"):
        export(with_export(config, "hf", folder=str(target)), run, quiet)
    assert export_folder.describe_files(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_no_export_is_left_alone(
    trained: tuple[Config, RunFolder], tmp_path: Path
) -> None:
    config, run = trained
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is no export"):
        export(with_export(config, "hf", folder=str(tmp_path)), run, quiet)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_damaged_write_is_found_by_reading_it_back(
    trained: tuple[Config, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = trained
    write = export_folder._write_shard

    def damaged(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed["model.norm_f.weight"][0] += 1
        write(path, changed)

    monkeypatch.setattr(export_folder, "_write_shard", damaged)
    with pytest.raises(RuntimeError, match=r"model\.norm_f\.weight is not what was written"):
        export(with_export(config, "hf", folder=str(tmp_path / "out")), run, quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "gguf"}, "format=gguf"),
        ({"format": "nvfp4"}, "did you mean nvfp4-"),
        ({"format": "hf", "dtype": "int8"}, "dtype=int8"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(
    trained: tuple[Config, RunFolder], settings: dict, message: str
) -> None:
    config, run = trained
    with pytest.raises(ConfigError, match=message):
        export(with_export(config, **settings), run, quiet)


def test_rotary_positions_are_refused_by_name(trained: tuple[Config, RunFolder]) -> None:
    config, run = trained
    rotary = dataclasses.replace(config.model, rope_theta=10000.0)
    with pytest.raises(ConfigError, match="rope_theta"):
        export(dataclasses.replace(config, model=rotary), run, quiet)
