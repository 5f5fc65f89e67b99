"""Prompts against the harness's own requests, and what templates do with rows they do not fit.

The golden files hold the requests that lm-evaluation-harness 0.4.13 builds for the first documents
of the same local files, seed 1234.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.accuracy.prompts import Prompt, build_prompts
from llmbench.bench.accuracy.task import Task
from llmbench.bench.accuracy.task_catalog import load_tasks
from llmbench.bench.accuracy.task_data import TaskData, load_task_data
from llmbench.bench.accuracy.templates import (
    as_text,
    as_value,
    hellaswag_clean,
    wikitext_detokenize,
)
from llmbench.bench.errors import BenchConfigError, WorkloadError

GOLDEN = [
    "arc_challenge",
    "gsm8k",
    "hellaswag",
    "kobest_boolq",
    "kobest_copa",
    "kobest_hellaswag",
    "kobest_sentineg",
    "kobest_wic",
    "mmlu_abstract_algebra",
    "mmlu_professional_law",
    "mmlu_sociology",
    "truthfulqa_mc1",
    "truthfulqa_mc2",
    "wikitext",
    "winogrande",
]
OWN_TASK = """\
task: own
output_type: multiple_choice
test_split: test
fewshot_split: dev
local_files: {test: t.jsonl, dev: t.jsonl}
doc_to_text: "{{q}}"
doc_to_choice: "{{c}}"
doc_to_target: "{{a}}"
"""


def stock(name: str) -> Task:
    (task,) = load_tasks([name]).tasks
    return task


@pytest.fixture(scope="session")
def golden(data_dir: Path) -> Callable[[str], dict[str, Any]]:
    """Read what the harness asks."""

    def read(name: str) -> dict[str, Any]:
        text = (data_dir / "lmeval_golden" / f"{name}.json").read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text)
        return found

    return read


@pytest.fixture(scope="session")
def loaded(data_dir: Path) -> Callable[[str], TaskData]:
    """Read a stock task's shared files, once."""
    made: dict[str, TaskData] = {}

    def load(name: str) -> TaskData:
        if name not in made:
            made[name] = load_task_data(stock(name), data_dir)
        return made[name]

    return load


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., list[Prompt]]:
    """Build the prompts of a task of one's own."""

    def build(rows: list[dict[str, Any]], keys: str = OWN_TASK, **how: Any) -> list[Prompt]:
        (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        (tmp_path / "own.yaml").write_text(keys, encoding="utf-8")
        (task,) = load_tasks(["own"], include=[tmp_path / "own.yaml"]).tasks
        return build_prompts(task, load_task_data(task, None), **how)

    return build


def arguments(prompt: Prompt) -> list[list[Any]]:
    """What the harness's sample files call the arguments of a document's requests."""
    if prompt.generation is not None:
        settings = {
            "until": list(prompt.generation.until),
            "do_sample": prompt.generation.do_sample,
            "temperature": prompt.generation.temperature,
        }
        return [[prompt.pairs[0][0], settings]]
    if prompt.text_size is not None:
        return [[text] for _, text in prompt.pairs]
    return [list(pair) for pair in prompt.pairs]


@pytest.mark.parametrize("limit", [2, 3, None])
@pytest.mark.parametrize("name", GOLDEN)
def test_requests_equal_the_harness_s(
    golden: Callable[[str], dict[str, Any]],
    loaded: Callable[[str], TaskData],
    name: str,
    limit: int | None,
) -> None:
    wanted = golden(name)
    prompts = build_prompts(
        stock(name), loaded(name), num_fewshot=wanted["n_shot"][name], limit=limit
    )
    assert len(prompts) == (limit or len(loaded(name).docs))
    assert stock(name).version == wanted["version"][name]
    docs = wanted["docs"][:limit]
    assert len(docs) >= 2
    for doc in docs:
        prompt = prompts[doc["doc_id"]]
        assert prompt.doc_id == doc["doc_id"]
        assert prompt.prompt_hash == doc["prompt_hash"]
        if name == "wikitext":  # the stored text is cut, its hash is of the whole
            (stored,) = doc["arguments"]
            text = stored if isinstance(stored, str) else stored[0]
            assert prompt.pairs[0][1].startswith(text)
            assert len(text) > 100
            continue
        assert arguments(prompt) == [list(each) for each in doc["arguments"]]
        target = hashlib.sha256(str(doc["target"]).encode()).hexdigest()
        assert prompt.target_hash == target


@pytest.mark.parametrize("name", ["arc_challenge", "gsm8k", "hellaswag", "winogrande"])
def test_seed_changes_the_shots(loaded: Callable[[str], TaskData], name: str) -> None:
    one, other = (
        build_prompts(stock(name), loaded(name), limit=5, seed=seed) for seed in (1234, 1)
    )
    assert all(a.prompt_hash != b.prompt_hash for a, b in zip(one, other, strict=True))
    assert all(a.doc_hash == b.doc_hash for a, b in zip(one, other, strict=True))


def test_seed_changes_the_shots_of_a_task_with_its_own_number(
    loaded: Callable[[str], TaskData],
) -> None:
    assert stock("gsm8k").num_fewshot == 5
    prompts = [build_prompts(stock("gsm8k"), loaded("gsm8k"), limit=1, seed=s) for s in (1, 2)]
    assert prompts[0][0].fewshot_ids != prompts[1][0].fewshot_ids


def test_no_question_stands_in_its_own_shots(loaded: Callable[[str], TaskData]) -> None:
    prompts = build_prompts(stock("hellaswag"), loaded("hellaswag"))
    assert all(prompt.doc_id not in prompt.fewshot_ids for prompt in prompts)
    assert all(len(set(prompt.fewshot_ids)) == 10 for prompt in prompts)


def test_openllm_draws_otherwise_than_the_stock_task(
    loaded: Callable[[str], TaskData], data_dir: Path
) -> None:
    (named,) = [task for task in load_tasks(["openllm"]).tasks if task.name == "winogrande"]
    ours = build_prompts(named, load_task_data(named, data_dir), limit=20)
    theirs = build_prompts(stock("winogrande"), loaded("winogrande"), limit=20)
    assert [p.fewshot_ids for p in ours] != [p.fewshot_ids for p in theirs]


@pytest.mark.parametrize(
    ("name", "count"), [("truthfulqa_mc1", 4114), ("truthfulqa_mc2", 5882), ("winogrande", 2534)]
)
def test_tasks_have_the_known_number_of_choices(
    loaded: Callable[[str], TaskData], name: str, count: int
) -> None:
    prompts = build_prompts(stock(name), loaded(name))
    assert sum(len(prompt.pairs) for prompt in prompts) == count


def test_gold_of_mc2_is_every_true_answer(loaded: Callable[[str], TaskData]) -> None:
    for prompt in build_prompts(stock("truthfulqa_mc2"), loaded("truthfulqa_mc2")):
        assert isinstance(prompt.gold, tuple)
        labels = prompt.doc["mc2_targets"]["labels"]
        assert [int(index in prompt.gold) for index in range(len(labels))] == labels


def test_gold_of_mc1_is_always_the_first(loaded: Callable[[str], TaskData]) -> None:
    prompts = build_prompts(stock("truthfulqa_mc1"), loaded("truthfulqa_mc1"), num_fewshot=3)
    assert {prompt.gold for prompt in prompts} == {0}
    assert {prompt.fewshot_ids for prompt in prompts} == {()}


def test_options_of_winogrande_share_their_continuation(
    loaded: Callable[[str], TaskData],
) -> None:
    for prompt in build_prompts(stock("winogrande"), loaded("winogrande"), limit=50):
        (first, rest), (second, same) = prompt.pairs
        assert rest == same
        assert first != second
        assert prompt.gold == int(prompt.doc["answer"]) - 1


def test_gold_of_copa_is_the_labelled_alternative(loaded: Callable[[str], TaskData]) -> None:
    for prompt in build_prompts(stock("kobest_copa"), loaded("kobest_copa")):
        assert prompt.gold == prompt.doc["label"]


def test_wikitext_counts_the_page_as_it_is_written(loaded: Callable[[str], TaskData]) -> None:
    prompts = build_prompts(stock("wikitext"), loaded("wikitext"))
    sizes = [prompt.text_size or (0, 0) for prompt in prompts]
    pages = [row["page"] for row in loaded("wikitext").docs]
    assert sum(size for _, size in sizes) == sum(len(page.encode()) for page in pages)
    # re.split counts an empty word at either end of a page that starts or ends with white space.
    ends = sum(page[0].isspace() + page[-1].isspace() for page in pages)
    assert sum(words for words, _ in sizes) == 241211 + ends


def test_choices_are_the_texts_without_delimiter(loaded: Callable[[str], TaskData]) -> None:
    (prompt,) = build_prompts(stock("arc_easy"), loaded("arc_easy"), limit=1)
    assert list(prompt.choices) == prompt.doc["choices"]["text"]
    assert [pair[1] for pair in prompt.pairs] == [" " + choice for choice in prompt.choices]


def test_doc_hash_is_of_the_indented_row_with_added_fields(
    loaded: Callable[[str], TaskData],
) -> None:
    (prompt,) = build_prompts(stock("hellaswag"), loaded("hellaswag"), limit=1)
    row = loaded("hellaswag").docs[0]
    assert list(prompt.doc) == [*row, "query", "choices", "gold"]
    text = json.dumps(prompt.doc, indent=2, ensure_ascii=False)
    assert prompt.doc_hash == hashlib.sha256(text.encode()).hexdigest()
    assert "query" not in row


def test_instruction_stands_in_front_of_plain_text(own: Callable[..., list[Prompt]]) -> None:
    rows = [{"q": "1?", "c": ["x", "y"], "a": 1}]
    keys = OWN_TASK + 'description: "Choose."\n'
    (prompt,) = own(rows, keys, system_instruction="Be brief.")
    assert prompt.pairs[0] == ("Be brief.\n\nChoose.1?", " x")
    (prompt,) = own(rows, keys.replace("Choose.", " Choose."), system_instruction="Be brief.")
    assert prompt.pairs[0][0] == "Be brief. Choose.1?"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [(1, 1), ("1", 1), ("y", 1), ([0, 2], (0, 2)), (["z", "x"], (2, 0)), (True, 1)],
)
def test_gold_is_told_by_index_or_text(
    own: Callable[..., list[Prompt]], answer: Any, gold: int | tuple[int, ...]
) -> None:
    keys = OWN_TASK.replace('"{{a}}"', "a") if isinstance(answer, bool) else OWN_TASK
    (prompt,) = own([{"q": "?", "c": ["x", "y", "z"], "a": answer}], keys)
    assert prompt.gold == gold


