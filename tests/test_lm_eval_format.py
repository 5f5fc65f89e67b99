"""Files in the reference harness's layout: names, keys, hashes, values as it writes them."""

import datetime
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.bench.accuracy.eval_plan import PreparedEval, prepare
from llmbench.bench.accuracy.evaluation import evaluate
from llmbench.bench.accuracy.lm_eval_format import write_lm_eval
from llmbench.bench.accuracy.model import GenerateRequest
from llmbench.bench.errors import ResultsError

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
ROWS = {
    "arc_challenge/test.jsonl": {
        "question": "Warm hands?",
        "choices": {"text": ["rub", "wait", "no"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    },
    "gsm8k/test.jsonl": {"question": "One and one?", "answer": "1 + 1 = 2\n#### 2"},
    "winogrande/validation.jsonl": {
        "sentence": "The cup was on the table, so _ was wet.",
        "option1": "the cup",
        "option2": "the table",
        "answer": "2",
    },
    "wikitext2/test_pages.jsonl": {"page": " = A page = \n It has words . \n"},
    "truthfulqa/validation.jsonl": {
        "question": "What is so?",
        "mc1_targets": {"choices": ["this", "that"], "labels": [1, 0]},
        "mc2_targets": {"choices": ["this", "so", "that"], "labels": [1, 1, 0]},
    },
    "kobest/sentineg_test.jsonl": {"sentence": "좋아요", "label": 1},
}
COPIES = {
    "arc_challenge/train.jsonl": "arc_challenge/test.jsonl",
    "gsm8k/train.jsonl": "gsm8k/test.jsonl",
    "winogrande/train_s.jsonl": "winogrande/validation.jsonl",
    "kobest/sentineg_train.jsonl": "kobest/sentineg_test.jsonl",
    "kobest/sentineg_dev.jsonl": "kobest/sentineg_test.jsonl",
}
TASKS = (
    "arc_challenge",
    "gsm8k",
    "winogrande",
    "wikitext",
    "truthfulqa_mc2",
    "kobest_sentineg",
)


class LengthModel:
    """Finds a continuation the likelier the shorter it is, and always answers the same."""

    name = "./models/tiny:1"
    max_length = 4096
    notices = ()

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.identity: dict[str, Any] = {"model_digest": "tiny", "device": "cpu"}

    def check_scores(self) -> None:
        pass

    def score(
        self, requests: Sequence[Any], *, with_hidden: bool = False
    ) -> Iterator[tuple[int, Any]]:
        from llmbench.engine.scoring import ContinuationScore

        for index, request in enumerate(requests):
            yield (
                index,
                tuple(
                    ContinuationScore(logprobs=(-0.5,) * len(ids), is_greedy=False, hidden=None)
                    for ids in request.continuations
                ),
            )

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[int, str]]:
        for index, _ in enumerate(requests):
            yield index, "It is\n#### 2"

    def head(self) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[..., Any]
) -> tuple[Path, PreparedEval, LengthModel]:
    """A finished run over one document a task."""
    data = tmp_path_factory.mktemp("data")
    for name, row in ROWS.items():
        path = data / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, source in COPIES.items():
        (data / name).write_bytes((data / source).read_bytes())
    prepared = prepare(EvalConfig(tasks=TASKS, num_fewshot=0, data_dir=data))
    folder = tmp_path_factory.mktemp("run") / "results"
    model = LengthModel(byte_tokenizer())
    evaluate(prepared, model, folder)
    return folder, prepared, model


@pytest.fixture(scope="module")
def written(run: tuple[Path, PreparedEval, LengthModel]) -> dict[str, Any]:
    """Parsed content of each written file by name; samples as lists."""
    folder, prepared, model = run
    parsed: dict[str, Any] = {}
    for path in write_lm_eval(folder, prepared, model, now=NOW):
        text = path.read_text(encoding="utf-8")
        is_list = path.suffix == ".jsonl"
        rows = [json.loads(line) for line in text.splitlines()] if is_list else json.loads(text)
        parsed[f"{path.parent.name}/{path.name}"] = rows
    return parsed


