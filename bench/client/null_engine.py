"""An engine that computes nothing: each request gets its one token at once.

With it the load generator, the processes and the connections measure themselves: what is slow or
lost against this target is not the target's fault.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmbench.engine.request import RequestOutput, SamplingParams


class NullEngine:
    """Answers each request with one token before `submit` returns."""

    info: dict[str, Any]
    failure: BaseException | None = None

    def __init__(self) -> None:
        self.info = {"model": "null"}

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        on_output: Callable[[RequestOutput], None],
    ) -> None:
        """Answer at once, on the caller's thread."""
        on_output(
            RequestOutput(
                request_id=request_id,
                parent_id=request_id,
                answer_index=0,
                new_token_ids=[0],
                text_delta="",
                num_prompt_tokens=len(prompt_token_ids),
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
    """Make the engine, as an `EngineFactory` does."""
    on_progress("no model to load")
    return NullEngine()
