"""Diagnose: what an unknown server does, from outside.

Read ``wire`` (bytes to events), then ``stream`` (events to tokens), then ``client``.
"""
