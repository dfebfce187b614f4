"""Ways to compute a model's pass, by torch or another back end, and the choice of the fastest."""
