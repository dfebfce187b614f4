"""The drafter's service over the pair's drafter, which is made here and not read.

python -m benchmarks.gpu.drafter real|fake
"""

from __future__ import annotations

import sys
from unittest.mock import patch

from benchmarks.gpu import pair
from benchmarks.gpu.shapes import fake, real
from drafter_svc.__main__ import main
from tandem.inference.loading.checkpoint import CheckpointSource, LoadedCheckpoint
from tandem.serving import model as serving

if __name__ == "__main__":
    shapes = fake() if sys.argv[1] == "fake" else real()

    def made(source: CheckpointSource) -> LoadedCheckpoint:
        """In place of reading a folder."""
        return pair.checkpoint("drafter", shapes)

    with patch.object(serving, "read_checkpoint", made), pair.lenient():
        main()
