"""Executors on eight processes and the mirror in one agree bit for bit: every mode, presets, adversarial families."""

from __future__ import annotations

from ranks import run_ranks

from engine_ranks import engine_and_mirror


def test_eight_ranks_and_the_mirror_agree() -> None:
    results = run_ranks(8, engine_and_mirror, False, launcher="fork", timeout=240)
    for result in results:
        assert result.value["wrong"] == []
        assert result.value["compared"] >= 100
    assert results[0].value["naive differs"], "the twin: adding the ranks' partials in another order must show"
