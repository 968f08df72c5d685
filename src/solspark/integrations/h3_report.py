"""What an H3 run did, as plain data: the dict behind `summary()` and the records behind it."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

from ..methods.spark import PackedRecord
from .h3_config import H3SparseAttentionConfig
from .h3_controller import H3Controller


def run_summary(controller: H3Controller) -> dict[str, Any]:
    """Return everything that `summary()` says of a run; waits for the device."""
    config = controller.config
    records = call_records(controller)
    last = controller.last_record
    first = next((call.record for call in controller.calls if call.record is not None), None)
    attention = "sol_int8" if config.precision == "int8" else "block_sparse_attention"
    backend = None if last is None else last.implementations.get(attention)
    return {
        "method": "sol",
        "preset": "spark" if config.sol_landmark_preprocess else "sol",
        "sol_backend": backend,
        "implementations": {} if last is None else dict(last.implementations),
        "completed_evaluations": controller.completed,
        "total_evaluations": config.total_evaluations,
        "warmup_mode": config.warmup_mode,
        "warmup_ratio": config.warmup_ratio,
        "warmup_steps": config.warmup_steps,
        "dense_evaluations": config.dense_evaluations,
        "trailing_dense_evaluations": config.trailing_dense,
        "extra_dense_evaluations": config.extra_dense_evaluations,
        "extra_dense_layers": config.extra_dense_layers,
        "evaluations_per_step": config.evaluations_per_step,
        "dense_layers": config.sol_dense_layers,
        "min_tokens": config.sol_min_tokens,
        "dense_backend": _backend_label(config.dense_backend),
        "processor_calls": dict(controller.counters),
        "sol_route_density": None if first is None else _route_density(config, first),
        "resolved": {} if last is None else _resolution(config, last),
        "sol_virtual_query_layout": None if last is None else last.virtual_queries,
        "reblock": None if last is None else last.reblock,
        "precision": config.precision,
        "int8": _int8(controller),
        **controller.layout_facts,
        "by_evaluation": _grouped(records, "evaluation"),
        "by_layer": _grouped(records, "layer"),
        "options": {field.name: _plain(getattr(config, field.name)) for field in fields(config)},
    }


def call_records(controller: H3Controller) -> list[dict[str, Any]]:
    """Return one record a processor call, in order; waits for the device."""
    delivered = controller.config.sol_log_density
    found = []
    for call in controller.calls:
        entry: dict[str, Any] = {
            "evaluation": call.evaluation,
            "layer": call.layer,
            "kind": call.kind,
            "seconds": call.watch.seconds(),
        }
        if call.record is not None:
            entry["density"] = call.record.density if delivered else None
            entry["video_density"] = call.record.video_density if delivered else None
            entry["route"] = call.record.route
            entry["implementations"] = dict(call.record.implementations)
        found.append(entry)
    return found


def _route_density(config: H3SparseAttentionConfig, record: PackedRecord) -> dict[str, Any]:
    """Return geometry, budget and delivered densities of one sparse call."""
    figures = dict(record.figures)
    if config.sol_log_density:
        figures["delivered_density"] = record.density
        figures["delivered_video_density"] = record.video_density
    return figures


def _int8(controller: H3Controller) -> dict[str, Any] | None:
    """Return how the INT8 calls quantise, as resolved by the newest, and what they have kept."""
    if controller.config.precision != "int8":
        return None
    return {
        "chunk_tokens": controller.config.chunk_tokens,
        **controller.mending,
        "calibrated_layers": len({name[0] for name in controller.int8.statistics}),
    }


def _backend_label(backend: Any) -> str | None:
    """Name the dense backend for a report."""
    if backend is None or isinstance(backend, str):
        return backend
    return getattr(backend, "__qualname__", type(backend).__name__)


def _resolution(config: H3SparseAttentionConfig, record: PackedRecord) -> dict[str, Any]:
    """Say what options that name an execution came to."""
    return {
        "route": record.route,
        "sol_route_topk_execution": {
            "requested": record.requested_execution,
            "resolved": record.resolved_execution,
        },
        "sol_force_local_blocks": config.packed().local_radius >= 0,
        "local_radius": config.packed().local_radius,
        "impl": {"requested": config.impl, "resolved": dict(record.implementations)},
    }


def _grouped(records: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Sum the records up by evaluation or by layer."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record[key], []).append(record)
    rows = []
    for index, members in sorted(groups.items()):
        kinds = Counter(member["kind"] for member in members)
        densities = [member["density"] for member in members if member.get("density") is not None]
        rows.append(
            {
                key: index,
                "calls": dict(kinds),
                "density": sum(densities) / len(densities) if densities else None,
                "seconds": sum(member["seconds"] for member in members),
            }
        )
    return rows


def _plain(value: Any) -> Any:
    """Make an option printable."""
    return _backend_label(value) if callable(value) else value
