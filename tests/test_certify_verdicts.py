"""Every emulated fabric goes through the measuring code and comes out under its own name; the command line says so."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks as run_processes
from typer.testing import CliRunner

from bicomm.certify.candidates import TRUSTED, VERDICTS, finish
from bicomm.certify.cli import NAMES, app
from bicomm.certify.emulate import EMULATIONS, Emulated, emulated
from bicomm.certify.families import FAMILIES
from bicomm.certify.measure import CHANNELS, measure
from bicomm.certify.verdict import Result
from bicomm.contract import exact, window

EXPECTED = {
    "exact": ("exact", "exact/1"),
    "window": ("window", "window(16,95,86)/1"),
    "window2": ("window", "window(24,72,65)/1"),
    "fp64": ("fp64", "fp64/1"),
    "chain": ("chain", "ordered/1"),
    "rotated": ("rotated", None),
    "tree": ("tree", None),
    "truncating": ("truncating", None),
    "ftz": ("ftz", None),
    "flaky": ("flaky", None),
}


def test_the_emulations_are_the_promised_ones() -> None:
    assert list(EMULATIONS) == list(EXPECTED)
    assert {verdict for verdict, _ in EXPECTED.values()} == set(VERDICTS) - {"unknown"}


# ----------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("name", EXPECTED)
def test_certify_names_an_emulation(name: str) -> None:
    ran = CliRunner().invoke(app, ["fabric", "--emulate", name, "--json", "--channels", "3000"])
    record = json.loads(ran.stdout)
    verdict, contract = EXPECTED[name]
    assert (record["verdict"], record["contract"]) == (verdict, contract)
    assert ran.exit_code == (0 if verdict in TRUSTED else 1)
    assert (record["world_size"], record["fabric"], record["machine"]) == (8, f"emulated:{name}", [])
    assert [family["name"] for family in record["families"]] == list(FAMILIES)
    assert {family["channels"] for family in record["families"]} == {3000}
    if verdict != "flaky":
        assert all(family["mismatches"] == 0 for family in record["families"])
        assert set(record["examples"]) == set(VERDICTS) - {verdict, "unknown"}
        for other, example in record["examples"].items():
            assert (example is None) == (other == "flaky"), other
            if example:
                _check_example(name, example)
    else:
        assert record["varies"] == ["call"]
        assert record["examples"]["repeatable"]["got"] != record["examples"]["repeatable"]["expected"]
    assert "specials: 3,000 channels" in ran.stderr


def _check_example(name: str, example: dict[str, Any]) -> None:
    """What a counter-example says was read is what the emulation gives for its operands."""
    words = [int(word, 16) for word in example["addends"]]
    addends = torch.tensor([w - (w >> 31 << 32) for w in words], dtype=torch.int32).view(torch.float32)[:, None]
    read = finish(EMULATIONS[name](addends, example["rank"], 0, 8, 0))
    assert int(read.view(torch.int32)) & 0xFFFFFFFF == int(example["got"], 16)
    assert example["got"] != example["expected"]


def test_the_installed_command(tmp_path: Path) -> None:
    out = tmp_path / "certificate.json"
    command = [sys.executable, "-m", "bicomm", "certify", "fabric", "--emulate", "rotated", "--channels", "500"]
    ran = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert "rotated: fp32 chain, ascending from the reading rank" in " ".join(ran.stdout.split())
    shown = subprocess.run(
        [sys.executable, "-m", "bicomm", "certify", "show", str(out), "--json"],
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert json.loads(shown.stdout)[0]["verdict"] == "rotated"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--emulate", "perfect"], "unknown emulation 'perfect'"),
        (["--emulate", "exact", "--channels", "0"], "--channels"),
        (["--emulate", "exact", "--channels", "5", "--full"], "leave out --channels"),
        (["--emulate", "exact", "--world-size", "1"], "--world-size"),
        (["--emulate", "exact", "--seed", str(2**63)], "--seed"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str) -> None:
    ran = CliRunner().invoke(app, ["fabric", *arguments])
    assert ran.exit_code == 2
    assert says in " ".join(ran.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    "names", [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
)
def test_one_process_of_a_launcher_measures_an_emulation(names: tuple[str, str], tmp_path: Path) -> None:
    """The launcher ends with its exit code, and standard output is one JSON object."""
    out = tmp_path / "certificate.json"
    told = []
    for rank in ("0", "1"):
        variables = {**dict(zip(names, (rank, "2"), strict=True)), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        arguments = ["fabric", "--emulate", "chain", "--json", "--channels", "10", "--out", str(out)]
        ran = CliRunner().invoke(app, arguments, env=variables)
        told.append((ran.exit_code, ran.stdout))
        assert out.exists() == (rank == "0")
        out.unlink(missing_ok=True)
    assert told[0][0] == 1 and json.loads(told[0][1])["verdict"] == "chain"
    assert told[1] == (0, "")


def test_what_was_measured_is_printed_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, why in ((tmp_path / "file" / "x.json", "File exists"), (tmp_path, "Is a directory")):
        arguments = ["fabric", "--emulate", "exact", "--json", "--channels", "10", "--out", str(out)]
        ran = CliRunner().invoke(app, arguments)
        assert (ran.exit_code, json.loads(ran.stdout)["verdict"]) == (1, "exact")
        assert ran.stderr.splitlines()[-1] == f"the certificate cannot be written to {out}: {why}"


def test_no_rank_of_a_switch_leaves_before_all_have_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A launcher ends every rank when the first one fails: with a verdict of no trust, all of them do."""
    monkeypatch.setenv("BICOMM_CERTIFICATES", str(tmp_path))
    met = []

    class Fake(Emulated):
        rank = local_rank = 0
        machine: list[dict[str, str]] = []  # noqa: RUF012

        def gather(self, mine: Any) -> list[Any]:
            met.append((mine, len(list(tmp_path.glob("*.json")))))
            return [mine]

    monkeypatch.setattr("bicomm.certify.hardware.open_switch", lambda: Fake("test", 3, EMULATIONS["chain"]))
    assert CliRunner().invoke(app, ["fabric", "--json", "--channels", "10"]).exit_code == 1
    assert len(met) == 2  # first the measurement's own reports
    assert met[-1] == (True, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_switch_the_reason_is_said() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bicomm", "certify", "fabric"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 2
    assert "there is no switch to measure: torch sees no GPU" in ran.stderr


# ---------------------------------------------------------------------------------------------- other world sizes


@pytest.mark.parametrize("world", [3, 6])
@pytest.mark.parametrize("name", [n for n in EXPECTED if n != "tree"])
def test_other_world_sizes(name: str, world: int) -> None:
    result = measure(emulated(name, world), channels=1000)
    assert (result.verdict, result.contract) == EXPECTED[name]
    if name not in ("chain", "rotated"):
        assert result.also == ()


def test_where_classes_are_one_function_the_simplest_is_named() -> None:
    for name in ("window", "chain", "tree"):  # two addends have one sum
        result = measure(emulated(name, 2), channels=1000)
        assert (result.verdict, result.contract) == ("exact", "exact/1")
        assert set(result.also) == {"window", "fp64", "chain", "rotated", "tree"}
    assert measure(emulated("truncating", 2), channels=1000).verdict == "truncating"
    assert measure(emulated("ftz", 2), channels=1000).verdict == "ftz"
    three = measure(emulated("tree", 3), channels=1000)  # (a + b) + c is a chain
    assert (three.verdict, three.also) == ("chain", ("rotated", "tree"))
    assert measure(emulated("tree", 4), channels=1000).verdict == "tree"


def test_the_seed_decides_the_inputs_and_not_the_verdict() -> None:
    results = [measure(emulated("chain"), channels=1000, seed=seed) for seed in (0, 0, 1)]
    assert results[0] == results[1] != results[2]
    assert {r.verdict for r in results} == {"chain"}


def test_unknown_families_and_no_channels_are_refused() -> None:
    for arguments in ({"families": ["normal", "odd"]}, {"channels": 0}):
        with pytest.raises(ValueError, match="expected families of normal, .* and channels >= 1"):
            measure(emulated("exact"), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least two ranks, got a world size of 1"):
        emulated("exact", 1)


# --------------------------------------------------------------------------------------- several processes measure


def run_ranks(world: int, reduction: Any) -> list[Result]:
    """Each rank in a thread of its own reads as itself alone, as on hardware; `gather` is the only thing they share."""
    barrier, mailbox = threading.Barrier(world), [None] * world
    results: list[Result | None] = [None] * world

    def rank(r: int) -> None:
        fabric = Emulated("test", world, reduction)
        fabric.readers = (r,)

        def gather(mine: Any) -> list[Any]:
            mailbox[r] = json.loads(json.dumps(mine))  # it travels as plain data
            barrier.wait(timeout=60)
            return list(mailbox)

        results[r] = measure(fabric, channels=1000, gather=gather)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results)
    return results  # type: ignore[return-value]


def test_ranks_agree_on_one_result() -> None:
    for name, expected in (("window2", "window"), ("rotated", "rotated")):
        results = run_ranks(3, EMULATIONS[name])
        assert all(result == results[0] for result in results)
        assert results[0].verdict == expected


def test_one_rank_that_reads_otherwise_spoils_the_verdict_of_all() -> None:
    def reduction(x: torch.Tensor, rank: int, call: int, blocks: int, alignment: int) -> torch.Tensor:
        return exact(x) if rank != 2 else window(x, 16, 95, 86)

    results = run_ranks(4, reduction)
    assert {result.verdict for result in results} == {"unknown"}
    assert all(result == results[0] for result in results)
    assert results[0].examples["exact"]["rank"] == 2  # type: ignore[index]


def test_ranks_that_make_other_addends_are_refused() -> None:
    def gather(mine: Any) -> list[Any]:
        return [mine, {**mine, "inputs": mine["inputs"] + 1}]

    with pytest.raises(RuntimeError, match="rank 1 made other addends than rank 0 from one seed"):
        measure(emulated("chain", 3), channels=100, gather=gather)


def _certify() -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["fabric"])
    return outcome.exit_code, outcome.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said without a GPU")
def test_without_a_switch_one_rank_says_so_and_all_end_alike() -> None:
    results = run_processes(3, _certify, launcher="fork")
    assert [result.value for result in results] == [
        (2, "there is no switch to measure: torch sees no GPU\n"),
        (2, ""),
        (2, ""),
    ]


def test_help_names_every_emulation_and_the_channels_that_trust_needs() -> None:
    assert tuple(EMULATIONS) == NAMES
    told = " ".join(
        CliRunner().invoke(app, ["fabric", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout.split()
    )
    assert f"{CHANNELS:,}" in told and all(name in told for name in NAMES)
