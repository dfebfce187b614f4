"""Ways to compute a model's pass by torch, and the interface of all back ends."""
