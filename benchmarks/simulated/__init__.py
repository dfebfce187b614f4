"""Services that are real but for their passes, run instead of a service's own module.

`device` makes a pass last as long as a device is said to take; `target` and `drafter` are the
services with it. `shuffled` is a drafter that turns bad.
"""
