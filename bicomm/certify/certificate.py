"""A certificate: what was measured, on which machine and world, as strictly read JSON under the user's data folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bicomm.certify.candidates import TRUSTED, VERDICTS
from bicomm.contract import Contract

SCHEMA = "bicomm-fabric-certificate/1"
LARGEST = 1 << 20  # bytes of a file that is looked at
GPU_KEYS = ("uuid", "name", "capability", "driver", "release", "fabric", "cluster", "clique")


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The result of one measurement; `record` is its JSON object, checked against the schema when it was made.

    Keys: schema, bicomm (version), date (ISO 8601, UTC), fabric ("nvls" or "emulated:NAME"), machine (one object a
    rank's GPU, sorted; empty for an emulation), world_size, versions, seed, and what `measure.Result` holds.
    """

    record: dict[str, Any]

    def __post_init__(self) -> None:
        _check(self.record)

    @property
    def contract(self) -> Contract | None:
        name = self.record["contract"]
        return None if name is None else Contract.parse(name)

    @property
    def trusted_class(self) -> bool:
        """May NVLS run under a verdict of this class at all?"""
        return self.record["verdict"] in TRUSTED

    def json(self) -> str:
        return json.dumps(self.record, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Read what `json` wrote. Raises ValueError that names the part that is wrong."""
        try:
            record = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"a certificate is a JSON object: {error}") from error
        return cls(record)


def directory() -> Path:
    """Where certificates live: `BICOMM_CERTIFICATES`, else the platform's folder for a user's data."""
    named = os.environ.get("BICOMM_CERTIFICATES")
    import platformdirs  # only who looks for a certificate needs it

    return Path(named) if named else platformdirs.user_data_path("bicomm") / "certificates"


def digest(machine: Sequence[dict[str, str]]) -> str:
    """16 hexadecimal digits that stand for these GPUs."""
    text = json.dumps(list(machine), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def path_for(machine: Sequence[dict[str, str]], world_size: int, folder: Path | None = None) -> Path:
    """The file of a machine's and world's certificate."""
    return (folder or directory()) / f"fabric-{digest(machine)}-w{world_size}.json"


def write(certificate: Certificate, path: Path) -> None:
    """Replace `path` in one step: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".fabric-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(certificate.json())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path) -> Certificate:
    """Read a file. Raises FileNotFoundError, or ValueError with the path and what is wrong with it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    try:
        of = os.fstat(handle)
        if not stat.S_ISREG(of.st_mode):
            raise ValueError(f"{path}: not a plain file")
        if of.st_mode & stat.S_IWOTH:
            raise ValueError(f"{path}: anybody may write it; it decides which sums are trusted: chmod o-w")
        if of.st_size > LARGEST:
            raise ValueError(f"{path}: {of.st_size:,} bytes, a certificate has at most {LARGEST:,}")
        data = os.read(handle, LARGEST + 1)
    finally:
        os.close(handle)
    try:
        return Certificate.from_json(data.decode())
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path}: {error}") from error


# ----------------------------------------------------------------------------------------------------------- schema


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key is given twice in a certificate")
    return record


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of a certificate")


def _check(record: Any) -> None:
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"expected a JSON object of schema {SCHEMA}")
    _object("certificate", record, FIELDS)
    verdict, name = record["verdict"], record["contract"]
    rule = None if name is None else _contract(name).rule
    wanted = {"exact": "exact", "window": "window", "fp64": "fp64", "chain": "ordered"}.get(verdict)
    if rule != wanted:
        raise ValueError(f"verdict {verdict!r} does not go with contract {name!r}")
    emulated = record["fabric"] != "nvls"
    if emulated != (not record["machine"]) or (not emulated and len(record["machine"]) != record["world_size"]):
        raise ValueError("'machine' has one GPU for each rank of hardware, and none for an emulation")


def _contract(name: str) -> Contract:
    contract = Contract.parse(name)
    if contract.id != name or contract.partial is not None:
        raise ValueError(f"'contract' is the id of a rule between ranks, got {name!r}")
    return contract


def _object(what: str, value: Any, fields: dict[str, Callable[[Any], bool]]) -> None:
    if not isinstance(value, dict) or set(value) != set(fields):
        given = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"a {what} has exactly the keys {', '.join(fields)}; got {given}")
    for key, right in fields.items():
        if not right(value[key]):
            raise ValueError(f"{key!r} of a {what} is wrong: {str(value[key])[:120]!r}")


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 2000 and value.isprintable()  # `show` prints it: no escapes


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _table(value: Any) -> bool:
    return isinstance(value, dict) and all(_text(k) and _text(v) for k, v in value.items())


def _machine(value: Any) -> bool:
    return isinstance(value, list) and all(_table(gpu) and set(gpu) == set(GPU_KEYS) for gpu in value)


_word = _matches(r"0x[0-9a-f]{8}")


def _example(value: Any) -> bool:
    if value is None:
        return True
    _object(
        "counter-example",
        value,
        {
            "variant": _text,
            "family": _text,
            "rank": _count,
            "addends": lambda words: isinstance(words, list) and all(map(_word, words)),
            "got": _word,
            "expected": _word,
        },
    )
    return True


def _examples(value: Any) -> bool:
    names = {*VERDICTS, "repeatable"}
    return isinstance(value, dict) and set(value) <= names and all(map(_example, value.values()))


def _families(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    for family in value:
        _object("family", family, {"name": _text, "channels": _count, "mismatches": _count})
    return len({family["name"] for family in value}) == len(value)


FIELDS: dict[str, Callable[[Any], bool]] = {
    "schema": _text,
    "bicomm": _text,
    "date": _matches(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"),
    "fabric": _matches(r"nvls|emulated:[\w-]+"),
    "machine": _machine,
    "world_size": lambda value: type(value) is int and value >= 2,
    "versions": _table,
    "seed": _count,
    "verdict": lambda value: isinstance(value, str) and value in VERDICTS,
    "variant": _text,
    "contract": lambda value: value is None or _text(value),
    "also": _texts,
    "varies": _texts,
    "search": _text,
    "closest": lambda value: value is None or _text(value),
    "families": _families,
    "examples": _examples,
    "observed": _table,
}
