"""Our model as an lm-evaluation-harness model. Importing this file imports the harness (2 s).

Shapes: B sequences of a batch, T positions, N scored tokens of a batch, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from torch import Tensor

from model import HybridModel

Pair = tuple[list[int], list[int]]  # context tokens and the tokens to score after them
DEFAULT_NEW_TOKENS = 128


class HarnessModel(TemplateLM):
    """Scores and continues text with `HybridModel`; batches sequences of similar length.

    Padding stands on the right, where a causal model never sees it. Contexts longer than
    `max_length` lose their beginning. A text without context is conditioned on the end-of-document
    token, as the harness prescribes; this model learns no prediction at that position, so the
    score of a text's first token then says little.
    """

    def __init__(
        self,
        model: HybridModel,
        tokenizer: Tokenizer,
        eos_id: int,
        max_length: int,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.model = model
        self.hf_tokenizer = tokenizer
        self.eos_id = eos_id
        self.max_length = max_length
        self.batch_size = batch_size

    @property
    def eot_token_id(self) -> int:
        return self.eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        return self.hf_tokenizer.encode(string, add_special_tokens=False).ids

    def tok_decode(self, tokens: Sequence[int]) -> str:
        return self.hf_tokenizer.decode(list(tokens))

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Summed log-likelihood (nats) of each continuation, and whether it is the greedy one.

        Raises:
            ValueError: when a continuation alone is longer than `max_length` tokens.
        """
        pairs = [(context, continuation) for _, context, continuation in requests]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for indices in self._batches([len(a) + len(b) for a, b in pairs]):
            for index, result in zip(
                indices, self._score([pairs[i] for i in indices]), strict=True
            ):
                results[index] = result
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Log-likelihood (nats) of whole texts, in windows that score each token once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Continue each context greedily until a stop string, the end token or `max_gen_toks`.

        Raises:
            ValueError: when a task asks for sampling.
        """
        prompts = [self.tok_encode(request.args[0]) or [self.eos_id] for request in requests]
        outputs = [""] * len(requests)
        for indices in self._batches([len(prompt) for prompt in prompts]):
            settings = [requests[i].args[1] for i in indices]
            texts = self._generate([prompts[i] for i in indices], settings)
            for index, text in zip(indices, texts, strict=True):
                outputs[index] = text
        return outputs

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Indices in batches of similar length, the longest first (memory runs out at once)."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    @torch.no_grad()
    def _score(self, pairs: list[Pair]) -> Iterator[tuple[float, bool]]:
        device = self.model.embedding.weight.device
        tokens_BT, labels_BT = self._pad([self._fit(*pair) for pair in pairs])
        tokens_BT, labels_BT = tokens_BT.to(device), labels_BT.to(device)
        scored_BT = labels_BT >= 0
        hidden_BTD = self.model.hidden(tokens_BT, torch.zeros_like(tokens_BT, dtype=torch.int32))
        labels_N = labels_BT[scored_BT]
        log_probs_NV = self.model.head(hidden_BTD[scored_BT]).float().log_softmax(dim=-1)
        nats_N = log_probs_NV.gather(1, labels_N[:, None]).squeeze(1).double().cpu()
        greedy_N = (log_probs_NV.argmax(dim=-1) == labels_N).cpu()
        lengths = [len(continuation) for _, continuation in pairs]
        for nats, greedy in zip(nats_N.split(lengths), greedy_N.split(lengths), strict=True):
            yield nats.sum().item(), bool(greedy.all())

    def _fit(self, context: list[int], continuation: list[int]) -> Pair:
        """The pair with its context's beginning cut off, so that `max_length` inputs serve."""
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens exceeds the {self.max_length} that "
                "the model is evaluated at; drop the task or evaluate at a longer sequence"
            )
        surplus = len(context) + len(continuation) - 1 - self.max_length
        return context[max(surplus, 0) :], continuation

    def _pad(self, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
        """Inputs and labels, both [B, T] int64; a label of -1 is not scored."""
        width = max(len(context) + len(continuation) for context, continuation in pairs) - 1
        tokens_BT = torch.full((len(pairs), width), self.eos_id)
        labels_BT = torch.full((len(pairs), width), -1)
        for row, (context, continuation) in enumerate(pairs):
            sequence = torch.tensor(context + continuation)
            end = len(sequence) - 1
            tokens_BT[row, :end] = sequence[:-1]
            labels_BT[row, len(context) - 1 : end] = sequence[len(context) :]
        return tokens_BT, labels_BT

    def _generate(self, prompts: list[list[int]], settings: list[dict]) -> list[str]:
        if any(setting.get("do_sample") for setting in settings):
            raise ValueError("do_sample=True: only greedy generation is supported; set it to false")
        stops = [_stop_strings(setting) for setting in settings]
        limits = [setting.get("max_gen_toks", DEFAULT_NEW_TOKENS) for setting in settings]
        limit = max(limits)
        room = max(self.max_length - limit, 1)

        def should_stop(row: int, new_tokens: list[int]) -> bool:
            text = self.tok_decode(new_tokens)
            return len(new_tokens) >= limits[row] or any(stop in text for stop in stops[row])

        outputs = self.model.generate(
            [prompt[-room:] for prompt in prompts], limit, self.eos_id, should_stop=should_stop
        )
        return [
            _before_first(self.tok_decode(tokens), stop)
            for tokens, stop in zip(outputs, stops, strict=True)
        ]


def _stop_strings(setting: dict) -> list[str]:
    until = setting.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def _before_first(text: str, stops: list[str]) -> str:
    """`text` up to the first of the stop strings."""
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]
