"""What the person who watches a run reads."""

import io

import pytest
from rich.console import Console

from pith.run.console import StepConsole, duration, step_line
from pith.run.metrics import StepMetrics

METRICS = StepMetrics(
    step=12,
    loss=3.45678,
    balance_loss=1.0,
    grad_norm=1.25,
    lr=3e-4,
    tokens=8192,
    step_seconds=2.0,
    tokens_per_second=12345.6,
)


def with_fields(**changes):
    fields = {name: getattr(METRICS, name) for name in StepMetrics.__dataclass_fields__}
    return StepMetrics(**(fields | changes))


def written(console_width: int, *steps: StepMetrics) -> str:
    stream = io.StringIO()
    console = StepConsole(200, console=Console(file=stream, width=console_width))
    for step in steps:
        console.step(step)
    return stream.getvalue()


def test_a_step_on_the_cpu_is_one_line():
    line = "step  12/200  loss  3.4568  grad norm   1.2500  lr 3.00e-04  12,346 tokens/s  eta 6m16s"
    assert step_line(METRICS, total_steps=200, seconds_left=376) == line


def test_a_step_on_a_gpu_also_says_mfu_and_memory():
    metrics = with_fields(mfu_causal=0.4123, memory_bytes=71_250_000_000)
    line = step_line(metrics, total_steps=200, seconds_left=1)
    assert line.endswith("12,346 tokens/s  mfu 41.2%  memory 71.25 GB  eta 1s")


def test_a_narrow_pipe_gets_whole_plain_lines():
    text = written(20, METRICS, with_fields(step=13))
    assert text.count("\n") == 2
    assert "\x1b" not in text


def test_the_eta_is_the_steps_left_times_the_usual_step_time():
    slow_first = [with_fields(step=1, step_seconds=60.0)]
    usual = [with_fields(step=step, step_seconds=2.0) for step in range(2, 101)]
    assert written(200, *slow_first, *usual).endswith("eta 3m20s\n")
    assert written(200, with_fields(step=200)).endswith("eta 0s\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (86399, "23h59m"),
        (97200, "1d03h"),
        (-1, "0s"),
    ],
)
def test_durations_read_in_their_two_largest_units(seconds, text):
    assert duration(seconds) == text
