"""Answers side by side: which prompts, where two answers part, and what the pages show of it."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.accuracy.sample_answers import (
    SampleAnswer,
    answer_prompts,
    first_difference,
    make_answer,
    prompt_ids,
    side_by_side,
    to_record,
)
from llmbench.bench.accuracy.sample_prompts import (
    SamplePrompt,
    builtin_prompts,
    choose_prompts,
    read_prompts,
)
from llmbench.bench.errors import BenchError, WorkloadError
from llmbench.bench.strict_json import dumps
from llmbench.reports.errors import NothingToReportError
from llmbench.reports.samples_page import as_html, as_markdown, make_page, write_samples

PROMPT = SamplePrompt(name="en-1", language="en", kind="code", text="Say <b>x</b> | y\nand *z*")
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="session")
def answer(byte_tokenizer: Callable[..., Any]) -> Callable[..., SampleAnswer]:
    """Make an answer of a text whose tokens are its bytes."""
    tokenizer = byte_tokenizer()

    def make(text: str, *, finish_reason: str = "length", ends: bool = False) -> SampleAnswer:
        ids = [int(token) for token in tokenizer.encode(text)]
        if ends:
            ids.append(int(tokenizer.eos_token_id))
        return make_answer(tokenizer, text, ids, finish_reason)

    return make


Answer = Callable[..., SampleAnswer]


# Prompts


def test_any_first_prompts_are_of_both_languages_and_of_several_kinds() -> None:
    prompts = builtin_prompts()
    assert [prompt.language for prompt in prompts] == ["en", "ko"] * (len(prompts) // 2)
    assert len(prompts) >= 24
    assert len({prompt.kind for prompt in prompts}) >= 8
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert len({prompt.name for prompt in prompts}) == len(prompts)


def test_korean_prompts_are_korean() -> None:
    for prompt in builtin_prompts():
        hangul = len(re.findall(r"[가-힣]", prompt.text))
        assert (hangul > len(prompt.text) / 3) == (prompt.language == "ko"), prompt.name


def test_more_samples_than_prompts_are_refused_with_the_way_out() -> None:
    with pytest.raises(WorkloadError, match="at most 32 samples, found 99") as refusal:
        choose_prompts(builtin_prompts(), 99)
    assert "--samples-file" in refusal.value.__notes__[0]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_line_separators_inside_a_prompt_end_no_line(tmp_path: Path, character: str) -> None:
    path = tmp_path / "own.jsonl"
    texts = [f"one{character}two", "three"]
    rows = [dumps({"prompt": text}) for text in texts]
    assert character in rows[0]
    path.write_text("\r\n".join(rows), encoding="utf-8", newline="")
    assert [prompt.text for prompt in read_prompts(path)] == texts


def test_own_prompts_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "왜?", "language": "ko"}\n\n{"prompt": "Why?", "name": "w"}\n')
    first, second = read_prompts(path)
    assert (first.name, first.text, first.language) == ("line-1", "왜?", "ko")
    assert (second.name, second.text, second.kind) == ("w", "Why?", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "found none"),
        ("{", "JSON object in line 1"),
        ("[1]", "text `prompt` in line 1"),
        ('{"prompt": "a"}\n{"prompt": " "}', "text `prompt` in line 2"),
    ],
)
def test_wrong_prompt_files_are_refused_by_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=message):
        read_prompts(path)


def test_prompt_is_a_turn_where_there_is_a_template(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(adds_bos=True, chat_template=CHAT)
    ids = prompt_ids(tokenizer, "hi", "be kind")
    assert tokenizer.decode(ids) == "[system]be kind[user]hi[assistant]"


def test_prompt_stands_as_it_is_where_there_is_none(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    assert tokenizer.decode(prompt_ids(tokenizer, "hi")) == "<s>hi"
    assert tokenizer.decode(prompt_ids(tokenizer, "hi", "be kind")) == "<s>be kind\n\nhi"


def test_refusal_of_a_template_is_told(byte_tokenizer: Callable[..., Any]) -> None:
    template = "{{ raise_exception('no system role') }}"
    with pytest.raises(BenchError, match="refuses a sample: no system role"):
        prompt_ids(byte_tokenizer(chat_template=template), "hi")


# Where answers part


def test_equal_answers_do_not_part(answer: Answer) -> None:
    assert first_difference(answer("same"), answer("same")) is None


def test_answers_part_at_the_first_different_token(answer: Answer) -> None:
    parted = first_difference(answer("blue sky"), answer("blue sea"))
    assert parted is not None
    assert (parted.token, parted.character) == (6, 6)
    assert (parted.base, parted.candidate) == ("k", "e")


def test_half_a_character_belongs_to_no_shared_text(answer: Answer) -> None:
    # 가 is ea b0 80, 각 is ea b0 81: the third byte differs.
    parted = first_difference(answer("x가"), answer("x각"))
    assert parted is not None
    assert (parted.token, parted.character) == (3, 1)


def test_answer_that_ends_early_parts_at_its_end(answer: Answer) -> None:
    parted = first_difference(answer("yes", ends=True), answer("yes, but"))
    assert parted is not None
    assert (parted.token, parted.character) == (3, 3)
    assert (parted.base, parted.candidate) == ("</s>", ",")


def test_answer_cut_short_parts_where_it_was_cut(answer: Answer) -> None:
    parted = first_difference(answer("yes, but"), answer("yes"))
    assert parted is not None
    assert (parted.token, parted.base, parted.candidate) == (3, ",", "")


def test_tokens_are_not_compared_over_different_vocabularies(answer: Answer) -> None:
    parted = first_difference(answer("abc"), answer("abd"), is_same_vocabulary=False)
    assert parted is not None
    assert (parted.token, parted.character, parted.base) == (None, 2, "c")
    assert first_difference(answer("a"), answer("a"), is_same_vocabulary=False) is None


# On the engine


def test_engine_answers_every_prompt_greedily_and_sampled_and_repeatably(
    scripted_llama: Callable[..., Path], byte_tokenizer: Callable[..., Any]
) -> None:
    from llmbench.engine.config import EngineConfig
    from llmbench.engine.engine_core import EngineCore

    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("abc")
    successors = {ids[0]: ids[1], ids[1]: ids[2], ids[2]: 1}
    folder = scripted_llama(successors, vocab_size=258, tokenizer=tokenizer)
    config = EngineConfig(model=str(folder), compile=False, num_kv_blocks=32)
    prompts = [
        SamplePrompt(name="one", language="en", kind="", text="a"),
        SamplePrompt(name="two", language="en", kind="", text="z"),
    ]
    heard: list[tuple[int, int]] = []
    core = EngineCore(config)
    found = answer_prompts(
        core, prompts, max_tokens=4, on_progress=lambda done, total: heard.append((done, total))
    )
    assert found["one", "greedy"].text == "bc"
    assert found["one", "greedy"].finish_reason == "stop"
    assert found["two", "greedy"].text == "zzzz"
    assert found["two", "sampled"].finish_reason == "length"
    assert heard[-1] == (4, 4)
    assert answer_prompts(core, prompts, max_tokens=4) == found


# Pages


def record(base: SampleAnswer | None, candidate: SampleAnswer) -> dict[str, Any]:
    answers: dict[Any, SampleAnswer] = {("en-1", mode): candidate for mode in ("greedy", "sampled")}
    theirs: Any = None if base is None else {("en-1", mode): base for mode in ("greedy", "sampled")}
    samples = side_by_side([PROMPT], answers, theirs)
    name = None if base is None else "base"
    return to_record(samples, candidate="small", base=name, seed=0, max_tokens=8)


def test_page_marks_the_first_different_token_in_both_answers(answer: Answer) -> None:
    page = make_page(record(answer("blue sky!"), answer("blue sea")))
    base, candidate = page.groups[0].pairs[0].answers
    assert (base.shared, base.first, base.rest) == ("blue s", "k", "y!")
    assert (candidate.shared, candidate.first, candidate.rest) == ("blue s", "e", "a")
    assert page.groups[0].pairs[0].finding == "first difference at token 7: “k” became “e”"
    assert page.summary[0].startswith("greedy: 0 of 1 answer the same")


def test_page_shows_that_an_answer_ended_early(answer: Answer) -> None:
    page = make_page(record(answer("yes", ends=True, finish_reason="stop"), answer("yes, but")))
    base, candidate = page.groups[0].pairs[0].answers
    assert (base.shared, base.first, base.facts) == ("yes", " (end)", "4 tokens, ended")
    assert (candidate.first, candidate.rest) == (",", " but")


def test_half_a_character_is_called_so_and_its_whole_is_marked(answer: Answer) -> None:
    page = make_page(record(answer("x가!"), answer("x각!")))
    base, candidate = page.groups[0].pairs[0].answers
    assert (base.shared, base.first, candidate.first, candidate.rest) == ("x", "가", "각", "!")
    assert "part of a character became part of a character" in page.groups[0].pairs[0].finding


def test_page_without_a_baseline_shows_one_answer(answer: Answer) -> None:
    page = make_page(record(None, answer("hello")))
    assert [len(pair.answers) for pair in page.groups[0].pairs] == [1, 1]
    assert page.groups[0].pairs[0].finding == ""
    assert "【" not in as_markdown(page)


def test_html_escapes_all_that_models_and_users_wrote_and_loads_nothing(answer: Answer) -> None:
    attack = "<script>alert(1)</script>"
    text = as_html(make_page(record(answer(attack + "a"), answer(attack + "b"))))
    assert "<script" not in text
    assert html.escape(attack, quote=False) in text
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)
    assert "@import" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_markdown_keeps_text_within_its_cell(answer: Answer) -> None:
    page = as_markdown(make_page(record(answer("a|b\nc*d"), answer("a|b\nc*e"))))
    row = next(line for line in page.splitlines() if line.startswith("| a"))
    assert row == r"| a\|b<br>c\*【d】 | a\|b<br>c\*【e】 |"
    assert r"> Say \<b\>x\</b\> \| y" in page


def test_both_pages_are_written_from_the_stored_answers(answer: Answer, tmp_path: Path) -> None:
    (tmp_path / "samples.json").write_text(dumps(record(answer("왜"), answer("와"))))
    paths = write_samples(tmp_path)
    assert [path.name for path in paths] == ["samples.md", "samples.html"]
    assert all("en-1" in path.read_text(encoding="utf-8") for path in paths)
    assert json.loads((tmp_path / "samples.json").read_text())["schema_version"] == 1


def test_folder_without_samples_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(NothingToReportError, match=r"samples\.json") as refusal:
        write_samples(tmp_path)
    assert "--samples" in refusal.value.__notes__[0]