def test_digit_that_is_no_number_is_a_text(own: Callable[..., list[Prompt]]) -> None:
    (prompt,) = own([{"q": "?", "c": ["\u00b9", "\u00b2"], "a": "\u00b2"}])
    assert prompt.gold == 1


def test_prompt_can_be_had_with_fewer_shots(own: Callable[..., list[Prompt]]) -> None:
    rows = [{"q": f"{n}?", "c": ["x", "y"], "a": n % 2} for n in range(3)]
    prompts = own(rows, OWN_TASK + "fewshot_config: {sampler: first_n}\n", num_fewshot=2)
    assert prompts[2].shorter(0) == prompts[2].pairs
    assert prompts[2].shorter(1) == (("1? y\n\n2?", " x"), ("1? y\n\n2?", " y"))
    assert prompts[2].shorter(2) == (("2?", " x"), ("2?", " y"))
    assert prompts[2].shorter(3) is None


def test_shots_are_built_of_question_delimiter_and_answer(
    own: Callable[..., list[Prompt]],
) -> None:
    rows = [{"q": f"{n}?", "c": ["x", "y"], "a": n % 2} for n in range(3)]
    keys = OWN_TASK + 'target_delimiter: " = "\nfewshot_delimiter: "; "\n'
    prompts = own(rows, keys + "fewshot_config: {sampler: first_n}\n", num_fewshot=2)
    assert prompts[2].pairs == (("0? = x; 1? = y; 2?", " = x"), ("0? = x; 1? = y; 2?", " = y"))


