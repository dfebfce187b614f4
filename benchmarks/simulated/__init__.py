"""Services that are real except for their passes, run instead of a service's own module.

`device` makes a pass take the time of a simulated device; `target` and `drafter` are the services
on such devices. `shuffled` is a drafter that can turn bad.
"""
