"""The continuation task as a harness task. Importing this imports the harness."""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask


class Continuation(ConfigurableTask):
    """Mutual information against a context of one character, not against the end of a document.

    The harness scores a choice without its context after the end-of-text token. Our models learn no
    prediction there, so the score of a choice's first token would be noise. Here it stands after
    the context's last visible character and the border that follows, which say nothing of the text.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config={k: v for k, v in (config or {}).items() if k != "class"})

    def construct_requests(
        self, doc: dict, ctx: str | list[str], **kwargs: Any
    ) -> list[Instance] | Instance:
        requests = super().construct_requests(doc, ctx, **kwargs)
        assert isinstance(requests, list)
        assert isinstance(ctx, str)
        ending = ctx[max(len(ctx.rstrip()) - 1, 0) :]
        for request in requests[len(requests) // 2 :]:
            request.arguments = (ending, request.args[1])
        return requests
