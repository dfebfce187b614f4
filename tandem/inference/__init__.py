"""A decoder-only transformer with a rewindable KV cache for many sequences at once."""

import sys

# `import openvino` would fork a process that reports to a statistics server, but nothing may leave
# a service that its caller did not ask for. OpenVINO replaces a missing module by a stub.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
