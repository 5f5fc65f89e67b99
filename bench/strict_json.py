"""JSON that every parser accepts: no NaN, no Infinity, in either direction.

Python writes `NaN` and `Infinity` unless told otherwise, which is not JSON (RFC 8259, section 6):
other tools refuse the file, and a comparison with NaN is always false, so a gate lets it pass. A
measured value that is not finite is therefore null. A *setting* may be infinite on purpose (all
requests at once, constant gaps): it is the text "inf", as in vLLM's result files.
"""

import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

INFINITE_SETTINGS = frozenset({"request_rate", "request_rates", "burstiness"})
"""Settings of which infinity is a legitimate value."""


def strict(value: Any, key: str = "") -> Any:
    """Return a copy of `value` made of JSON's own types, without numbers that JSON lacks.

    Takes dataclasses, mappings, sequences, sets, enumerations, paths and numpy's scalars; `key`
    is the name under which the value stands.
    """
    if isinstance(value, enum.Enum):
        return strict(value.value, key)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "inf" if value == math.inf and key in INFINITE_SETTINGS else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: strict(getattr(value, name), name) for name in names}
    if isinstance(value, Mapping):
        return {str(name): strict(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item, key) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(strict(item, key) for item in value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return strict(value.tolist(), key)
    raise TypeError(f"no JSON form for {type(value).__name__} under `{key}`")


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Write strict JSON; on one line unless `indent` is given."""
    plain = strict(value)
    text = json.dumps(plain, allow_nan=False, ensure_ascii=False, indent=indent)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, as in names that are not valid UTF-8
        text = json.dumps(plain, allow_nan=False, indent=indent)
    return text


def loads(text: str | bytes) -> Any:
    """Read JSON and raise ValueError on what is not: NaN, Infinity, numbers beyond a float."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def setting(value: float | str) -> float:
    """Return a setting as a number: the opposite of writing infinity as "inf"."""
    return float(value)


def digest(value: Any) -> str:
    """Return the sha256 of the canonical JSON form: equal values, whatever their key order."""
    text = json.dumps(
        strict(value), allow_nan=False, ensure_ascii=True, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the range of a number")
    return number
