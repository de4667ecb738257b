"""The tokenizer is byte-level, deterministic, and takes text for text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline.config import ConfigError, TokenizerConfig
from pipeline.data.tokenizer import (
    check_tokenizer,
    encode_documents,
    load_tokenizer,
    read_token_bytes,
    train_tokenizer,
    vocab_size_of,
)

TEXTS = [f"the {i}th word, and another word: naïve café {i * i}\n" for i in range(300)]
CONFIG = TokenizerConfig(vocab_size=400)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, CONFIG).save(str(path))
    return path


def test_training_twice_gives_the_same_file(path: Path) -> None:
    """In another process, whose hash seeds and threads differ."""
    code = (
        "from tests.data.test_tokenizer import *\n"
        "print(train_tokenizer(TEXTS, CONFIG).to_str(pretty=True), end='')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == path.read_text()


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_survives_and_token_bytes_are_its_length(path: Path, text: str) -> None:
    tokenizer = load_tokenizer(path)
    (ids,) = encode_documents(tokenizer, [text], 0)
    assert ids[-1] == 0
    assert (ids[:-1] != 0).all()
    assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text
    assert read_token_bytes(path)[ids].sum() == len(text.encode())


def test_the_end_of_a_document_is_id_0_and_its_name_in_text_is_only_text(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    assert tokenizer.token_to_id(CONFIG.eos_token) == 0
    assert vocab_size_of(tokenizer) == 400
    (ids,) = encode_documents(tokenizer, [f"a {CONFIG.eos_token} b"], 0)
    assert (ids == 0).sum() == 1


def test_a_tokenizer_that_is_not_byte_level_is_refused(path: Path, tmp_path: Path) -> None:
    content = json.loads(path.read_text())
    other = tmp_path / "other.json"
    for change, message in [
        ({"decoder": None}, "is not byte-level"),
        ({"decoder": {"type": "WordPiece"}}, "is not byte-level"),
        ({"model": {"type": "Unigram", "vocab": []}}, "is no tokenizer.json"),
    ]:
        other.write_text(json.dumps(content | change))
        with pytest.raises(ConfigError, match=message):
            check_tokenizer(TokenizerConfig(path=str(other)))
    other.write_text("{")
    with pytest.raises(ConfigError, match=r"other\.json is no tokenizer\.json"):
        check_tokenizer(TokenizerConfig(path=str(other)))


def test_a_tokenizer_without_the_named_end_of_document_is_refused(path: Path) -> None:
    check_tokenizer(TokenizerConfig(path=str(path)))
    with pytest.raises(ConfigError, match="has no token '</s>'"):
        check_tokenizer(TokenizerConfig(path=str(path), eos_token="</s>"))


def test_the_file_is_an_ordinary_hugging_face_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.decode(tokenizer.encode("the 7th word").ids) == "the 7th word"
