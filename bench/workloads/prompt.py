"""A prompt as a dataset gives it, before sampling settings make it a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of one prompt, the tokens to generate, and its text where it has one."""

    token_ids: tuple[int, ...]
    max_tokens: int
    text: str | None = None