def rows_of(written: dict[str, Any], task: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = written[
        f".__models__tiny__1/samples_{task}_2026-01-02T03-04-05.678901.jsonl"
    ]
    return rows


def results_of(written: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = written[".__models__tiny__1/results_2026-01-02T03-04-05.678901.json"]
    return found


def test_files_are_named_as_the_harness_names_them(written: dict[str, Any]) -> None:
    assert len(written) == 1 + len(TASKS)
    assert results_of(written)["model_name_sanitized"] == ".__models__tiny__1"


def test_scores_stand_under_metric_and_filter(written: dict[str, Any]) -> None:
    results = results_of(written)["results"]
    assert results["arc_challenge"]["acc,none"] == 0.0
    assert results["arc_challenge"]["acc_stderr,none"] == "N/A"  # a single document
    assert {"name", "alias", "sample_len"} <= results["arc_challenge"].keys()
    assert results["gsm8k"]["exact_match,strict-match"] == 1.0
    assert results["gsm8k"]["exact_match,flexible-extract"] == 1.0
    assert 0 < results["truthfulqa_mc2"]["acc,none"] < 1
    assert results["wikitext"]["word_perplexity_stderr,none"] == "N/A"
    assert results["kobest_sentineg"]["f1,none"] in (0.0, 1.0)


def test_counts_shots_versions_and_directions_are_told(written: dict[str, Any]) -> None:
    document = results_of(written)
    assert document["n-samples"]["arc_challenge"] == {"original": 1, "effective": 1}
    assert document["n-shot"]["gsm8k"] == 0
    assert document["versions"]["gsm8k"] == 3.0
    assert document["higher_is_better"]["wikitext"]["word_perplexity"] is False
    assert document["config"]["fewshot_seed"] == 1234
    assert document["tokenizer_bos_token"] == ["<s>", "0"]
    assert document["configs"]["gsm8k"]["num_fewshot"] == 0


def test_choice_rows_hold_every_request_and_answer(written: dict[str, Any]) -> None:
    (row,) = rows_of(written, "arc_challenge")
    assert row["target"] == "1"
    assert row["arguments"]["gen_args_2"] == {
        "arg_0": "Question: Warm hands?\nAnswer:",
        "arg_1": " no",
    }
    assert row["resps"][0] == [["-2.0", "False"]]  # " rub" is four bytes
    assert row["filtered_resps"][2] == ["-1.5", "False"]
    assert row["filter"] == "none"
    assert row["acc"] == 0.0
    assert {"acc", "acc_norm"} <= set(row["metrics"])


def test_generation_has_a_row_a_filter(written: dict[str, Any]) -> None:
    rows = rows_of(written, "gsm8k")
    assert [row["filter"] for row in rows[:2]] == ["strict-match", "flexible-extract"]
    for row in rows[:2]:
        assert row["resps"] == [["It is\n#### 2"]]
        assert row["filtered_resps"] == ["2"]
        assert row["exact_match"] == 1.0
        assert row["arguments"]["gen_args_0"]["arg_1"]["until"][0] == "Question:"
        assert row["target"] == "1 + 1 = 2\n#### 2"


def test_whole_texts_have_a_loss_and_a_size(written: dict[str, Any]) -> None:
    (row,) = rows_of(written, "wikitext")
    loss, words = row["word_perplexity"]
    assert row["resps"] == [[str(loss)]]
    assert row["filtered_resps"] == [str(loss)]
    assert words == 10  # as the harness counts: 8 between white space, and both empty ends
    assert list(row["arguments"]["gen_args_0"]) == ["arg_0"]


def test_pairs_of_gold_and_pick_stand_for_f1(written: dict[str, Any]) -> None:
    (row,) = rows_of(written, "kobest_sentineg")
    assert row["f1"] == [1, 0]


@pytest.mark.parametrize("task", TASKS)
def test_targets_and_hashes_belong_together(written: dict[str, Any], task: str) -> None:
    for row in rows_of(written, task):
        assert hashlib.sha256(row["target"].encode()).hexdigest() == row["target_hash"]
        dumped = json.dumps(row["doc"], indent=2, ensure_ascii=False)
        assert hashlib.sha256(dumped.encode()).hexdigest() == row["doc_hash"]
        prompt = row["arguments"]["gen_args_0"]["arg_0"]
        assert hashlib.sha256(prompt.encode()).hexdigest() == row["prompt_hash"]


def test_task_hash_is_that_of_all_rows(written: dict[str, Any]) -> None:
    rows = rows_of(written, "gsm8k")
    joined = "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)
    expected = hashlib.sha256(joined.encode()).hexdigest()
    assert results_of(written)["task_hashes"]["gsm8k"] == expected


def test_folder_without_scores_is_refused(
    tmp_path: Path, run: tuple[Path, PreparedEval, LengthModel]
) -> None:
    _, prepared, model = run
    with pytest.raises(ResultsError, match="expected the scores of a run"):
        write_lm_eval(tmp_path, prepared, model)


def test_tasks_without_a_document_in_the_shard_are_left_out(
    tmp_path: Path, run: tuple[Path, PreparedEval, LengthModel]
) -> None:
    """And the group that lacks one with them, as it has no score."""
    _, prepared, model = run
    data = prepared.config.data_dir
    assert data is not None
    (tmp_path / "both.yaml").write_text(
        "group: both\nsummary: both\ntask: [gsm8k, three]\n"
        "aggregate_metric_list: [{metric: primary, weight_by_size: false}]\n"
        "metadata: {version: 1}\n"
    )
    (tmp_path / "three.jsonl").write_text('{"q": "a", "a": "b"}\n' * 3)
    (tmp_path / "three.yaml").write_text(
        "task: three\nsummary: three\nlocal_files: {test: three.jsonl}\ntest_split: test\n"
        'output_type: generate_until\nnum_fewshot: 0\ndoc_to_text: "{{q}}"\n'
        'doc_to_target: a\ngeneration_kwargs: {until: ["."]}\n'
        "metric_list: [{metric: exact_match}]\nmetadata: {version: 1.0}\n"
    )
    config = EvalConfig(
        tasks=("both",), num_fewshot=0, data_dir=data, include=(tmp_path,), shard=(1, 2)
    )
    folder = tmp_path / "run"
    evaluate(prepare(config), model, folder)
    result, samples = write_lm_eval(folder, prepare(config), model, now=NOW)
    document = json.loads(result.read_text(encoding="utf-8"))
    assert samples.name.startswith("samples_three_")
    assert list(document["results"]) == ["three"]
    assert list(document["n-samples"]) == ["three"]
    assert document["group_subtasks"] == {}
