"""Others' models: a plain transformers model behind our scoring gives the harness's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evals.adapter import HarnessModel, Local
from evals.scoring import Scorer
from evals.tokenizers import OfTransformers
from evals.transformers_lm import Transformers

from .models import EOS, byte_tokenizer

pytestmark = pytest.mark.slow
MAX_LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with opinions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=EOS + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    byte_tokenizer().save(str(place / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[HarnessModel, Any]:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    lm = Transformers.from_folder(folder, torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = OfTransformers(tokenizer)
    ours = HarnessModel(
        Local(Scorer(lm, text, EOS)), text, EOS, MAX_LENGTH, 3, shares_prefixes=False
    )
    return ours, HFLM(pretrained=lm.model, tokenizer=tokenizer, batch_size=1, max_length=MAX_LENGTH)


def requests(*arguments: tuple) -> list[Any]:
    return [SimpleNamespace(args=argument, task_name="t") for argument in arguments]


def test_log_likelihoods(both: tuple[HarnessModel, Any]) -> None:
    asked = requests(
        ("the cat", " sat"), ("", "hello"), ("a" * 200, " end"), ("x", "y"), ("the cat", " sat on")
    )
    ours, theirs = (lm.loglikelihood(asked, disable_tqdm=True) for lm in both)
    for (nats, greedy), (expected, is_greedy) in zip(ours, theirs, strict=True):
        assert nats == pytest.approx(expected, abs=1e-3)
        assert greedy == is_greedy


def test_rolling_texts(both: tuple[HarnessModel, Any]) -> None:
    asked = requests(("a short text",), ("a long text of many words. " * 6,))
    ours, theirs = (lm.loglikelihood_rolling(asked, disable_tqdm=True) for lm in both)
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_generation_left_padded_and_stopped(both: tuple[HarnessModel, Any]) -> None:
    settings = {"until": [], "max_gen_toks": 20, "do_sample": False}
    prompts = ("once upon", "a", "some longer prompt")
    free = both[1].generate_until(requests(*((p, settings) for p in prompts)), disable_tqdm=True)
    stop = next(text[5:7] for text in free if len(text) > 8)
    stopped = settings | {"until": [stop]}
    asked = requests(*((p, kind) for p in prompts for kind in (settings, stopped)))
    ours, theirs = (lm.generate_until(asked, disable_tqdm=True) for lm in both)
    assert ours == theirs
    assert len(set(ours)) > 3


def test_logits_that_are_more_than_a_product_are_refused(folder: Path) -> None:
    model = Transformers.from_folder(folder, torch.device("cpu")).model
    forward = model.forward

    def capped(*args: Any, **settings: Any) -> Any:
        output = forward(*args, **settings)
        output.logits = output.logits.tanh()
        return output

    model.forward = capped
    with pytest.raises(ValueError, match="evaluate it with the harness itself"):
        Transformers(model)
