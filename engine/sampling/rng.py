"""Counter-based noise: a draw is a pure function of (request seed, position, stream).

A stateful generator hands out its next number to whoever asks first, so a request's text comes
to depend on its neighbours in the batch, on how its prompt is cut in chunks and on preemption.
Here no state exists: the number for output position 57 of a request is a hash of the request's
seed and 57, as in the counter-based generators of Salmon et al. 2011 ("Parallel random numbers:
as easy as 1, 2, 3"). The hash is the finalizer of SplitMix64 (Steele et al. 2014, figure 16),
applied once per word; it uses only 64-bit integer operations, so that a GPU kernel can repeat
it bit for bit.
"""

import hashlib
from typing import Final

TARGET: Final = 0
"""Stream that draws output tokens from the model's own distribution."""
ACCEPT: Final = 1
"""Reserved for the accept-or-reject decision about a speculated token."""
RESIDUAL: Final = 2
"""Reserved for the token that replaces a rejected one."""
DRAFT: Final = 3
"""Reserved for the draft model's own draws."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: SplitMix64's increment
_SEEDED = 1
_UNSEEDED = 2


def _mix(word: int) -> int:
    """Spread every bit of a 64-bit word over all bits of the result (a bijection)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _hash(*words: int) -> int:
    """Chain words of any sign and size (taken modulo 2^64) into one 64-bit word."""
    state = 0
    for word in words:
        state = _mix(((state + _GOLDEN) ^ word) & _MASK)
    return state


def uniform(seed: int, position: int, stream: int = TARGET) -> float:
    """Return this position's number in the open interval (0, 1).

    It is an odd multiple of 2^-53: 52 random bits and a half step that keeps it off both ends.
    """
    return ((_hash(seed, position, stream) >> 12) + 0.5) * 2.0**-52


def request_seed(
    engine_seed: int, seed: int | None, request_id: int | str, answer_index: int
) -> int:
    """Return the 64-bit key of one answer's noise, to be stored in `Request.rng_seed`.

    With a seed of its own a request depends on nothing else; without one it depends on the
    engine's seed and on its id, or on its ordinal where runs are to repeat under fresh ids.
    """
    if seed is not None:
        return _hash(_SEEDED, seed, answer_index)
    if isinstance(request_id, str):
        digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
        request_id = int.from_bytes(digest, "little")
    return _hash(_UNSEEDED, engine_seed, request_id, answer_index)
