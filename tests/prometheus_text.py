"""Read Prometheus' text format."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        for name, labels, value, *_ in family.samples:
            inside = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
            key = f"{name}{{{inside}}}" if inside else name
            assert key not in found, f"{key} is there twice"
            found[key] = value
    return found
