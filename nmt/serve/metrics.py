"""Figures for Prometheus: requests, lines, batches, the queue and how long answers take."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
LINES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "nmt_requests", "Requests answered", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "nmt_request_seconds",
            "From a request's head to the end of its answer",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.lines = Counter("nmt_lines", "Lines translated", registry=self.registry)
        self.batches = Histogram(
            "nmt_batch_lines", "Lines of a batch", buckets=LINES, registry=self.registry
        )

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def observe_batch(self, n_lines: int) -> None:
        self.batches.observe(n_lines)
        self.lines.inc(n_lines)

    def watch(self, name: str, description: str, measure: Callable[[], float]) -> None:
        """Report what `measure` returns whenever Prometheus asks."""
        Gauge(name, description, registry=self.registry).set_function(measure)

    def format(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text
