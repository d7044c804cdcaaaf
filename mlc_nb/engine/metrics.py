"""Counts and times of the engine and of one request; every number is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from mlc_nb.protocol.responses import PromptTokensDetails, Usage

__all__ = ["EngineMetrics", "RequestTimes"]

# Field -> kind, its name in Prometheus where the field's is not in base units, meaning.
_PROMETHEUS = {
    "steps": ("counter", "", "Calls of the model."),
    "prefill_tokens": ("counter", "", "Tokens that were computed as parts of prompts."),
    "decode_tokens": ("counter", "", "Tokens that were computed one by one."),
    "prefill_time_s": ("counter", "prefill_seconds", "Seconds in steps with any prompt tokens."),
    "decode_time_s": ("counter", "decode_seconds", "Seconds in steps without prompt tokens."),
    "prompt_tokens": ("counter", "", "Prompt tokens of the sequences that have run."),
    "cached_prompt_tokens": ("counter", "", "Prompt tokens that the prefix cache had already."),
    "finished_requests": ("counter", "", "Requests that finished."),
    "aborted_requests": ("counter", "", "Requests that were aborted."),
    "failed_requests": ("counter", "", "Requests that failed."),
    "preemptions": ("counter", "", "Times that a sequence gave its pages back to be computed again."),
    "running_requests": ("gauge", "", "Sequences that hold KV pages."),
    "waiting_requests": ("gauge", "", "Sequences in line."),
    "free_pages": ("gauge", "", "KV pages that no request holds."),
    "total_pages": ("gauge", "", "KV pages."),
    "prefix_cache_pages": ("gauge", "", "KV pages that the prefix cache can share."),
    "weight_bytes": ("gauge", "", "Bytes of the weights."),
    "kv_bytes": ("gauge", "", "Bytes of the KV pages."),
}


@dataclass(slots=True)
class EngineMetrics:
    """Sums since the engine was made or reset.

    Attributes
    ----------
    model
        The name of what runs.
    steps
        Calls of the model.
    prefill_tokens, decode_tokens
        Tokens that went through the model as parts of prompts, and one by one.
    prefill_time_s, decode_time_s
        Seconds in steps with any prompt tokens, and in steps without.
    prompt_tokens, cached_prompt_tokens
        Prompt tokens of the sequences that have run, and those of them that the prefix cache had already.
    finished_requests, aborted_requests, failed_requests
        How the requests so far ended.
    running_requests, waiting_requests
        Sequences (answers of requests) that hold KV pages now, and sequences in line.
    free_pages, total_pages
        KV pages that no request holds, and all of them.
    prefix_cache_pages
        KV pages that the prefix cache can share; those that no request holds are free all the same.
    weight_bytes, kv_bytes
        Memory that the weights and the KV pages take.
    preemptions
        How often a request gave its pages back to one that came before it, to be computed again.
    last_finished_request
        The ``usage.extra`` of the request that finished last.
    """

    model: str = ""
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    prefill_time_s: float = 0.0
    decode_time_s: float = 0.0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    free_pages: int = 0
    total_pages: int = 0
    prefix_cache_pages: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    preemptions: int = 0
    last_finished_request: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all values by name."""
        return asdict(self)

    def prometheus(self) -> str:
        """Return all counts, times and sizes in the text form that Prometheus scrapes."""
        escaped = self.model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines: list[str] = []
        for name, (kind, unit, meaning) in _PROMETHEUS.items():
            metric = f"mlc_nb_{unit or name}" + "_total" * (kind == "counter")
            value = getattr(self, name)
            lines += [
                f"# HELP {metric} {meaning}",
                f"# TYPE {metric} {kind}",
                f'{metric}{{model="{escaped}"}} {value}',
            ]
        return "\n".join(lines) + "\n"

    def record_step(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float) -> None:
        """Count one step of the model."""
        self.steps += 1
        self.prefill_tokens += num_prefill_tokens
        self.decode_tokens += num_decode_tokens
        if num_prefill_tokens:
            self.prefill_time_s += seconds
        else:
            self.decode_time_s += seconds


class RequestTimes:
    """When a request was submitted, first ran, gave its first token and ended, in `perf_counter` seconds."""

    def __init__(self) -> None:
        self.submitted = perf_counter()
        self.first_step: float | None = None
        self.first_token: float | None = None

    def usage(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int, num_choices: int) -> Usage:
        """Return the usage of a request that ends now.

        Parameters
        ----------
        cached_tokens
            Prompt tokens that did not have to be computed.
        completion_tokens
            Tokens of all answers together.
        num_choices
            How many answers there are; the first token of each comes from a prefill.
        """
        now = perf_counter()
        first_token = self.first_token if self.first_token is not None else now
        first_step = self.first_step if self.first_step is not None else now
        decode_tokens = max(completion_tokens - num_choices, 0)
        prefill_tokens = prompt_tokens - cached_tokens
        decode_seconds = now - first_token
        decodes = decode_tokens > 0 and decode_seconds > 0
        extra = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": cached_tokens,
            "prefill_tokens": prefill_tokens,
            "decode_tokens": decode_tokens,
            "jump_forward_tokens": 0,
            "prefill_tokens_per_s": prefill_tokens / max(first_token - first_step, 1e-9),
            "decode_tokens_per_s": decode_tokens / decode_seconds if decodes else None,
            "ttft_s": first_token - self.submitted,
            "inter_token_latency_s": decode_seconds / decode_tokens if decodes else None,
            "end_to_end_latency_s": now - self.submitted,
        }
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
            extra=extra,
        )
