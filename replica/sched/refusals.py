"""What is said when the engine says no: the errors of the core, worded for the client."""

from __future__ import annotations

from events.errors import ADAPTER_LOAD_FAILED, ADAPTER_NOT_FINITE, ENGINE_GONE, CoreError


def too_long(message: str) -> CoreError:
    """Larger than the model's context or than this replica."""
    return CoreError(status=400, message=message, code="context_length_exceeded")


def bad_request(message: str) -> CoreError:
    """Makes no sense; the gateway should not have let it pass."""
    return CoreError(status=400, message=message, code="invalid_value")


def queue_full(drain_ms: float) -> CoreError:
    """Too much waits already; `drain_ms` is how long the waiting prefill will take."""
    return CoreError(
        status=429,
        message="This replica's queue is full.",
        type="rate_limit_error",
        code="queue_full",
        retry_after_s=min(max(drain_ms / 1000.0, 1.0), 60.0),
        reroute=True,
    )


def too_late() -> CoreError:
    """Its deadline passed."""
    return CoreError(
        status=504,
        message="The request's deadline passed.",
        type="timeout_error",
        code="deadline_exceeded",
    )


def slow_reader() -> CoreError:
    """Nobody takes what it puts out."""
    return CoreError(
        status=503, type="server_error", code="slow_reader", message="The reader was too slow."
    )


def comes_too_late(wait_ms: float) -> CoreError:
    """Its first token would come after its deadline; `wait_ms` of prefill is before it."""
    return CoreError(
        status=429,
        message="The first token can't come by the request's deadline: too much waits here.",
        type="rate_limit_error",
        code="deadline",
        retry_after_s=min(max(wait_ms / 1000.0, 1.0), 60.0),
        reroute=True,
    )


def engine_failure() -> CoreError:
    """The row that made a step fail; the cause is in the log."""
    return CoreError(
        status=500,
        message="The engine failed while it computed this request.",
        type="server_error",
        code="engine_error",
    )


def grammar_failure() -> CoreError:
    """Its schema, regex or grammar took more than its share to follow."""
    return CoreError(
        status=400,
        message="The requested output format is too complex to be enforced.",
        code="grammar_too_complex",
    )


def nothing_left() -> CoreError:
    """What it bars and what its format allows leave no token; no replica could do better."""
    return CoreError(
        status=400,
        message="What the request bars and the output format that it asks for leave no token.",
        code="no_token_left",
    )


def unknown_adapter(name: str) -> CoreError:
    """No such LoRA adapter here, or not with this content."""
    return CoreError(
        status=404,
        message=f"The model '{name}' is not served here.",
        code="model_not_found",
        param="model",
    )


def adapter_failed(name: str, started: bool) -> CoreError:
    """Its LoRA adapter could not be loaded; why is in the log. The next request tries again."""
    return CoreError(
        status=503,
        message=f"The adapter '{name}' could not be loaded.",
        type="server_error",
        code=ADAPTER_LOAD_FAILED,
        retry_after_s=1.0,
        reroute=not started,
    )


def adapter_not_finite(name: str) -> CoreError:
    """What is computed with its LoRA adapter leaves the range of numbers."""
    return CoreError(
        status=500,
        message=f"The model gave no finite numbers with the adapter '{name}'.",
        type="server_error",
        code=ADAPTER_NOT_FINITE,
    )


def engine_gone(started: bool) -> CoreError:
    """The engine is closed or dead. `started`: the child has put out tokens already."""
    return CoreError(
        status=503,
        message="This replica's engine has stopped.",
        type="server_error",
        code=ENGINE_GONE,
        retry_after_s=1.0,
        reroute=not started,
    )
