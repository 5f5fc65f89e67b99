"""The event log keeps what was recorded, in order, through its file."""

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmbench.bench.client.events import FINAL_KINDS, Event, EventLog, end_detail, reason_detail

EVENTS = st.lists(
    st.builds(
        Event,
        request_index=st.integers(0, 2**31 - 1),
        kind=st.sampled_from(
            ["scheduled", "admitted", "sent", "token", *sorted(FINAL_KINDS)],
        ),
        t_s=st.floats(0, 1e9),
        num_tokens=st.integers(0, 1000),
        detail=st.none() | st.text(max_size=20).map(reason_detail),
        emit_s=st.none() | st.floats(0, 1e9),
    ),
    max_size=30,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(events=EVENTS)
def test_log_reads_back_as_written(tmp_path: Path, events: list[Event]) -> None:
    log = EventLog()
    for event in events:
        log.append(*event)
    path = tmp_path / "events.parquet"
    log.write_parquet(path)
    assert list(EventLog.read_parquet(path)) == events


def test_no_partial_file_is_left_behind(tmp_path: Path) -> None:
    EventLog().write_parquet(tmp_path / "events.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["events.parquet"]


def test_details_are_json_objects() -> None:
    assert json.loads(reason_detail("prompt of 100 tokens")) == {"reason": "prompt of 100 tokens"}
    detail = json.loads(
        end_detail(
            {
                "finish_reason": "stop",
                "num_prompt_tokens": 4,
                "num_output_tokens": 2,
                "num_cached_tokens": 0,
            }
        )
    )
    assert detail["num_output_tokens"] == 2
