"""The EP sweep measures what it says, finds wrong bits and keeps off multicast; the model fits what was measured."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ROOT, run_ranks

import bicomm

sys.path.insert(0, str(ROOT / "bench"))

import common

import ep_bytes
import ep_operands
import ep_plot
import ep_series
import ep_stage
import ep_sweep
import model
import model_fit
import model_machine
from model_fit import Fit, Point, fit, fit_all, pair_points

RESULTS = ROOT / "bench" / "results"


# ------------------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    ("world", "how", "expected"),
    [
        (8, ep_bytes.PULL, 28), (8, ep_bytes.SWITCH, 32), (8, ep_bytes.OWNER, 14), (2, ep_bytes.PULL, 4),
        (2, ep_bytes.OWNER, 8), (4, ep_bytes.PULL, 12), (4, ep_bytes.OWNER, 12), (72, ep_bytes.PULL, 284),
        (72, ep_bytes.SWITCH, 288),
    ],
)  # fmt: skip
def test_bytes_over_the_links_of_an_output_element(world: int, how: str, expected: float) -> None:
    assert ep_bytes.moved(how, world, 3, 5, 8).link == 15 * expected


def test_rows_are_routed_once_and_arrive_where_the_sweep_says() -> None:
    world, tokens, top_k = 5, 7, 3
    routing = ep_operands.Routing(world, tokens, top_k)
    places = set(zip(routing.ranks.flatten().tolist(), routing.rows.flatten().tolist(), strict=True))
    assert places == {(r, i) for r in range(world) for i in range(int(routing.count[r]))}
    for owner in range(world):
        arrived = []  # as an all-to-all leaves them: by sender, then by row
        for sender in range(world):
            first = int(routing.sent[sender, :owner].sum())
            arrived += [(sender, first + i) for i in range(int(routing.sent[sender, owner]))]
        at = routing.arrival(owner)
        for token, slot in itertools.product(range(tokens), range(top_k)):
            told = (int(routing.ranks[owner, token, slot]), int(routing.rows[owner, token, slot]))
            assert arrived[int(at[token, slot])] == told


@pytest.mark.parametrize("world", [2, 4, 8, 16, 72])
@pytest.mark.parametrize("tokens", [1, 3, 64, 512])
def test_the_reserved_room_is_enough(world: int, tokens: int) -> None:
    routing = ep_operands.Routing(world, tokens, 8)
    taken = world * tokens * 64 * 4 + routing.most * 64 * 2 + tokens * 64 * 2 + 3 * 256
    assert taken <= ep_operands.room(world, tokens, 64, 8)


# ------------------------------------------------------------------------------------------------------------ sweep


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("sweep")
    words = ["--tokens", "1,5", "--hidden", "64,96", "--seconds", "0.001"]
    run_ranks(
        3, ROOT / "bench" / "ep_sweep.py", *words, launcher="torchrun", timeout=120.0,
        env={"BICOMM_BENCH_OUT": str(folder), "CUDA_VISIBLE_DEVICES": "", "NCCL_NVLS_ENABLE": "1"},
    )  # fmt: skip
    path = folder / "ep_sweep_cpu.json"
    return json.loads(path.read_text()), path


def test_a_sweep_on_three_ranks_has_every_series_at_every_size(record: tuple[dict[str, Any], Path]) -> None:
    told, _ = record
    assert told["world"] == 3 and told["timed"] and told["shared"]
    assert {"date", "commit", "machine", "versions", "topology", "copy_GB_per_s"} <= set(told)
    sizes = {(row["tokens"], row["hidden"]) for row in told["results"]}
    assert sizes == {(1, 64), (5, 64), (1, 96), (5, 96)}
    names = {row["name"] for row in told["results"]}
    assert {"ordered", "exact", "owner", "dispatch", "exact, by all-to-all", "gloo all-reduce fp32"} <= names
    assert len(told["results"]) == len(names) * len(sizes)
    for row in told["results"]:
        assert (
            row["us"] > 0 and row["us_p10"] <= row["us"] and row["share"] == pytest.approx(row["bound_us"] / row["us"])
        )
    assert told["setup"]["symmetric_memory_ms"] > 0 and told["setup"]["barriers"][0]["us"] > 0
    assert told["not_run"] == {"multimem": "the ranks work on CPUs"}
    assert [row for row in told["checks"] if row["wrong"]] == [] and len(told["checks"]) == 2 * len(names)


def test_multicast_stays_off_whatever_the_environment_says(record: tuple[dict[str, Any], Path]) -> None:
    assert record[0]["topology"]["environment"] == {
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"
    }  # fmt: skip
    script = str(ROOT / "bench" / "ep_sweep.py")
    refused = subprocess.run([sys.executable, script, "--allow-multi"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "unrecognized arguments" in refused.stderr


def test_table_and_plot_are_made_from_the_record(record: tuple[dict[str, Any], Path]) -> None:
    table = record[1].with_suffix(".md").read_text()
    assert "## hidden 96" in table and "| tokens a rank | 1 | 5 |" in table and table.count("| exact |") == 2
    pytest.importorskip("matplotlib")
    assert ep_plot.plot(record[1]).stat().st_size > 10_000


def test_a_sweep_finds_one_wrong_bit() -> None:
    """A world of one, in this process: right results count 0 wrong elements, one flipped bit counts 1."""
    stage = ep_stage.Stage(bicomm.local_world(1), torch.device("cpu"), 0.0)
    modes = ["ordered", "exact", "owner", "dispatch"]
    with ep_operands.Operands(stage, 3, 16, 4) as at:
        at.fill_to_check(wide=True)
        for series in ep_series.modes_of(stage, at, modes):
            stage.first(series.call, series.barriers)
            assert ep_sweep._wrong(stage, at, series, 0, True) == 0, series.name
            bits = series.result[0].view(torch.int32 if series.result[0].dtype == torch.float32 else torch.int16)
            bits[1, 1] ^= 1
            assert ep_sweep._wrong(stage, at, series, 0, True) == 1, series.name


def test_the_peers_of_a_local_world_sum_what_the_ranks_hold() -> None:
    """They read the ranks' buffers in place, which lie at equal distances; run here on a local world on the CPU."""
    stage = ep_stage.LocalStage.__new__(ep_stage.LocalStage)
    ep_stage.Stage.__init__(stage, bicomm.local_world(3), torch.device("cpu"), 0.0)
    nbytes = -(-ep_operands.room(3, 3, 24, 4) // 768) * 768  # whole rows of 24 bf16, whole units of 256
    with ThreadPoolExecutor(3) as pool:  # growing is collective; what comes after is not
        list(pool.map(lambda comm: comm.reserve(1, nbytes // 4), stage.comms))
    with ep_operands.Operands(stage, 3, 24, 4) as at:
        at.fill_to_check(wide=False)
        found = list(ep_series.peers_of(stage, at))
        assert [series.of for series in found] == ["combine", "owner", "dispatch"]
        for series, comm in itertools.product(found, stage.comms):
            series.call(comm)
            assert ep_sweep._wrong(stage, at, series, comm.rank, False) == 0
            series.result[comm.rank].zero_()
            assert ep_sweep._wrong(stage, at, series, comm.rank, False) > 0


def test_an_error_in_a_table_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    common.table("t", [{"name": "NCCL", "error": "[/gloo/pair.cc:534] Connection closed"}])
    assert "[/gloo/pair.cc:534] Connection closed" in capsys.readouterr().out


def test_one_rank_on_a_cpu_is_told_what_to_run() -> None:
    command = [sys.executable, str(ROOT / "bench" / "ep_sweep.py"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "launch/ep_sweep.sh" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--tokens", "abc"), ("--tokens", ""), ("--tokens", "1,,4"), ("--tokens", "0"), ("--hidden", "2048,-1"),
        ("--modes", "exact,sum"), ("--top-k", "0"), ("--seconds", "nan"), ("--most-bytes", "0"), ("--local-world", "x"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_sweep_refuses_what_is_no_size_or_mode(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ep_sweep.py", *words])
    with pytest.raises(SystemExit) as ended:
        ep_sweep.main()
    assert ended.value.code == 2 and f"argument {words[0]}: " in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ model


def _points(us: dict[int, float]) -> list[Point]:
    return [Point("a", 2, 1, 1, nbytes, time) for nbytes, time in us.items()]


def test_a_fit_finds_the_latency_and_rates_of_data_that_follow_the_model() -> None:
    truth = Fit(5.0, 1e-6, 4e6, 3e-6)
    sizes = [2**i for i in range(10, 22)] + [4_000_000] + [2**i for i in range(23, 28)]
    found = fit(_points({n: truth.at(n) for n in sizes}))
    assert (found.latency, found.slope, found.knee, found.slope_beyond) == pytest.approx((5.0, 1e-6, 4e6, 3e-6))
    assert found.rate == pytest.approx(1e-3 / 3e-6)


def test_errors_are_relative_so_that_small_calls_count_too() -> None:
    """The twin: least squares of the errors in microseconds misses the small sizes by far."""
    data = {1_000: 4.0, 100_000: 4.4, 10_000_000: 48.0, 1_000_000_000: 5200.0}
    found = fit(_points(data))
    assert max(abs(found.at(n) / us - 1) for n, us in data.items()) < 0.2
    x = torch.tensor([[1.0, n] for n in data], dtype=torch.float64)
    plain = torch.linalg.lstsq(x, torch.tensor(list(data.values()), dtype=torch.float64)[:, None]).solution
    assert abs(float((x @ plain)[0]) / 4.0 - 1) > 0.5


def test_no_latency_and_no_slope_is_negative() -> None:
    found = fit(_points({1_000: 1.0, 10_000: 12.0, 100_000: 150.0}))
    assert found.latency >= 0 and found.slope > 0
    flat = fit(_points({1_000: 10.0, 10_000: 9.0, 100_000: 8.0}))
    assert flat.slope == 0 and flat.latency == pytest.approx(8.9, abs=0.3)


def test_the_two_h200_table_is_fitted_and_predicted_within_a_fifth() -> None:
    fitted = fit_all("pair", pair_points())
    assert len(fitted.points) == 18 and fitted.median_error < 0.2 and fitted.median_held_out < 0.2
    assert 300 < fitted.fits["ordered"].rate < 373  # no faster than the peer copy


@pytest.mark.parametrize("path", sorted(RESULTS.glob("ep_sweep_*.json")), ids=lambda path: path.stem)
def test_committed_sweeps_are_fitted_within_a_fifth(path: Path) -> None:
    record = json.loads(path.read_text())
    points = model_fit.points_of(record)
    if record["timed"]:
        assert path.with_suffix(".png").exists() and path.with_suffix(".md").exists()
        assert fit_all(path.stem, points).median_error < 0.2
    assert [row for row in record["checks"] if row["wrong"]] == []


def test_the_model_says_which_mode_where() -> None:
    sets = [(fit_all("pair", pair_points()), {"benchmark": "two_h200"})]
    h200 = model_machine.machine("h200", sets)
    size = {"hidden": 7168, "tokens": 512, "top_k": 8}
    assert model_machine.advice(h200.predict(2, 1, **size)).startswith("fastest: ordered")  # partials are fewer bytes
    assert model_machine.advice(h200.predict(8, 1, **size)).startswith("fastest: owner")
    gb200 = model_machine.machine("gb200", sets)
    times = [gb200.predict(world, 1, **size)["ordered"] for world in (16, 32, 64, 72)]
    assert times == sorted(times)
    assert h200.predict(8, 4, **size)["ordered"] > h200.predict(8, 1, **size)["ordered"]
    told = "\n".join(gb200.sources)
    assert "the vendor's 900" in told and told.count("not measured") >= 3


def test_the_model_answers_on_the_command_line() -> None:
    def told(*words: str) -> str:
        command = [sys.executable, str(ROOT / "bench" / "model.py"), *words, "--sweep"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    answer = told("--domain", "8", "--hidden", "7168", "--tokens", "64")
    assert "fastest: owner" in answer and "median" in answer
    table = told("--table")
    assert "gb200" in table and "72" in table
    errors = told()
    assert "error on every point" in errors and "of 18 points" in errors


@pytest.mark.parametrize(
    "words",
    [("--domain", "0"), ("--domain", "1"), ("--domain", "8", "--tokens", "-4"), ("--sweep", "no_such.json")],
)
def test_the_model_refuses_what_is_no_size_or_file(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["model.py", *words])
    with pytest.raises(SystemExit) as ended:
        model.main()
    assert ended.value.code == 2
