"""Results in the layout of lm-evaluation-harness 0.4.13, for tools that read the harness's files.

    <folder>/<model>/results_<date>.json         scores under "metric,filter", versions, settings
    <folder>/<model>/samples_<task>_<date>.jsonl one line a document and filter

Scores are ours and stay what they are; the harness's names are used where it has one (`acc_bytes`
for our `acc_norm_bytes`, `acc` for MC2). Where the harness gives no standard error it writes "N/A".
Keys that describe the harness itself, its version and commit, are left out: it has not run.
"""

import datetime
import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench import strict_json
from llmbench.bench.accuracy.aggregate import GroupScore, TaskScore
from llmbench.bench.accuracy.items import ItemRecord, items_path, read_items
from llmbench.bench.accuracy.metric_scores import MetricScore
from llmbench.bench.errors import ResultsError

if TYPE_CHECKING:
    from llmbench.bench.accuracy.eval_plan import PreparedEval, PreparedTask
    from llmbench.bench.accuracy.model import EvaluatedModel
    from llmbench.bench.accuracy.prompts import Prompt
    from llmbench.bench.accuracy.task import TaskGroup

HARNESS_METRICS = {"acc_norm_bytes": "acc_bytes", "mc2": "acc"}
"""Our name of a metric → the harness's, where they differ."""

NO_FILTER = "none"
NOT_AVAILABLE = "N/A"

_UNSAFE = re.compile(r'["<>:/|\\?*\[\]]+')


