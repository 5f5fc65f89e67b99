"""Templates that turn a row of a data set into text: Jinja, sandboxed, with a few named filters.

A template is the name of a field, or Jinja text as lm-evaluation-harness writes it. One that is a
single expression in `{{ }}` gives the expression's own value (a list of choices, an index) without
the detour over its printed form. A missing field is an error, never an empty text. What a template
cannot say is a filter of this module:

    hellaswag_clean       drop the marks that WikiHow's markup left in HellaSwag
    wikitext_detokenize   undo WikiText's spaces around punctuation
    indices_of(value)     positions of `value` in a list
    regex_replace(pattern, replacement, count)

The first two restate the cleaning rules of the harness's tasks `hellaswag` and `wikitext`, whose
odd ones are kept: prompts have to be equal to the character.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmbench.bench.errors import BenchConfigError, WorkloadError

EVALUATION_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""What a sound template raises on a row that it does not fit."""


def hellaswag_clean(text: str) -> str:
    """Clean a piece of HellaSwag as the harness does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


_WIKITEXT_RULES: tuple[tuple[str | re.Pattern[str], str], ...] = (
    ("s '", "s'"),
    (re.compile(r"/' [0-9]/"), r"/'[0-9]/"),  # as written there, slashes included
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def wikitext_detokenize(text: str) -> str:
    """Put a page of WikiText back together: the harness's replacements, in its order."""
    for pattern, replacement in _WIKITEXT_RULES:
        if isinstance(pattern, str):
            text = text.replace(pattern, replacement)
        else:
            text = pattern.sub(replacement, text)
    return text


def indices_of(values: Sequence[Any], value: Any) -> list[int]:
    """Return the positions at which `value` stands."""
    return [index for index, found in enumerate(values) if found == value]


def regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    """Replace what a regular expression matches; the harness's own filter."""
    return re.sub(pattern, replacement, text, count=count)


_ENVIRONMENT = ImmutableSandboxedEnvironment(  # rows are shared by all tasks of a file
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)
_ENVIRONMENT.filters.update(
    hellaswag_clean=hellaswag_clean,
    wikitext_detokenize=wikitext_detokenize,
    indices_of=indices_of,
    regex_replace=regex_replace,
)


class Template:
    """A compiled template; raises one of EVALUATION_ERRORS where it does not fit a row."""

    def __init__(self, source: str) -> None:
        """Compile.

        Raises:
            jinja2.TemplateSyntaxError: not Jinja.
        """
        self.source = source
        self._text = _ENVIRONMENT.from_string(source)
        self._expression = None
        body = _ENVIRONMENT.parse(source).body
        if len(body) == 1 and isinstance(body[0], nodes.Output) and len(body[0].nodes) == 1:
            is_expression = not isinstance(body[0].nodes[0], nodes.TemplateData)
            if is_expression and source.startswith("{{") and source.endswith("}}"):
                inner = source[2:-2].strip("-+")
                self._expression = _ENVIRONMENT.compile_expression(inner, undefined_to_none=False)

    def text(self, doc: Mapping[str, Any]) -> str:
        """Render as text."""
        return self._text.render(doc)

    def value(self, doc: Mapping[str, Any]) -> Any:
        """Return what the template stands for: a value, or a printed one read back."""
        if self._expression is None:
            return ast.literal_eval(self.text(doc))
        found = self._expression(doc)
        if isinstance(found, jinja2.Undefined):
            str(found)  # raises
        return found


@lru_cache(maxsize=1024)
def compiled(source: str) -> Template:
    """Return the compiled template of a text, made once."""
    return Template(source)


def check_template(source: str, where: str) -> None:
    """Refuse what is not a template.

    Raises:
        BenchConfigError: with the line of the template and what is wrong.
    """
    try:
        compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise BenchConfigError(
            f"{where} is not a template (its line {error.lineno}: {error.message}): {source!r}"
        ) from error


def as_text(source: str, doc: Mapping[str, Any], where: str) -> Any:
    """Return the field named `source`, as it is, or else the template rendered as text."""
    if source in doc:
        return doc[source]
    try:
        return compiled(source).text(doc)
    except EVALUATION_ERRORS as error:
        raise _misfit(error, doc, where) from error


def as_value(source: str, doc: Mapping[str, Any], where: str) -> Any:
    """Return the field named `source`, or else the value that the template stands for."""
    if source in doc:
        return doc[source]
    try:
        return compiled(source).value(doc)
    except (*EVALUATION_ERRORS, SyntaxError) as error:
        raise _misfit(error, doc, where) from error


def _misfit(error: Exception, doc: Mapping[str, Any], where: str) -> WorkloadError:
    reason = getattr(error, "message", None) or str(error)
    if isinstance(error, KeyError):
        reason = f"no entry for {reason}"
    misfit = WorkloadError(f"{where} does not fit the row: {reason}")
    misfit.add_note(f"the row has the fields {', '.join(map(str, doc)) or '(none)'}")
    return misfit
