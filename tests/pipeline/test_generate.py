"""Generation from the command line: whole characters, the caller's prompt, reproducible draws."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from model import HybridModel
from pipeline.config import Config, ConfigError, GenerateConfig
from pipeline.data.shards import Dataset
from pipeline.data.tokenizer import load_tokenizer
from pipeline.generate import TextStream, generate
from pipeline.runs import RunFolder
from pipeline.stages import dataset_folder
from pipeline.trained import find_checkpoint, load_model
from tests.data.corpora import EOS
from tests.pipeline.exported import STEPS, assert_refused, command, trained_run

pytestmark = pytest.mark.slow

PROMPT = 'words, {that} "repeat": ${x}'


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunFolder]:
    return trained_run(tmp_path_factory.mktemp("runs"))


def text_of(config: Config, run: RunFolder, **settings: object) -> str:
    out = io.StringIO()
    chosen = GenerateConfig(**{"max_new_tokens": 12, **settings})  # type: ignore[arg-type]
    generate(dataclasses.replace(config, generate=chosen), run, out)
    return out.getvalue()


def tokenizer_of(config: Config, run: RunFolder) -> Tokenizer:
    return load_tokenizer(Dataset.open(dataset_folder(config, run)).tokenizer_path)


def test_the_text_is_the_model_s_greedy_continuation_in_bf16(
    trained: tuple[Config, RunFolder],
) -> None:
    config, run = trained
    model, precision = load_model(config, find_checkpoint(config, run), torch.device("cpu"))
    precision.mode = "bf16"
    tokenizer = tokenizer_of(config, run)
    ids = tokenizer.encode("words that", add_special_tokens=False).ids
    (continued,) = model.generate([ids], 12, EOS)
    expected = "words that" + tokenizer.decode(continued) + "\n"
    assert text_of(config, run, prompt="words that") == expected


def test_a_prompt_begins_as_documents_do(
    trained: tuple[Config, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = trained
    prompts: list[list[int]] = []
    monkeypatch.setattr(HybridModel, "generate", lambda _, ids, *__, **___: prompts.extend(ids))
    text_of(config, run, prompt="words")
    monkeypatch.setattr(Dataset, "bos_id", 7)
    text_of(config, run, prompt="words")
    assert prompts[1] == [7, *prompts[0]]


def test_draws_depend_on_the_seed_alone(trained: tuple[Config, RunFolder]) -> None:
    config, run = trained
    drawn = [
        text_of(config, run, prompt="words", temperature=1.0, top_p=0.9, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_it_stops_at_the_end_of_a_document(
    trained: tuple[Config, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = trained
    tokenizer = tokenizer_of(config, run)
    letters = [tokenizer.token_to_id(letter) for letter in "abc"]
    chosen = iter([*letters, EOS, *letters])
    monkeypatch.setattr("model.generate._choose", lambda *_: torch.tensor([next(chosen)]))
    assert text_of(config, run, prompt="x") == "xabc\n"


def test_several_prompts_come_from_a_file_each_with_draws_of_its_own(
    trained: tuple[Config, RunFolder], tmp_path: Path
) -> None:
    config, run = trained
    file = tmp_path / "prompts.txt"
    file.write_text("words\nthat\nwords\n", encoding="utf-8-sig")  # as some editors save
    text = text_of(config, run, prompts=str(file), temperature=2.0, seed=5)
    first = text_of(config, run, prompt="words", temperature=2.0, seed=5)
    third = text_of(config, run, prompt="words", temperature=2.0, seed=7)
    assert text.startswith(first)
    assert text.endswith(third)
    assert first != third


def test_characters_of_several_tokens_are_printed_whole(trained: tuple[Config, RunFolder]) -> None:
    config, run = trained
    tokenizer = tokenizer_of(config, run)
    pieces: list[str] = []
    out = io.StringIO()
    out.write = lambda text: pieces.append(text) or len(text)  # type: ignore[method-assign]
    stream = TextStream(tokenizer, out)
    ids = tokenizer.encode("é→日本 ok", add_special_tokens=False).ids
    assert len(ids) > 8
    for token in ids:
        stream.put(token)
    assert "".join(pieces) == "é→日本 ok"
    assert "\ufffd" not in "".join(pieces)
    stream.put(tokenizer.encode("é", add_special_tokens=False).ids[0])
    stream.end()
    assert "".join(pieces) == "é→日本 ok\ufffd"


def test_spaces_survive_a_decoder_that_strips_the_first() -> None:
    vocab = {"\u2581hi": 0, "\u2581you": 1, "<0xC3>": 2, "<0xA9>": 3}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    spaces = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    ids = [0, 1, 2, 3, 0]
    assert tokenizer.decode(ids) == "hi you\u00e9 hi"
    for prompt in (0, 1, 4):
        out = io.StringIO(tokenizer.decode(ids[:prompt]))
        out.seek(0, io.SEEK_END)
        stream = TextStream(tokenizer, out, ids[:prompt])
        for token in ids[prompt:]:
            stream.put(token)
        stream.end()
        assert out.getvalue() == "hi you\u00e9 hi"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either"),
        ({"prompt": "a", "prompts": "b"}, "give either"),
        ({"prompt": ""}, "at least one character"),
        ({"prompts": "/none/such"}, "cannot be read"),
    ],
)
def test_a_missing_prompt_is_refused(
    trained: tuple[Config, RunFolder], settings: dict, message: str
) -> None:
    config, run = trained
    with pytest.raises(ConfigError, match=message):
        text_of(config, run, **settings)


def test_the_command_takes_the_prompt_as_it_stands(
    trained: tuple[Config, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = trained
    assert command(run, "generate", f"prompt={PROMPT}", "max_new_tokens=5", f"step={STEPS}") == 0
    assert capsys.readouterr().out == text_of(config, run, prompt=PROMPT, max_new_tokens=5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "give either"),
        (("prompt=a", "top_p=0"), "generate.top_p: must be between"),
        (("prompt=a", "temperature=-1"), "generate.temperature: must be at least 0"),
        (("prompt=a", "seed=x"), "generate.seed: expected int"),
        (("prompt=a", "step=3"), "no checkpoint of step 3"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(
    trained: tuple[Config, RunFolder],
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    _, run = trained
    assert_refused(run, "generate", overrides, message, capsys)
