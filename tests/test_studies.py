"""Studies: rows that last, findings that follow from them, each run on a tiny model."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbench.bench import strict_json
from llmbench.bench.errors import BenchConfigError, ResultsError
from llmbench.bench.model_facts import read_model_facts
from llmbench.bench.results import read_results
from llmbench.bench.studies import (
    batching,
    kv_cache,
    load_generator,
    paged_vs_reserved,
    prefix_cache,
    step_cost,
    vs_transformers,
)
from llmbench.bench.studies.batching import BatchingSettings
from llmbench.bench.studies.kv_cache import KVCacheSettings, growth_exponent
from llmbench.bench.studies.load_generator import LoadGeneratorSettings
from llmbench.bench.studies.paged_vs_reserved import PagedVsReservedSettings
from llmbench.bench.studies.prefix_cache import PrefixCacheSettings
from llmbench.bench.studies.registry import STUDIES
from llmbench.bench.studies.step_cost import StepCostSettings
from llmbench.bench.studies.study import (
    CONCLUSION,
    Conclusion,
    Lab,
    Row,
    Study,
    StudyResult,
    interleaved,
    run_study,
)
from llmbench.bench.studies.vs_transformers import VsTransformersSettings, ratio_of_pairs
from llmbench.reports.study_report import write_study_report

UNITS = ("_s", "_bytes", "_share", "_ratio", "_nats")
UNITLESS = {"mean_batch", "ratio"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a two-layer random Llama in bfloat16, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return str(folder)


def run(study: Study[Any], settings: Any, folder: Path) -> StudyResult:
    """Run a study, and hold it to what every study promises."""
    result = run_study(study, settings, folder / "study")
    written = read_results(folder / "study")
    assert [record["row"] for record in written.records] == result.rows
    # What the folder holds is enough to conclude again, and says the same.
    again = study.conclude([record["row"] for record in written.records])
    stored = strict_json.loads((folder / "study" / CONCLUSION).read_bytes())
    assert stored == strict_json.strict(again)
    assert stored["finding"] == result.finding
    assert written.manifest["config"]["study"] == study.name
    for row in [*result.rows, *result.conclusion.table]:
        for name, value in row.items():
            if isinstance(value, float):
                assert name.endswith(UNITS) or name in UNITLESS, f"{name} has no unit"
    return result


def assert_report(folder: Path, *pictures: str) -> None:
    """Hold the report of a study's folder to its pictures."""
    written = {path.name for path in write_study_report(folder / "study")}
    expected = {f"{name}.{suffix}" for name in pictures for suffix in ("svg", "png", "csv")}
    assert written == expected | {"summary.md", "table.csv"}


# The frame


@dataclass(frozen=True, slots=True, kw_only=True)
class CountSettings:
    count: int = 3
    seed: int = 0


def count_up(settings: CountSettings, lab: Lab) -> Iterator[Row]:
    for number in range(settings.count):
        yield {"number": number}
    if settings.count > 3:
        raise KeyboardInterrupt


def count_all(rows: Sequence[Row]) -> Conclusion:
    return Conclusion(finding=f"{len(rows)} rows", table=list(rows))


COUNT = Study(name="count", settings_type=CountSettings, measure=count_up, conclude=count_all)


def test_rows_of_an_interrupted_study_stay(tmp_path: Path) -> None:
    seen: list[Row] = []
    with pytest.raises(KeyboardInterrupt):
        run_study(COUNT, CountSettings(count=5), tmp_path / "study", on_row=seen.append)
    written = [record["row"] for record in read_results(tmp_path / "study").records]
    assert written == seen == [{"number": number} for number in range(5)]
    assert not (tmp_path / "study" / CONCLUSION).exists()


def test_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    run(COUNT, CountSettings(), tmp_path)
    before = (tmp_path / "study" / "results.jsonl").read_bytes()
    with pytest.raises(ResultsError, match="holds results already"):
        run_study(COUNT, CountSettings(), tmp_path / "study")
    assert (tmp_path / "study" / "results.jsonl").read_bytes() == before


def test_headline_figures_stand_beside_the_finding_in_json(tmp_path: Path) -> None:
    def conclude(rows: Sequence[Row]) -> Conclusion:
        return Conclusion(finding="all", table=[], summary={"largest": rows[-1]["number"]})

    study = Study(name="count", settings_type=CountSettings, measure=count_up, conclude=conclude)
    record = run(study, CountSettings(), tmp_path).to_record()
    assert record["largest"] == 2
    assert record["settings"] == {"count": 3, "seed": 0}
    strict_json.dumps(record)


