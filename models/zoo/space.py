"""Train an adapter of the embedded target, and its look-ahead rows:
`python -m models.zoo.space all`.

SPACE (Yi et al., arXiv 2402.11809): the target is tuned so that rows of masks after any place
guess what follows. Here it is a low-rank change of all layers; the rows of the text are held to
those of the target before.
"""

from models.loop import Stage
from models.zoo.training import masks

TRAINING = masks.Training(
    "space",
    [
        Stage("divergence", steps=2000, rows=8, length=256, start=1.0, end=0.6),
        Stage("overlap", steps=1600, rows=8, length=256, start=0.6, end=0.0),
    ],
    adapts=True,
)

if __name__ == "__main__":
    masks.main(TRAINING, __doc__)
