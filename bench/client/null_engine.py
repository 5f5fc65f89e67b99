"""An engine that computes nothing: each request gets its tokens at once.

With it the load generator, the processes and the connections measure themselves: what is slow or
lost against this target is not the target's fault.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmbench.engine.request import Request, RequestOutput, SamplingParams


class NullEngine:
    """Answers each request with one token before `submit` returns."""

    info: dict[str, Any]

    def __init__(self) -> None:
        self.info = {"model": "null"}

    def make_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> Request:
        """Build a request; nothing is checked."""
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            sampling_params=params,
            arrival_s=time.perf_counter(),
        )

    def submit(self, request: Request, on_output: Callable[[RequestOutput], None]) -> None:
        """Answer at once, on the caller's thread."""
        on_output(
            RequestOutput(
                request_id=request.request_id,
                parent_id=request.parent_id,
                answer_index=0,
                new_token_ids=[0],
                text_delta="",
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=1,
                num_cached_tokens=0,
                finish_reason="length",
            )
        )

    def abort(self, request_id: str) -> None:
        """Nothing is ever in flight."""

    def begin_cell(self) -> None:
        """There is no cache to forget."""

    def end_cell(self, steps_path: Path) -> None:
        """There are no steps to write."""

    def shutdown(self) -> None:
        """Nothing runs."""


def make_null_engine(on_progress: Callable[[str], None]) -> NullEngine:
    """Factory for `EngineProcess`."""
    on_progress("no model to load")
    return NullEngine()
