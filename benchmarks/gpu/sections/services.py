"""The same texts through gRPC: drafts inside, then three processes on one device."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
import uvloop

import target_svc.loading as loading
import target_svc.servicer as servicers
from benchmarks.gpu import pair
from benchmarks.gpu.pair import LeftOut
from benchmarks.gpu.processes import Process
from benchmarks.gpu.run import Run
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline
from tandem.rpc.security.settings import tls_of
from tandem.rpc.server import RunningServer
from target_svc.settings import TargetSettings

_PROMPT = 128
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
# Of a section that begins with less, nothing would come.
_LEAST_SECONDS = 15.0
# Of the engine's tokens/s, that come through (issue 62).
_BAR = 0.9
# The drafter's process: weights, a pool, its compiled kernels.
_DRAFTER_BYTES = 12 << 30
# Texts of one setting after the other, each alone and sixteen at once.
_TEXTS, _GAMMAS = (1, 16), (0, 4, 8)


def measure_inside(run: Run, until: Deadline) -> None:
    """The target's service in this process, over the models that it has."""
    run.model("drafter")
    uvloop.run(_serve(run, until, "services", inside=True))


def measure_apart(run: Run, until: Deadline) -> None:
    """A drafter's service beside, with a model of its own on the same device."""
    run.model("target")
    if run.shapes.real and torch.cuda.mem_get_info()[0] < _DRAFTER_BYTES:
        raise LeftOut("no memory for a drafter in a process of its own")
    uvloop.run(_serve(run, until, "three processes", inside=False))


async def _serve(run: Run, until: Deadline, line: str, *, inside: bool) -> None:
    if until.left < _LEAST_SECONDS:
        raise LeftOut("no time")
    shapes, real = run.shapes, run.shapes.real
    settings = TargetSettings(
        model="target",
        device=shapes.device.type,
        # Where OpenVINO is not installed, `auto` would look for it on a CPU.
        engine="torch",
        drafts="model" if inside else "",
        max_length=shapes.capacity,
        max_nodes=0,
        max_sequences=max(_TEXTS),
    )
    target = run.model("target").decoder
    models = [run.model("drafter").decoder] if inside else []
    with (
        patch.object(servicers, "load_target", lambda settings: target),
        patch.object(loading, "load_models", lambda *args, **options: models),
    ):
        service = servicers.make_service(settings)
        server = RunningServer(settings.listen, service, tls_of(settings), None)
        await server.start()
        try:
            await server.ready()
            addresses = {"TARGETS": f"127.0.0.1:{server.port}"}
            if not inside:
                addresses["DRAFTERS"] = await _drafter(run, until)
            at = await _orchestrator(run, until, addresses, line)
            found = await _clients(run, until, at, line)
        finally:
            for role in ("drafter", f"orchestrator of {line}", f"clients of {line}"):
                if role in run.processes:
                    run.processes.pop(role).end()
            await asyncio.wait_for(server.stop(0.5), _STOP_SECONDS)
    run.found[line] = found
    for setting, own in found.items():
        texts, _, size = setting.split(", ")
        whole = run.found.get("rounds", {}).get(setting, {}).get("tokens_per_s")
        barred = real and inside and int(texts) == max(_TEXTS)
        bar = _BAR if barred and whole else None
        mark = f"t/s {own['ms_a_round']:.1f}ms"
        name = f"{texts} {size}"
        run.add(Figure(line, name, own["tokens_per_s"], "", whole, bar, True, mark))
        if own["errors"]:
            run.errors[f"{line}, {setting}"] = own["errors"][0]


async def _drafter(run: Run, until: Deadline) -> str:
    """Start the drafter's service; its address, when it is ready."""
    kind = "real" if run.shapes.real else "fake"
    variables = {
        "MODEL": "drafter",
        "DEVICE": run.shapes.device.type,
        "ENGINE": "torch",
        "MAX_LENGTH": str(run.shapes.capacity),
        "MAX_SEQUENCES": str(max(_TEXTS)),
    }
    return await _started(run, until, "drafter", ("benchmarks.gpu.drafter", kind), variables)


async def _orchestrator(run: Run, until: Deadline, addresses: Mapping[str, str], line: str) -> str:
    role = f"orchestrator of {line}"
    return await _started(run, until, role, ("orchestrator",), addresses)


async def _started(
    run: Run, until: Deadline, role: str, command: tuple[str, ...], settings: Mapping[str, str]
) -> str:
    """Start a service, and read its port from its log."""
    prefix = f"TANDEM_{role.split()[0].upper()}_"
    own = {"LISTEN": "127.0.0.1:0", "LOG_FORMAT": "json", "LOG_LEVEL": "info", **settings}
    process = run.spawn(role, command, **{prefix + key: value for key, value in own.items()})
    # An orchestrator is ready when it has found the others, for which its clients wait.
    event = "ready" if role == "drafter" else "listening"
    while not until.over:
        if process.code is not None:
            raise RuntimeError(f"the {role} ended: {process.tail}")
        if port := _port(process, event):
            return f"127.0.0.1:{port}"
        await asyncio.sleep(_POLL_SECONDS)
    raise LeftOut(f"the {role} was not ready in time: {process.tail[-200:]}")


def _port(process: Process, event: str) -> int:
    """From the log line of that event; 0 without one."""
    for line in process.log.read_text().splitlines():
        if line.startswith("{") and line.endswith("}"):
            said = json.loads(line)
            if said.get("event") == event:
                return int(said["port"])
    return 0


async def _clients(run: Run, until: Deadline, address: str, line: str) -> dict[str, Any]:
    """What a process of clients finds."""
    out = run.scratch / f"clients of {line}.json"
    plan = {
        "address": address,
        "out": str(out),
        "seconds": max(until.left, 5.0),
        "texts": _TEXTS,
        "gammas": _GAMMAS if run.shapes.real else _GAMMAS[:2],
        "tokens": run.shapes.new_tokens,
        "prompt": pair.tokens(min(_PROMPT, run.shapes.capacity // 4), run.shapes),
        "vocabulary": run.shapes.vocabulary,
    }
    written = run.scratch / f"plan of {line}.json"
    written.write_text(json.dumps(plan))
    out.unlink(missing_ok=True)
    role = f"clients of {line}"
    process = run.spawn(role, ("benchmarks.gpu.client", str(written)), CUDA_VISIBLE_DEVICES="")
    # This thread's loop serves meanwhile.
    await asyncio.to_thread(process.wait, until.left + _STOP_SECONDS)
    if process.code not in (None, 0):
        run.errors[role] = process.tail
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if not found:
        raise RuntimeError(f"no text came through: {process.tail}")
    return found