def test_begun_answer_is_part_of_shots_and_question(own: Callable[..., list[Prompt]]) -> None:
    rows = [{"q": f"{n}?", "c": ["x", "y"], "a": n % 2} for n in range(2)]
    keys = OWN_TASK + 'gen_prefix: "A:"\nfewshot_config: {sampler: first_n}\n'
    prompts = own(rows, keys, num_fewshot=1)
    assert prompts[1].pairs[0] == ("0? A: x\n\n1? A:", " x")


def test_written_answers_are_asked_with_the_target_as_gold(
    own: Callable[..., list[Prompt]],
) -> None:
    keys = OWN_TASK.replace("multiple_choice", "generate_until").replace(
        'doc_to_choice: "{{c}}"\n', ""
    )
    rows = [{"q": "a?", "a": 17}, {"q": "b?", "a": 18}]
    prompts = own(rows, keys + "fewshot_config: {sampler: first_n}\n", num_fewshot=1)
    assert prompts[1].pairs == (("a? 17\n\nb?", ""),)
    assert prompts[1].gold == "18"
    assert prompts[1].choices == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"c": ["x", "y"], "a": 0}, r"doc_to_text of the task own, row 1 .* 'q' is undefined"),
        ({"q": "?", "a": 0}, r"doc_to_choice of the task own, row 1 of the split test .* 'c'"),
        ({"q": "?", "c": ["x", "y"]}, r"doc_to_target of the task own, row 1 .* 'a'"),
        ({"q": "?", "c": ["x", "y"], "a": 2}, "2 is neither one of the 2 choices nor its index"),
        ({"q": "?", "c": ["x", "y"], "a": -1}, "'-1' is neither"),
        ({"q": "?", "c": ["x", "y"], "a": "w"}, "'w' is neither"),
        ({"q": "?", "c": ["x", "y"], "a": []}, "no choice is right"),
        ({"q": "?", "c": ["x"], "a": 0}, "list of at least two texts"),
        ({"q": "?", "c": "xy", "a": 0}, "list of at least two texts"),
        ({"q": "?", "c": [1, 2], "a": 0}, "needs texts"),
    ],
)
def test_row_that_does_not_fit_is_named(
    own: Callable[..., list[Prompt]], row: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        own([{"q": "?", "c": ["x", "y"], "a": 0}, row])


def test_misfit_lists_the_fields_that_there_are(own: Callable[..., list[Prompt]]) -> None:
    with pytest.raises(WorkloadError) as caught:
        own([{"question": "?", "c": ["x", "y"], "a": 0}])
    assert caught.value.__notes__ == ["the row has the fields question, c, a"]


def test_limit_below_one_is_refused(loaded: Callable[[str], TaskData]) -> None:
    with pytest.raises(BenchConfigError, match="at least 1 document, found 0"):
        build_prompts(stock("wikitext"), loaded("wikitext"), limit=0)


def test_shots_of_data_loaded_without_are_refused(data_dir: Path) -> None:
    data = load_task_data(stock("arc_easy"), data_dir, needs_pool=False)
    with pytest.raises(WorkloadError, match="arc_easy needs 2 shots"):
        build_prompts(stock("arc_easy"), data, num_fewshot=2)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("q", "what"),
        ("{{ q }}\n", "what\n"),
        ("{{ q | regex_replace('w', 'W') }}", "What"),
        ("{# q #}{{ n }}", "3"),
    ],
)
def test_templates_render_as_in_the_harness(source: str, text: str) -> None:
    assert as_text(source, {"q": "what", "n": 3}, "here") == text


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("{{ [n, q] }}", [3, "what"]),
        ("['{{ q }}', {{ n }}]", ["what", 3]),
        ("{{ l | indices_of(1) }}", [0, 2]),
        ("l", [1, 0, 1]),
        ("{{- n -}}", 3),
        ("{% if n == 3 %}[1]{% else %}[2]{% endif %}", [1]),
    ],
)
def test_templates_give_values(source: str, value: Any) -> None:
    assert as_value(source, {"q": "what", "n": 3, "l": [1, 0, 1]}, "here") == value


