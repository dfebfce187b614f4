"""One engine each, behind the protocol; run in that engine's own environment.

Nothing here but `tandem_services` may import Tandem or what it needs.
"""
