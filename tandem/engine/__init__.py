"""Who runs when: jobs whose steps ask, and one thread that answers the asks of all together."""
