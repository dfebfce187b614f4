"""One worker per engine, which speaks the protocol in that engine's own environment.

`tandem_services` and `transformers_pair` run in our environment; the others must not import Tandem.
"""
