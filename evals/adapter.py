"""A language model as lm-evaluation-harness's own. Importing this imports the harness (2 s)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from evals.scoring import Prompts, Score, Scorer, plan_batches

Request = tuple[Any, list[int], list[int]]  # cache key, context tokens, tokens to score after them
DEFAULT_NEW_TOKENS = 256  # the harness's own


class Workers(Protocol):
    """Who computes batches: `Scorer.score` or `Scorer.continue_prompts` of each, in order."""

    def map(self, method: str, batches: Iterable[Any]) -> Iterator[Any]: ...


class Local:
    """This process."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def map(self, method: str, batches: Iterable[Any]) -> Iterator[Any]:
        return map(getattr(self.scorer, method), batches)


class HarnessModel(TemplateLM):
    """Scores and continues text; the same numbers on any number of workers.

    Contexts longer than `max_length` lose their beginning, as with the harness's own models. A text
    without context is conditioned on the tokenizer's beginning-of-text token, or else its
    end-of-text token, as the harness prescribes; a model that learns no prediction there says
    little by the score of such a text's first token.

    Args:
        tokenizer: has `encode(text)` and `decode(ids)`; see `evals.tokenizers`.
        shares_prefixes: `LanguageModel.shares_prefixes` of the workers' model.
    """

    def __init__(
        self,
        workers: Workers,
        tokenizer: Any,
        eos_id: int,
        max_length: int,
        batch_size: int = 32,
        *,
        prefix_id: int | None = None,
        shares_prefixes: bool = True,
    ) -> None:
        super().__init__()
        self.workers = workers
        self.text_tokenizer = tokenizer
        self.eos_id = eos_id
        self.prefix_id = eos_id if prefix_id is None else prefix_id
        self.max_length = max_length
        self.batch_size = batch_size
        self.shares_prefixes = shares_prefixes

    @property
    def eot_token_id(self) -> int:
        return self.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.prefix_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        return self.text_tokenizer.encode(string, add_special_tokens)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        return self.text_tokenizer.decode(tokens)

    def truncates(self, request: Instance) -> bool:
        """Whether a request's context loses its beginning; a rolling text loses nothing."""
        if request.request_type == "loglikelihood_rolling":
            return False
        context, rest = request.args
        if request.request_type == "generate_until":
            return len(self.tok_encode(context)) > self.max_length - self._settings(rest)[0]
        return len(self.tok_encode(context + rest)) - 1 > self.max_length

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Summed log-likelihood (nats) of each continuation, and whether it is the greedy one.

        Raises:
            ValueError: when a continuation alone is longer than `max_length` tokens.
        """

        def finished(place: int, score: Score) -> None:
            key = requests[place][0]
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, score)

        pairs = [self._fit(context or [self.prefix_id], rest) for _, context, rest in requests]
        return self._score(pairs, finished)

    def _score(
        self,
        pairs: Sequence[tuple[list[int], list[int]]],
        finished: Callable[[int, Score], None] = lambda place, score: None,
    ) -> list[Score]:
        batches = plan_batches(pairs, self.batch_size, share=self.shares_prefixes)
        results: list[Score] = [(0.0, True)] * len(pairs)
        for batch, scores in zip(batches, self.workers.map("score", batches), strict=True):
            places = [place for group in batch for place in group.places]
            for place, score in zip(places, scores, strict=True):
                results[place] = score
                finished(place, score)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Log-likelihood (nats) of whole texts, in windows that score each token once."""
        windows: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [make_disjoint_window(pair) for pair in pairs]
            counts.append(len(windows) - before)
        scores = iter(self._score(windows))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Continue each context greedily until a stop string, the end token or `max_gen_toks`.

        Raises:
            ValueError: when a task asks for sampling, or for more tokens than the model takes.
        """
        outputs = [""] * len(requests)
        batches = list(self._prompt_batches(requests))
        texts = self.workers.map("continue_prompts", [batch for _, batch in batches])
        for (places, _), continued in zip(batches, texts, strict=True):
            for place, text in zip(places, continued, strict=True):
                outputs[place] = text
                self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return outputs

    def _prompt_batches(self, requests: Sequence[Instance]) -> Iterator[tuple[list[int], Prompts]]:
        """Places and prompts of each batch: one limit, the same stops, similar lengths."""
        alike: dict[tuple[int, tuple[str, ...]], list[tuple[list[int], int]]] = {}
        for place, request in enumerate(requests):
            text, settings = request.args
            limit, stops = self._settings(settings)
            tokens = self.tok_encode(text) or [self.prefix_token_id]
            tokens = tokens[-(self.max_length - limit) :]
            alike.setdefault((limit, stops), []).append((tokens, place))
        for (limit, stops), prompts in alike.items():
            prompts.sort(key=lambda prompt: (-len(prompt[0]), prompt[1]))
            for start in range(0, len(prompts), self.batch_size):
                part = prompts[start : start + self.batch_size]
                together = Prompts(tuple(tuple(tokens) for tokens, _ in part), limit, stops)
                yield [place for _, place in part], together

    def _settings(self, settings: dict) -> tuple[int, tuple[str, ...]]:
        """The limit in tokens and the stop strings of a request."""
        known = normalize_gen_kwargs(settings, DEFAULT_NEW_TOKENS)
        if known.get("do_sample"):
            raise ValueError("do_sample=True: only greedy generation is supported; set it to false")
        limit = known["max_gen_toks"]
        if limit >= self.max_length:
            raise ValueError(
                f"max_gen_toks={limit}: the model is evaluated at {self.max_length} tokens, prompt "
                "included; evaluate at more (evals.max_length) or lower the limit"
            )
        eos = self.text_tokenizer.decode([self.eos_id], keep_special=True)
        return limit, tuple(handle_stop_sequences(known.get("until"), eos=eos))

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The pair with its context's beginning cut off, so that `max_length` inputs serve."""
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens exceeds the {self.max_length} that "
                "the model is evaluated at; drop the task, or evaluate at more (evals.max_length)"
            )
        surplus = len(context) + len(continuation) - 1 - self.max_length
        return context[max(surplus, 0) :], continuation
