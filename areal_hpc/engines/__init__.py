"""Generation engines: one protocol (base.py), one file per engine."""
