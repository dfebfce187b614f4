"""Ways to compute a model's pass by torch, and what any back end is."""
