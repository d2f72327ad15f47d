"""The built-in demo: a tiny model that learns to write out its reasoning."""
