"""Answers side by side, as Markdown and as one HTML page that needs nothing beside it.

Made of `samples.json` alone (bench/accuracy/sample_answers.py). The text that both answers share is
plain, the first token that differs is marked, what follows it is shaded. The page carries its style
and loads nothing, so it can be mailed; every text on it was written by a model or a user, so all of
it is escaped.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from llmbench.bench import strict_json
from llmbench.reports.errors import NothingToReportError
from llmbench.reports.figure import write_file
from llmbench.reports.format import counted

SAMPLES = "samples.json"
TEMPLATE = "samples_page.html.jinja"
MARKS = "【", "】"
"""Around the first differing token in Markdown: rare in any text, and readable in its source."""
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&$])")
_ENDS = {"length": "cut at the limit", "stop": "ended", "error": "failed", "abort": "broken off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """One answer, cut where it parts from the other."""

    label: str
    facts: str
    shared: str
    first: str
    rest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPair:
    """One prompt in one mode."""

    mode: str
    finding: str
    answers: tuple[ShownAnswer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPrompt:
    """One prompt in all its modes."""

    anchor: str
    about: str
    prompt: Mapping[str, Any]
    pairs: tuple[ShownPair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All that both forms show."""

    title: str
    subtitle: str
    summary: tuple[str, ...]
    has_base: bool
    groups: tuple[ShownPrompt, ...]


def write_samples(folder: Path) -> list[Path]:
    """Write `samples.md` and `samples.html` beside the folder's `samples.json`."""
    path = folder / SAMPLES
    if not path.exists():
        error = NothingToReportError(f"expected {SAMPLES} in {folder}, found none")
        error.add_note("`llmbench eval … --samples N` writes it")
        raise error
    page = make_page(strict_json.loads(path.read_bytes()))
    return [
        write_file(folder / "samples.md", as_markdown(page).encode()),
        write_file(folder / "samples.html", as_html(page).encode()),
    ]


def make_page(record: Mapping[str, Any]) -> Page:
    """Return what both forms show of the samples."""
    has_base = record["base"] is not None
    names = (record["base"], record["candidate"])
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for sample in record["samples"]:
        by_prompt.setdefault(sample["prompt"]["name"], []).append(sample)
    groups = []
    for number, samples in enumerate(by_prompt.values(), start=1):
        prompt = samples[0]["prompt"]
        pairs = tuple(_pair(sample, names, record) for sample in samples)
        about = " · ".join(filter(None, (prompt["language"], prompt["kind"])))
        groups.append(ShownPrompt(anchor=f"p{number}", about=about, prompt=prompt, pairs=pairs))
    title = f"{names[0]} and {names[1]}, answer by answer" if has_base else f"answers of {names[1]}"
    return Page(
        title=title,
        subtitle=(
            f"each prompt greedily, and sampled at temperature {record['temperature']:g} with seed "
            f"{record['seed']}; at most {counted(record['max_tokens'], 'token')}"
        ),
        summary=_summary(record["samples"]) if has_base else (),
        has_base=has_base,
        groups=tuple(groups),
    )


def as_html(page: Page) -> str:
    """Return the page as one HTML file."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE).render(page=page)


def as_markdown(page: Page) -> str:
    """Return the page as Markdown: a table of one row for each pair of answers."""
    lines = [f"# {_escape(page.title)}", "", _escape(page.subtitle), ""]
    lines += [f"- {_escape(line)}" for line in page.summary]
    if page.has_base:
        lines.append(f"- {MARKS[0]} {MARKS[1]} stands around the first token that differs")
    for group in page.groups:
        lines += ["", f"## {_escape(group.prompt['name'])} {_escape(group.about)}".rstrip(), ""]
        lines += [f"> {_escape(line)}".rstrip() for line in group.prompt["text"].split("\n")]
        for pair in group.pairs:
            heads = [f"{_escape(answer.label)} ({answer.facts})" for answer in pair.answers]
            cells = [_marked(answer) for answer in pair.answers]
            finding = f": {_escape(pair.finding)}" if pair.finding else ""
            lines += ["", f"**{pair.mode}**{finding}", ""]
            lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _pair(
    sample: Mapping[str, Any], names: tuple[str | None, str], record: Mapping[str, Any]
) -> ShownPair:
    parted = sample["divergence"]
    mode = sample["mode"]
    if mode == "sampled":
        mode = f"sampled at {record['temperature']:g}"
    sides = [("base", sample["base"], names[0]), ("candidate", sample["candidate"], names[1])]
    answers = tuple(
        _answer(str(name), answer, parted, side) for side, answer, name in sides if answer
    )
    return ShownPair(mode=mode, finding=_finding(sample), answers=answers)


def _answer(
    label: str, answer: Mapping[str, Any], parted: Mapping[str, Any] | None, side: str
) -> ShownAnswer:
    text: str = answer["text"]
    ended = _ENDS.get(answer["finish_reason"], answer["finish_reason"])
    facts = f"{counted(len(answer['token_ids']), 'token')}, {ended}"
    if parted is None:
        return ShownAnswer(label=label, facts=facts, shared=text, first="", rest="")
    start = parted["character"]
    end = start + len(parted[side])
    if parted["token"] is not None:
        ends = answer["ends"]
        end = ends[parted["token"]] if parted["token"] < len(ends) else start
    end = max(end, start + 1)  # half a character is no text: its whole is marked
    first = text[start:end]
    if not first:
        first = " (end)"  # a mark that is seen where an answer ends early
    return ShownAnswer(label=label, facts=facts, shared=text[:start], first=first, rest=text[end:])


def _finding(sample: Mapping[str, Any]) -> str:
    if sample["base"] is None:
        return ""
    parted = sample["divergence"]
    if parted is None:
        return "the same answer"
    if parted["token"] is None:
        return f"texts part at character {parted['character'] + 1:,} (different tokenizers)"
    tokens = [_quoted(parted[side]) for side in ("base", "candidate")]
    return f"first difference at token {parted['token'] + 1:,}: {tokens[0]} became {tokens[1]}"


def _summary(samples: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    lines = []
    for mode in dict.fromkeys(sample["mode"] for sample in samples):
        chosen = [sample for sample in samples if sample["mode"] == mode]
        parted = [sample["divergence"] for sample in chosen if sample["divergence"] is not None]
        line = f"{mode}: {len(chosen) - len(parted)} of {counted(len(chosen), 'answer')} the same"
        places = [parting["token"] + 1 for parting in parted if parting["token"] is not None]
        if places:
            line += "; where they differ, the first different token is number "
            line += f"{statistics.median(places):g} in the median"
        lines.append(line)
    return tuple(lines)


def _quoted(piece: str) -> str:
    if not piece:
        return "the end"
    if HALF_CHARACTER in piece:
        return "part of a character"
    shown = piece.replace("\n", "\\n")
    return f"“{shown}”"


def _marked(answer: ShownAnswer) -> str:
    text = _escape(answer.shared)
    if answer.first or answer.rest:
        text += f"{MARKS[0]}{_escape(answer.first)}{MARKS[1]}{_escape(answer.rest)}"
    return text.replace("\r", "").replace("\n", "<br>")


def _escape(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", text)
