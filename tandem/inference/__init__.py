"""A decoder-only transformer with a rewindable KV cache for many sequences at once."""

import sys

# `import openvino` would report itself to a statistics server, from a process that it forks for
# that: nothing leaves a service but what its caller asked for. OpenVINO has a stub for this case.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
