"""`train.init_from`: another model's weights and nothing else of it; what does not fit is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import HybridModel, ModelConfig
from model.hf import from_nemotron_h
from pipeline.config import Config, ConfigError, PrecisionConfig
from pipeline.export.stage import export
from pipeline.hf_folder import read_model_config, read_tensors
from pipeline.preflight import _check_warm_start, check
from pipeline.runs import RunFolder
from pipeline.tracking import _tags
from pipeline.train import checkpoint
from pipeline.train.loop import Trainer
from pipeline.warm_start import find_source, write_warm_start
from tests.data.corpora import document, write_corpus
from tests.pipeline.exported import STEPS, trained_run, with_export
from tests.train.tiny import configuration, start, state_of, tensors_of, train, with_train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunFolder]:
    """A run in NVFP4 that has ended."""
    return trained_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def folder(source: tuple[Config, RunFolder]) -> Path:
    """Its last weights as a Hugging Face folder."""
    config, run = source
    return export(with_export(config, "hf"), run, lambda line: None)[0]


def dataset_of(run: RunFolder) -> Path:
    return run.path.parent / "data" / "tiny"


def warm(run: RunFolder, wanted: str, recipe: str = "bf16", **train_changes: object) -> Config:
    """A new run's configuration, in another precision than the source's unless asked."""
    config = configuration(run.path.parent, 6, init_from=wanted, **train_changes)
    return dataclasses.replace(config, seed=77, precision=PrecisionConfig(recipe, first=0, last=0))


def begin(config: Config, name: str) -> RunFolder:
    run = start(config, name)
    write_warm_start(run, find_source(config))
    return run


def weights(model: HybridModel) -> dict[str, Tensor]:
    return {f"model/{name}": tensor.detach() for name, tensor in model.named_parameters()}


def restored(config: Config, run: RunFolder, dataset: Path) -> Trainer:
    trainer = Trainer(config, run, dataset, "cpu")
    trainer.progress.restore(trainer.setup, trainer.records.note)
    return trainer


@pytest.mark.parametrize("form", ["run", "run@step", "checkpoint", "folder"])
def test_training_begins_with_the_source_s_weights_and_its_own_rest(
    source: tuple[Config, RunFolder], folder: Path, form: str
) -> None:
    _, run = source
    wanted = {
        "run": run.id,
        "run@step": f"{run.id}@{STEPS}",
        "checkpoint": str(run.checkpoints / f"step-{STEPS:08d}"),
        "folder": str(folder),
    }[form]
    config = warm(run, wanted)
    trainer = restored(config, begin(config, f"from-{form}"), dataset_of(run))
    then = {n: t for n, t in tensors_of(run).items() if n.startswith("model/")}
    now = weights(trainer.setup.trainable.model)
    assert then.keys() == now.keys()
    assert all(torch.equal(then[name], now[name]) for name in then)
    assert trainer.progress.step == 0
    assert not trainer.setup.optimizer.state
    assert trainer.setup.schedule.learning_rate(0) < trainer.setup.schedule.learning_rate(1)


def test_an_older_step_of_the_source_can_be_named(source: tuple[Config, RunFolder]) -> None:
    _, run = source
    config = warm(run, f"{run.id}@2")
    trainer = restored(config, begin(config, "from-step-2"), dataset_of(run))
    name = "model/blocks.1.ffn.up.weight"
    assert torch.equal(weights(trainer.setup.trainable.model)[name], tensors_of(run, 2)[name])
    assert not torch.equal(tensors_of(run, 2)[name], tensors_of(run)[name])


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "mxfp4"])
def test_weights_go_on_in_another_precision_and_lower_the_first_loss(
    source: tuple[Config, RunFolder], recipe: str
) -> None:
    _, run = source
    config = warm(run, run.id, recipe)
    new = begin(config, f"across-{recipe}")
    train(config, new, dataset_of(run))
    cold = with_train(config, init_from=None)
    beside = start(cold, f"cold-{recipe}")
    train(cold, beside, dataset_of(run))

    def first_loss(folder: RunFolder) -> float:
        lines = map(json.loads, folder.metrics.read_text().splitlines())
        return next(r["metrics"]["train/loss"] for r in lines if r["kind"] == "train")

    assert first_loss(new) < first_loss(beside) - 0.05


def test_the_run_s_state_and_tags_say_what_it_began_from(source: tuple[Config, RunFolder]) -> None:
    _, run = source
    config = warm(run, run.id)
    new = begin(config, "recorded")
    train(config, new, dataset_of(run))
    recorded = state_of(new, 6)["warm_start"]
    assert (recorded["run"], recorded["step"], recorded["kind"]) == (run.id, STEPS, "checkpoint")
    assert _tags(new)["init.run"] == run.id
    assert state_of(run, STEPS)["warm_start"] is None


def test_once_it_has_a_checkpoint_the_source_is_not_read_again(
    source: tuple[Config, RunFolder], folder: Path, tmp_path: Path
) -> None:
    _, run = source
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = warm(run, str(copy))
    new = begin(config, "resumed")
    train(config, new, dataset_of(run))
    shutil.rmtree(new.checkpoints / "step-00000006")
    shutil.rmtree(copy)
    _check_warm_start(config, new)
    trainer = restored(config, new, dataset_of(run))
    assert trainer.progress.step == 4


def test_a_folder_saved_by_transformers_is_read(
    source: tuple[Config, RunFolder], folder: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    shutil.copy(folder / "tokenizer.json", tmp_path / "theirs")
    _, run = source
    config = warm(run, str(tmp_path / "theirs"))
    trainer = restored(config, begin(config, "from-transformers"), dataset_of(run))
    name = "model/blocks.0.mamba.in_dt.weight"
    assert torch.equal(weights(trainer.setup.trainable.model)[name], tensors_of(run)[name])


@pytest.mark.parametrize(
    ("model_changes", "named"),
    [
        ({"pattern": "M-M"}, r"pattern \('M-\*' there, 'M-M' here\)"),
        ({"ffn_hidden_size": 96}, r"ffn_hidden_size \(64 there, 96 here\)"),
        ({"tie_embeddings": True}, "tie_embeddings"),
        ({"vocab_size": 301}, "vocab_size"),
    ],
)
@pytest.mark.parametrize("form", ["run", "folder"])
def test_another_architecture_is_refused_by_name_before_any_work(
    source: tuple[Config, RunFolder], folder: Path, model_changes: dict, named: str, form: str
) -> None:
    _, run = source
    config = warm(run, run.id if form == "run" else str(folder))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model_changes))
    with pytest.raises(ConfigError, match=named):
        check(config, ("prepare",), None)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("nobody", "no such run"),
        ("trained@3", "no checkpoint of step 3"),
        ("trained@last", "give <run>@<step>"),
    ],
)
def test_a_source_that_is_not_there_is_refused_by_name(
    source: tuple[Config, RunFolder], wanted: str, message: str
) -> None:
    _, run = source
    with pytest.raises(ConfigError, match=message):
        find_source(warm(run, wanted))


def test_a_run_that_has_no_checkpoint_yet_is_refused(
    source: tuple[Config, RunFolder], tmp_path: Path
) -> None:
    _, run = source
    young = RunFolder(tmp_path / "young")  # a checkpoint that is being written has no state yet
    shutil.copytree(run.path, young.path, ignore=shutil.ignore_patterns("state.json"))
    with pytest.raises(ConfigError, match="run young has no complete checkpoint"):
        find_source(warm(young, "young"))


def test_a_fork_and_a_warm_start_exclude_each_other(source: tuple[Config, RunFolder]) -> None:
    _, run = source
    config = warm(run, run.id, fork_from=f"{run.id}@{STEPS}")
    with pytest.raises(ConfigError, match="give one"):
        check(config, ("prepare",), None)


def test_an_empty_folder_is_no_source(source: tuple[Config, RunFolder], tmp_path: Path) -> None:
    _, run = source
    with pytest.raises(ConfigError, match="no checkpoint, no model"):
        find_source(warm(run, str(tmp_path)))


def test_a_damaged_checkpoint_is_refused(source: tuple[Config, RunFolder], tmp_path: Path) -> None:
    _, run = source
    name = f"step-{STEPS:08d}"
    copy = Path(shutil.copytree(run.checkpoints / name, tmp_path / name))
    file = next(copy.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="size or checksum differs"):
        find_source(warm(run, str(copy)))


@pytest.mark.parametrize("name", ["copied", "step-3"])
def test_a_checkpoint_is_read_wherever_it_was_copied(
    source: tuple[Config, RunFolder], tmp_path: Path, name: str
) -> None:
    _, run = source
    copy = Path(shutil.copytree(run.checkpoints / f"step-{STEPS:08d}", tmp_path / name))
    config = warm(run, str(copy))
    assert find_source(config).run is None
    new = begin(config, name)
    there = checkpoint.at_step(run.checkpoints, STEPS).tensors("model")
    here = dict(restored(config, new, dataset_of(run)).setup.trainable.model.named_parameters())
    assert all(torch.equal(here[key], tensor) for key, tensor in there.items())


def test_a_run_may_be_given_by_its_folder_and_a_folder_that_is_not_there_is_said_so(
    source: tuple[Config, RunFolder],
) -> None:
    _, run = source
    assert find_source(warm(run, str(run.path))).run == run.id
    with pytest.raises(ConfigError, match=r"init_from=/none/such: no such folder"):
        find_source(warm(run, "/none/such"))


@pytest.mark.parametrize(
    ("content", "message"), [(None, "has no tokenizer.json"), ("{", "is no tokenizer.json")]
)
def test_a_folder_s_tokenizer_has_to_be_there_and_whole(
    source: tuple[Config, RunFolder],
    folder: Path,
    tmp_path: Path,
    content: str | None,
    message: str,
) -> None:
    _, run = source
    other = edited(folder, tmp_path / "other")
    (other / "tokenizer.json").unlink()
    if content:
        (other / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_source(warm(run, str(other)))


@pytest.mark.parametrize("form", ["run", "folder"])
def test_weights_of_another_tokenizer_are_refused(
    source: tuple[Config, RunFolder], folder: Path, tmp_path: Path, form: str
) -> None:
    _, run = source
    dataset = tmp_path / "corpus"
    documents = [document(7 * i, 40) for i in range(80)]
    write_corpus(dataset, {"code": documents, "prose": documents}, holdout=[document(3, 40)])
    path = dataset / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    dropped = max(content["model"]["vocab"].items(), key=lambda item: item[1])[0]
    del content["model"]["vocab"][dropped]
    path.write_text(json.dumps(content))
    manifest = json.loads((dataset / "manifest.json").read_text())
    from pipeline.data import shards

    manifest["tokenizer"] |= shards.describe_file(dataset, "tokenizer.json")
    manifest["content_hash"] = shards.content_hash(manifest)
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    config = warm(run, run.id if form == "run" else str(folder))
    new = begin(config, f"other-tokenizer-{form}")
    with pytest.raises(ConfigError, match="another tokenizer"):
        restored(config, new, dataset)


def edited(folder: Path, target: Path, **changes: object) -> Path:
    """A copy of a model folder whose configuration says something else."""
    shutil.copytree(folder, target)
    values = json.loads((target / "config.json").read_text()) | changes
    values = {key: value for key, value in values.items() if value is not None}
    (target / "config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"layers_block_type": None, "hybrid_override_pattern": "ME*"}, "'E'"),
        ({"layers_block_type": ["mamba", "moe", "attention"]}, "moe"),
        ({"layers_block_type": None, "hybrid_override_pattern": 7}, "hybrid_override_pattern=7"),
        ({"layers_block_type": "MMM"}, "layers_block_type='MMM' must be a list"),
        ({"layers_block_type": [["mamba"]]}, "layers_block_type has"),
        ({"num_hidden_layers": 52}, "num_hidden_layers=52"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"hidden_size": -32}, "hidden_size=-32"),
        ({"n_groups": 3}, "mamba_num_groups=3"),
        ({"ssm_state_size": None}, "ssm_state_size"),
        ({"layer_norm_epsilon": "tiny"}, "layer_norm_epsilon='tiny'"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon=nan"),
        ({"layer_norm_epsilon": 1e-3}, "norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "packed weights are for serving"),
    ],
)
def test_a_hostile_or_foreign_configuration_is_refused_by_name(
    source: tuple[Config, RunFolder], folder: Path, tmp_path: Path, changes: dict, named: str
) -> None:
    _, run = source
    other = edited(folder, tmp_path / "other", **changes)
    with pytest.raises(ConfigError) as caught:
        find_source(warm(run, str(other)))
    assert named in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "{", "null", "\x00"])
def test_a_configuration_that_is_no_object_is_refused(
    source: tuple[Config, RunFolder], tmp_path: Path, content: str
) -> None:
    _, run = source
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        find_source(warm(run, str(tmp_path)))


def test_files_outside_the_folder_or_not_as_indexed_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    tensors = read_tensors(folder)
    other = edited(folder, tmp_path / "other")
    index = other / "model.safetensors.index.json"
    for target, message in (
        ("../copy.safetensors", "lies outside the folder"),
        ("/etc/passwd", "lies outside the folder"),
        ("absent.safetensors", "missing"),
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, target)}))
        with pytest.raises(ConfigError, match=message):
            read_tensors(other)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model.safetensors"}}))
    with pytest.raises(ConfigError, match="index and files differ"):
        read_tensors(other)
    index.write_text("{}")
    with pytest.raises(ConfigError, match="no weight_map"):
        read_tensors(other)


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    other = edited(folder, tmp_path / "other")
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="read from safetensors files only"):
        read_tensors(other)


def test_tensors_of_other_shapes_are_refused_by_name(
    source: tuple[Config, RunFolder], folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    _, run = source
    cases = {
        "0.mixer.in_proj.weight": (torch.zeros(7, 32), r"in_proj"),
        "0.mixer.A_log": (torch.zeros(3), r"0\.mamba\.A_log"),
        "1.mixer.up_proj.weight": (torch.zeros(64, 5), r"1\.ffn\.up"),
    }
    for number, (name, (tensor, named)) in enumerate(cases.items()):
        other = edited(folder, tmp_path / str(number))
        save_file(
            {**read_tensors(folder), f"model.layers.{name}": tensor}, other / "model.safetensors"
        )
        config = warm(run, str(other))
        new = begin(config, f"shape-{number}")
        with pytest.raises(ConfigError, match=named):
            restored(config, new, dataset_of(run))


def test_a_tied_model_begins_from_a_folder_with_a_copied_head(tmp_path: Path) -> None:
    shape = ModelConfig("M-*", 300, 32, 64, 2, 1, 16, 2, 16, 16, 1, tie_embeddings=True)
    from pipeline.warm_start import _from_folder
    from tests.pipeline.test_export import write_model

    model = HybridModel(shape, seed=4)
    write_model(tmp_path / "tied", model, 10**9)
    tensors = _from_folder(tmp_path / "tied", shape)
    assert tensors.keys() == dict(model.named_parameters()).keys()
    read = from_nemotron_h(read_tensors(tmp_path / "tied"), read_model_config(tmp_path / "tied"))
    assert torch.equal(read["head.weight"], read["embedding.weight"])
