"""The committed stubs are what the protos generate, and the protos pass their lint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

BIN = Path(sys.executable).parent


def test_buf_lint() -> None:
    result = subprocess.run(
        [BIN / "buf", "lint"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_stubs_are_generated_from_the_protos(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("protos/**/*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos"]
    command += [
        f"--plugin=protoc-gen-{name}={BIN / ('protoc-gen-' + name)}"
        for name in ("mypy", "mypy_grpc")
    ]
    command += [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    command += [f"--mypy_out=quiet:{tmp_path}", f"--mypy_grpc_out=quiet:{tmp_path}"]
    subprocess.run([*command, *protos], cwd=ROOT, check=True)
    generated = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*_pb2*")}
    committed = {path.relative_to(ROOT) for path in ROOT.glob("tandem/*/v1/*_pb2*")}
    assert set(generated) == committed
    for name, path in generated.items():
        assert path.read_text() == (ROOT / name).read_text(), f"{name}: run `make protos`"


@pytest.mark.parametrize("extra", [b"", b"\xf8\x7f\x01"])
def test_unknown_fields_are_tolerated(extra: bytes) -> None:
    """A newer peer may say more."""
    from tandem.common.v1 import common_pb2

    message = common_pb2.Sampling(temperature=0.5).SerializeToString() + extra
    assert common_pb2.Sampling.FromString(message).temperature == 0.5
