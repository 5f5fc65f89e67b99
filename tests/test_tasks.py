"""Task files: what stock names stand for, and that a broken file is named with its line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from llmbench.bench.accuracy.task import Task
from llmbench.bench.accuracy.task_catalog import list_tasks, load_tasks
from llmbench.bench.accuracy.task_yaml import STOCK_FOLDER
from llmbench.bench.errors import BenchConfigError

MINIMAL = """\
task: colors
local_files: {test: colors.jsonl}
output_type: multiple_choice
test_split: test
doc_to_text: "Q: {{question}}"
doc_to_choice: ["red", "blue"]
doc_to_target: label
"""

STOCK_TASKS = [
    "arc_challenge",
    "arc_easy",
    "gsm8k",
    "hellaswag",
    "kobest_boolq",
    "kobest_copa",
    "kobest_hellaswag",
    "kobest_sentineg",
    "kobest_wic",
    "piqa",
    "truthfulqa_mc1",
    "truthfulqa_mc2",
    "wikitext",
    "winogrande",
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a task file and return its path."""

    def save(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return save


def only(path: Path, name: str = "colors") -> Task:
    (task,) = load_tasks([name], include=[path]).tasks
    return task


@pytest.mark.parametrize("name", STOCK_TASKS)
def test_stock_task_loads_under_its_name(name: str) -> None:
    (task,) = load_tasks([name]).tasks
    assert task.name == name
    assert task.summary
    assert task.official_sizes[task.eval_split] > 0
    assert load_tasks([name]).groups == ()


def test_mmlu_has_57_subjects_from_one_file() -> None:
    selection = load_tasks(["mmlu"])
    assert len(selection.tasks) == 57
    assert {task.family for task in selection.tasks} == {"mmlu_<subject>"}
    assert sum(task.official_sizes["test"] for task in selection.tasks) == 14042
    assert {task.sampler for task in selection.tasks} == {"first_n"}
    (group,) = selection.groups
    assert group.members == tuple(task.name for task in selection.tasks)
    assert (group.metric, group.weighting) == ("acc", "items")


def test_mmlu_subject_stands_in_all_its_keys() -> None:
    (task,) = load_tasks(["mmlu_us_foreign_policy"]).tasks
    assert task.dataset_name == "us_foreign_policy"
    assert task.local_filter == {"subject": "us_foreign_policy"}
    assert "<" not in task.description
    assert load_tasks(["mmlu_virology"]).tasks[0].digest != task.digest


def test_mmlu_parts_cover_the_whole() -> None:
    parts = ["mmlu_stem", "mmlu_other", "mmlu_social_sciences", "mmlu_humanities"]
    whole = {task.name for task in load_tasks(["mmlu"]).tasks}
    found = [task.name for part in parts for task in load_tasks([part]).tasks]
    assert sorted(found) == sorted(whole)


def test_open_llm_v1_is_the_six_suites_with_their_shots() -> None:
    selection = load_tasks(["open-llm-v1"])
    group = selection.groups[-1]
    assert group.name == "open-llm-v1"
    assert (group.metric, group.weighting) == (None, "tasks")
    shots = {task.name: task.num_fewshot for task in selection.tasks if task.family is None}
    assert shots == {
        "arc_challenge": 25,
        "hellaswag": 10,
        "truthfulqa_mc2": 0,
        "winogrande": 5,
        "gsm8k": 5,
    }
    assert {task.num_fewshot for task in selection.tasks if task.family} == {5}
    primary = {task.name: task.primary_metric for task in selection.tasks}
    assert [primary.get(name, "acc") for name in group.members] == [
        "acc_norm",
        "acc_norm",
        "acc",
        "mc2",
        "acc",
        "exact_match,strict-match",
    ]


def test_members_stand_before_the_group_that_holds_them() -> None:
    assert [group.name for group in load_tasks(["open-llm-v1"]).groups] == ["mmlu", "open-llm-v1"]


def test_openllm_names_the_split_of_shots_as_the_harness_does() -> None:
    selection = load_tasks(["openllm"])
    tasks = {task.name: task for task in selection.tasks}
    assert tasks["hellaswag"].fewshot_split == "train"
    assert tasks["winogrande"].fewshot_split == "train"
    assert tasks["truthfulqa_mc1"].num_fewshot == 0
    assert [group.name for group in selection.groups] == ["mmlu"]


def test_one_task_with_two_meanings_is_refused() -> None:
    with pytest.raises(BenchConfigError, match=r"hellaswag .* twice .* fewshot_split"):
        load_tasks(["hellaswag", "openllm"])


def test_names_are_loaded_once_and_in_order() -> None:
    selection = load_tasks(["piqa", "kobest", "kobest_wic", "piqa"])
    assert [task.name for task in selection.tasks] == [
        "piqa",
        "kobest_boolq",
        "kobest_copa",
        "kobest_hellaswag",
        "kobest_sentineg",
        "kobest_wic",
    ]


def test_unknown_name_comes_with_close_ones() -> None:
    with pytest.raises(BenchConfigError, match="unknown task 'hellaswagg'") as caught:
        load_tasks(["hellaswagg"])
    assert "hellaswag" in caught.value.__notes__[0]


def test_no_name_is_refused() -> None:
    with pytest.raises(BenchConfigError, match="no task"):
        load_tasks([])


def test_list_has_every_task_with_a_line_and_its_shots() -> None:
    lines = {line.name: line for line in list_tasks()}
    assert lines["arc_challenge"].num_fewshot == 25
    assert lines["arc_easy"].num_fewshot == 0
    assert lines["open-llm-v1"].kind == "group"
    assert sum(line.family is not None for line in lines.values()) == 57
    assert all(line.summary and "\n" not in line.summary for line in lines.values())


def test_every_stock_file_says_where_it_is_from() -> None:
    for path in STOCK_FOLDER.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# "), path.name
        assert isinstance(yaml.safe_load(text), dict)


def test_own_task_needs_one_small_file(write: Callable[..., Path]) -> None:
    task = only(write(MINIMAL))
    assert task.is_local
    assert task.metrics == ("acc", "acc_norm")
    assert (task.target_delimiter, task.fewshot_delimiter) == (" ", "\n\n")
    assert task.primary_metric == "acc"


def test_folder_of_task_files_is_read_whole(write: Callable[..., Path], tmp_path: Path) -> None:
    write(MINIMAL)
    write(MINIMAL.replace("colors", "shades"), "other.yml")
    write("note: not a task\n", "notes.yaml")
    assert {only(tmp_path).name, only(tmp_path, "shades").name} == {"colors", "shades"}


def test_included_keys_are_taken_and_overridden(write: Callable[..., Path]) -> None:
    write(MINIMAL, "base.yaml")
    child = write('include: base.yaml\ntask: child\ntarget_delimiter: ""\n', "child.yaml")
    task = only(child, "child")
    assert task.target_delimiter == ""
    assert task.doc_to_text == "Q: {{question}}"


def test_stock_task_can_be_included(write: Callable[..., Path]) -> None:
    task = only(write("include: hellaswag\ntask: mine\nnum_fewshot: 3\n"), "mine")
    assert task.num_fewshot == 3
    assert task.dataset_path == "Rowan/hellaswag"


def test_stock_task_is_replaced_only_on_demand(write: Callable[..., Path]) -> None:
    text = "include: piqa.yaml\ntask: piqa\nnum_fewshot: 2\n"
    with pytest.raises(BenchConfigError, match=r"mine\.yaml:2: piqa is the name") as caught:
        load_tasks(["piqa"], include=[write(text)])
    assert "override: true" in caught.value.__notes__[0]
    assert only(write(text + "override: true\n"), "piqa").num_fewshot == 2


def test_two_own_tasks_of_one_name_are_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    write(MINIMAL, "a.yaml")
    write(MINIMAL, "b.yaml")
    with pytest.raises(BenchConfigError, match=r"b\.yaml:1: colors is the name of .*a\.yaml"):
        load_tasks(["colors"], include=[tmp_path])


def test_own_group_may_set_shots_of_its_members(write: Callable[..., Path]) -> None:
    group = "group: few\ntask:\n  - task: piqa\n    num_fewshot: 4\n  - arc_easy\n"
    selection = load_tasks(["few"], include=[write(group)])
    assert [task.num_fewshot for task in selection.tasks] == [4, None]
    assert selection.groups == ()


def test_variants_make_a_task_each(write: Callable[..., Path]) -> None:
    text = MINIMAL.replace("colors", "colors_<tone>") + "variants: {tone: {dark: , light: }}\n"
    path = write(text)
    assert only(path, "colors_dark").local_files == {"test": ("colors_dark.jsonl",)}
    assert only(path, "colors_light").family == "colors_<tone>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("doc_to_text:", "doc_to_txt:"), r"mine\.yaml:5: unknown key 'doc_to_txt'"),
        (("doc_to_target: label\n", ""), "colors lacks doc_to_target"),
        (('doc_to_choice: ["red", "blue"]\n', ""), "colors lacks doc_to_choice"),
        (('doc_to_text: "Q: {{question}}"\n', ""), "colors lacks doc_to_text"),
        (("multiple_choice", "multiple-choice"), r":3: output_type must be one of"),
        (("multiple_choice", "loglikelihood"), r":3: output_type must be one of"),
        (("test_split: test\n", ""), "neither test_split nor validation_split"),
        (("local_files: {test: colors.jsonl}\n", ""), "neither a dataset_path nor local_files"),
        (("{test: colors.jsonl}", "{test: []}"), r":2: split test needs a path"),
        (("{test: colors.jsonl}", "{test: 'https://x.y/z'}"), r":2: .* needs local files"),
        (("colors.jsonl}", "colors.jsonl"), r"mine\.yaml:\d+: "),
        (("{{question}}", "{{question"), r":5: doc_to_text is not a template"),
        (('["red", "blue"]', "[yes, no]"), r":6: doc_to_choice needs a list of texts"),
        (("test_split: test", "test_split: 3"), r":4: test_split needs text or null, found 3"),
        (("task: colors", "task: colors\nnum_fewshot: -1"), r":2: num_fewshot must be"),
        (("task: colors", "task: colors\ntask: more"), r":2: the key 'task' is given twice"),
        (("task: colors", "task: colors\nrepeats: 2"), r":2: repeats must be 1"),
        (("label\n", "!function utils.target\n"), r":7: Python functions are not run"),
        (("task: colors", "task: colors\nmetric_list: [{metric: bleu}]"), "no metric 'bleu'"),
        (("task: colors", "task: colors\nmetric_list: []"), "metric_list is empty"),
        (("task: colors", "task: colors\nprimary_metric: f1"), "primary_metric 'f1' is not"),
        (("task: colors", "task: colors\nfewshot_config: {split: x}"), "fewshot_config takes"),
        (("task: colors", "task: colors\nfilter_list: [{name: x}]"), "each filter needs"),
        (("task: colors", "task: colors\nofficial_sizes: {test: many}"), "whole numbers above 0"),
        (("task: colors", "task: colors\nvariants: {a: 1}"), ":2: variants needs one name"),
        (("task: colors", "task: colors\ninclude: nowhere.yaml"), ":2: no file nowhere.yaml"),
        (("task: colors", "task: colors\ninclude: mine.yaml"), "includes itself"),
        (("task: colors", "? [a]\n: b\ntask: colors"), ":1: a key needs to be plain text"),
    ],
)
def test_broken_task_file_is_named_with_its_line(
    write: Callable[..., Path], change: tuple[str, str], message: str
) -> None:
    text = MINIMAL.replace(*change)
    assert text != MINIMAL
    with pytest.raises(BenchConfigError, match=message):
        load_tasks(["colors"], include=[write(text)])


