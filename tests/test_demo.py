"""The demo tells the truth: its verdicts hold on several world sizes, and a fault of one ulp in one rank is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import bicomm
from bicomm.demo import batches, run, text
from bicomm.demo.layer import TILE, Experts, Router, Routing, Shape, in_tiles, partial, row_maps
from bicomm.demo.table import Report

SMALL = Shape(hidden=96, intermediate=32, experts=16, top_k=4)
TOKENS = 70
COMMAND = Path(run.__file__).with_name("__main__.py")
ARGUMENTS = ["--tokens", "70", "--hidden", "96", "--intermediate", "32", "--experts", "16", "--top-k", "4", "--cpu"]


def _reports(fault: int) -> list[Report | None]:
    """On four ranks a sound run and one with a fault; then a sound one on three of them and on one, in one launch."""
    world = bicomm.init(device="cpu")
    found = [
        run.demo(world, SMALL, TOKENS, repeats=1),
        run.demo(world, SMALL, TOKENS, repeats=1, fault=fault),
    ]
    for size in (3, 1):
        group = dist.new_group(list(range(size)))
        if world.rank < size:
            found.append(run.demo(bicomm.init(group, device="cpu"), SMALL, TOKENS, repeats=1))
    return found


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    results = run_ranks(4, _reports, 2, launcher="fork", timeout=100.0)
    assert not any(report for r in results[1:] for report in r.value)  # rank 0 has the report
    assert [r.stdout for r in results[1:]] == [""] * 3  # and it alone speaks
    assert "[1/7]" in results[0].stdout
    return results[0].value


def test_every_mode_has_the_bits_of_its_contract_in_every_batch(reports: list[Report]) -> None:
    report = reports[0]
    assert report.failures == []
    assert [line.mode for line in report.lines] == list(run.MODES)
    assert all(line.wrong == (0, 0, 0, 0) for line in report.lines)
    assert [row.changed for row in report.rows] == [dict.fromkeys(run.MODES, 0)] * 3
    assert report.rows[0].splits[0] == 0  # a rank without tokens
    assert len(set(report.rows[0].splits)) > 2
    assert {line.contract for line in report.lines} == {"ordered/1", "exact/1", "fp64/1", "owner/1"}
    assert all("shared memory" in line.executor for line in report.lines)
    assert report.switch


def test_the_ways_without_a_contract_do_differ(reports: list[Report]) -> None:
    report = reports[0]
    assert all(control.changed > 0 for control in report.controls)
    assert all(row.naive > 0 for row in report.rows)


def test_one_ulp_in_one_rank_is_found_in_every_mode(reports: list[Report]) -> None:
    report = reports[1]
    for line in report.lines:
        assert sum(line.wrong) > 0, line.mode
        assert any(failure.startswith(f"{line.mode}: ") for failure in report.failures)
    for row in report.rows:  # they have no fault, so they differ from the first batch, which has
        assert all(n > 0 for n in row.changed.values())
        assert any(failure.startswith(f"batch {row.name}: ") for failure in report.failures)


def test_owner_has_the_same_bits_on_any_number_of_ranks(reports: list[Report]) -> None:
    four, _, three, one = ({line.mode: line.digest for line in report.lines} for report in reports)
    assert three["owner"] == one["owner"] == four["owner"]
    assert len({four["ordered"], three["ordered"], one["ordered"]}) == 3  # partials depend on who has which expert
    assert reports[2].failures == reports[3].failures == []


def test_the_command_prints_two_tables_under_torchrun() -> None:
    ranks = run_ranks(3, COMMAND, *ARGUMENTS, "--repeats", 1, launcher="torchrun", timeout=100.0)
    assert [r.stdout == "" for r in ranks] == [False, True, True]
    assert "OK: all 20 results" in ranks[0].stdout
    assert "same bits, 3 ranks" in ranks[0].stdout
    assert max(map(len, ranks[0].stdout.splitlines())) <= 96
    assert "\x1b" not in ranks[0].stdout  # plain lines in a pipe


def test_the_command_reports_a_fault_and_fails_on_every_rank_under_mpirun() -> None:
    ranks = run_ranks(3, COMMAND, *ARGUMENTS, "--perturb-rank", 1, launcher="mpirun", timeout=100.0, check=False)
    assert [r.returncode for r in ranks] == [1, 1, 1]
    assert "DIFFERS exact: " in ranks[0].stdout
    assert "FAILED" in ranks[0].stdout


def test_the_command_runs_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bicomm.demo", *ARGUMENTS])
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as stop:
        run.main()
    assert stop.value.code == 0
    assert "OK: all 20 results" in capsys.readouterr().out
    assert torch.get_num_threads() == threads


def test_more_slots_than_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bicomm.demo", "--experts", "4", "--top-k", "5"])
    with pytest.raises(SystemExit) as stop:
        run.main()
    assert stop.value.code == 2


def _layer() -> tuple[torch.Tensor, Router]:
    return text.embed(text.licence(), TOKENS, SMALL.hidden, 1, torch.device("cpu")), Router(
        SMALL, 0, torch.device("cpu")
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 63, 65])
def test_rows_of_the_layer_do_not_depend_on_the_batch(rows: int) -> None:
    tokens, router = _layer()
    experts = Experts(SMALL, range(16), 0, tokens.device)
    whole, few = router(tokens), router(tokens[:rows])
    assert torch.equal(whole.expert[:rows], few.expert)
    assert torch.equal(whole.weight[:rows], few.weight)
    sums = [partial(*experts.rows(x, r), x.shape[0], SMALL.top_k) for x, r in ((tokens, whole), (tokens[:rows], few))]
    assert run.differing(sums[0][:rows], sums[1]) == 0


def test_what_lies_in_the_padding_of_a_tile_is_dropped() -> None:
    seen = []

    def work(tile: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tile.shape))
        return torch.where(tile == 0, float("nan"), tile)

    x = torch.ones(TILE + 3, 5)
    assert torch.equal(in_tiles(work, x), x)
    assert seen == [(TILE, 5)] * 2
    assert in_tiles(work, x[:0]).shape == (0, 5)


def test_equal_scores_go_to_the_lower_expert() -> None:
    router = Router(SMALL, 0, torch.device("cpu"))
    routing = router(torch.zeros(2, SMALL.hidden))
    assert routing.expert.tolist() == [[0, 1, 2, 3]] * 2
    assert routing.weight.tolist() == [[0.25] * 4] * 2


@pytest.mark.parametrize("size", [1, 3, 5, 16])
def test_the_maps_of_owner_lead_to_the_rows_of_their_slots(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    expert = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(9)])
    routing = Routing(expert, torch.ones(9, 4))
    row_of_slot, rank_of_slot = row_maps(routing, SMALL, size)
    slots = []  # of each rank's rows, as its experts make them
    for rank in range(size):
        made = Experts(SMALL, SMALL.experts_of(rank, size), 0, expert.device).rows(torch.zeros(9, 96), routing)
        slots.append(made[1])
    for slot in range(36):
        rank, row = int(rank_of_slot.view(-1)[slot]), int(row_of_slot.view(-1)[slot])
        assert int(slots[rank][row]) == slot


@pytest.mark.parametrize("size", [1, 2, 3, 8, 12])
def test_batches_give_every_token_one_owner(size: int) -> None:
    for batch in [batches.first(50, size), *batches.others(50, 25, size, 0)]:
        assert sum(batch.splits) == batch.tokens
        assert len(batch.splits) == size
        assert min(batch.splits) >= 0
        owned = torch.cat([batch.ids[batch.owned(rank)] for rank in range(size)])
        assert torch.equal(owned, batch.ids)
        assert len(set(batch.ids.tolist())) == batch.tokens
    assert size == 1 or batches.others(50, 25, size, 0)[0].splits[0] == 0


def test_a_token_is_its_bytes_and_not_its_place() -> None:
    data = text.licence()
    assert data.startswith(b"Apache License")
    twice = data[:40] + data[:40]
    x = text.embed(twice, 80, 16, 0, torch.device("cpu"))
    assert torch.equal(x[10:40], x[50:80])
    assert not torch.equal(x[10], x[11])
