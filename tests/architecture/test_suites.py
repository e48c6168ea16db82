"""What `make` runs as a suite of its own lies where that suite looks."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_tests_of_ray_lie_together() -> None:
    marked = {path for path in TESTS.rglob("test_*.py") if "pytest.mark.ray" in path.read_text()} - {
        Path(__file__)
    }
    together = set((TESTS / "serve_app" / "on_ray").glob("test_*.py"))
    assert marked == together, "make test-ray looks nowhere else, and runs nothing there that is not marked"
