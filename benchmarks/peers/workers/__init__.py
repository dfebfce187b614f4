"""One engine each, behind the protocol; run in that engine's own environment.

`tandem_services` and `transformers_pair` run in ours; no other may import Tandem.
"""
