"""Certificates: written whole, read strictly, kept where the platform or BICOMM_CERTIFICATES says, shown on request."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bicomm.certify import certificate
from bicomm.certify.certificate import Certificate, digest, directory, path_for, read, write
from bicomm.certify.cli import app
from bicomm.certify.emulate import emulated
from bicomm.certify.measure import measure
from bicomm.certify.report import certify
from bicomm.contract import EXACT


@pytest.fixture(scope="module")
def exact() -> Certificate:
    return certify(measure(emulated("exact", 3), channels=200), "emulated:exact", [], 3, 0)


def gpu(number: int) -> dict[str, str]:
    return {**dict.fromkeys(certificate.GPU_KEYS, "x"), "uuid": f"GPU-{number}"}


def test_what_is_written_is_read(exact: Certificate, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fabric-x.json"
    write(exact, path)
    assert read(path) == exact
    assert read(path).contract == EXACT
    assert exact.trusted_class
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == ["fabric-x.json"]
    write(exact, path)  # replaces it
    assert Certificate.from_json(exact.json()) == exact


def test_where_certificates_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BICOMM_CERTIFICATES", str(tmp_path))
    assert directory() == tmp_path
    monkeypatch.delenv("BICOMM_CERTIFICATES")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert directory().name == "certificates"
    assert "bicomm" in str(directory())
    one, two = [gpu(1), gpu(2)], [gpu(1), gpu(3)]
    assert digest(one) != digest(two)
    assert path_for(one, 2, tmp_path) != path_for(one, 4, tmp_path)
    assert path_for(one, 2, tmp_path).name == f"fabric-{digest(one)}-w2.json"


def change(**values: Any) -> Any:
    return lambda record: record.update(values)


def drop(key: str) -> Any:
    return lambda record: record.pop(key)


EXAMPLE = {
    "variant": "v", "family": "normal", "rank": 0,
    "addends": ["0x00000000"], "got": "0x00000000", "expected": "0x00000001",
}  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (change(schema="bicomm-fabric-certificate/2"), "schema bicomm-fabric-certificate/1"),
        (drop("schema"), "schema"),
        (drop("verdict"), "exactly the keys"),
        (change(note="x"), "exactly the keys"),
        (change(verdict="perfect"), "'verdict' of a certificate is wrong: 'perfect'"),
        (change(verdict=None), "'verdict'"),
        (change(verdict="window"), "verdict 'window' does not go with contract 'exact/1'"),
        (change(verdict="unknown"), "does not go with contract"),
        (change(contract=None), "does not go with contract None"),
        (change(contract="exact"), "is the id of a rule"),
        (change(contract="exact/1+slot-fp64-activation/1"), "is the id of a rule"),
        (change(contract="window(0,1,1)/1"), "a window needs"),
        (change(contract="nobody/1"), "unknown contract"),
        (change(contract=7), "'contract'"),
        (change(world_size=1), "'world_size'"),
        (change(world_size=True), "'world_size'"),
        (change(world_size="8"), "'world_size'"),
        (change(world_size=8.0), "'world_size'"),
        (change(seed=-1), "'seed'"),
        (change(date="yesterday"), "'date'"),
        (change(date="2026-01-01T00:00:00Z"), "'date'"),
        (change(fabric="nvls"), "one GPU for each rank"),
        (change(fabric="other"), "'fabric'"),
        (change(machine=[{"uuid": "1"}]), "'machine'"),
        (change(machine="H200"), "'machine'"),
        (change(families=[]), "'families'"),
        (change(families=[{"name": "normal", "channels": 1}]), "a family has exactly the keys"),
        (change(families=[{"name": "normal", "channels": -1, "mismatches": 0}]), "'channels' of a family"),
        (change(families=[{"name": "normal", "channels": 1, "mismatches": 0}] * 2), "'families'"),
        (change(families=[[]]), "a family has exactly the keys"),
        (change(examples={"better": None}), "'examples'"),
        (change(examples={"fp64": {**EXAMPLE, "got": "0x0"}}), "'got' of a counter-example"),
        (change(examples={"fp64": {**EXAMPLE, "addends": [0]}}), "'addends' of a counter-example"),
        (change(examples={"fp64": {**EXAMPLE, "more": 1}}), "a counter-example has exactly"),
        (change(examples=[]), "'examples'"),
        (change(versions={"torch": 2}), "'versions'"),
        (change(versions={"torch": "2" * 3000}), "'versions'"),
        (change(also="window"), "'also'"),
        (change(variant="\x1b[31m"), "'variant'"),  # a terminal would obey it
        (change(variant="\ud800"), "'variant'"),  # and this cannot be printed
        (change(observed=None), "'observed'"),
    ],
)
def test_the_schema_is_strict(exact: Certificate, edit: Any, says: str) -> None:
    record = copy.deepcopy(exact.record)
    edit(record)
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        Certificate(record)
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        Certificate.from_json(json.dumps(record))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "JSON object"), ("{", "JSON object"), ("[]", "JSON object of schema"), ("null", "JSON object of schema"),
        ('{"schema": NaN}', "NaN is no number"), ('{"schema": 1, "schema": 2}', "a key is given twice"),
        ("[" * 100_000, "JSON object"), ("\x80\x04K\x01.", "JSON object"),
    ],
)  # fmt: skip
def test_other_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Certificate.from_json(text)


def test_files_that_are_not_read(exact: Certificate, tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    write(exact, good)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.json")
    link = tmp_path / "link.json"
    link.symlink_to(good)
    with pytest.raises(ValueError, match=r"link.json: .*symbolic links"):
        read(link)
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="not a plain file"):
        read(pipe)
    with pytest.raises(ValueError, match="not a plain file|directory"):
        read(tmp_path)
    open_to_all = tmp_path / "open.json"
    write(exact, open_to_all)
    open_to_all.chmod(0o666)
    with pytest.raises(ValueError, match="anybody may write it"):
        read(open_to_all)
    large = tmp_path / "large.json"
    large.write_text(exact.json() + " " * certificate.LARGEST)
    with pytest.raises(ValueError, match="bytes, a certificate has at most"):
        read(large)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\x80\x04\xff")
    with pytest.raises(ValueError, match=r"binary.json: "):
        read(binary)


def test_a_failed_write_leaves_the_old_one(exact: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fabric-x.json"
    write(exact, path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write(exact, path)
    assert os.listdir(tmp_path) == ["fabric-x.json"]
    assert read(path) == exact


def test_show(exact: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BICOMM_CERTIFICATES", str(tmp_path))
    empty = CliRunner().invoke(app, ["show"])
    assert empty.exit_code == 1
    assert f"no certificates in {tmp_path}" in empty.stderr
    nowhere = CliRunner().invoke(app, ["show"], env={"BICOMM_CERTIFICATES": "x" * 300})
    assert nowhere.exit_code == 1 and isinstance(nowhere.exception, SystemExit)
    write(exact, tmp_path / "fabric-a-w3.json")
    shown = CliRunner().invoke(app, ["show"])
    assert shown.exit_code == 0
    words = " ".join(shown.stdout.split())
    for part in (
        "verdict exact: exact/1",
        "may NVLS run under it no: the certificate is of an emulation",
        "emulated:exact",
        "First counter-example",
        "200",
    ):
        assert part in words
    odd = copy.deepcopy(exact.record)
    odd["families"][0]["name"] = "[/red]"
    odd["examples"]["fp64"]["variant"] = "[/blue]"
    write(Certificate(odd), tmp_path / "odd.json")
    assert "[/red]" in (told := CliRunner().invoke(app, ["show", str(tmp_path / "odd.json")]).stdout)
    assert "[/blue]" in told
    (tmp_path / "fabric-b-w3.json").write_text("{}")
    both = CliRunner().invoke(app, ["show", "--json"])
    assert both.exit_code == 1
    assert "fabric-b-w3.json: expected a JSON object of schema" in both.stderr
    assert [record["verdict"] for record in json.loads(both.stdout)] == ["exact"]
    assert CliRunner().invoke(app, ["show", str(tmp_path / "none.json")]).exit_code == 1
