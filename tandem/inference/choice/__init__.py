"""Which pass serves a model: what there is, how fast each is, what earlier starts found."""
