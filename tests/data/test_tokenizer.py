"""The tokenizer is byte-level, deterministic, and takes text for text."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from pipeline.config import ConfigError, TokenizerConfig
from pipeline.data import tekken
from pipeline.data.tokenizer import (
    check_tokenizer,
    encode_documents,
    load_tokenizer,
    read_token_bytes,
    tokenizer_json,
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
        ({"model": {"type": "Unigram"}}, "is no tokenizer.json"),
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


def test_documents_begin_and_end_as_configured_and_names_in_text_stay_text(path: Path) -> None:
    config = TokenizerConfig(vocab_size=400, bos_token="<|begin|>")
    tokenizer = train_tokenizer(TEXTS, config)
    assert [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|begin|>")] == [0, 1]
    texts = ["one", "<|begin|>two<|endoftext|>", "three"]
    for ids, text in zip(encode_documents(tokenizer, texts, 0, 1), texts, strict=True):
        assert (ids[0], ids[-1]) == (1, 0)
        assert (ids[1:-1] > 1).all()
        assert tokenizer.decode(ids[1:-1].tolist(), skip_special_tokens=False) == text


def test_a_folder_or_a_name_on_the_hub_is_as_good_as_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        if name != "owner/model":
            raise OSError(f"{name} does not exist\nmore")
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for name in (path.parent, "owner/model"):
        assert tokenizer_json(name) == path.read_text()
    assert asked == [("owner/model", "tokenizer.json")]
    for name, message in [
        ("owner/none", r"nor owner/none on the hub \(owner/none does not exist\)"),
        ("none.json", "no file none.json, and no name on the hub"),
        (str(tmp_path), r"no tokenizer\.json in"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_tokenizer(TokenizerConfig(path=name))


def test_a_tokenizer_with_byte_fallback_counts_its_bytes(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    for token in ("\u2581", "a", "\u2581a", "\u00e9"):
        vocab[token] = len(vocab)
    model = models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(tmp_path / "t.json"))
    text = " a a\n\u00e9\u4e2d </s>"
    (ids,) = encode_documents(load_tokenizer(tmp_path / "t.json"), [text], 1)
    assert load_tokenizer(tmp_path / "t.json").decode(ids[:-1].tolist()) == text
    assert read_token_bytes(tmp_path / "t.json")[ids].sum() == len(text.encode())


def small_tekken() -> dict[str, object]:
    """A file of tekken's form: bytes, then a few merges; one rank more than is used."""
    words = [b"th", b"the", b" t", b" the", b"he", b"unused"]
    tokens = [bytes([byte]) for byte in range(256)] + words
    return {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
            "default_vocab_size": 1000 + len(tokens) - 1,
            "default_num_special_tokens": 1000,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for i, token in enumerate(tokens)
        ],
    }


def test_a_tekken_file_becomes_an_ordinary_tokenizer_with_its_ids(tmp_path: Path) -> None:
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(small_tekken()))
    check_tokenizer(TokenizerConfig(path=str(tmp_path), eos_token="</s>", bos_token="<s>"))
    tokenizer = load_tokenizer(path)
    assert vocab_size_of(tokenizer) == 1000 + 256 + 5
    assert [tokenizer.token_to_id(name) for name in ("<unk>", "<s>", "</s>")] == [0, 1, 2]
    (ids,) = encode_documents(tokenizer, ["the the</s>\u00e9"], 2, 1)
    # "the" is rank 257, " the" 259; "</" and so on are bytes; the control token's name is text.
    assert ids[:3].tolist() == [1, 1257, 1259]
    assert (ids[1:-1] >= 1000).all()
    assert tokenizer.decode(ids.tolist()) == "the the</s>\u00e9"
    assert read_token_bytes(path)[ids].sum() == len("the the</s>\u00e9".encode())


@pytest.mark.slow
def test_mistrals_tekken_gives_the_ids_of_tiktoken_and_131072_of_them() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    pytest.importorskip("mistral_common")
    content = json.loads(tekken.installed_tekken().read_text())
    config = content["config"]
    special = config["default_num_special_tokens"]
    used = content["vocab"][: config["default_vocab_size"] - special]
    ranks = {base64.b64decode(entry["token_bytes"]): i for i, entry in enumerate(used)}
    theirs = tiktoken.Encoding(
        "tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    ours = load_tokenizer("tekken")
    assert vocab_size_of(ours) == 131_072
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:40]
    for text in [
        *(file.read_text() for file in files),
        "na\u00efve \u4e2d\u6587 \U0001f600\r\n\t 12345",
    ]:
        (ids,) = encode_documents(ours, [text], 2)
        assert (ids[:-1] - special).tolist() == theirs.encode(text, disallowed_special=())


def test_tekken_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tekken.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"mistral-common is not installed; pip install"):
        check_tokenizer(TokenizerConfig(path="tekken", eos_token="</s>"))


def test_what_a_models_inputs_were_cut_and_filled_to_is_ignored(path: Path, tmp_path: Path) -> None:
    stored = Tokenizer.from_file(str(path))
    stored.enable_truncation(4)
    stored.enable_padding(length=8)
    stored.save(str(tmp_path / "tokenizer.json"))
    text = "a sentence that is longer than four tokens"
    whole, same = (load_tokenizer(p).encode(text).ids for p in (path, tmp_path / "tokenizer.json"))
    assert len(whole) > 8
    assert whole == same


def test_one_token_cannot_begin_and_end_documents() -> None:
    with pytest.raises(ConfigError, match="bos_token='<s>' ends documents already"):
        check_tokenizer(TokenizerConfig(vocab_size=400, eos_token="<s>", bos_token="<s>"))
