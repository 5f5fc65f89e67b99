"""Lengths of made-up requests: prompt and answer each from a law around a given length.

uniform     whole numbers from floor(L(1 - r)) to ceil(L(1 + r)), at least 1: vLLM's meaning of
            the range ratio r; r = 0 is the fixed length L
normal      mean L, standard deviation rL
lognormal   mean L, standard deviation rL, skewed to long lengths as real prompts are: the
            logarithm has variance ln(1 + r^2) and mean ln L - ln(1 + r^2) / 2

The last two have no upper end: a pair with a length under 1, or together longer than the model
has room for, is drawn again, and the number of such draws is told. A uniform range that does not
fit at its upper end is refused instead, as it says itself how far it goes.
"""

import math
from dataclasses import dataclass

import numpy as np

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.workload import LengthDistribution

MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """One law of lengths, in tokens."""

    distribution: LengthDistribution
    length: int
    ratio: float

    @property
    def bounds(self) -> tuple[int, int]:
        """Shortest and longest length; of a law without a longest, its mean."""
        if self.distribution in ("normal", "lognormal"):
            return 1, self.length
        # 10 * 1.1 is 11.000000000000002: without the margin, its ceiling would be 12.
        low = math.floor(self.length * (1 - self.ratio) + 1e-9)
        high = math.ceil(self.length * (1 + self.ratio) - 1e-9)
        return max(low, 1), high

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one length; under 1 or over any limit is possible where the law has no bounds."""
        if self.distribution == "normal":
            return round(self.length * (1 + self.ratio * rng.standard_normal()))
        if self.distribution == "lognormal":
            variance = math.log1p(self.ratio**2)
            log_length = math.log(self.length) - variance / 2
            exponent = log_length + math.sqrt(variance) * rng.standard_normal()
            # exp overflows past 700; such a length fits no model anyway.
            return round(math.exp(min(exponent, 100.0)))
        low, high = self.bounds
        return int(rng.integers(low, high + 1))


def draw_length_pairs(
    inputs: LengthLaw, outputs: LengthLaw, num: int, room: int, rng: np.random.Generator
) -> tuple[list[tuple[int, int]], int]:
    """Return `num` pairs (input, output), each at most `room` together, and the draws refused."""
    longest = inputs.bounds[1] + outputs.bounds[1]
    if longest > room:
        error = WorkloadError(
            f"random lengths of {inputs.bounds[1]} + {outputs.bounds[1]} tokens exceed the "
            f"{room} that the model leaves for them"
        )
        error.add_note("lower --random-input-len, --random-output-len or --random-range-ratio")
        raise error
    pairs = []
    num_refused = 0
    for _ in range(num):
        for _ in range(MAX_DRAWS):
            pair = (inputs.draw(rng), outputs.draw(rng))
            if min(pair) >= 1 and sum(pair) <= room:
                break
            num_refused += 1
        else:
            error = WorkloadError(
                f"{MAX_DRAWS} draws of {inputs.distribution} lengths gave none between 1 and "
                f"the {room} tokens of the model"
            )
            error.add_note("lower --random-range-ratio")
            raise error
        pairs.append(pair)
    return pairs, num_refused
