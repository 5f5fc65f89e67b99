"""Task files: YAML read with line numbers, includes merged, variants made, every key checked.

A mistake in a task file is found before any data or model is touched, and named with its file and
line. Python functions (`!function`), which the harness runs from beside the file, are refused: a
task is data here, and what a template cannot say is a filter of templates.py.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmbench.bench.errors import BenchConfigError

STOCK_FOLDER = Path(__file__).parent / "tasks"

_TEXT, _WHOLE, _FLAG = "text", "a whole number", "true or false"
_LIST, _MAPPING, _NOTHING = "a list", "a mapping", "null"

TASK_KEYS: Mapping[str, tuple[str, ...]] = {
    "task": (_TEXT,),
    "task_alias": (_TEXT,),
    "tag": (_TEXT, _LIST),
    "dataset_path": (_TEXT, _NOTHING),
    "dataset_name": (_TEXT, _NOTHING),
    "dataset_kwargs": (_MAPPING, _NOTHING),
    "training_split": (_TEXT, _NOTHING),
    "validation_split": (_TEXT, _NOTHING),
    "test_split": (_TEXT, _NOTHING),
    "fewshot_split": (_TEXT, _NOTHING),
    "fewshot_config": (_MAPPING,),
    "num_fewshot": (_WHOLE, _NOTHING),
    "output_type": (_TEXT,),
    "description": (_TEXT,),
    "doc_to_text": (_TEXT,),
    "doc_to_choice": (_TEXT, _LIST),
    "doc_to_target": (_TEXT, _WHOLE),
    "gen_prefix": (_TEXT, _NOTHING),
    "target_delimiter": (_TEXT,),
    "fewshot_delimiter": (_TEXT,),
    "generation_kwargs": (_MAPPING,),
    "filter_list": (_LIST,),
    "metric_list": (_LIST,),
    "repeats": (_WHOLE,),
    "should_decontaminate": (_FLAG,),
    "doc_to_decontamination_query": (_TEXT,),
    "metadata": (_MAPPING,),
    "include": (_TEXT, _LIST),
    # beyond the harness; see task.py
    "summary": (_TEXT,),
    "local_files": (_MAPPING,),
    "local_filter": (_MAPPING,),
    "official_sizes": (_MAPPING,),
    "official_mix": (_MAPPING,),
    "doc_fields": (_MAPPING,),
    "doc_to_contexts": (_TEXT,),
    "doc_to_gold": (_TEXT,),
    "doc_to_original": (_TEXT,),
    "primary_metric": (_TEXT,),
    "variants": (_MAPPING,),
    "override": (_FLAG,),
}
GROUP_KEYS: Mapping[str, tuple[str, ...]] = {
    "group": (_TEXT,),
    "group_alias": (_TEXT,),
    "task": (_LIST,),
    "aggregate_metric_list": (_LIST, _NOTHING),
    "tag": (_TEXT, _LIST),
    "metadata": (_MAPPING,),
    "include": (_TEXT, _LIST),
    "summary": (_TEXT,),
    "override": (_FLAG,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """The keys of a task or group, merged and with its variant put in, and where they stand."""

    path: Path
    keys: Mapping[str, Any]
    lines: Mapping[str, str]  # key → "file:line"
    family: str | None = None

    def refuse(self, key: str | None, message: str) -> BenchConfigError:
        """Return the error that a key is wrong."""
        return BenchConfigError(f"{self.lines.get(key or '', str(self.path))}: {message}")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML without Python objects, and without a key given twice."""


def _mapping(loader: Any, node: Any) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(
                problem="a key needs to be plain text", problem_mark=key_node.start_mark
            )
        if key_node.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"the key {key_node.value!r} is given twice",
                problem_mark=key_node.start_mark,
            )
        seen.add(key_node.value)
    loader.flatten_mapping(node)
    return dict(loader.construct_pairs(node, deep=True))


def _function(loader: Any, node: Any) -> None:
    raise yaml.MarkedYAMLError(
        problem=f"Python functions are not run (!function {node.value}); say it as a template",
        problem_mark=node.start_mark,
    )


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_constructor("!function", _function)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_scalar)


def read_definitions(path: Path) -> list[Definition]:
    """Read a file: one task or group, a task for each variant, or none if it names neither.

    Raises:
        BenchConfigError: with file and line of what is wrong.
    """
    keys, lines = _read(path, ())
    name = "group" if "group" in keys else "task"
    if name not in keys:
        return []
    definition = Definition(path=path, keys=keys, lines=lines)
    _check_keys(definition, GROUP_KEYS if name == "group" else TASK_KEYS)
    variants = keys.get("variants")
    if variants is None:
        return [definition]
    if len(variants) != 1 or not all(isinstance(table, dict) for table in variants.values()):
        raise definition.refuse("variants", "variants needs one name with a mapping of its values")
    ((placeholder, table),) = variants.items()
    made = []
    for value, extra in table.items():
        merged = {key: item for key, item in keys.items() if key != "variants"} | (extra or {})
        filled = Definition(
            path=path,
            keys=_fill(merged, f"<{placeholder}>", str(value)),
            lines=lines,
            family=str(keys["task"]),
        )
        _check_keys(filled, TASK_KEYS)
        made.append(filled)
    return made


def _read(path: Path, including: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of a file over those of what it includes, and the line of each."""
    if path in including:
        raise BenchConfigError(f"{path} includes itself")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchConfigError(f"cannot read the task file {path}: {error}") from error
    try:
        node: Any = yaml.compose(text, Loader=_Loader)
        found: Any = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BenchConfigError(f"{path}:{line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise BenchConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise BenchConfigError(f"{path} holds no mapping of keys, found {type(found).__name__}")
    lines = {str(key.value): f"{path}:{key.start_mark.line + 1}" for key, _ in node.value}
    included = found.pop("include", [])
    keys: dict[str, Any] = {}
    all_lines: dict[str, str] = {}
    for name in [included] if isinstance(included, str) else included:
        below = _find_included(path, str(name), lines["include"])
        more, more_lines = _read(below, (*including, path))
        keys |= more
        all_lines |= more_lines
    return keys | {str(key): value for key, value in found.items()}, all_lines | lines


def _find_included(path: Path, name: str, where: str) -> Path:
    places = [path.parent / name, STOCK_FOLDER / name, STOCK_FOLDER / f"{name}.yaml"]
    for place in places:
        if place.is_file():
            return place.resolve()
    error = BenchConfigError(f"{where}: no file {name} to include beside it, nor a stock task")
    error.add_note("stock files are named after their task, as hellaswag.yaml")
    raise error


def _check_keys(definition: Definition, known: Mapping[str, tuple[str, ...]]) -> None:
    for key, value in definition.keys.items():
        if key not in known:
            error = definition.refuse(key, f"unknown key {key!r}")
            close = difflib.get_close_matches(key, known, n=1)
            if close:
                error.add_note(f"did you mean {close[0]}?")
            raise error
        if _kind(value) not in known[key]:
            raise definition.refuse(key, f"{key} needs {' or '.join(known[key])}, found {value!r}")


def _kind(value: Any) -> str:
    if value is None:
        return _NOTHING
    if isinstance(value, bool):
        return _FLAG
    kinds = {str: _TEXT, int: _WHOLE, list: _LIST, dict: _MAPPING}
    return kinds.get(type(value), type(value).__name__)


def _fill(value: Any, placeholder: str, text: str) -> Any:
    if isinstance(value, str):
        return value.replace(placeholder, text)
    if isinstance(value, dict):
        return {key: _fill(item, placeholder, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, placeholder, text) for item in value]
    return value
