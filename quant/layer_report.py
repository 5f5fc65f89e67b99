"""What quantizing one layer did to it, for the result and the table a user reads."""

from dataclasses import asdict, dataclass
from typing import Any

from llmbench.quant.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """How well one layer was quantized.

    Attributes:
        relative_mse: ||(W - Q) X||^2 / ||W X||^2 over the calibration tokens; over the weights
            alone, ||W - Q||^2 / ||W||^2, where a method sees no tokens.
        loss: The method's own objective at the end.
        damp: Share of the Hessian's mean diagonal that was added to it.
        fallback: Why the layer was not quantized as asked, and how instead.
        num_tokens: Tokens that the layer's statistics cover.
    """

    relative_mse: float
    loss: float | None = None
    damp: float | None = None
    fallback: str | None = None
    num_tokens: int = 0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "LayerReport":
        """From `to_json`'s object."""
        return cls(**{**record, "notes": tuple(record["notes"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """A quantized layer and its report."""

    weight: QuantizedWeight
    report: LayerReport
