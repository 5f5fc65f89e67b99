"""What tests of evaluations share: an engine that remembers what it was asked, and a comparison."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.model import GenerateRequest
from llmbench.engine.config import EngineConfig
from llmbench.engine.scoring import ContinuationScore, ScoreRequest


class CountingModel(EngineModel):
    """The engine in float32 with a small cache; remembers the requests that it was sent."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        values: dict[str, Any] = {"dtype": "float32", "compile": False}
        values["kv_cache_memory_bytes"] = 1 << 20
        super().__init__(EngineConfig(model=str(folder), **(values | settings)))
        self.asked: list[ScoreRequest | GenerateRequest] = []
        self.wanted_hidden = False

    def score(
        self, requests: Sequence[ScoreRequest], *, with_hidden: bool = False
    ) -> Iterator[tuple[int, tuple[ContinuationScore, ...]]]:
        self.asked += requests
        self.wanted_hidden |= with_hidden and bool(requests)
        return super().score(requests, with_hidden=with_hidden)

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[int, str]]:
        self.asked += requests
        return super().generate(requests)


def reference_model(folder: Path) -> Any:
    """The same checkpoint as transformers runs it."""
    import torch
    from transformers import LlamaForCausalLM

    classes: Any = LlamaForCausalLM
    return classes.from_pretrained(folder, dtype=torch.float32).eval()


def assert_same_answers(
    found: Mapping[str, Sequence[ItemRecord]], expected: Mapping[str, Sequence[ItemRecord]]
) -> None:
    """All answers are equal, log-likelihoods to 1e-5; divergences may differ."""
    assert found.keys() == expected.keys()
    for task, items in expected.items():
        for item, other in zip(items, found[task], strict=True):
            assert other.loglikelihoods == (
                None
                if item.loglikelihoods is None
                else pytest.approx(item.loglikelihoods, abs=1e-5)
            )
            unequal: dict[str, Any] = {"loglikelihoods": None, "metrics": {}, "divergence": None}
            assert dataclasses.replace(other, **unequal) == dataclasses.replace(item, **unequal)
