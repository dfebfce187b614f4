"""Services whose passes take as long as a device is said to take: real in all else.

`device` makes a pass last, `target` and `drafter` are the services with it, and `fleet` runs
several of them behind one orchestrator.
"""
