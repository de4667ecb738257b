"""Tokenizer files that transformers' `AutoTokenizer` loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from pipeline.data.shards import Dataset
from pipeline.data.tokenizer import load_tokenizer
from pipeline.export.folder import write_json
from pipeline.hf_folder import TOKENIZER


def write_tokenizer(folder: Path, dataset: Dataset, max_length: int) -> None:
    """The corpus's own tokenizer.json, and what its tokens around documents are for.

    Where documents began with a token, the exported tokenizer puts it before each text.
    """
    eos = load_tokenizer(dataset.tokenizer_path).id_to_token(dataset.eos_id)
    special = {"eos_token": eos, "pad_token": eos}
    if dataset.bos_id is None:
        shutil.copyfile(dataset.tokenizer_path, folder / TOKENIZER)
    else:
        tokenizer = Tokenizer.from_file(str(dataset.tokenizer_path))
        bos = special["bos_token"] = tokenizer.id_to_token(dataset.bos_id)
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, dataset.bos_id)]
        )
        tokenizer.save(str(folder / TOKENIZER))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            **special,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        },
    )
    write_json(folder / "special_tokens_map.json", special)
