"""What does a long prompt do to the streams that are running? Five batching policies compared.

A running stream gets a token a step, so a step that also computes a long prompt makes every stream
wait for it. `static` lets nobody join a running batch; `prefill_first` stops decoding for each new
prompt; `mixed` decodes beside whole prompts; `chunked` and `splitfuse` cut prompts to a token
budget, so that no step is long (Sarathi-Serve, Agrawal et al. 2024; Dynamic SplitFuse, Holmes et
al. 2024). Means hide the difference, for most steps hold no prompt: it stands in the tail of the
time between tokens.

Each policy serves the same requests at the same arrival times, through the processes of
`serve-bench`: mostly short prompts, and every `long_every`-th a long one.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from llmbench.bench.errors import BenchConfigError
from llmbench.bench.studies.study import (
    Conclusion,
    Lab,
    ModelSettings,
    Row,
    Study,
    require_positive,
    three_digits,
    time_text,
)
from llmbench.engine.config import EngineConfig, Policy

if TYPE_CHECKING:
    from llmbench.bench.workloads.workload import Workload

POLICIES: tuple[Policy, ...] = get_args(Policy)
SPLITTING = ("chunked", "splitfuse")
STOPPING = ("prefill_first", "mixed")
WARMUPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings(ModelSettings):
    """A request rate, and short prompts with long ones among them.

    Attributes:
        max_num_batched_tokens: Token budget of a step, for every policy; those that never split a
            prompt exceed it for a long one.
        short_input_len: Tokens of a short prompt; each is up to half shorter or longer.
        time_limit_s: Longest time of a policy; what has not ended by then is aborted.
    """

    policies: tuple[Policy, ...] = POLICIES
    request_rate: float = 1.5
    num_prompts: int = 36
    short_input_len: int = 32
    long_input_len: int = 1024
    long_every: int = 6
    output_len: int = 48
    max_num_batched_tokens: int = 128
    max_num_seqs: int = 32
    time_limit_s: float = 300.0

    def __post_init__(self) -> None:
        require_positive(
            self,
            "request_rate",
            "num_prompts",
            "short_input_len",
            "long_input_len",
            "long_every",
            "output_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "time_limit_s",
        )
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown or not self.policies:
            error = BenchConfigError(
                f"policies must be some of {', '.join(POLICIES)}, not {', '.join(unknown)}"
            )
            for name in unknown:
                for close in difflib.get_close_matches(name, POLICIES, n=1):
                    error.add_note(f"did you mean {close}?")
            raise error

    def engine_of(self, policy: Policy) -> EngineConfig:
        """The engine that serves under a policy."""
        return self.engine(
            policy=policy,
            prefix_cache="none",
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.long_input_len + self.output_len,
        )


def measure(settings: BatchingSettings, lab: Lab) -> Iterator[Row]:
    """Yield a row for each policy."""
    from llmbench.bench.client.built_in_engine import BuiltInEngineFactory
    from llmbench.bench.client.generator import LoadProgress
    from llmbench.bench.config import Cell
    from llmbench.bench.serve import CellFiles, Rig, run_cell

    workload = _workload(settings)
    cell = Cell(
        request_rate=settings.request_rate,
        max_concurrency=None,
        burstiness=1.0,
        num_prompts=settings.num_prompts,
        num_warmups=WARMUPS,
        time_limit_s=settings.time_limit_s,
        seed=settings.seed,
    )
    for policy in settings.policies:
        files = CellFiles(
            events=_path(lab.folder, "events", policy),
            warmup_events=_path(lab.folder, "warmup", policy),
            steps=_path(lab.folder, "steps", policy),
        )

        def report(stage: str, load: LoadProgress, policy: str = policy) -> None:
            done = load.num_completed + load.num_failed
            lab.progress(f"{policy}, {stage}", done, load.num_total)

        lab.note(f"starting the engine with policy {policy}")
        with Rig(BuiltInEngineFactory(settings.engine_of(policy))) as rig:
            rig.wait_until_ready()
            outcome = run_cell(rig, cell, policy, workload, files, on_progress=report)
        if outcome.error is not None:
            raise outcome.error
        metrics, validity = outcome.record["metrics"], outcome.record["validity"]
        row = {
            "policy": policy,
            "request_rate_req_s": settings.request_rate,
            "verdict": validity["verdict"],
            "reasons": validity["reasons"],
            "num_completed": metrics["num_completed"],
            "num_failed": metrics["num_failed"] + metrics["num_aborted"] + metrics["num_lost"],
            "duration_s": metrics["duration_s"],
            "output_throughput_tok_s": metrics["output_throughput_tok_s"],
            "mean_batch": metrics["mean_batch_size"],
        }
        for name in ("itl", "ttft", "tpot"):
            summary = metrics[f"{name}_s"]
            row |= {
                f"{name}_p50_s": summary["median"],
                f"{name}_p95_s": summary["p95"],
                f"{name}_p99_s": summary["p99"],
                f"{name}_max_s": summary["max"],
            }
        row |= {"itl_p99_interval_s": metrics["itl_s"]["p99_ci"], "num_itl": metrics["itl_s"]["n"]}
        yield row


def _path(folder: Path, what: str, policy: str) -> Path:
    return folder / f"{what}-{policy}.parquet"


def _workload(settings: BatchingSettings) -> "Workload":
    from llmbench.bench.model_facts import read_model_facts
    from llmbench.bench.studies.prompts import PromptSource
    from llmbench.bench.workloads.streams import stream
    from llmbench.bench.workloads.workload import RequestSpec, Workload, workload_digest
    from llmbench.engine.models.source import resolve_folder

    engine = settings.engine()
    folder = resolve_folder(engine.model, with_weights=engine.load_format != "dummy")
    facts = read_model_facts(folder, engine)
    if settings.long_input_len + settings.output_len > facts.max_model_len:
        raise BenchConfigError(
            f"long_input_len {settings.long_input_len} + output_len {settings.output_len} exceed "
            f"the model's {facts.max_model_len} tokens"
        )
    half = settings.short_input_len // 2
    lengths = stream(settings.seed, "batching/lengths")
    input_lens = lengths.integers(
        settings.short_input_len - half, settings.short_input_len + half + 1, settings.num_prompts
    ).tolist()
    # Not the first ones: a long prompt shows its effect on streams that are running.
    for index in range(settings.long_every // 2, settings.num_prompts, settings.long_every):
        input_lens[index] = settings.long_input_len
    source = PromptSource.of_folder(folder, facts.vocab_size, settings.seed)
    requests = tuple(
        RequestSpec(
            index=index,
            prompt_token_ids=prompt,
            max_tokens=settings.output_len,
            ignore_eos=True,
        )
        for index, prompt in enumerate(source.draw(input_lens, "batching"))
    )
    return Workload(requests=requests, digest=workload_digest(requests))


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Compare the best policy that splits prompts with those that stop streams for whole ones.

    `static` stops none, as nobody joins a running batch: its price is the wait for the first token.
    """
    columns = (
        "policy",
        "itl_p50_s",
        "itl_p95_s",
        "itl_p99_s",
        "itl_max_s",
        "ttft_p50_s",
        "output_throughput_tok_s",
        "verdict",
    )
    table = [{name: row[name] for name in columns} for row in rows]
    by_name = {row["policy"]: row for row in rows}
    tails = {name: row["itl_p99_s"] for name, row in by_name.items() if row["itl_p99_s"]}
    split = min((name for name in tails if name in SPLITTING), key=tails.__getitem__, default=None)
    stopping = [name for name in STOPPING if name in tails]
    if split is None or not stopping:
        return Conclusion(finding=_finding_without_pair(rows, tails), table=table)
    ratios = {name: tails[name] / tails[split] for name in stopping}
    rest = " and ".join(
        f"{time_text(tails[name])} with {name} ({three_digits(ratios[name])} times)"
        for name in stopping
    )
    finding = (
        f"with {split}, which splits long prompts, 1 token in 100 takes more than "
        f"{time_text(tails[split])} to come; that is {rest}"
    )
    if "static" in by_name:
        waits = {name: by_name[name]["ttft_p50_s"] for name in ("static", split)}
        finding += (
            f"; static, which lets nobody join a running batch, gives first tokens after "
            f"{time_text(waits['static'])} ({split} {time_text(waits[split])})"
        )
    return Conclusion(
        finding=finding,
        table=table,
        summary={"splitting_policy": split, "itl_p99_ratio": ratios},
        notes=tuple(
            f"{row['policy']}: {'; '.join(row['reasons'])}" for row in rows if row["reasons"]
        ),
    )


def _finding_without_pair(rows: Sequence[Row], tails: dict[str, float]) -> str:
    if not tails:
        most = max((row["num_itl"] for row in rows), default=0)
        return f"{most:,} gaps between tokens are too few for a 99th percentile of any policy"
    listed = ", ".join(f"{name} {time_text(tail)}" for name, tail in tails.items())
    return f"99th percentile of the time between tokens: {listed}"


STUDY = Study(name="batching", settings_type=BatchingSettings, measure=measure, conclude=conclude)
