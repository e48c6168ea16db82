"""What a process is told of the collector that it pushes to; values alone, no OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """What the environment says of a collector. ``pushes_metrics``: one is named for metrics. The protocols are
    ``grpc`` or ``http/protobuf``. ``service_name``: "" where the environment names the service itself."""

    pushes_metrics: bool = False
    metrics_protocol: str = "http/protobuf"
    traces_protocol: str = "http/protobuf"
    service_name: str = ""
