"""Train look-ahead rows of the frozen embedded target: `python -m models.zoo.pass all`.

PaSS (Monea, Joulin and Grave, arXiv 2311.13581): only the rows are learned.
"""

from models.loop import Stage
from models.zoo.training import masks

TRAINING = masks.Training(
    "pass",
    [
        Stage("divergence", steps=1800, rows=8, length=256, start=1.0, end=0.4),
        Stage("overlap", steps=1200, rows=8, length=256, start=0.4, end=0.0),
    ],
    adapts=False,
)

if __name__ == "__main__":
    masks.main(TRAINING, __doc__)
