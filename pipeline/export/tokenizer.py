"""Tokenizer files that transformers' `AutoTokenizer` loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.data.shards import Dataset
from pipeline.data.tokenizer import load_tokenizer
from pipeline.export.folder import write_json
from pipeline.hf_folder import TOKENIZER


def write_tokenizer(folder: Path, dataset: Dataset, max_length: int) -> None:
    """The corpus's own tokenizer.json, and what its end-of-document token is for."""
    shutil.copyfile(dataset.tokenizer_path, folder / TOKENIZER)
    eos = load_tokenizer(dataset.tokenizer_path).id_to_token(dataset.eos_id)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "pad_token": eos,
            "bos_token": None,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        },
    )
    write_json(folder / "special_tokens_map.json", {"eos_token": eos, "pad_token": eos})