def write_lm_eval(
    folder: Path,
    prepared: "PreparedEval",
    model: "EvaluatedModel",
    *,
    now: datetime.datetime | None = None,
) -> list[Path]:
    """Write a finished run's results and samples beside its own; returns the new files.

    Tasks without a document in this limit or shard, and groups that lack one, are left out.

    Raises:
        ResultsError: the folder holds no scores, or not those of `prepared`.
    """
    try:
        scores = strict_json.loads((folder / "scores.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ResultsError(f"expected the scores of a run in {folder}: {error}") from error
    tasks = {name: TaskScore.from_record(one) for name, one in scores["tasks"].items()}
    groups = {name: GroupScore.from_record(one) for name, one in scores["groups"].items()}
    date = (now or datetime.datetime.now()).isoformat().replace(":", "-")
    target = folder / _UNSAFE.sub("__", model.name)
    target.mkdir(parents=True, exist_ok=True)
    hashes, written = {}, []
    asked = [each for each in prepared.tasks if each.prompts]
    for each in asked:
        name = each.task.name
        if name not in tasks:
            raise ResultsError(f"expected a score of {name} in {folder}, found none")
        rows = list(sample_rows(each, read_items(items_path(folder, name))))
        hashes[name] = _sha256(
            "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)
        )
        path = target / f"samples_{name}_{date}.jsonl"
        path.write_text("".join(_line(row) for row in rows), encoding="utf-8")
        written.append(path)
    document = {
        **_scores(asked, prepared.groups, tasks, groups),
        **_settings(prepared, model),
        "task_hashes": hashes,
    }
    path = target / f"results_{date}.json"
    text = json.dumps(document, indent=2, ensure_ascii=False, default=str)
    path.write_text(text, encoding="utf-8")
    return [path, *written]


def sample_rows(prepared: "PreparedTask", items: Sequence[ItemRecord]) -> Iterator[dict[str, Any]]:
    """Yield what the harness logs of each document, filter by filter."""
    prompts = {prompt.doc_id: prompt for prompt in prepared.prompts}
    task = prepared.task
    filters = [one.name for one in task.filters] if task.generation is not None else [NO_FILTER]
    for name in filters:
        for item in items:
            if (prompt := prompts.get(item.doc_id)) is None:
                continue  # of another limit
            answers = _answers(item)
            kept = [item.filtered.get(name, "")] if task.generation is not None else answers
            metrics = _item_metrics(item, name)
            if "f1" in task.metrics:
                metrics["f1"] = [item.gold, item.pick]
            yield {
                "doc_id": item.doc_id,
                "doc": prompt.doc,
                "target": _target(prompt),
                "arguments": _arguments(prompt, task.definition.get("generation_kwargs")),
                "resps": [[answer] for answer in answers],
                "filtered_resps": kept,
                "filter": name,
                "metrics": list(metrics),
                "doc_hash": item.doc_hash,
                "prompt_hash": item.prompt_hash,
                "target_hash": item.target_hash,
                **metrics,
            }


def _answers(item: ItemRecord) -> list[Any]:
    """What the model said to each request, numbers as texts."""
    if item.response is not None:
        return [item.response]
    logs = item.loglikelihoods or ()
    if item.text_size is not None:
        return [str(value) for value in logs]
    return [[str(log), str(greedy)] for log, greedy in zip(logs, item.is_greedy, strict=True)]


def _item_metrics(item: ItemRecord, filter_name: str) -> dict[str, Any]:
    if item.text_size is not None:
        words, num_bytes = item.text_size
        total = math.fsum(item.loglikelihoods or (math.nan,))
        log = total if math.isfinite(total) else None
        return {
            "word_perplexity": [log, words],
            "byte_perplexity": [log, num_bytes],
            "bits_per_byte": [log, num_bytes],
        }
    split = {name: name.partition(",") for name in item.metrics}
    return {
        HARNESS_METRICS.get(name, name): item.metrics[key]
        for key, (name, _, of_filter) in split.items()
        if (of_filter or NO_FILTER) == filter_name
    }


def _arguments(prompt: "Prompt", generation: Any) -> dict[str, dict[str, Any]]:
    asked: list[tuple[Any, ...]]
    if prompt.generation is not None:
        asked = [(prompt.pairs[0][0], generation)]
    elif prompt.text_size is not None:
        asked = [(text,) for _, text in prompt.pairs]
    else:
        asked = list(prompt.pairs)
    return {
        f"gen_args_{number}": {f"arg_{place}": value for place, value in enumerate(arguments)}
        for number, arguments in enumerate(asked)
    }


def _target(prompt: "Prompt") -> str:
    """The harness's target, which the prompt holds as a digest: an index, or some text."""
    candidates = [str(prompt.gold), "0", prompt.pairs[0][1], prompt.pairs[0][1].lstrip()]
    candidates += prompt.choices
    if isinstance(prompt.gold, tuple):
        candidates.append(str(list(prompt.gold)))
    for candidate in candidates:
        if _sha256(candidate) == prompt.target_hash:
            return candidate
    return str(prompt.gold)


def _scores(
    asked: "Sequence[PreparedTask]",
    all_groups: "Sequence[TaskGroup]",
    tasks: Mapping[str, TaskScore],
    groups: Mapping[str, GroupScore],
) -> dict[str, Any]:
    results: dict[str, dict[str, Any]] = {}
    shots: dict[str, int] = {}
    higher: dict[str, dict[str, bool | None]] = {}
    for each in asked:
        name, score = each.task.name, tasks[each.task.name]
        results[name] = {"name": name, "alias": each.task.alias, "sample_len": score.num_items}
        for key, metric in score.metrics.items():
            results[name] |= _metric(key, metric)
        shots[name] = each.num_shots
        higher[name] = {
            _harness_name(key)[0]: metric.higher_is_better for key, metric in score.metrics.items()
        }
    scored = [group for group in all_groups if group.name in groups]
    group_results = {group.name: _group(group, groups[group.name]) for group in scored}
    for group in scored:  # members before the groups that hold them
        found = {shots[member] for member in group.members if member in shots}
        if len(found) == 1:
            shots[group.name] = found.pop()
        merged: dict[str, bool | None] = {}
        for member in group.members:
            for metric_name, is_higher in higher.get(member, {}).items():
                same = merged.get(metric_name, is_higher) == is_higher
                merged[metric_name] = is_higher if same else None
        higher[group.name] = merged
    versions = {each.task.name: each.task.version for each in asked}
    versions |= {group.name: group.version for group in scored}
    return {
        "results": results | group_results,
        **({"groups": group_results} if group_results else {}),
        "group_subtasks": {group.name: list(group.members) for group in scored},
        "configs": {
            each.task.name: {**each.task.definition, "num_fewshot": each.num_shots}
            for each in sorted(asked, key=lambda each: each.task.name)
        },
        "versions": dict(sorted(versions.items())),
        "n-shot": dict(sorted(shots.items())),
        "higher_is_better": dict(sorted(higher.items())),
        "n-samples": {
            each.task.name: {
                "original": each.num_docs,
                "effective": tasks[each.task.name].num_items,
            }
            for each in asked
        },
    }


def _group(group: "TaskGroup", score: GroupScore) -> dict[str, Any]:
    """The group's score by its own weighting, which is also that of the harness's group."""
    name = group.metric or "average"  # of unlike metrics; the harness has none
    metric = score.primary
    return {
        "alias": group.alias,
        "name": group.name,
        "sample_len": score.num_items,
        **_metric(name, metric),
        "sample_count": {",".join(_harness_name(name)): score.num_items},
    }


def _metric(key: str, metric: MetricScore) -> dict[str, Any]:
    name, filter_name = _harness_name(key)
    error = NOT_AVAILABLE if metric.stderr is None else metric.stderr
    return {f"{name},{filter_name}": metric.value, f"{name}_stderr,{filter_name}": error}


def _harness_name(key: str) -> tuple[str, str]:
    name, _, filter_name = key.partition(",")
    return HARNESS_METRICS.get(name, name), filter_name or NO_FILTER


def _settings(prepared: "PreparedEval", model: "EvaluatedModel") -> dict[str, Any]:
    config, tokenizer = prepared.config, model.tokenizer
    chat = prepared.facts()["chat"]
    template = None if chat is None else chat["template"]
    instruction = config.system_instruction
    specials = {
        f"tokenizer_{kind}_token": [
            getattr(tokenizer, f"{kind}_token"),
            str(getattr(tokenizer, f"{kind}_token_id")),
        ]
        for kind in ("pad", "eos", "bos")
    }
    return {
        "config": {
            "model": "llmbench",
            "model_args": {"pretrained": model.name},
            "model_identity": model.identity,
            "batch_size": None,  # the engine batches as it likes
            "batch_sizes": [],
            "device": model.identity.get("device"),
            "use_cache": None,
            "limit": dict(config.limits) if isinstance(config.limits, Mapping) else config.limits,
            "bootstrap_iters": 0,
            "gen_kwargs": None,
            "fewshot_seed": config.seed,
        },
        "date": datetime.datetime.now().timestamp(),
        "transformers_version": importlib.metadata.version("transformers"),
        "llmbench_version": importlib.metadata.version("llmbench"),
        **specials,
        "eot_token_id": tokenizer.eos_token_id,
        "max_length": config.max_length or model.max_length,
        "model_source": "llmbench",
        "model_name": model.name,
        "model_name_sanitized": _UNSAFE.sub("__", model.name),
        "system_instruction": instruction,
        "system_instruction_sha": None if instruction is None else _sha256(instruction),
        "fewshot_as_multiturn": bool(chat and chat["fewshot_as_multiturn"]),
        "chat_template": template,
        "chat_template_sha": None if template is None else _sha256(template),
    }


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