def test_sides_take_turns_in_being_first() -> None:
    order = [name for _, name in interleaved(["a", "b"], 4)]
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_registry_loads_neither_torch_nor_numpy() -> None:
    blocked = ("torch", "transformers", "numpy", "pandas", "matplotlib", "scipy", "pyarrow")
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}));"
        "from llmbench.bench.studies.registry import STUDIES;"
        "files = {'quantization': {'calibration': 'a.txt', 'text': 'b.txt'}};"
        "[study.settings_type(**files.get(name, {})) for name, study in STUDIES.items()]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_found_under_its_own_name(name: str) -> None:
    assert STUDIES[name].name == name


@pytest.mark.parametrize(
    ("settings_type", "field", "value"),
    [
        (KVCacheSettings, "output_lens", ()),
        (KVCacheSettings, "repetitions", 0),
        (PagedVsReservedSettings, "max_model_len", 64),
        (PagedVsReservedSettings, "kv_tokens", 512),
        (PagedVsReservedSettings, "input_lens", (9, 8)),
        (BatchingSettings, "policies", ("chunky",)),
        (BatchingSettings, "request_rate", math.nan),
        (PrefixCacheSettings, "prefix_lens", (-1,)),
        (VsTransformersSettings, "batch_size", 0),
        (StepCostSettings, "num_seqs", (0,)),
        (LoadGeneratorSettings, "request_rates", (-1.0,)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_impossible_settings_are_refused_when_made(
    settings_type: type, field: str, value: object
) -> None:
    with pytest.raises(BenchConfigError):
        settings_type(**{field: value})


# kv-cache


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_growth_exponent_of_a_power_is_that_power(exponent: float) -> None:
    lengths = [8, 16, 32, 64]
    # Below a quarter of the longest, times are of something else.
    seconds = [99.0] + [3.0 * length**exponent for length in lengths[1:]]
    assert growth_exponent(lengths, seconds) == pytest.approx(exponent)


def test_a_single_length_has_no_growth() -> None:
    assert growth_exponent([8, 64], [1.0, 2.0]) is None


def test_kv_cache_study_reads_one_stream_off_at_every_length(
    tiny_model: str, tmp_path: Path
) -> None:
    settings = KVCacheSettings(
        model=tiny_model, input_len=4, output_lens=(4, 8, 16), repetitions=2, num_threads=1
    )
    result = run(kv_cache.STUDY, settings, tmp_path)
    assert len(result.rows) == 2 * 3 * 2
    for manager in ("paged", "uncached"):
        for repetition in range(2):
            stream = [
                row
                for row in result.rows
                if (row["kv_manager"], row["repetition"]) == (manager, repetition)
            ]
            assert [row["num_output_tokens"] for row in stream] == [4, 8, 16]
            times = [row["duration_s"] for row in stream]
            assert times == sorted(times)


def test_kv_cache_finding_compares_the_longest_stream() -> None:
    rows = [
        {
            "kv_manager": manager,
            "num_output_tokens": length,
            "repetition": 0,
            "duration_s": length**exponent / 1000,
        }
        for manager, exponent in (("paged", 1), ("uncached", 2))
        for length in (10, 20, 40)
    ]
    conclusion = kv_cache.conclude(rows)
    assert conclusion.finding == (
        "without a KV cache 40 tokens take 1.60 s in place of 40.0 ms (40.0 times as long), and "
        "time grows with the length to the power 2.00, with the cache to the power 1.00"
    )
    assert [row["speedup_ratio"] for row in conclusion.table] == pytest.approx([10, 20, 40])


def test_kv_cache_study_refuses_what_the_model_cannot_hold(tiny_model: str, tmp_path: Path) -> None:
    settings = KVCacheSettings(model=tiny_model, output_lens=(512,))
    with pytest.raises(BenchConfigError, match="exceed the model's 512 tokens"):
        run_study(kv_cache.STUDY, settings, tmp_path / "study")


# paged-vs-reserved


def test_paged_vs_reserved_study_shares_one_pool(tiny_model: str, tmp_path: Path) -> None:
    settings = PagedVsReservedSettings(
        model=tiny_model,
        num_prompts=12,
        kv_tokens=256,
        max_model_len=128,
        input_lens=(4, 8),
        max_tokens=(16, 64),
        mean_output_len=8,
        block_size=4,
        num_threads=1,
    )
    result = run(paged_vs_reserved.STUDY, settings, tmp_path)
    whole, asked, paged = result.rows
    assert whole["largest_batch"] == 2  # 256 tokens hold two reservations of 128
    assert whole["largest_batch"] <= asked["largest_batch"] <= paged["largest_batch"]
    assert whole["kv_waste_share"] > asked["kv_waste_share"] > paged["kv_waste_share"]
    assert len({row["num_output_tokens"] for row in result.rows}) == 1
    assert all(row["memory_limited_s"] > 0 for row in (whole, asked))
    for row in result.rows:
        assert row["kv_used_mean_bytes"] <= row["kv_reserved_mean_bytes"] <= row["kv_pool_bytes"]
        if row["memory_limited_s"]:
            held = row["kv_reserved_mean_bytes"] + row["kv_stranded_mean_bytes"]
            assert held == pytest.approx(row["kv_pool_bytes"])
        else:
            assert row["kv_stranded_mean_bytes"] == 0
    assert_report(tmp_path, "paged-vs-reserved", "memory-map")


def test_picture_shows_every_block_after_every_step(tiny_model: str, tmp_path: Path) -> None:
    settings = PagedVsReservedSettings(
        model=tiny_model,
        num_prompts=4,
        kv_tokens=128,
        max_model_len=64,
        input_lens=(4, 8),
        max_tokens=(16,),
        mean_output_len=4,
        block_size=4,
        num_threads=1,
    )
    run(paged_vs_reserved.STUDY, settings, tmp_path)
    for variant in paged_vs_reserved.VARIANTS:
        picture = np.load(tmp_path / "study" / f"memory-{variant}.npz")
        states, times = picture["state"], picture["time_s"]
        assert states.shape == (len(times), 32)
        assert (np.diff(times) > 0).all()
        assert (states[-1] == paged_vs_reserved.FREE).all()
        assert (states == paged_vs_reserved.FILLED).any()
        # Blocks are taken when tokens come, reservations before.
        assert (states == paged_vs_reserved.EMPTY).any() == (variant != "paged")


def test_paged_vs_reserved_finding_names_waste_batch_and_gain() -> None:
    rows = [
        {
            "variant": variant,
            "kv_waste_share": waste,
            "largest_batch": batch,
            "output_throughput_tok_s": speed,
            "kv_reserved_mean_bytes": 100.0,
            "kv_used_mean_bytes": 50.0,
            "kv_wasted_mean_bytes": 50.0,
            "kv_stranded_mean_bytes": 0.0,
            "memory_limited_s": 1.0 if variant != "paged" else 0.0,
        }
        for variant, waste, batch, speed in (
            ("reserved-model-length", 0.9, 4, 100.0),
            ("reserved-max-tokens", 0.6, 12, 200.0),
            ("paged", 0.05, 40, 300.0),
        )
    ]
    conclusion = paged_vs_reserved.conclude(rows)
    finding = conclusion.finding
    assert "blocks waste 5%" in finding
    assert "held 40 requests at once in place of 12 and 4" in finding
    assert "gave 1.50 and 3.00 times the output tokens/s" in finding
    assert conclusion.notes == (
        "paged: memory never kept a request waiting, so its means are over the whole run",
    )


# batching


def test_batching_study_serves_through_the_processes_of_serve_bench(
    tiny_model: str, tmp_path: Path
) -> None:
    settings = BatchingSettings(
        model=tiny_model,
        policies=("chunked",),
        request_rate=100.0,
        num_prompts=6,
        short_input_len=4,
        long_input_len=40,
        long_every=3,
        output_len=4,
        max_num_batched_tokens=16,
        num_threads=1,
    )
    result = run(batching.STUDY, settings, tmp_path)
    (row,) = result.rows
    assert (row["policy"], row["num_completed"], row["num_failed"]) == ("chunked", 6, 0)
    assert row["num_itl"] == 6 * 3
    assert_report(tmp_path, "batching")
    assert row["itl_p99_s"] is None  # 18 gaps carry no 99th percentile
    assert (
        result.finding == "18 gaps between tokens are too few for a 99th percentile of any policy"
    )
    assert (tmp_path / "study" / "events-chunked.parquet").is_file()


def batching_row(policy: str, p99_s: float | None, **more: Any) -> Row:
    row = dict.fromkeys(("itl_p50_s", "itl_p95_s", "itl_max_s", "output_throughput_tok_s"), 0.01)
    return {
        **row,
        "policy": policy,
        "itl_p99_s": p99_s,
        "ttft_p50_s": 0.25,
        "num_itl": 1000,
        "verdict": "VALID",
        "reasons": [],
        **more,
    }


def test_batching_finding_compares_the_best_splitting_policy() -> None:
    rows = [
        batching_row("static", 0.02, ttft_p50_s=5.0),
        batching_row("prefill_first", 1.0, reasons=["3 of 36 requests failed"]),
        batching_row("mixed", 0.5),
        batching_row("chunked", 0.2),
        batching_row("splitfuse", 0.25),
    ]
    conclusion = batching.conclude(rows)
    assert conclusion.finding == (
        "with chunked, which splits long prompts, 1 token in 100 takes more than 200 ms to come; "
        "that is 1.00 s with prefill_first (5.00 times) and 500 ms with mixed (2.50 times); "
        "static, which lets nobody join a running batch, gives first tokens after 5.00 s "
        "(chunked 250 ms)"
    )
    assert conclusion.notes == ("prefill_first: 3 of 36 requests failed",)


def test_batching_finding_of_one_policy_is_its_tail() -> None:
    finding = batching.conclude([batching_row("mixed", 0.5)]).finding
    assert finding == "99th percentile of the time between tokens: mixed 500 ms"


# prefix-cache


def test_prefix_cache_study_finds_whole_blocks_of_the_second_request(
    tiny_model: str, tmp_path: Path
) -> None:
    settings = PrefixCacheSettings(
        model=tiny_model, prefix_lens=(0, 20, 64), suffix_len=8, repetitions=1, num_threads=1
    )
    result = run(prefix_cache.STUDY, settings, tmp_path)
    cached = {
        (row["prefix_cache"], row["request"], row["num_prefix_tokens"]): row["num_cached_tokens"]
        for row in result.rows
    }
    assert len(cached) == len(result.rows) == 2 * 2 * 3
    found = {key: number for key, number in cached.items() if number}
    assert found == {("hash", "second", 20): 16, ("hash", "second", 64): 64}
    longest = result.conclusion.table[-1]
    assert longest["hit_share"] == pytest.approx(64 / 72)
    assert longest["cached_kv_bytes"] < longest["uncached_kv_bytes"]


def test_prefix_cache_finding_is_of_the_longest_prefix() -> None:
    times = {("none", "first"): 2.0, ("none", "second"): 2.0, ("hash", "first"): 2.2}
    rows = [
        {
            "prefix_cache": cache,
            "num_prefix_tokens": length,
            "request": request,
            "repetition": 0,
            "ttft_s": length * times.get((cache, request), 0.1),
            "num_prompt_tokens": 2 * length,
            "num_cached_tokens": length if (cache, request) == ("hash", "second") else 0,
            "kv_held_bytes": 60 if cache == "hash" else 100,
        }
        for length in (1, 2)
        for cache in ("none", "hash")
        for request in ("first", "second")
    ]
    assert prefix_cache.conclude(rows).finding == (
        "behind a cached prefix of 2 tokens the first token comes after 200 ms in place of "
        "4.00 s (20.0 times sooner), and two requests hold 60% of the memory; where nothing is "
        "found, the time is 1.10 times that without a cache"
    )


# vs-transformers


def test_vs_transformers_study_times_both_sides_in_turn(tiny_model: str, tmp_path: Path) -> None:
    settings = VsTransformersSettings(
        model=tiny_model,
        input_len=8,
        output_len=4,
        batch_size=3,
        transformers_batch_size=2,
        prompt_len=12,
        repetitions=2,
        start_ups=0,
        num_threads=1,
    )
    result = run(vs_transformers.STUDY, settings, tmp_path)
    record = result.to_record()
    for name in ("one_stream_ratio", "batch_ratio", "prompt_ratio", "window_ratio"):
        assert 0 < record[name]["low"] <= record[name]["value"] <= record[name]["high"]
        assert record[name]["interval"] == "range of 2 pairs"
    loads = [row for row in result.rows if row["measure"] != "memory"]
    assert [row["side"] for row in loads] == 4 * [
        "built-in",
        "transformers",
        "transformers",
        "built-in",
    ]
    windows = {row["num_prompt_tokens"] for row in loads if row["measure"] == "window"}
    assert windows == {read_model_facts(Path(tiny_model), settings.engine()).max_model_len}
    sizes = {(row["measure"], row["side"]): row["num_requests"] for row in loads}
    assert (sizes["batch", "built-in"], sizes["batch", "transformers"]) == (3, 2)
    nats = record["mean_token_nats"]
    assert nats["built-in"] == pytest.approx(nats["transformers"], rel=1e-2)  # of bfloat16
    assert record["peak_memory"]["peak_resident_bytes"] > record["peak_memory"]["weight_bytes"]
    assert_report(tmp_path, "vs-transformers")


def test_a_window_of_one_token_has_nothing_to_score() -> None:
    with pytest.raises(BenchConfigError, match="window_len must be at least 2, not 1"):
        VsTransformersSettings(window_len=1)


def test_a_window_longer_than_the_model_reads_is_refused(tiny_model: str, tmp_path: Path) -> None:
    settings = VsTransformersSettings(model=tiny_model, window_len=99_999)
    with pytest.raises(BenchConfigError, match=r"window_len is 99,999, .* reads at most"):
        list(vs_transformers.measure(settings, Lab(folder=tmp_path)))


def test_ratio_is_of_pairs_of_the_same_repetition() -> None:
    ratio = ratio_of_pairs({0: 4.0, 1: 9.0, 2: 8.0}, {2: 2.0, 1: 3.0, 0: 2.0})
    assert ratio == {"value": 3.0, "low": 2.0, "high": 4.0, "interval": "range of 3 pairs"}


def test_ratio_of_many_pairs_has_a_bootstrap_interval() -> None:
    ratio = ratio_of_pairs(dict(enumerate(range(1, 21))), dict.fromkeys(range(20), 1.0))
    assert ratio["interval"] == "95% bootstrap interval of 20 pairs"
    assert 1.0 < ratio["low"] < ratio["value"] == 10.5 < ratio["high"] < 20.0


@pytest.mark.slow
def test_fresh_process_reports_its_first_token(tiny_model: str) -> None:
    from llmbench.bench.studies.start_up import time_start_up

    settings = VsTransformersSettings(model=tiny_model, prompt_len=64, num_threads=1)
    report = time_start_up(settings.engine_config, [5, 6, 7])
    assert 0 < report["loaded_s"] < report["first_token_s"]
    assert report["peak_resident_bytes"] > report["weight_bytes"] > 0


@pytest.mark.slow
def test_failed_start_says_why(tiny_model: str) -> None:
    from llmbench.bench.errors import TargetError
    from llmbench.bench.studies.start_up import time_start_up

    settings = VsTransformersSettings(model=tiny_model, prompt_len=1000)
    with pytest.raises(TargetError, match="longest is 512 tokens") as caught:
        time_start_up(settings.engine_config, [5])
    assert caught.value.__notes__ == ["give --max-model-len 512 or less"]


# step-cost


def test_step_cost_study_splits_a_step_into_its_parts(tmp_path: Path) -> None:
    settings = StepCostSettings(
        num_seqs=(1, 4), num_steps=20, num_warmup_steps=2, input_len=8, num_threads=1
    )
    result = run(step_cost.STUDY, settings, tmp_path)
    assert [row["num_seqs"] for row in result.rows] == [1, 4]
    for row in result.rows:
        assert row["num_steps"] == 20
        for part in step_cost.PARTS:
            assert 0 < row[f"{part}_p50_s"] < row["step_max_s"]
    assert result.conclusion.summary["step_cost_s"] == result.rows[1]["step_p50_s"]
    assert result.finding.startswith("a step of 4 sequences costs ")


# load-generator


def test_load_generator_study_loses_nothing(tmp_path: Path) -> None:
    settings = LoadGeneratorSettings(request_rates=(200.0, 1000.0), duration_s=0.4)
    result = run(load_generator.STUDY, settings, tmp_path)
    assert [row["num_sent"] for row in result.rows] == [80, 400]
    assert [row["num_lost"] for row in result.rows] == [0, 0]
    assert result.rows[0]["send_error_p99_s"] is None  # 80 requests carry no 99th percentile
    assert "and none of 400 is lost" in result.finding


# The command


def test_study_command_prints_one_document(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from llmbench.cli.main import main

    folder = tmp_path / "out"
    flags = ["--num-seqs", "1,2", "--num-steps", "5", "--input-len", "4", "--num-threads", "1"]
    assert main(["study", "step-cost", *flags, "--output", str(folder), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["study"] == "step-cost"
    assert document["settings"]["num_seqs"] == [1, 2]
    assert document["num_seqs"] == 2
    assert all(Path(path).is_file() for path in document["files"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["study", "kv-cach"], "kv-cache"),
        (["study", "kv-cache", "--repetitions", "0"], "--repetitions must be positive, not 0"),
        (["study", "kv-cache", "--output-lens", "4,x"], "4,x"),
        (["study", "kv-cache", "no-such-model"], "no-such-model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_of_a_study_is_exit_code_2(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from llmbench.cli.main import main

    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err


def test_help_lists_every_study(capfd: pytest.CaptureFixture[str]) -> None:
    from llmbench.cli.main import main

    assert main(["study", "--help"]) == 0
    listed = capfd.readouterr().out
    assert all(name in listed for name in STUDIES)
