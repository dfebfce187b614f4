"""Commands that make drafters, or what they draft from, and steer what they learn."""
