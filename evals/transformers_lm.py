"""Any causal model of transformers behind our scoring: others' models go in the same table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evals.lm import LanguageModel, Stop


class Transformers(LanguageModel[None]):
    """A `PreTrainedModel`: its decoder's last hidden states and its output embeddings.

    Raises:
        ValueError: where the model's logits are more than these two, such as capped or scaled ones.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.decoder, self.output = model.get_decoder(), model.get_output_embeddings()
        self._check()

    @classmethod
    def from_folder(cls, folder: Path, device: torch.device, **settings: Any) -> Transformers:
        """The model of a local folder: FP32 on a CPU, else BF16. Runs no code of the folder's."""
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, **settings
        )
        return cls(model.to(device))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        return self.decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state

    def head(self, hidden_ND: Tensor) -> Tensor:
        return self.output(hidden_ND)

    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, eos_id: int, should_stop: Stop
    ) -> list[list[int]]:
        from transformers import StoppingCriteria, StoppingCriteriaList

        width = max(map(len, prompts))
        tokens_BT = torch.full((len(prompts), width), eos_id)
        mask_BT = torch.zeros_like(tokens_BT)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, width - len(prompt) :] = 1
        done = torch.zeros(len(prompts), dtype=torch.bool)

        class AtStops(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **settings: Any) -> Tensor:
                for row in torch.nonzero(~done).flatten().tolist():
                    done[row] = should_stop(row, _until(input_ids[row, width:].tolist(), eos_id))
                return done.to(input_ids.device)

        output_BT = self.model.generate(
            tokens_BT.to(self.device),
            attention_mask=mask_BT.to(self.device),
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=eos_id,
            eos_token_id=eos_id,
            stopping_criteria=StoppingCriteriaList([AtStops()]),
        )
        return [_until(row[width:].tolist(), eos_id) for row in output_BT]

    @torch.no_grad()
    def _check(self) -> None:
        tokens_BT = torch.arange(4, device=self.device)[None]
        logits = self.model(tokens_BT).logits
        if not torch.allclose(self.head(self.hidden(tokens_BT)), logits, atol=1e-3, rtol=1e-3):
            raise ValueError(
                f"{type(self.model).__name__} does more than multiply its hidden states by its "
                "output embeddings; evaluate it with the harness itself"
            )


def _until(tokens: list[int], eos_id: int) -> list[int]:
    return tokens[: tokens.index(eos_id)] if eos_id in tokens else tokens
