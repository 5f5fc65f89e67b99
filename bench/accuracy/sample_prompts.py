"""Prompts for a look at answers side by side: sixteen English, sixteen Korean, written for this.

Scores say that a model got worse, answers show how: it repeats itself, loses a language first, ends
too early. So the kinds differ (explaining, arithmetic, code, summarizing a text that is given,
translating, playing a part, following a format, a plain safety question) and every kind comes in
both languages. A user's own prompts come from JSON Lines: `{"prompt": …}` a line, with `name`,
`language` and `kind` if they are known.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbench.bench import strict_json
from llmbench.bench.errors import WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePrompt:
    """One question to a model."""

    name: str
    language: str
    kind: str
    text: str


_ENGLISH = (
    ("explanation", "Explain to a ten-year-old why the moon changes its shape over a month."),
    (
        "arithmetic",
        "A baker sells 14 loaves before noon and twice as many after it. Each loaf costs 3 "
        "dollars. How many dollars does she take in? Show each step.",
    ),
    (
        "code",
        "Write a Python function that returns the second largest number in a list, and None if "
        "there is no such number.",
    ),
    (
        "summary",
        "Summarize the following in one sentence.\n\nThe town library will close for six weeks "
        "from the first of March, because its heating has to be replaced. Borrowed books need not "
        "be returned before it opens again. Readers with a library card may use the university "
        "library two streets away in the meantime, but only to read there.",
    ),
    ("translation", "Translate into Korean: The train leaves at seven, so please do not be late."),
    (
        "role play",
        "You are the keeper of a small lighthouse. A lost sailor radios you in thick fog. Answer "
        "him in three or four sentences.",
    ),
    ("safety", "What should I do first if a pan of oil catches fire on the stove?"),
    ("list", "Name five things to check before riding a bicycle that stood in a shed all winter."),
    (
        "format",
        "Give the name, the age and the city of this person as a JSON object: Maria, who turned "
        "41 last week, moved from Porto to Lyon.",
    ),
    (
        "reasoning",
        "Tom is taller than Ann. Ann is taller than Lee. Is Lee taller than Tom? Say why in one "
        "sentence.",
    ),
    ("letter", "Write a short, polite note to a neighbour whose dog barks every night."),
    ("comparison", "What is the difference between weather and climate? Give one example of each."),
    ("story", "Begin a story with this sentence: The map was blank except for one red dot."),
    ("facts", "Why is sea water salty, and why are most lakes not?"),
    (
        "rewriting",
        "Make this sentence shorter without losing what it says: Due to the fact that it was "
        "raining, we came to the decision that we would stay at home.",
    ),
    ("opinion", "Give two reasons for and two reasons against school uniforms."),
)

_KOREAN = (
    ("explanation", "비가 온 뒤에 무지개가 생기는 까닭을 초등학생에게 설명해 주세요."),
    (
        "arithmetic",
        "사과 한 상자에 12개가 들어 있습니다. 다섯 상자를 사서 이웃에게 17개를 나누어 주었다면 "
        "몇 개가 남습니까? 풀이 과정을 보여 주세요.",
    ),
    ("code", "문자열을 받아 모음의 개수를 세는 파이썬 함수를 작성해 주세요."),
    (
        "summary",
        "다음 글을 한 문장으로 요약해 주세요.\n\n우리 동네 수영장은 다음 달부터 아침 여섯 시에 "
        "문을 엽니다. 그 대신 저녁에는 한 시간 일찍 닫습니다. 이미 등록한 회원은 남은 기간만큼 "
        "요금을 돌려받을 수 있지만, 이번 달 말까지 안내 창구에 신청해야 합니다.",
    ),
    ("translation", "영어로 옮겨 주세요: 창문을 열어 두고 나와서 마음이 놓이지 않아요."),
    (
        "role play",
        "당신은 백 년 된 떡집의 주인입니다. 처음 온 외국인 손님에게 가게를 소개하는 말을 서너 "
        "문장으로 해 주세요.",
    ),
    ("safety", "집에서 가스 냄새가 나면 가장 먼저 무엇을 해야 하나요?"),
    ("list", "처음으로 혼자 등산을 가는 사람이 챙겨야 할 것을 다섯 가지 알려 주세요."),
    (
        "format",
        "다음 사람의 이름, 나이, 직업을 JSON 객체로 써 주세요: 서른두 살인 박지훈 씨는 부산에서 "
        "배를 고치는 일을 합니다.",
    ),
    (
        "reasoning",
        "월요일은 수요일보다 춥고, 수요일은 금요일보다 춥습니다. 세 요일 가운데 가장 따뜻한 "
        "날은 언제입니까? 이유도 한 문장으로 말해 주세요.",
    ),
    ("letter", "약속 시간에 늦은 친구에게 화내지 않고 서운함을 전하는 짧은 글을 써 주세요."),
    ("comparison", "된장과 간장은 무엇이 다른지 만드는 방법과 쓰임새로 나누어 설명해 주세요."),
    ("story", "다음 문장으로 이야기를 시작해 주세요: 우체통 안에서 작은 노랫소리가 들렸다."),
    ("facts", "겨울에 철새가 남쪽으로 날아가는 까닭은 무엇인가요?"),
    (
        "rewriting",
        "다음 문장을 더 간결하게 고쳐 주세요: 그 영화는 내가 지금까지 보아 왔던 영화들 중에서 "
        "가장 재미가 있었던 영화라고 말할 수 있다.",
    ),
    ("opinion", "아이에게 용돈을 주는 것의 좋은 점과 나쁜 점을 두 가지씩 말해 주세요."),
)


def builtin_prompts() -> tuple[SamplePrompt, ...]:
    """The built-in prompts, English and Korean in turn, so that any first N are of both."""
    languages = (
        [
            SamplePrompt(name=f"{language}-{number}", language=language, kind=kind, text=text)
            for number, (kind, text) in enumerate(texts, start=1)
        ]
        for language, texts in (("en", _ENGLISH), ("ko", _KOREAN))
    )
    return tuple(itertools.chain.from_iterable(zip(*languages, strict=True)))


def read_prompts(path: Path) -> tuple[SamplePrompt, ...]:
    """Prompts of a JSON Lines file, in its order.

    Raises:
        WorkloadError: the file cannot be read, is empty, or a line is no prompt.
    """
    try:
        # Not splitlines(): that also cuts at U+2028 and U+0085, which JSON texts may hold.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as cause:
        raise WorkloadError(f"cannot read {path} as UTF-8 text: {cause}") from cause
    prompts = tuple(
        _prompt(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()
    )
    if not prompts:
        raise WorkloadError(f"expected prompts, a line each, found none in {path}")
    return prompts


def choose_prompts(prompts: Sequence[SamplePrompt], count: int) -> tuple[SamplePrompt, ...]:
    """The first `count` prompts; WorkloadError where there are fewer."""
    if count > len(prompts):
        error = WorkloadError(f"expected at most {len(prompts)} samples, found {count}")
        error.add_note("more prompts of your own: --samples-file FILE, JSON Lines of `prompt`")
        raise error
    return tuple(prompts[:count])


def _prompt(line: str, number: int, path: Path) -> SamplePrompt:
    where = f"line {number} of {path}"
    try:
        row: Any = strict_json.loads(line)
    except ValueError as cause:
        raise WorkloadError(f"expected a JSON object in {where}: {cause}") from cause
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        error = WorkloadError(f"expected a text `prompt` in {where}")
        error.add_note('a line is {"prompt": "…", "language": "en", "kind": "code"}')
        raise error
    named = {key: str(row.get(key) or "") for key in ("language", "kind")}
    return SamplePrompt(name=str(row.get("name") or f"line-{number}"), text=text, **named)
