"""What drafting methods gain: tokens a round, look-ups, and parts of a target."""
