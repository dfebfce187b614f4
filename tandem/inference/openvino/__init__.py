"""A model's pass by OpenVINO's runtime, traced from the model's own modules."""
