"""Executors on eight processes and the mirror in one agree bit for bit: every mode, tree and adversarial family."""

from __future__ import annotations

from ranks import run_ranks

from bicomm.presets import PARTIALS
from engine_ranks import MODES, engine_and_mirror
from families import FAMILIES


def test_eight_ranks_and_the_mirror_agree() -> None:
    results = run_ranks(8, engine_and_mirror, False, launcher="fork", timeout=240)
    for result in results:
        assert result.value["wrong"] == []
        assert result.value["compared"] == len(FAMILIES) * (len(MODES) * len(PARTIALS) + 2)  # and owner, with weights
    assert results[0].value["naive differs"], "the twin: adding the ranks' partials in another order must show"
