"""Tables of a candidate against its baseline: what changed task by task, and how far it diverges.

Scores alone hide what happened: as many answers may have become wrong as became right. So flips
stand beside the difference, the interval is that of the pairs, and the divergence of whole
distributions stands below, where it moves before any answer does. Built from `scores.json` alone.
"""

from collections.abc import Mapping, Sequence

from llmbench.reports.eval_table import PERPLEXITY, Record, Remarks, value_text
from llmbench.reports.format import NULL, counted, number
from llmbench.reports.tables import Column, Table, text_column

_DIVERGENCE = (
    ("KL mean", "kl_mean", "kl_se"),
    ("median", "kl_median", None),
    ("p90", "kl_p90", None),
    ("p99", "kl_p99", None),
    ("p99.9", "kl_p99_9", None),
    ("max", "kl_max", None),
)


def paired_table(paired: Sequence[Record], *, base: str, candidate: str) -> Table:
    """Return what changed, task by task, on the same items."""
    remarks = Remarks()
    rows = [_paired_row(score, remarks) for score in paired]
    names = (
        "task",
        "metric",
        "base",
        "candidate",
        "difference",
        "95 % interval",
        "R→W / W→R / W→W",
        "p (Holm)",
    )
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    flips = [score["flip_rate"] for score in paired if score["flip_rate"] is not None]
    notes = [f"base: {base}; candidate: {candidate}; the same items to both"]
    if flips:
        notes.append("R→W: answers that went from right to wrong; W→W: wrong, but another answer")
        notes.append(
            "p: McNemar's exact test of right and wrong answers, sign flips of differences "
            "otherwise; adjusted for the number of tasks (Holm)"
        )
    return Table(
        columns=tuple(
            text_column(name, column) for name, column in zip(names, columns, strict=True)
        ),
        notes=(*notes, *remarks.notes),
    )


def divergence_tables(divergences: Mapping[str, Record]) -> tuple[Table, Table]:
    """Return KL by task, and the change of probabilities and of perplexity."""
    shown = {name: record for name, record in divergences.items() if record["num_tokens"]}
    records = list(shown.values())
    names = [_where(name) for name in shown]

    def column(title: str, value: str, error: str | None) -> Column:
        cells = [_infinite_or(record, value, error) for record in records]
        return text_column(title, cells)

    kl = Table(
        columns=(
            text_column("task", names),
            text_column("tokens", [number(record["num_tokens"]) for record in records]),
            *(column(*entry) for entry in _DIVERGENCE),
        ),
        notes=(
            "KL(base ‖ candidate) in nats, over the whole vocabulary at every scored token of "
            "every continuation; ± standard error over items; "
            f"{NULL}: too few tokens to say",
        ),
    )
    ratios = [
        _interval_text(
            record["perplexity_ratio"],
            record["perplexity_ratio_low"],
            record["perplexity_ratio_high"],
        )
        for record in records
    ]
    changes = Table(
        columns=(
            text_column("task", names),
            text_column("items", [number(record["num_items"]) for record in records]),
            text_column(
                "RMS Δp",
                [_percent_error(record, "rms_delta_p", "rms_delta_p_se") for record in records],
            ),
            text_column(
                "same top token",
                [_percent_error(r, "top1_agreement", "top1_agreement_se") for r in records],
            ),
            text_column("base perplexity", [number(r["base_perplexity"]) for r in records]),
            text_column("perplexity", [number(r["perplexity"]) for r in records]),
            text_column("ratio", ratios),
        ),
        notes=("Δp: change of the probability of the given token; perplexity: of these tokens",),
    )
    return kl, changes


def difference_text(value: float | None, unit: str) -> str:
    """Return a signed difference: points of a share, per cent of a perplexity, bits."""
    if value is None:
        return NULL
    if unit == "bits":
        return f"{value:+.3f} bits"
    return f"{100 * value:+.1f} {'points' if unit == 'share' else '%'}"


def p_text(value: float | None) -> str:
    """Return a p-value; three digits behind the point are all that anyone reads."""
    if value is None:
        return NULL
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _paired_row(score: Record, remarks: Remarks) -> tuple[str, ...]:
    unit = "share" if score["unit"] == "share" else PERPLEXITY
    told = []
    if score["num_left_out"]:
        left_out = counted(score["num_left_out"], "item")
        told.append(f"{left_out} left out: no usable answer of one of the models")
    flips = score["flips"]
    counts = NULL
    if flips is not None:
        keys = ("num_right_to_wrong", "num_wrong_to_right", "num_wrong_to_other")
        counts = " / ".join(f"{flips[key]:,}" for key in keys)
    low, high = score["low"], score["high"]
    between = NULL
    if low is not None and high is not None:
        scale = 1.0 if score["unit"] == "bits" else 100.0
        between = f"[{scale * low:+.3g}, {scale * high:+.3g}]"
    return (
        score["task"] + remarks.mark(*told),
        score["metric"],
        value_text(score["base"], unit),
        value_text(score["candidate"], unit),
        difference_text(score["difference"], score["unit"]),
        between,
        counts,
        p_text(score["adjusted_p"]),
    )


def _infinite_or(record: Record, value: str, error: str | None) -> str:
    if value in record["infinite"]:
        return "inf"
    text = number(record[value])
    spread = record[error] if error is not None else None
    return text if spread is None else f"{text} ± {number(spread, 2)}"


def _percent_error(record: Record, value: str, error: str) -> str:
    if record[value] is None:
        return NULL
    text = number(100 * record[value])
    spread = record[error]
    return f"{text} %" if spread is None else f"{text} ± {number(100 * spread, 2)} %"


def _interval_text(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return NULL
    if low is None or high is None:
        return number(value, 4)
    return f"{number(value, 4)} [{number(low, 4)}, {number(high, 4)}]"


def _where(name: str) -> str:
    return "all tasks" if name == "" else name
