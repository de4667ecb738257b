"""The largest input that each linear meets on given text: the scale of its activations.

Served weights in NVFP4 multiply activations in NVFP4, whose global scale is not found anew for each
tensor, as in training, but is fixed in the checkpoint.

Legend: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model import HybridModel
from pipeline.config import Config, ConfigError
from pipeline.data.shards import Dataset
from pipeline.data.stream import Batch, make_batch, validation_rows
from pipeline.data.tokenizer import encode_documents, load_tokenizer
from quant import Precision
from quant.quantize import amax_of


def calibration_rows(config: Config, dataset: Dataset) -> list[Batch]:
    """Rows of `export.calibration`'s text, or of every source's held-out text, equal shares.

    Raises `ConfigError` where there is no such text.
    """
    settings, length = config.export, config.train.sequence_length
    if settings.calibration is not None:
        return [_rows_of_text(Path(settings.calibration), dataset, length, settings)]
    share = max(settings.calibration_tokens // len(dataset.sources), length)
    found = [validation_rows(dataset, name, length, share) for name in dataset.sources]
    if not any(len(rows.tokens_BT) for rows in found):
        raise ConfigError(
            "export: no text is held out to measure activations on; name one: calibration=..."
        )
    return [rows for rows in found if len(rows.tokens_BT)]


def _rows_of_text(path: Path, dataset: Dataset, length: int, settings: Any) -> Batch:
    """One document, cut into rows; the last one is filled up with end-of-document tokens."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"export.calibration: {path} cannot be read ({error})") from error
    if not text.strip():
        raise ConfigError(f"export.calibration: {path} is empty")
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    (ids,) = encode_documents(tokenizer, [text], dataset.eos_id, dataset.bos_id)
    num_rows = min(-(-len(ids) // length), max(settings.calibration_tokens // length, 1))
    padded = np.full(num_rows * length + 1, dataset.eos_id, dtype=dataset.dtype)
    used = ids[: len(padded)]
    padded[: len(used)] = used
    rows_BT = np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length]
    return make_batch(rows_BT, np.zeros(num_rows, np.int64), dataset.eos_id, length)


@torch.no_grad()
def input_amax(
    model: HybridModel, precision: Precision, batches: Iterable[Batch], batch_size: int
) -> dict[str, Tensor]:
    """Largest magnitude of each linear's input, an FP32 scalar, by the linear's name.

    The model runs in its recipe's precision, as it will be served.
    """
    largest: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            amax = amax_of(inputs[0])
            largest[name] = torch.maximum(largest[name], amax) if name in largest else amax

        return look

    device = model.embedding.weight.device
    with _hooks(precision, watch), precision.override("recipe"):
        for batch in batches:
            for start in range(0, len(batch.tokens_BT), batch_size):
                part = slice(start, start + batch_size)
                model.hidden(batch.tokens_BT[part].to(device), batch.seq_idx_BT[part].to(device))
    return largest


@contextmanager
def _hooks(precision: Precision, watch: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    handles = [
        layer.register_forward_pre_hook(watch(name)) for name, layer in precision.layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