@pytest.mark.parametrize(
    "source",
    ["{{ nothing }}", "{{ d.nothing }}", "{{ d['x'] }}", "{{ q.index('z') }}", "{{ q + 1 }}"],
)
def test_templates_refuse_what_is_not_there(source: str) -> None:
    doc = {"q": "what", "d": {}}
    with pytest.raises(WorkloadError, match="here does not fit the row: "):
        as_text(source, doc, "here")
    with pytest.raises(WorkloadError, match="here does not fit the row: "):
        as_value(source, doc, "here")


def test_templates_reach_no_python() -> None:
    with pytest.raises(WorkloadError, match="unsafe"):
        as_text("{{ ''.__class__.__mro__ }}", {}, "here")


def test_templates_change_no_row() -> None:
    doc = {"l": [1]}
    with pytest.raises(WorkloadError, match="unsafe"):
        as_value("{{ l.append(2) }}", doc, "here")
    assert doc == {"l": [1]}


def test_cleaning_of_hellaswag_keeps_the_harness_s_quirks() -> None:
    text = " Do it [title] Now.  [step] Take   two [substeps] steps. "
    assert hellaswag_clean(text) == "Do it. Now.  Take  two steps."


def test_wikitext_is_put_back_together() -> None:
    raw = ' = A @-@ B = \n It cost 1 @,@ 000 ( about " ten " ) ; that \'s all . \n'
    assert wikitext_detokenize(raw) == ' = A-B =\nIt cost 1,000 (about "ten"); that\'s all.\n'
