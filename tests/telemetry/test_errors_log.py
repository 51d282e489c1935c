"""What failed, and how often lately."""

from psrl.errors import EngineError, EngineRequestError
from psrl.telemetry.errors_log import MAX_MESSAGE_CHARACTERS, ErrorLog, ErrorRates, ErrorRecord, read_errors


def test_errors_come_back_with_class_unit_step_and_whether_a_retry_can_help(tmp_path):
    log = ErrorLog(tmp_path / "errors.jsonl", clock=lambda: 12.5)
    log.record(EngineError("replica 0 is gone"), unit="train-0-000001-e0", step=3)
    log.record(EngineRequestError("bad ids"), unit="train-0-000002-e0", step=3)
    log.record(KeyError("x"), unit="train step 4", step=4)
    log.record_text("SandboxError", "y" * 10_000, is_retryable=True, unit="train-0-000003-e0", step=4)
    log.close()
    first, second, third, fourth = read_errors(tmp_path / "errors.jsonl")
    assert first == ErrorRecord(
        time=12.5, unit="train-0-000001-e0", error_class="EngineError", is_retryable=True, message="replica 0 is gone", step=3
    )
    assert (second.error_class, second.is_retryable) == ("EngineRequestError", False)
    assert (third.error_class, third.is_retryable) == ("KeyError", False)
    assert len(fourth.message) == MAX_MESSAGE_CHARACTERS


def test_rates_count_the_last_units_only():
    rates = ErrorRates(window=4)
    assert (rates.rate(), rates.rates()) == (0.0, {})
    for error_class in (None, "EngineError", None, None, "SandboxError"):
        rates.observe(error_class)
    assert rates.num_units == 4
    assert rates.rates() == {"EngineError": 0.25, "SandboxError": 0.25}
    assert rates.rate() == 0.5
    for _ in range(4):
        rates.observe(None)
    assert rates.rates() == {}
