"""From the keys of a task file to a `Task` or `TaskGroup`, with every value checked.

Defaults are those of lm-evaluation-harness: one blank before an answer, an empty line between
shots, answers written greedily up to the next empty line and at most 256 tokens long.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from llmbench.bench.accuracy.task import (
    DEFAULT_MAX_GEN_TOKS,
    AnswerFilter,
    Generation,
    OutputType,
    Sampler,
    Task,
    TaskGroup,
)
from llmbench.bench.accuracy.task_yaml import Definition
from llmbench.bench.accuracy.templates import check_template

FILE_BUILDERS = ("json", "csv", "parquet")  # dataset_path of the harness for files of one's own

_DEFAULT_METRICS: Mapping[str, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}
_METRICS: Mapping[str, tuple[str, ...]] = {
    **_DEFAULT_METRICS,
    "multiple_choice": (
        "acc",
        "acc_norm",
        "acc_norm_bytes",
        "acc_bytes",
        "mc2",
        "exact_match",
        "f1",
    ),
}
_TEMPLATES = (
    "description",
    "doc_to_text",
    "doc_to_choice",
    "doc_to_target",
    "doc_to_contexts",
    "doc_to_gold",
    "doc_to_original",
    "gen_prefix",
)


def parse_task(found: Definition) -> Task:
    """Make the task that a definition describes.

    Raises:
        BenchConfigError: with file and line of the key that is missing or wrong.
    """
    keys = found.keys
    output_type = _one_of(found, "output_type", get_args(OutputType))
    _check_templates(found, output_type)
    if not keys.get("test_split") and not keys.get("validation_split"):
        raise found.refuse(None, "names neither test_split nor validation_split: nothing to ask")
    if keys.get("repeats", 1) != 1:
        raise found.refuse("repeats", "repeats must be 1: each question is asked once")
    shots = keys.get("num_fewshot")
    if shots is not None and shots < 0:
        raise found.refuse("num_fewshot", f"num_fewshot must be at least 0, found {shots}")
    _check_official(found)
    dataset_path, local_files = _data(found)
    metrics, settings = _metrics(found, output_type)
    filters = tuple(_filter(found, item) for item in keys.get("filter_list") or ())
    choice = keys.get("doc_to_choice")
    fewshot_delimiter = keys.get("fewshot_delimiter", "\n\n")
    is_written = output_type == "generate_until"
    return Task(
        name=keys["task"],
        version=(keys.get("metadata") or {}).get("version", 0),
        summary=keys.get("summary", ""),
        output_type=output_type,
        dataset_path=dataset_path,
        dataset_name=keys.get("dataset_name"),
        local_files=local_files,
        local_filter=keys.get("local_filter", {}),
        official_sizes=keys.get("official_sizes", {}),
        official_mix=keys.get("official_mix"),
        training_split=keys.get("training_split"),
        validation_split=keys.get("validation_split"),
        test_split=keys.get("test_split"),
        fewshot_split=keys.get("fewshot_split"),
        num_fewshot=shots,
        sampler=_sampler(found),
        description=keys.get("description", ""),
        doc_fields=keys.get("doc_fields", {}),
        doc_to_text=keys.get("doc_to_text", ""),
        doc_to_choice=tuple(choice) if isinstance(choice, list) else choice,
        doc_to_target=keys["doc_to_target"],
        doc_to_contexts=keys.get("doc_to_contexts"),
        doc_to_gold=keys.get("doc_to_gold"),
        doc_to_original=keys.get("doc_to_original"),
        gen_prefix=keys.get("gen_prefix"),
        target_delimiter=keys.get("target_delimiter", " "),
        fewshot_delimiter=fewshot_delimiter,
        generation=_generation(found, fewshot_delimiter) if is_written else None,
        filters=filters,
        metrics=metrics,
        metric_settings=settings,
        primary_metric=_primary(found, metrics, filters),
        alias=keys.get("task_alias", keys["task"]),
        tags=_texts(found, "tag"),
        family=found.family,
        path=found.path,
        definition=keys,
    )


def parse_group(found: Definition, members: Sequence[str]) -> TaskGroup | None:
    """Make the group that a definition describes; None if it takes no mean of its members."""
    entries = found.keys.get("aggregate_metric_list") or []
    if not entries:
        return None
    if not all(isinstance(entry, dict) and "metric" in entry for entry in entries):
        raise found.refuse("aggregate_metric_list", "each entry needs the key metric")
    first = entries[0]
    return TaskGroup(
        name=found.keys["group"],
        alias=found.keys.get("group_alias", found.keys["group"]),
        summary=found.keys.get("summary", ""),
        members=tuple(dict.fromkeys(members)),
        metric=None if first["metric"] == "primary" else first["metric"],
        weighting="items" if first.get("weight_by_size", True) else "tasks",
        version=(found.keys.get("metadata") or {}).get("version", 0),
    )


def _check_templates(found: Definition, output_type: str) -> None:
    needed = ["doc_to_target"]
    if output_type == "multiple_choice" and "doc_to_contexts" not in found.keys:
        needed.append("doc_to_choice")
    if output_type != "loglikelihood_rolling" and "doc_to_contexts" not in found.keys:
        needed.append("doc_to_text")
    if "doc_to_contexts" in found.keys:
        needed.append("doc_to_gold")
    for key in needed:
        if key not in found.keys:
            raise found.refuse(None, f"{found.keys['task']} lacks {key}, needed by {output_type}")
    templates = {key: found.keys.get(key) for key in _TEMPLATES}
    for name, source in (found.keys.get("doc_fields") or {}).items():
        if not isinstance(source, str):
            raise found.refuse("doc_fields", f"doc_fields.{name} needs a template: {source!r}")
        templates[f"doc_fields.{name}"] = source
    for key, source in templates.items():
        if isinstance(source, str):
            check_template(source, f"{found.lines.get(key.split('.')[0], found.path)}: {key}")
    choices = found.keys.get("doc_to_choice")
    if isinstance(choices, list) and not all(isinstance(item, str) for item in choices):
        error = found.refuse("doc_to_choice", f"doc_to_choice needs a list of texts: {choices!r}")
        error.add_note("YAML reads yes, no, on and off as true and false: put them in quotes")
        raise error


def _check_official(found: Definition) -> None:
    """Refuse facts on the published data set that are no counts."""
    mix = found.keys.get("official_mix")
    if mix is not None and (
        set(mix) != {"field", "split", "counts"} or not isinstance(mix["counts"], dict)
    ):
        raise found.refuse("official_mix", "official_mix needs field, split and counts")
    for key, counts in (
        ("official_sizes", found.keys.get("official_sizes", {})),
        ("official_mix", mix["counts"] if mix else {}),
    ):
        if not all(type(count) is int and count > 0 for count in counts.values()):
            raise found.refuse(key, f"{key} needs whole numbers above 0, found {counts!r}")


def _data(found: Definition) -> tuple[str | None, dict[str, tuple[str, ...]]]:
    """Where the rows are: the set on the hub, and the files of each split."""
    path, key, files = found.keys.get("dataset_path"), "local_files", found.keys.get("local_files")
    if path in FILE_BUILDERS:
        path, key = None, "dataset_kwargs"
        files = (found.keys.get("dataset_kwargs") or {}).get("data_files")
        if not isinstance(files, dict):
            error = found.refuse(key, f"data_files needs a mapping split: path, found {files!r}")
            error.add_note("a bare path would be a split named train, whatever it holds")
            raise error
    if path is None and not files:
        raise found.refuse(None, "names neither a dataset_path nor local_files")
    made = {}
    for split, paths in (files or {}).items():
        listed = paths if isinstance(paths, list) else [paths]
        if not listed or not all(isinstance(item, str) and item for item in listed):
            raise found.refuse(key, f"split {split} needs a path or a list of paths: {paths!r}")
        if remote := [item for item in listed if "://" in item]:
            raise found.refuse(key, f"split {split} needs local files, found {remote[0]}")
        made[str(split)] = tuple(listed)
    return path, made


def _metrics(
    found: Definition, output_type: str
) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    entries = found.keys.get("metric_list")
    if entries is None:
        return _DEFAULT_METRICS[output_type], {}
    settings = {}
    for entry in entries:
        if not isinstance(entry, dict) or "metric" not in entry:
            raise found.refuse("metric_list", f"each entry needs the key metric, found {entry!r}")
        name = str(entry["metric"])
        if name not in _METRICS[output_type]:
            raise found.refuse(
                "metric_list",
                f"no metric {name!r} for {output_type}; known: {', '.join(_METRICS[output_type])}",
            )
        settings[name] = {key: value for key, value in entry.items() if key != "metric"}
    if not settings:
        raise found.refuse("metric_list", "metric_list is empty")
    return tuple(settings), settings


def _primary(found: Definition, metrics: tuple[str, ...], filters: Sequence[AnswerFilter]) -> str:
    names = list(metrics)
    if found.keys["output_type"] == "generate_until":
        chains = [each.name for each in filters] or ["none"]
        names = [f"{metric},{chain}" for metric in metrics for chain in chains]
    primary: str = found.keys.get("primary_metric", names[0])
    if primary not in names:
        raise found.refuse(
            "primary_metric", f"primary_metric {primary!r} is not one of {', '.join(names)}"
        )
    return primary


def _filter(found: Definition, entry: Any) -> AnswerFilter:
    steps: Any = entry.get("filter") if isinstance(entry, dict) else None
    is_whole = isinstance(steps, list) and all(
        isinstance(step, dict) and isinstance(step.get("function"), str) for step in steps
    )
    if not is_whole or not isinstance(entry.get("name"), str):
        raise found.refuse(
            "filter_list", f"each filter needs a name and a list of functions, found {entry!r}"
        )
    return AnswerFilter(name=entry["name"], steps=tuple(steps))


def _generation(found: Definition, fewshot_delimiter: str) -> Generation:
    settings = dict(found.keys.get("generation_kwargs") or {})
    until = settings.pop("until", [fewshot_delimiter])
    until = [until] if isinstance(until, str) else until
    budget = settings.pop("max_gen_toks", DEFAULT_MAX_GEN_TOKS)
    temperature = settings.pop("temperature", 0.0)
    does_sample = settings.pop("do_sample", False)
    problems = {
        "until needs texts that are not empty": not isinstance(until, list)
        or not all(isinstance(text, str) and text for text in until),
        "max_gen_toks needs a whole number above 0": type(budget) is not int or budget < 1,
        "temperature needs a number of at least 0": type(temperature) not in (int, float)
        or not temperature >= 0,
        "do_sample needs true or false": not isinstance(does_sample, bool),
        f"unknown settings {', '.join(map(str, settings))}; "
        f"known: until, max_gen_toks, temperature, do_sample": bool(settings),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise found.refuse("generation_kwargs", f"generation_kwargs: {problem}")
    return Generation(
        until=tuple(until),
        max_gen_toks=budget,
        temperature=float(temperature),
        do_sample=does_sample,
    )


def _sampler(found: Definition) -> Sampler:
    settings = found.keys.get("fewshot_config") or {}
    unknown = set(settings) - {"sampler"}
    if unknown or settings.get("sampler", "default") not in get_args(Sampler):
        raise found.refuse(
            "fewshot_config",
            f"fewshot_config takes sampler: {' or '.join(get_args(Sampler))}, found {settings!r}",
        )
    sampler: Sampler = settings.get("sampler", "default")
    return sampler


def _one_of(found: Definition, key: str, known: Sequence[str]) -> Any:
    value = found.keys.get(key)
    if value not in known:
        raise found.refuse(key, f"{key} must be one of {', '.join(known)}, found {value!r}")
    return value


def _texts(found: Definition, key: str) -> tuple[str, ...]:
    value = found.keys.get(key, [])
    return (value,) if isinstance(value, str) else tuple(map(str, value))
