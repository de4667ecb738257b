"""`python -m pipeline generate`: continue texts with a run's checkpoint, streamed as they come."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pipeline.config import Config, ConfigError, GenerateConfig
from pipeline.data.shards import open_corpus
from pipeline.data.tokenizer import load_tokenizer
from pipeline.runs import RunFolder
from pipeline.stages import dataset_folder
from pipeline.trained import find_checkpoint, inference_device, load_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Prints tokens as text as soon as their bytes are whole characters.

    Tokens are decoded behind those before them, the prompt's to begin with: some tokenizers strip
    the space off the first of a text.
    """

    def __init__(self, tokenizer: Tokenizer, out: TextIO, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._out = tokenizer, out
        self._shown = [*prompt]  # the tokens last shown
        self._pending: list[int] = []

    def put(self, token: int) -> None:
        """One more token."""
        self._pending.append(token)
        text = self._new_text()
        if not text.endswith(INCOMPLETE):
            self._write(text)

    def end(self) -> None:
        """Print what is left, a character cut off in the middle too."""
        self._write(self._new_text())

    def _new_text(self) -> str:
        before, whole = self._decoded(self._shown), self._decoded(self._shown + self._pending)
        return whole[len(before) :]

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        if text:
            self._shown, self._pending = self._pending, []


def generate(config: Config, run: RunFolder, out: TextIO | None = None) -> None:
    """Print each prompt with its continuation, in BF16, until the end of the document.

    Greedy unless `temperature` is above 0; draws depend on `seed`, and on which prompt it is of
    several. Raises `ConfigError` without a prompt, or where one is empty.
    """
    out = out or sys.stdout
    settings = config.generate
    prompts = _prompts(settings)
    dataset = open_corpus(config.data, dataset_folder(config, run))
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    model, precision = load_model(config, find_checkpoint(config, run), inference_device())
    precision.mode = "bf16"
    first = [] if dataset.bos_id is None else [dataset.bos_id]  # as documents began in training
    for number, prompt in enumerate(prompts):
        ids = [*first, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        stream = TextStream(tokenizer, out, ids)
        out.write(prompt)
        out.flush()

        def show(row: int, new_tokens: list[int], stream: TextStream = stream) -> bool:
            stream.put(new_tokens[-1])
            return False

        model.generate(
            [ids],
            settings.max_new_tokens,
            dataset.eos_id,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed + number,
            should_stop=show,
        )
        stream.end()
        out.write("\n")


def _prompts(settings: GenerateConfig) -> list[str]:
    if (settings.prompt is None) == (settings.prompts is None):
        raise ConfigError('generate: give either prompt="..." or prompts=<file, one a line>')
    if settings.prompt is not None:
        prompts = [settings.prompt]
    else:
        path = Path(str(settings.prompts))
        try:
            prompts = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"prompts={path}: cannot be read ({error})") from error
    if not prompts or "" in prompts:
        raise ConfigError("generate: a prompt needs at least one character")
    return prompts