def test_misspelt_key_comes_with_the_right_one(write: Callable[..., Path]) -> None:
    with pytest.raises(BenchConfigError) as caught:
        load_tasks(["colors"], include=[write(MINIMAL.replace("doc_to_text", "doc_to_txt"))])
    assert caught.value.__notes__ == ["did you mean doc_to_text?"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{until: ''}", "until needs texts"),
        ("{until: [1]}", "until needs texts"),
        ("{max_gen_toks: 0}", "max_gen_toks needs"),
        ("{temperature: -1}", "temperature needs"),
        ("{temperature: .nan}", "temperature needs"),
        ("{do_sample: 1}", "do_sample needs"),
        ("{top_p: 0.5}", "unknown settings top_p"),
    ],
)
def test_broken_generation_settings_are_refused(
    write: Callable[..., Path], settings: str, message: str
) -> None:
    text = MINIMAL.replace("multiple_choice", "generate_until")
    with pytest.raises(BenchConfigError, match=message):
        load_tasks(["colors"], include=[write(text + f"generation_kwargs: {settings}\n")])


def test_written_answers_stop_where_shots_part_unless_said_otherwise(
    write: Callable[..., Path],
) -> None:
    task = only(write(MINIMAL.replace("multiple_choice", "generate_until")))
    assert task.generation is not None
    assert task.generation.until == ("\n\n",)
    assert (task.generation.max_gen_toks, task.generation.temperature) == (256, 0.0)
    assert task.primary_metric == "exact_match,none"


def test_group_that_holds_itself_is_refused(write: Callable[..., Path]) -> None:
    path = write("group: loop\ntask: [piqa, loop]\n")
    with pytest.raises(BenchConfigError, match="loop holds itself"):
        load_tasks(["loop"], include=[path])


def test_file_without_a_task_is_refused_when_named(write: Callable[..., Path]) -> None:
    with pytest.raises(BenchConfigError, match="names no task"):
        load_tasks(["piqa"], include=[write("note: nothing\n")])


def test_missing_task_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchConfigError, match=r"cannot read the task file .*gone\.yaml"):
        load_tasks(["piqa"], include=[tmp_path / "gone.yaml"])


def test_tasks_need_no_torch() -> None:
    script = (
        "import sys; from llmbench.bench.accuracy import prompts, task_catalog, task_data;"
        "task_catalog.load_tasks(['mmlu']); heavy = {'torch', 'transformers', 'datasets'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
